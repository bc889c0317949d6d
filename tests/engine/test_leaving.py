"""A cancelled sequence leaves a step that others share: at once, with its blocks, and without a trace in theirs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core import BLOCK_TOKENS, FinishReason, KVPolicy, SamplingParams
from perilune.engine import segments
from perilune.engine.loop import EngineLoop
from perilune.engine.policy import EngineLimits
from perilune.engine.stepper import TierPolicy
from perilune.kernels import select as kernel_choice
from perilune.kernels.tiers import AttentionPolicy
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.mri import CancelFlag, SequenceSlice, StepPlan
from perilune.runtime.torch_runtime import TorchRuntime
from perilune.runtime.weights import WeightBuilder
from tests.engine.harness import Bench, Listener, spec, text
from tests.engine.tiered import FAKE_WINDOW, SEGMENT, FakeTiers, TieredRuntime
from tests.fakes import FakeRuntime, MemoryKVStore, expected_tokens
from tests.runtime.families import PLENTY, make_model

GREEDY = SamplingParams()
CANCEL_S = 0.05
POISON = b"\x5a"
TIER_POLICY = TierPolicy(1 << 20, {"general": AttentionPolicy(window_tokens=FAKE_WINDOW)})


class LeavingFlag(CancelFlag):
    """Lets `leavers` go when the runtime asks for the `turn`-th time; their blocks are given up and poisoned."""

    def __init__(self, runtime: TorchRuntime, leavers: dict[str, list[int]], turn: int) -> None:
        super().__init__(self._who)
        self._runtime, self._leavers, self._turns = runtime, leavers, turn
        self.gone: set[str] = set()

    def _who(self) -> set[str]:
        self._turns -= 1
        if self._turns <= 0 and not self.gone:
            for name, blocks in self._leavers.items():
                self.gone.add(name)
                self._runtime.release_context(name)
                self._runtime.evict_kv(blocks)
                for block in blocks:
                    self._runtime.block_view(block)[:] = POISON * self._runtime.kv_spec.block_bytes
        return self.gone


@pytest.fixture(scope="module")
def make_runtime(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], TorchRuntime]:
    folder = tmp_path_factory.mktemp("model")
    make_model("llama-untied", folder)

    def make() -> TorchRuntime:
        kernels = kernel_choice.load(1)
        weights = WeightBuilder(open_checkpoint(folder), kernels, "bf16", "auto", 512).build(PLENTY)
        return TorchRuntime(weights, kernels, num_blocks=24, fingerprint="test", entropy=lambda: 1)

    return make


PROMPTS = {
    "a": [3 + 7 * i % 200 for i in range(90)],
    "b": [5 + 11 * i % 200 for i in range(70)],
    "c": [4 + 3 * i % 200 for i in range(40)],
}
TABLES = {"a": [0, 1, 2, 3], "b": [8, 9, 10, 11], "c": [16, 17, 18, 19]}
FIRST = {"a": 50, "b": 33, "c": 32}
"""Tokens of each prompt that a first, undisturbed step computes."""


def piece(name: str, start: int, end: int) -> SequenceSlice:
    prompt = PROMPTS[name]
    return SequenceSlice(name, prompt[start:end], start, TABLES[name], end == len(prompt))


def play(runtime: TorchRuntime, decoding: set[str], flag: CancelFlag) -> tuple[dict[str, int], dict[str, bytes]]:
    """One step in which everybody's prompt ends, or in which `decoding` ones decode token 5: tokens, KV bytes."""
    slices = []
    for name, prompt in PROMPTS.items():
        runtime.init_context(name, prompt, GREEDY)
        runtime.forward_step(StepPlan((piece(name, 0, FIRST[name]),)), CancelFlag())
        if name in decoding:
            runtime.forward_step(StepPlan((piece(name, FIRST[name], len(prompt)),)), CancelFlag())
            slices.append(SequenceSlice(name, [5], len(prompt), TABLES[name], True))
        else:
            slices.append(piece(name, FIRST[name], len(prompt)))
    tokens = runtime.forward_step(StepPlan(tuple(slices)), flag).tokens
    kv = {name: b"".join(bytes(runtime.block_view(b)) for b in TABLES[name]) for name in PROMPTS}
    for name in PROMPTS:
        runtime.release_context(name)
    return tokens, kv


@pytest.mark.parametrize("decoding", [set(), {"a"}, {"a", "b"}, {"a", "b", "c"}], ids=len)
@pytest.mark.parametrize("leavers", [{"a"}, {"b"}, {"c"}, {"a", "c"}], ids=lambda who: "".join(sorted(who)))
def test_who_stays_is_not_touched_and_who_leaves_not_computed(
    make_runtime: Callable[[], TorchRuntime], leavers: set[str], decoding: set[str]
) -> None:
    """Whenever they leave: KV and tokens of the rest are the same, bit for bit, and the freed blocks stay as they
    were when they were freed."""
    undisturbed, kv = play(make_runtime(), decoding, CancelFlag())
    left_midway = 0
    for turn in range(1, 9):
        runtime = make_runtime()
        flag = LeavingFlag(runtime, {name: TABLES[name] for name in leavers}, turn)
        tokens, after = play(runtime, decoding, flag)
        if not flag.gone:
            assert tokens == undisturbed
            continue
        left_midway += turn > 1
        assert tokens == {name: token for name, token in undisturbed.items() if name not in leavers}
        for name, data in after.items():
            if name in leavers:
                assert data == POISON * len(data), f"{name} was written after it left"
            else:
                assert data == kv[name], f"{name} changed"
    assert left_midway


def test_a_decode_call_is_cut_short_for_a_leaver(make_runtime: Callable[[], TorchRuntime]) -> None:
    runtime = make_runtime()
    undisturbed, kv = play(make_runtime(), set(PROMPTS), CancelFlag())
    flag = LeavingFlag(runtime, {"b": TABLES["b"]}, 2)
    flag.wake()  # as if it had come in the first call
    tokens, after = play(runtime, set(PROMPTS), flag)
    assert flag.gone == {"b"}
    assert tokens == {"a": undisturbed["a"], "c": undisturbed["c"]}
    assert (after["a"], after["c"]) == (kv["a"], kv["c"])


# ------------------------------------------------------------------------------------------- the engine


def running(runtime: FakeRuntime, **limits: float) -> EngineLoop:
    engine = EngineLoop(runtime, None, EngineLimits(**limits))  # type: ignore[arg-type]
    engine.start()
    return engine


def submit(engine: EngineLoop, seq_id: str, prompt: list[int], new: int = 2) -> Listener:
    listener = Listener()
    engine.submit(spec(seq_id, prompt, new=new), listener)
    return listener


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_its_blocks_are_back_while_the_others_step_goes_on() -> None:
    """A decoding sequence beside a chunk of 1.5 s, one that waits, and one that no step has seen yet."""
    runtime = FakeRuntime(num_blocks=256, prefill_s=0.003, decode_s=0.001)
    engine = running(runtime, guard_s=1.5, batch=2)
    chat = submit(engine, "chat", text(1, 64), new=10_000)
    chat.wait_token()
    long = submit(engine, "long", text(2, 2000), new=1)
    until(lambda: len(runtime.plans[-1].slices) == 2)
    waiting = submit(engine, "waiting", text(3, 200))
    free, steps = engine.stats().free_blocks, len(runtime.plans)
    for seq_id, listener in (("chat", chat), ("waiting", waiting)):
        start_s = time.monotonic()
        engine.cancel(seq_id)
        listener.wait()
        assert listener.times[-1] - start_s < 4 * CANCEL_S, "generous: the machine may be busy"
    until(lambda: engine.stats().waiting == 0)
    assert len(runtime.plans) == steps, "the step went on"
    assert engine.stats().running == 1
    assert engine.stats().free_blocks >= free + 2
    assert long.finish is None
    long.wait()
    assert long.tokens == expected_tokens(text(2, 2000), 1)
    computed = sum(len(p.token_ids) for plan in runtime.plans for p in plan.slices if p.seq_id == "long")
    assert computed == 2000, "nothing of the other's was computed twice"
    engine.close()
    engine.check_integrity()
    assert not runtime.faults


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([33, 64, 150, 400]), min_size=3, max_size=5),
    gone=st.sets(st.integers(0, 4), min_size=1, max_size=3),
    delay_s=st.floats(0.0, 0.06),
)
def test_neighbours_answers_do_not_change(lengths: list[int], gone: set[int], delay_s: float) -> None:
    runtime = FakeRuntime(num_blocks=128, prefill_s=0.0002, decode_s=0.0005)
    engine = running(runtime, guard_s=0.05, solo_s=0.05)
    listeners = [submit(engine, f"s{i}", text(i, size), new=12) for i, size in enumerate(lengths)]
    time.sleep(delay_s)
    for index in gone:
        engine.cancel(f"s{index}")
        engine.cancel(f"s{index}")
    for index, (size, listener) in enumerate(zip(lengths, listeners, strict=True)):
        listener.wait()
        tokens = expected_tokens(text(index, size), len(listener.tokens))
        assert listener.tokens == tokens
        assert index in gone or len(tokens) == 12
    engine.close()
    engine.check_integrity()
    assert not runtime.faults, runtime.faults[:3]
    assert engine.stats().free_blocks == 128


def test_an_id_can_be_used_again_right_after_its_cancel() -> None:
    runtime = FakeRuntime(num_blocks=128, prefill_s=0.001, decode_s=0.001)
    engine = running(runtime, guard_s=0.2)
    other = submit(engine, "other", text(9, 40), new=10_000)
    other.wait_token()
    for turn in range(20):
        first = submit(engine, "same", text(turn, 200))
        time.sleep(0.002 * (turn % 5))
        engine.cancel("same")
        first.wait()
    last = submit(engine, "same", text(3, 3 * BLOCK_TOKENS))
    last.wait()
    assert last.tokens == expected_tokens(text(3, 3 * BLOCK_TOKENS), 2)
    engine.cancel("other")
    other.wait()
    engine.close()
    engine.check_integrity()
    assert not runtime.faults


# ------------------------------------------------------------------------------------- tiered sequences


def tiered_bench(tiers: FakeTiers) -> tuple[Bench, list[Listener]]:
    """Two sequences that decode in one step and read segments on disk, which nobody else has."""
    bench = Bench(tiers=tiers, warm_tokens=SEGMENT, num_blocks=128)
    listeners = [
        bench.add(spec(f"s{i}", text(i, 520), new=60, shared=0, kv_policy=KVPolicy.TIERED)) for i in (1, 2)
    ]
    while any(len(listener.tokens) < 40 for listener in listeners):
        bench.step()
        bench.loader.run()
    for sequence in bench.stepper.sequences:
        assert sum(tiers.is_cold(slot) for slot in sequence.segments) >= 2
    return bench, listeners


def test_whoever_leaves_a_tiered_step_gives_cold_segments_back_and_harms_nobody() -> None:
    bench, (leaver, other) = tiered_bench(FakeTiers(warm=12, cold=12))
    assert bench.stepper.segments is not None
    free = bench.stepper.segments.pool.free
    gone: set[str] = set()

    def left() -> set[str]:
        if not gone:
            gone.add("s1")
            bench.stepper.cancel("s1")
        return gone

    plan = bench.stepper.plan(bench.flag)
    assert plan is not None
    assert len(plan.slices) == 2
    bench.stepper.execute(plan, CancelFlag(left))
    assert leaver.reason is FinishReason.CANCELLED
    assert bench.stepper.segments.pool.free == free + 4
    bench.run()
    assert other.reason is FinishReason.LENGTH
    assert other.tokens == expected_tokens(text(2, 520), 60)


def test_a_cancel_is_heard_while_loaded_segments_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the loading sequence, and of another: each segment takes far longer than a cancel may."""
    blocks, document = MemoryKVStore(), text(1, 1280)
    Bench(blocks, tiers=FakeTiers(warm=12)).answer(
        spec("doc", document, owner="doc", ingest=True, kv_policy=KVPolicy.TIERED)
    )
    monkeypatch.setattr(segments, "CLOSE_BATCH", 1)
    tiers = FakeTiers(warm=40)
    close_records, closing = tiers.close_records, threading.Event()

    def slowly(*arguments: Any) -> None:
        closing.set()
        time.sleep(0.04)
        close_records(*arguments)

    tiers.close_records = slowly  # type: ignore[method-assign]
    runtime = TieredRuntime(256, 16_000, decode_s=0.3)  # a step that takes long gives closing as long
    tiers.attach(runtime)
    engine = EngineLoop(runtime, blocks, EngineLimits(), tier_policy=TIER_POLICY)
    engine.start()
    other = submit(engine, "other", text(5, 40), new=200)
    other.wait_token()
    loading = Listener()
    engine.submit(spec("loading", document + text(2, 30), shared=1280, kv_policy=KVPolicy.TIERED), loading)
    waits = submit(engine, "waits", text(6, 40))
    for seq_id, listener in (("waits", waits), ("loading", loading)):
        closing.clear()
        assert closing.wait(10)
        start_s = time.monotonic()
        engine.cancel(seq_id)
        assert listener.wait() is FinishReason.CANCELLED
        assert listener.times[-1] - start_s < 0.04 + 2 * CANCEL_S, "generous: the machine may be busy"
    engine.close()
    engine.check_integrity()
    assert not runtime.faults


def test_a_stream_stutters_little_while_loaded_segments_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, document = MemoryKVStore(), text(1, 1280)
    Bench(blocks, tiers=FakeTiers(warm=12)).answer(
        spec("doc", document, owner="doc", ingest=True, kv_policy=KVPolicy.TIERED)
    )
    monkeypatch.setattr(segments, "CLOSE_BATCH", 1)
    tiers = FakeTiers(warm=40)
    close_records = tiers.close_records
    bench = Bench(blocks, tiers=tiers, decode_s=0.01, num_blocks=256)

    def slowly(*arguments: Any) -> None:
        bench.sleep(0.02)
        close_records(*arguments)

    tiers.close_records = slowly  # type: ignore[method-assign]
    other = bench.add(spec("other", text(5, 40), new=400))
    while not other.tokens:
        bench.step()
    loading = bench.add(spec("loading", document + text(2, 30), shared=1280, kv_policy=KVPolicy.TIERED))
    longest_s = 0.0
    while not loading.tokens:
        before_s = bench.now
        bench.step()
        bench.loader.run()
        longest_s = max(longest_s, bench.now - before_s)
    assert longest_s < 0.1, "closing one segment alone takes 80 ms"
    bench.run()
    assert loading.tokens == expected_tokens(document + text(2, 30), 4)
    assert loading.cached == (0, 1280)
