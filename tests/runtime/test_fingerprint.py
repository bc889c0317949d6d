"""The name of a model's KV: everything its bytes depend on is in it (spec D5)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import pytest

from perilune.kernels import select as kernel_choice
from perilune.kernels.interface import Kernels
from perilune.kernels.reference import ReferenceKernels
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.loader import model_fingerprint
from perilune.runtime.weights import DecodeWeights, Precision, WeightBuilder, memory_need
from tests.runtime.families import PLENTY, make_model
from tests.runtime.gguf_models import write_gguf

EXACT = ReferenceKernels("oracle tests")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_model("llama-untied", folder)
    return folder


def fingerprint_of(
    path: Path,
    kernels: Kernels | None = None,
    precision: Precision = "bf16",
    policy: DecodeWeights = "auto",
    free_bytes: int = PLENTY,
) -> str:
    chosen = kernels or kernel_choice.load(1)
    checkpoint = open_checkpoint(path)
    weights = WeightBuilder(checkpoint, chosen, precision, policy, 64).build(free_bytes)
    return model_fingerprint(checkpoint, weights, chosen)


def test_fingerprint_sees_weights_config_and_precision(folder: Path, tmp_path: Path) -> None:
    first = fingerprint_of(folder)
    assert fingerprint_of(folder) == first
    assert fingerprint_of(folder, precision="fp32") != first
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert fingerprint_of(copy) == first
    config = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert fingerprint_of(copy) != first


def test_fingerprint_sees_one_changed_bit_anywhere(smollm2_path: Path, tmp_path: Path) -> None:
    """A fine-tuned tensor of the same size, in the middle of a large file."""
    checkpoint = open_checkpoint(smollm2_path)
    weights = WeightBuilder(checkpoint, EXACT, "bf16", "auto", 64).build(PLENTY)
    first = model_fingerprint(checkpoint, weights, EXACT)
    tuned = tmp_path / smollm2_path.name
    shutil.copyfile(smollm2_path, tuned)
    with tuned.open("r+b") as file:
        file.seek(50_000_123)
        byte = file.read(1)[0]
        file.seek(50_000_123)
        file.write(bytes([byte ^ 1]))
    assert model_fingerprint(open_checkpoint(tuned), weights, EXACT) != first


def test_fingerprint_sees_whose_arithmetic_it_is(tmp_path: Path) -> None:
    """The embedding is exact where it is packed and rounded to bf16 where it isn't; kernels round differently."""
    path = tmp_path / "model.gguf"
    write_gguf(path, make_model("llama-untied", tmp_path / "hf"), "llama", gguf.GGMLQuantizationType.Q8_0)
    need = memory_need(open_checkpoint(path), "bf16", "auto")
    names = {
        fingerprint_of(path),
        fingerprint_of(path, EXACT),
        fingerprint_of(path, policy="bf16"),
        fingerprint_of(path, policy="int8"),
        fingerprint_of(path, free_bytes=need.total_bytes - 1),
    }
    assert len(names) == 5
