"""A fault in the bookkeeping of tiers, loads or saves ends the sequences it concerns, with an error, and no others:
blocks and segments come back, and the engine goes on. Each is injected where another room's code is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from perilune.core import FinishReason, KVPolicy, SequenceSpec, ServiceClass
from perilune.engine.loop import EngineLoop
from perilune.engine.policy import EngineLimits
from perilune.engine.stepper import TierPolicy
from perilune.kernels.tiers import AttentionPolicy
from perilune.runtime.kv.store import KVStore
from tests.engine.harness import Bench, Listener, spec, text
from tests.engine.tiered import FAKE_WINDOW, SEGMENT, FakeTiers, TieredRuntime
from tests.fakes import MemoryKVStore, expected_tokens


class Fault(Exception):
    """What a test injects."""


def tiered(seq_id: str, tokens: list[int], **more: Any) -> SequenceSpec:
    return spec(seq_id, tokens, kv_policy=KVPolicy.TIERED, **more)


class Failing:
    """`original`, which raises where `when` says so of its arguments; `times` counts it."""

    def __init__(self, original: Callable[..., Any], when: Callable[..., bool] = lambda *a, **k: True) -> None:
        self._original, self._when = original, when
        self.times = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._when(*arguments, **named):
            self.times += 1
            raise Fault
        return self._original(*arguments, **named)


def saved_document(tokens: list[int], segments: KVStore | None = None) -> MemoryKVStore:
    """A store that holds the blocks of a document, and `segments`, if given, its closed segments."""
    blocks = MemoryKVStore()
    bench = Bench(blocks, segment_store=segments, tiers=FakeTiers())
    bench.answer(tiered("doc", tokens, owner="doc", ingest=True, service_class=ServiceClass.P2_BATCH))
    return blocks


@contextmanager
def engine_over(
    tiers: FakeTiers, blocks: KVStore | None = None, segments: KVStore | None = None, warm_tokens: int = 1 << 20
) -> Iterator[EngineLoop]:
    """The engine thread over the checking runtime. Afterwards it still lives, and nothing has leaked."""
    runtime = TieredRuntime(256, 16_000, decode_s=0.0002)
    tiers.attach(runtime)
    policy = TierPolicy(warm_tokens, {"general": AttentionPolicy(window_tokens=FAKE_WINDOW)})
    engine = EngineLoop(runtime, blocks, EngineLimits(), segment_store=segments, tier_policy=policy)
    engine.start()
    try:
        yield engine
        assert engine.alive, "the fault stopped the engine"
    finally:
        engine.close()
    engine.check_integrity()
    assert engine.stats().free_blocks == 256
    assert not runtime.faults, runtime.faults[:3]
    assert not runtime.open_contexts


def ask(engine: EngineLoop, wanted: SequenceSpec) -> Listener:
    listener = Listener()
    engine.submit(wanted, listener)
    return listener


def ended_alone(victim: Listener, other: Listener, prompt: list[int], new: int) -> None:
    """`victim` ended with an error that says something; `other` has its whole answer to `prompt`."""
    assert victim.wait() is FinishReason.ERROR
    assert victim.finish is not None
    assert victim.finish.error
    assert other.wait() is FinishReason.LENGTH
    assert other.tokens == expected_tokens(prompt, new)


OTHER = text(7, 300)
DOCUMENT = text(1, 640)


def test_a_loaded_segment_that_cannot_be_closed() -> None:
    """It is closed between steps, as its blocks come."""
    blocks, tiers = saved_document(DOCUMENT), FakeTiers(warm=10)
    with engine_over(tiers, blocks) as engine:
        other = ask(engine, tiered("other", OTHER, new=200))
        other.wait_token()
        tiers.close_records = Failing(tiers.close_records, lambda slot, *_: len(tiers.closed) >= 3)  # type: ignore[method-assign]
        victim = ask(engine, tiered("victim", DOCUMENT + text(2, 30), shared=640))
        assert victim.wait() is FinishReason.ERROR
        del tiers.close_records
        ended_alone(victim, other, OTHER, 200)
        again = ask(engine, tiered("again", DOCUMENT + text(2, 30), shared=640))
        again.wait()
        assert again.tokens == expected_tokens(DOCUMENT + text(2, 30), 4)


@pytest.mark.parametrize("method", ["begin_move", "is_cold"])
def test_a_move_that_cannot_begin_concerns_nobody(method: str) -> None:
    tiers = FakeTiers(warm=4, cold=8)
    with engine_over(tiers, warm_tokens=SEGMENT) as engine:
        fault = Failing(getattr(tiers, method), lambda *a, **k: not getattr(tiers, "off", False))
        setattr(tiers, method, fault)
        first = ask(engine, tiered("first", OTHER, new=100))
        if method == "is_cold":  # steps ask it too: those that do end, and only those
            first.wait()
            tiers.off = True  # type: ignore[attr-defined]
            first = ask(engine, tiered("second", OTHER, new=100))
        first.wait()
        assert first.tokens == expected_tokens(OTHER, 100)
        assert fault.times


def test_memory_that_cannot_be_measured_concerns_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_over(FakeTiers(warm=4, cold=8), warm_tokens=SEGMENT) as engine:
        listener = ask(engine, tiered("first", OTHER, new=100))
        fault = Failing(engine._stepper.kv_use)
        monkeypatch.setattr(engine._stepper, "kv_use", fault)
        listener.wait()
        assert listener.tokens == expected_tokens(OTHER, 100)
        assert fault.times


def test_a_move_that_cannot_end_takes_its_readers_along() -> None:
    """Which bytes the slot has is unknown then: nobody may read it any more, now or later."""
    tiers = FakeTiers(warm=12, cold=4)
    with engine_over(tiers, warm_tokens=SEGMENT) as engine:
        other = ask(engine, spec("other", OTHER, new=200))
        other.wait_token()
        tiers.end_move = Failing(tiers.end_move)  # type: ignore[method-assign]
        victim = ask(engine, tiered("victim", DOCUMENT, new=60))
        ended_alone(victim, other, OTHER, 200)
        del tiers.end_move
        again = ask(engine, tiered("again", DOCUMENT, new=4))
        again.wait()
        assert again.tokens == expected_tokens(DOCUMENT, 4)


@pytest.mark.parametrize("method", ["open", "close_records", "views"])
def test_a_segment_that_cannot_be_made(method: str) -> None:
    """In the plan, in the step, and where it is handed to the saver: the neighbours in the same step go on."""
    tiers = FakeTiers(warm=10)
    with engine_over(tiers, MemoryKVStore(), MemoryKVStore()) as engine:
        other = ask(engine, tiered("other", OTHER, new=200))
        other.wait_token()
        setattr(tiers, method, Failing(getattr(tiers, method)))
        victim = ask(engine, tiered("victim", DOCUMENT, owner="doc", new=60))
        assert victim.wait() is FinishReason.ERROR
        delattr(tiers, method)
        ended_alone(victim, other, OTHER, 200)
        again = ask(engine, tiered("again", DOCUMENT, owner="doc", new=4))
        again.wait()
        assert again.tokens == expected_tokens(DOCUMENT, 4)


@pytest.mark.parametrize("method", ["open", "views"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_jump_that_cannot_begin(method: str, after: int) -> None:
    segments = MemoryKVStore()
    blocks = saved_document(DOCUMENT, segments)
    tiers = FakeTiers(warm=10)
    calls = 0

    def now(*_: Any, **__: Any) -> bool:
        nonlocal calls
        calls += 1
        return calls > after

    with engine_over(tiers, blocks, segments) as engine:
        other = ask(engine, spec("other", OTHER, new=200))
        other.wait_token()
        setattr(tiers, method, Failing(getattr(tiers, method), now))
        victim = ask(engine, tiered("victim", DOCUMENT + text(2, 30), shared=640))
        assert victim.wait() is FinishReason.ERROR
        delattr(tiers, method)
        ended_alone(victim, other, OTHER, 200)
        again = ask(engine, tiered("again", DOCUMENT + text(2, 30), shared=640))
        again.wait()
        assert again.tokens == expected_tokens(DOCUMENT + text(2, 30), 4)


def test_a_store_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = saved_document(DOCUMENT)
    with engine_over(FakeTiers(), blocks) as engine:
        other = ask(engine, spec("other", OTHER, new=200))
        other.wait_token()
        for seq_id, policy in (("full", KVPolicy.FULL), ("tiered", KVPolicy.TIERED)):
            with monkeypatch.context() as broken:
                broken.setattr(blocks, "prefix_length", Failing(blocks.prefix_length))
                victim = ask(engine, spec(seq_id, DOCUMENT, kv_policy=policy))
                assert victim.wait() is FinishReason.ERROR
        ended_alone(victim, other, OTHER, 200)


def test_a_context_that_cannot_be_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is complete all the same."""
    with engine_over(FakeTiers()) as engine:
        runtime = engine._stepper._runtime
        with monkeypatch.context() as broken:
            broken.setattr(runtime, "release_context", Failing(runtime.release_context))
            listener = ask(engine, spec("a", OTHER))
            assert listener.wait() is FinishReason.LENGTH
        runtime.release_context("a")
