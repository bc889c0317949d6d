"""Tiered sequences in the engine: what is closed when, what is read, what is given back (spec R4, R9)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perilune.core import EngineToken, FinishReason, KVPolicy, SequenceSpec, ServiceClass
from perilune.engine.tier_rules import TierRules
from perilune.errors import InvalidRequest
from perilune.runtime.kv.spec import TierSpec
from perilune.runtime.mri import CancelFlag, StepPlan, StepResult
from tests.engine.harness import Bench, spec, text
from tests.engine.tiered import HOT, SEGMENT, FakeTiers
from tests.fakes import MemoryKVStore, expected_tokens


def tiered(seq_id: str, tokens: list[int], **more: object) -> SequenceSpec:
    return spec(seq_id, tokens, kv_policy=KVPolicy.TIERED, **more)  # type: ignore[arg-type]


def ingest(seq_id: str, tokens: list[int]) -> SequenceSpec:
    return tiered(seq_id, tokens, owner=seq_id, ingest=True, service_class=ServiceClass.P2_BATCH)


def test_rules_at_the_borders() -> None:
    rules = TierRules(TierSpec(1, 1, 1, 8, 8, 0), 4096)
    assert [rules.prefill_reads(p) for p in (0, 4095, 4096, 6143, 6144)] == [0, 0, 1, 1, 2]
    assert [rules.decode_reads(p, 1024) for p in (3070, 3071, 5118, 5119)] == [0, 1, 1, 2]
    assert rules.decode_reads(4095, 1 << 20) == 1, "a window reaches no further than blocks are kept"
    assert [rules.released(p) for p in (4095, 4096, 6144)] == [0, 1, 2]
    assert [rules.cold(p) for p in (6143, 6144, 8192)] == [0, 1, 2]
    assert rules.to_border(2048) == 2048
    assert rules.to_border(2049) == 2047
    for position in range(0, 20_000, 7):
        assert rules.released(position) <= rules.prefill_reads(position)
        assert rules.released(position) <= rules.decode_reads(position, 4096)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 255, 256, 257, 385, 500, 640, 641])
@pytest.mark.parametrize("chunk", [32, 96, 1000])
def test_answers_are_those_of_full_kv(length: int, chunk: int) -> None:
    bench = Bench(tiers=FakeTiers(), chunk_tokens=chunk)
    listener = bench.answer(tiered("a", text(1, length), new=200))
    assert listener.tokens == expected_tokens(text(1, length), 200)


def test_only_sinks_and_the_hot_zone_keep_blocks() -> None:
    tiers = FakeTiers(warm=10)
    bench = Bench(tiers=tiers, chunk_tokens=64)
    bench.add(tiered("a", text(1, 1000), new=100))
    most = 0
    while bench.step() is not None:
        sequence = next(iter(bench.stepper.sequences), None)
        if sequence is not None:
            most = max(most, sequence.held_blocks)
            held = [i for i, block in enumerate(sequence.block_table) if block >= 0]
            assert held[:2] == [0, 1]
            assert len(held) == sequence.held_blocks
    assert most <= 2 + (HOT + SEGMENT) // 32 + 1
    bench.check_idle()
    assert len(tiers.closed) == 7 + 4, "seven of eight segments close in one go, the last while decoding"


def test_a_decoding_sequence_closes_a_few_records_a_step() -> None:
    tiers = FakeTiers()
    bench = Bench(tiers=tiers)
    bench.add(tiered("a", text(1, 120), new=60))
    seen = []
    while bench.step() is not None:
        seen.append(len(tiers.closed))
    assert seen[7:13] == [0, 1, 2, 3, 4, 4]
    assert all(count == 1 for _, _, count in tiers.closed)


def test_a_second_question_shares_segments() -> None:
    tiers = FakeTiers()
    bench = Bench(tiers=tiers)
    document = text(1, 640)
    bench.answer(tiered("first", document + text(2, 20), shared=640))
    closed = len(tiers.closed)
    listener = bench.answer(tiered("second", document + text(3, 30), shared=640))
    assert listener.cached == (640, 0)
    assert listener.tokens == expected_tokens(document + text(3, 30), 4)
    assert len(tiers.closed) == closed, "nothing is closed twice"
    assert bench.stepper.lookup(spec_hashes(document)).ram == 640


def spec_hashes(tokens: list[int]) -> list[bytes]:
    from perilune.runtime.kv.spec import block_hashes
    from tests.engine.harness import SALT

    return block_hashes(tokens, SALT)


def test_a_restart_loads_segments_and_the_last_blocks() -> None:
    blocks, segments = MemoryKVStore(), MemoryKVStore()
    document = text(1, 640)
    bench = Bench(blocks, segment_store=segments, tiers=FakeTiers())
    bench.answer(ingest("doc", document))
    fresh = Bench(blocks, segment_store=segments, tiers=FakeTiers())
    assert fresh.stepper.lookup(spec_hashes(document)).disk == 640
    listener = fresh.answer(tiered("ask", document + text(2, 30), shared=640))
    assert listener.cached == (0, 640)
    assert listener.tokens == expected_tokens(document + text(2, 30), 4)
    assert fresh.watcher.loads[0].size_bytes == 4 * (4 + 1024) + (2 + 4) * 256


@pytest.mark.parametrize("lost", [0, 1, 2, 3, 4, 7])
def test_a_lost_segment_is_closed_again_from_blocks(lost: int) -> None:
    blocks, segments = MemoryKVStore(), MemoryKVStore()
    document = text(1, 640)
    Bench(blocks, segment_store=segments, tiers=FakeTiers()).answer(ingest("doc", document))
    del segments._blocks[list(segments._blocks)[lost]]
    fresh = Bench(blocks, segment_store=segments, tiers=FakeTiers())
    listener = fresh.answer(tiered("ask", document + text(2, 30), shared=640))
    assert listener.tokens == expected_tokens(document + text(2, 30), 4)
    assert listener.cached == (0, 640)


def test_blocks_alone_are_enough() -> None:
    blocks = MemoryKVStore()
    document = text(1, 640)
    Bench(blocks, tiers=FakeTiers()).answer(ingest("doc", document))
    listener = Bench(blocks, tiers=FakeTiers()).answer(tiered("ask", document + text(2, 30), shared=640))
    assert listener.cached == (0, 640)
    assert listener.tokens == expected_tokens(document + text(2, 30), 4)


def test_a_damaged_block_in_the_hot_zone_costs_no_wrong_answer() -> None:
    blocks, segments = MemoryKVStore(), MemoryKVStore()
    document = text(1, 640)
    Bench(blocks, segment_store=segments, tiers=FakeTiers()).answer(ingest("doc", document))
    names = spec_hashes(document)
    for place in (0, 19, 17, 16):
        del blocks._blocks[names[place]]
        fresh = Bench(blocks, segment_store=segments, tiers=FakeTiers())
        listener = fresh.answer(tiered("ask", document + text(2, 30), shared=640))
        assert listener.tokens == expected_tokens(document + text(2, 30), 4)


def test_forgetting_an_owner_deletes_segments_too() -> None:
    blocks, segments = MemoryKVStore(), MemoryKVStore()
    bench = Bench(blocks, segment_store=segments, tiers=FakeTiers())
    bench.answer(ingest("doc", text(1, 640)))
    assert segments.entries()
    future = bench.stepper.forget("doc")
    bench.saver.run()
    assert future.result() > 640 * 8
    assert not segments.entries()
    assert not blocks.entries()
    assert bench.stepper.lookup(spec_hashes(text(1, 640))).total == 0
    bench.check_idle()


def test_old_segments_go_cold_and_bytes_stay() -> None:
    tiers = FakeTiers(warm=4, cold=8)
    bench = Bench(tiers=tiers, warm_tokens=SEGMENT, chunk_tokens=64)
    listener = bench.answer(tiered("a", text(1, 1100), new=60))
    assert listener.tokens == expected_tokens(text(1, 1100), 60)
    assert tiers.moves >= 4
    again = bench.answer(tiered("b", text(1, 1100) + text(2, 5), new=60))
    assert again.cached == (1088, 0)
    assert again.tokens == expected_tokens(text(1, 1100) + text(2, 5), 60)


def test_a_sequence_longer_than_all_slots_is_cut() -> None:
    bench = Bench(tiers=FakeTiers(warm=3, cold=0))
    listener = bench.answer(tiered("a", text(1, 300), new=500))
    assert listener.reason is FinishReason.LENGTH
    assert len(listener.tokens) == 3 * SEGMENT - 300


def test_sequences_that_share_no_slots_take_turns() -> None:
    bench = Bench(tiers=FakeTiers(warm=4, cold=0), num_blocks=64)
    listeners = [bench.add(tiered(f"s{i}", text(i + 1, 400), new=90)) for i in range(4)]
    bench.run()
    for i, listener in enumerate(listeners):
        assert listener.tokens == expected_tokens(text(i + 1, 400), 90)


def test_full_and_tiered_run_in_one_step() -> None:
    bench = Bench(tiers=FakeTiers())
    one = bench.add(tiered("tiered", text(1, 400), new=30))
    other = bench.add(spec("full", text(2, 400), new=30))
    bench.run()
    assert any(len(plan.slices) == 2 for plan in bench.runtime.plans)
    assert one.tokens == expected_tokens(text(1, 400), 30)
    assert other.tokens == expected_tokens(text(2, 400), 30)
    assert not any(
        piece.segments for plan in bench.runtime.plans for piece in plan.slices if piece.seq_id == "full"
    )


def test_a_cancel_delays_closing_and_loses_nothing() -> None:
    tiers = FakeTiers()
    bench = Bench(tiers=tiers)
    listener = bench.add(tiered("a", text(1, 400), new=30))
    bench.step()
    original = tiers.close_records

    def close(slot: int, blocks: list[int], first: int, count: int) -> None:
        original(slot, blocks, first, count)
        bench.flag.set()

    tiers.close_records = close  # type: ignore[method-assign, assignment]
    for _ in range(4):
        bench.step()
        bench.flag.clear()
    tiers.close_records = original  # type: ignore[method-assign]
    bench.run()
    assert listener.tokens == expected_tokens(text(1, 400), 30)


def test_a_runtime_without_tiers_says_so() -> None:
    bench = Bench()
    with pytest.raises(InvalidRequest, match="tiers"):
        bench.stepper.capacity(tiered("a", text(1, 10)))


def test_a_token_says_how_much_was_read_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first decode step and one in sixteen after it; layers that report nothing read blocks only."""
    bench = Bench(tiers=FakeTiers())
    compute, measured = bench.runtime.forward_step, []

    def forward(plan: StepPlan, cancelled: CancelFlag) -> StepResult:
        result = compute(plan, cancelled)
        marked = [piece for piece in plan.slices if piece.measure]
        measured.extend(piece.end for piece in marked)
        rows = {piece.seq_id: ((0.0,) * 6, (0.2, 0.3, 0.5, 0.1, 0.4, piece.end / 4)) for piece in marked}
        return replace(result, attention=rows)

    monkeypatch.setattr(bench.runtime, "forward_step", forward)
    listener = bench.answer(tiered("a", text(1, 400), new=40))
    shares = [event.exact_share for event in listener.events if isinstance(event, EngineToken)]
    assert shares == [1.0] + [0.25] * 39
    assert measured == [401, 417, 433]
    full = bench.answer(spec("b", text(2, 400), new=40))
    assert {event.exact_share for event in full.events if isinstance(event, EngineToken)} == {1.0}
    assert len(measured) == 3
