"""Engine, disk and the real runtime together: an answer is the same whether its KV was computed or restored
(spec R9)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from perilune.core import FinishReason
from perilune.engine.loop import EngineLoop
from perilune.engine.policy import EngineLimits
from perilune.runtime.kv.disk import DiskKVStore
from perilune.runtime.loader import LoadedModel, load_model
from tests.engine.harness import Listener, ingest, spec

SENTENCES = [
    "The tide tables of the harbour are printed twice a year.",
    "Clause 14.2 sets the notice period at ninety days.",
    "A lantern was left burning in the north window.",
    "Invoices above 2,500 crowns need two signatures.",
    "The archive moved to the cellar of the old customs house in 1911.",
]


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Iterator[LoadedModel]:
    loaded = load_model(smollm2_path, num_blocks=96, threads=2)
    yield loaded
    loaded.close()


def answer(engine: EngineLoop, seq_id: str, prompt: list[int], shared: int, owner: str | None) -> Listener:
    listener = Listener()
    engine.submit(spec(seq_id, prompt, new=24, shared=shared, owner=owner), listener)
    assert listener.wait(120) is FinishReason.LENGTH
    return listener


@pytest.mark.parametrize("tail", [1, 33, 64])
def test_restored_answers_equal_computed_ones(model: LoadedModel, tmp_path: Path, tail: int) -> None:
    """`tail` puts the prompt's end one token past a block, one past two, and on a border."""
    text = " ".join(SENTENCES[i % 5].replace("1911", str(1900 + i)) for i in range(60))
    tokens = model.tokenizer.encode(text)[: 640 + tail]
    assert len(tokens) == 640 + tail
    store = DiskKVStore(tmp_path / "kv", 1 << 30)
    cold: list[list[int]] = []
    warm: list[list[int]] = []
    restored: list[list[int]] = []
    for turn, chunk in enumerate((4096, 224)):
        engine = EngineLoop(model.runtime, store, EngineLimits(chunk_tokens=chunk))
        engine.start()
        first = answer(engine, f"first{turn}", tokens, 640, "doc")
        again = answer(engine, f"again{turn}", tokens, 640, None)
        (restored if turn else cold).append(first.tokens)
        warm.append(again.tokens)
        reusable = (len(tokens) - 2) // 32 * 32
        assert first.cached == ((0, min(640, reusable)) if turn else (0, 0))
        assert again.cached == (min(640, reusable), 0)
        engine.close()
        engine.check_integrity()
    store.close()
    assert cold[0] == restored[0] == warm[0] == warm[1]
    assert len(set(cold[0])) > 3, "the model only repeats itself: nothing is compared"


def test_an_ingest_beside_a_question_changes_neither(model: LoadedModel, tmp_path: Path) -> None:
    document = model.tokenizer.encode(" ".join(SENTENCES * 12))[:640]
    question = model.tokenizer.encode("What is the notice period of clause 14.2?")
    alone = EngineLoop(model.runtime, None, EngineLimits())
    alone.start()
    right = answer(alone, "alone", document + question, 0, None).tokens
    alone.close()
    store = DiskKVStore(tmp_path / "kv", 1 << 30)
    engine = EngineLoop(model.runtime, store, EngineLimits())
    engine.start()
    slow = Listener()
    engine.submit(ingest("doc", document), slow)
    beside = answer(engine, "beside", question, 0, None)
    assert slow.wait(120) is FinishReason.STOP
    assert answer(engine, "after", document + question, 640, None).tokens == right
    assert beside.tokens
    engine.close()
    engine.check_integrity()
    store.close()
