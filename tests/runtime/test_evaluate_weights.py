"""Accuracy of weight precisions, on small random models: exact where nothing is rounded, worse with fewer bits."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from perilune.errors import InvalidRequest
from perilune.kernels import packing
from perilune.kernels.reference import ReferenceKernels
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.evaluate.text import default_text, read_text
from perilune.runtime.evaluate.weights import PREFILL, RoundedCheckpoint, WeightsEvaluation, WeightsResult
from perilune.runtime.weights import DecodeWeights, pack_matrix
from tests.runtime.families import make_model
from tests.runtime.gguf_models import write_gguf

EXACT = ReferenceKernels("oracle tests")
TOKENS = torch.randint(3, 320, (700,), generator=torch.Generator().manual_seed(5)).tolist()
CANDIDATES: list[tuple[str, DecodeWeights]] = [
    ("bf16", "bf16"),
    ("int8", "int8"),
    ("stored", "stored"),
    ("mixed", {"default": "stored", "mlp": "int8"}),
    (PREFILL, "bf16"),
]


@pytest.fixture(scope="module")
def q4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    model = make_model("llama-tied-llama3", folder / "hf")
    return write_gguf(folder / "base.gguf", model, "llama", gguf.GGMLQuantizationType.Q4_1)


def evaluate(path: Path, limit_s: float = 1e6, length: int = 300) -> WeightsResult:
    """The tokenizer isn't needed for token ids."""
    evaluation = WeightsEvaluation(open_checkpoint(path), None, EXACT)  # type: ignore[arg-type]
    return evaluation.run(TOKENS, CANDIDATES, length=length, limit_s=limit_s)


def test_what_is_kept_as_stored_has_no_error_and_rounding_has_some(q4: Path) -> None:
    result = evaluate(q4)
    assert (result.tokens, result.length, result.cut) == (600, 300, False), "the rest is too short for a stretch"
    found = {accuracy.name: accuracy for accuracy in result.accuracies}
    assert list(found) == [name for name, _ in CANDIDATES]
    assert found["stored"].overall.kld_max == 0
    assert found["stored"].overall.ppl_change.value == 0
    for name in ("bf16", "int8", PREFILL):
        assert 1e-9 < found[name].overall.kld_mean.value < 0.01, name
        assert found[name].overall.top1_agreement.value > 0.9
    assert 0 < found["mixed"].overall.kld_mean.value < found["int8"].overall.kld_mean.value
    assert found["stored"].weight_bytes < found["mixed"].weight_bytes < found["int8"].weight_bytes


def test_positions_are_counted_in_each_stretch(q4: Path) -> None:
    found = evaluate(q4).accuracies[0]
    assert [bucket for bucket, _ in found.by_position] == [(0, 300)]
    assert found.by_position[0][1].tokens == found.overall.tokens == 2 * 299


def test_rounding_is_that_of_the_packed_copy(q4: Path) -> None:
    base = open_checkpoint(q4)
    rounded = RoundedCheckpoint(base, EXACT, "int8")
    for part, source, layer in (("down", "down", 1), ("head", "embed", None)):
        expected = packing.unpack(pack_matrix(EXACT, base.tensor(source, layer), "int8"))
        assert torch.equal(rounded.tensor(part, layer).float32(), expected)
        assert not torch.equal(expected, base.tensor(source, layer).float32())
    embed = base.tensor("embed").float32()
    assert torch.equal(rounded.tensor("embed").float32(), embed.bfloat16().float())
    kept = RoundedCheckpoint(base, EXACT, "stored")
    assert torch.equal(kept.tensor("embed").float32(), embed)
    assert torch.equal(rounded.tensor("final_norm").float32(), base.tensor("final_norm").float32())


def test_the_time_limit_cuts_the_text_for_all_alike(q4: Path) -> None:
    result = evaluate(q4, limit_s=0)
    assert result.cut
    assert result.tokens == 300
    assert {accuracy.overall.tokens for accuracy in result.accuracies} == {299}


def test_too_little_text_is_refused(q4: Path) -> None:
    evaluation = WeightsEvaluation(open_checkpoint(q4), None, EXACT)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="has 100 tokens"):
        evaluation.run(TOKENS[:100], CANDIDATES, length=300, limit_s=1)


def test_texts(tmp_path: Path) -> None:
    assert len(default_text().text) > 200_000
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("eins")
    second.write_text("zwei")
    text = read_text([first, second])
    assert (text.name, text.text, len(text.digest)) == ("a.txt, b.txt", "eins\n\nzwei", 16)
    second.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        read_text([second])
    with pytest.raises(InvalidRequest, match="can't be read"):
        read_text([tmp_path / "nowhere"])
