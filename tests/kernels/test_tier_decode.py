"""Decode over closed segments: native equals the reference for any mix of tiers, policies and shapes.

Tolerance: outputs are averages of values of size one. bf16 output rounds by 2^-9, bf16 weights of the bf16 blocks
as much, queries and weights over INT8 by 2^-15; what is left is a unit at the edge of the budget, which one side
reads exactly and the other by its mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perilune.kernels import tier_reference
from perilune.kernels.interface import (
    ATTENTION_PARTS,
    ATTENTION_STATS,
    HeadBudgets,
    HeadShape,
    KVLayout,
    KVPool,
    RaggedBatch,
    SegmentBatch,
    SegmentPool,
)
from perilune.kernels.native import NativeKernels
from perilune.kernels.reference import ReferenceKernels
from perilune.kernels.select import load
from perilune.kernels.tiers import (
    SEGMENT_TOKENS,
    SINK_TOKENS,
    UNIT_TOKENS,
    AttentionPolicy,
    SegmentLayout,
)
from tests.kernels.cases import NUM_LAYERS, head_shape, random_model
from tests.kernels.conftest import LEVEL_NAMES

RELAXED = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LAYER = 1
TOKENS = ATTENTION_STATS.index("exact_tokens")
FLAT = AttentionPolicy(
    window_tokens=512,
    min_units=8,
    max_units=40,
    top_p=0.6,
    dense_layers=0,
    dense_tokens=0,
)


@dataclass(frozen=True)
class Sequence:
    """`closed` segments, then `tail` tokens of bf16."""

    closed: int
    tail: int
    policy: AttentionPolicy

    @property
    def length(self) -> int:
        return self.closed * SEGMENT_TOKENS + self.tail


@dataclass(frozen=True)
class Opened:
    q: torch.Tensor
    pool: KVPool
    batch: RaggedBatch
    payloads: torch.Tensor  # kept alive here


@st.composite
def policies(draw: st.DrawFn) -> AttentionPolicy:
    units = draw(st.integers(0, 60))
    return AttentionPolicy(
        sparse=draw(st.sampled_from([True, True, True, False])),
        window_tokens=draw(st.integers(0, 3000)),
        topk_units=draw(st.integers(0, 50)),
        top_p=draw(st.sampled_from([0.3, 0.9, 0.99, 1.0])),
        min_units=units,
        max_units=units + draw(st.integers(0, 200)),
        summary_weight=draw(st.sampled_from([0.0, 0.5, 1.0])),
        dense_layers=draw(st.sampled_from([0, 2])),
        dense_tokens=draw(st.sampled_from([0, 0, 3000])),
        dense_layer_tokens=draw(st.sampled_from([0, 5000])),
    )


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    closed = draw(st.integers(0, 3))
    return Sequence(closed, draw(st.integers(1, 700)), draw(policies()))


@st.composite
def shapes(draw: st.DrawFn) -> HeadShape:
    return head_shape(
        draw(st.sampled_from([1, 3, 4, 8])), draw(st.integers(1, 2)), draw(st.sampled_from([64, 80, 128, 256]))
    )


def fill_slot(pool: SegmentPool, slot: int, tokens: int, generator: torch.Generator) -> None:
    """Records of alike keys: a cluster is a direction, and neighbours of a unit share it."""
    layout = pool.layout
    units = tokens // UNIT_TOKENS
    shape = (layout.records, units * UNIT_TOKENS, layout.head_dim)
    centres = torch.randn(layout.records, units, 1, layout.head_dim, generator=generator)
    noise = torch.randn(layout.records, units, UNIT_TOKENS, layout.head_dim, generator=generator)
    v = torch.randn(shape, generator=generator)
    records = tier_reference.encode((centres + 0.4 * noise).view(shape), v)
    tier_reference.write_records(records, pool, slot, 0)


def open_case(kernels: NativeKernels, heads: HeadShape, rows: list[Sequence], seed: int = 0) -> Opened:
    """Bf16 blocks of the closed segments don't exist (-1), but for the sinks; slots and blocks lie in no order."""
    generator = torch.Generator().manual_seed(seed)
    layout = SegmentLayout(NUM_LAYERS, heads.num_kv_heads, heads.head_dim)
    slots = sum(row.closed for row in rows)
    segments = kernels.allocate_segments(layout, slots + 1)
    payloads = torch.zeros((slots + 1) * layout.segment_payload_bytes + 64, dtype=torch.uint8)
    base = payloads.data_ptr() + -payloads.data_ptr() % 64
    segments.payloads.copy_(base + layout.segment_payload_bytes * torch.arange(slots + 1))
    free_slots = torch.randperm(slots + 1, generator=generator).tolist()
    kv = KVLayout(NUM_LAYERS, heads.num_kv_heads, heads.head_dim, "bf16")
    wide = max(-(-row.length // 32) for row in rows)
    tables = torch.full((len(rows), wide), -1, dtype=torch.int32)
    slot_tables = torch.full((len(rows), max(row.closed for row in rows) + 1), -1, dtype=torch.int32)
    free_blocks = torch.randperm(len(rows) * (wide + 2), generator=generator).int()
    for index, row in enumerate(rows):
        for segment in range(row.closed):
            slot = free_slots.pop()
            slot_tables[index, segment] = slot
            fill_slot(segments, slot, SEGMENT_TOKENS - (SINK_TOKENS if segment == 0 else 0), generator)
        kept = [b for b in range(-(-row.length // 32)) if row.closed == 0 or b < 2 or b >= 64 * row.closed]
        tables[index, kept], free_blocks = free_blocks[: len(kept)], free_blocks[len(kept) :]
    pool = kernels.allocate_pool(kv, len(rows) * (wide + 2))
    numbers = pool.data.view(torch.bfloat16)
    numbers.copy_(torch.randn(numbers.numel(), generator=generator))
    q = torch.randn(len(rows), heads.num_q_heads, heads.head_dim, generator=generator) * 1.5
    lengths = torch.tensor([row.length for row in rows], dtype=torch.int32)
    counts = torch.tensor([row.closed for row in rows], dtype=torch.int32)
    stats = torch.full((len(rows), NUM_LAYERS, len(ATTENTION_STATS)), -1.0)
    tiers = SegmentBatch(segments, slot_tables, counts, tuple(row.policy for row in rows), stats)
    cu_q = torch.arange(len(rows) + 1, dtype=torch.int32)
    return Opened(q.bfloat16(), pool, RaggedBatch(cu_q, lengths, tables, tiers), payloads)


def with_tiers(batch: RaggedBatch, **changes: Any) -> RaggedBatch:
    assert batch.segments is not None
    return replace(batch, segments=replace(batch.segments, **changes))


def stats_of(batch: RaggedBatch) -> torch.Tensor:
    assert batch.segments is not None
    assert batch.segments.stats is not None
    return batch.segments.stats[:, LAYER]


def assert_same(
    native: NativeKernels, reference: ReferenceKernels, case: Opened, heads: HeadShape, window: int | None = None
) -> None:
    theirs = with_tiers(case.batch, stats=torch.full((len(case.q), NUM_LAYERS, len(ATTENTION_STATS)), -1.0))
    got = native.decode_attention(case.q, case.pool, LAYER, case.batch, heads, window=window)
    expected = reference.decode_attention(case.q, case.pool, LAYER, theirs, heads, window=window)
    error = (got.float() - expected.float()).abs()
    assert torch.isfinite(got).all()
    assert error.max() < 0.02, error.max()
    assert error.mean() < 0.002, error.mean()
    mine, want = stats_of(case.batch), stats_of(theirs)
    torch.testing.assert_close(mine[:, :TOKENS], want[:, :TOKENS], rtol=0.01, atol=3e-3)
    assert (mine[:, TOKENS] - want[:, TOKENS]).abs().max() <= UNIT_TOKENS, (mine, want)


@RELAXED
@given(heads=shapes(), rows=st.lists(sequences(), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_equals_reference(
    native: NativeKernels, reference: ReferenceKernels, heads: HeadShape, rows: list[Sequence], seed: int
) -> None:
    assert_same(native, reference, open_case(native, heads, rows, seed), heads)


@RELAXED
@given(
    heads=shapes(),
    rows=st.lists(sequences(), min_size=1, max_size=3),
    shares=st.lists(st.sampled_from([0.0, 0.0, 0.03, 0.5, 1.0, 2.75, 1e4]), min_size=16, max_size=16),
    seed=st.integers(0, 99),
)
def test_equals_reference_with_shares(
    native: NativeKernels,
    reference: ReferenceKernels,
    heads: HeadShape,
    rows: list[Sequence],
    shares: list[float],
    seed: int,
) -> None:
    case = open_case(native, heads, rows, seed)
    by_head = torch.tensor(shares[: NUM_LAYERS * heads.num_kv_heads]).view(NUM_LAYERS, -1)
    sketched = torch.rand(by_head.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    budgets = HeadBudgets(by_head, sketched.to(torch.uint8))
    assert_same(native, reference, replace(case, batch=with_tiers(case.batch, budgets=budgets)), heads)


@pytest.mark.parametrize(
    "policy",
    [
        replace(FLAT, sparse=False),
        FLAT,
        replace(FLAT, summary_weight=0.0),
        replace(FLAT, top_p=1.0, topk_units=20),
        replace(FLAT, dense_layers=2, dense_layer_tokens=0),
    ],
    ids=["dense", "flat", "no summaries", "fixed budget", "four times the budget"],
)
def test_each_form(native: NativeKernels, reference: ReferenceKernels, policy: AttentionPolicy) -> None:
    heads = head_shape(3, 3, 64)
    case = open_case(native, heads, [Sequence(3, 200, policy)])
    assert_same(native, reference, case, heads)
    read = float(stats_of(case.batch)[0, TOKENS])
    assert (read > 6000) == (not policy.sparse)


def test_heads_read_their_shares(native: NativeKernels, reference: ReferenceKernels) -> None:
    """A head without one reads as if the segments before its window weren't there; no layer is special."""
    heads = head_shape(2, 3, 64)
    policy = replace(FLAT, top_p=1.0, topk_units=20, window_tokens=512, dense_layers=2, dense_layer_tokens=10**6)
    case = open_case(native, heads, [Sequence(4, 200, policy)])
    shares = torch.ones(NUM_LAYERS, 3)
    shares[LAYER] = torch.tensor([0.0, 0.52, 3.0])
    budgets = HeadBudgets(shares, torch.ones(NUM_LAYERS, 3, dtype=torch.uint8))
    shared = replace(case, batch=with_tiers(case.batch, budgets=budgets))
    assert_same(native, reference, shared, heads)
    exact = SINK_TOKENS + SEGMENT_TOKENS + 200
    read = torch.tensor([exact, exact + 10 * UNIT_TOKENS, exact + 60 * UNIT_TOKENS]).float().mean()
    assert float(stats_of(shared.batch)[0, TOKENS]) == pytest.approx(float(read))
    local = with_tiers(case.batch, policies=(replace(policy, topk_units=0, summary_weight=0.0, dense_layers=0),))
    got = native.decode_attention(case.q, case.pool, LAYER, shared.batch, heads)
    near_only = native.decode_attention(case.q, case.pool, LAYER, local, heads)
    torch.testing.assert_close(got[:, :2], near_only[:, :2])
    assert not torch.allclose(got[:, 2:], near_only[:, 2:], atol=0.01)
    everything = with_tiers(case.batch, budgets=budgets, policies=(replace(policy, sparse=False),))
    dense = with_tiers(case.batch, policies=(replace(policy, sparse=False),))
    whole = [native.decode_attention(case.q, case.pool, LAYER, batch, heads) for batch in (everything, dense)]
    assert torch.equal(*whole)


def test_mixed_batch_gives_each_sequence_what_it_gets_alone(native: NativeKernels) -> None:
    heads = head_shape(3, 2, 64)
    rows = [
        Sequence(2, 300, FLAT),
        Sequence(0, 500, AttentionPolicy()),
        Sequence(3, 40, replace(FLAT, min_units=60, max_units=60)),
        Sequence(1, 9, replace(FLAT, sparse=False)),
    ]
    case = open_case(native, heads, rows)
    together = native.decode_attention(case.q, case.pool, LAYER, case.batch, heads)
    for index, row in enumerate(rows):
        one = slice(index, index + 1)
        tiers = replace(
            case.batch.segments,  # type: ignore[type-var]
            tables=case.batch.segments.tables[one].contiguous(),  # type: ignore[union-attr]
            counts=case.batch.segments.counts[one].contiguous(),  # type: ignore[union-attr]
            policies=(row.policy,),
            stats=None,
        )
        alone = RaggedBatch(
            case.batch.cu_q[:2],
            case.batch.kv_lengths[one].contiguous(),
            case.batch.block_tables[one].contiguous(),
            None if row.closed == 0 else tiers,
        )
        q = case.q[one].contiguous()
        assert torch.equal(native.decode_attention(q, case.pool, LAYER, alone, heads), together[one]), index


def test_window_layers_read_blocks_only(native: NativeKernels, reference: ReferenceKernels) -> None:
    heads = head_shape(4, 1, 64)
    case = open_case(native, heads, [Sequence(2, 300, FLAT), Sequence(0, 90, FLAT)])
    got = native.decode_attention(case.q, case.pool, LAYER, case.batch, heads, window=200)
    kept = replace(case.batch, block_tables=case.batch.block_tables.clamp(min=0), segments=None)
    expected = reference.attention(case.q, case.pool, LAYER, kept, heads, window=200)
    torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=0.02)
    assert (stats_of(case.batch) == -1).all()


def test_selected_units_matter(native: NativeKernels) -> None:
    """A key that answers the query is found among thousands; dropping its unit would be seen."""
    heads = head_shape(1, 1, 64)
    case = open_case(native, heads, [Sequence(3, 64, replace(FLAT, summary_weight=1.0))])
    dense = with_tiers(case.batch, policies=(replace(FLAT, sparse=False),))
    none = with_tiers(case.batch, policies=(replace(FLAT, top_p=1.0, topk_units=0, summary_weight=0.0),))
    q = case.q * 2
    full, hybrid, local = (
        native.decode_attention(q, case.pool, LAYER, batch, heads).float() for batch in (dense, case.batch, none)
    )
    assert (hybrid - full).norm() < 0.5 * (local - full).norm()


def test_bad_segments_are_refused(native: NativeKernels) -> None:
    heads = head_shape(1, 1, 64)
    case = open_case(native, heads, [Sequence(1, 40, FLAT)])
    tiers = case.batch.segments
    assert tiers is not None
    empty = replace(tiers.pool, payloads=torch.zeros_like(tiers.pool.payloads))
    released = case.batch.block_tables.clone()
    released[0, 64] = -1
    bad = [
        with_tiers(case.batch, tables=torch.full_like(tiers.tables, tiers.pool.num_slots)),
        with_tiers(case.batch, tables=torch.full_like(tiers.tables, -1)),
        with_tiers(case.batch, counts=tiers.counts + 5),
        with_tiers(case.batch, pool=empty),
        replace(case.batch, block_tables=released),
    ]
    for batch in bad:
        with pytest.raises(ValueError, match="blocks"):
            native.decode_attention(case.q, case.pool, LAYER, batch, heads)
    with pytest.raises(ValueError, match="blocks"):  # the window reaches a released block
        native.decode_attention(case.q, case.pool, LAYER, case.batch, heads, window=100)
    wide = head_shape(1, 1, 528)
    beyond = native.allocate_pool(KVLayout(NUM_LAYERS, 1, 528, "bf16"), 2)
    with pytest.raises(ValueError, match="head_dim"):
        native.decode_attention(torch.zeros(1, 1, 528).bfloat16(), beyond, LAYER, case.batch, wide)
    records = SegmentLayout(NUM_LAYERS, 1, 64)
    for layout in (
        replace(records, head_dim=128),
        replace(records, num_kv_heads=2),
        replace(records, num_layers=1),
    ):
        pool = native.allocate_segments(layout, tiers.pool.num_slots)
        pool.payloads.copy_(tiers.pool.payloads)
        other = with_tiers(case.batch, pool=pool, stats=None)
        with pytest.raises(ValueError, match="blocks"):  # records of another model
            native.decode_attention(case.q, case.pool, LAYER, other, heads)
    budgets = HeadBudgets(torch.ones(NUM_LAYERS, 2), torch.ones(NUM_LAYERS, 2, dtype=torch.uint8))
    other = with_tiers(case.batch, budgets=budgets)
    with pytest.raises(ValueError, match="need"):  # of another model
        native.decode_attention(case.q, case.pool, LAYER, other, heads)
    with pytest.raises(ValueError, match="policies"):
        native.decode_attention(case.q, case.pool, LAYER, with_tiers(case.batch, policies=()), heads)


def test_numbers_past_32_bits_are_all_there_is(native: NativeKernels) -> None:
    heads = head_shape(1, 1, 64)
    policy = replace(FLAT, top_p=1.0, topk_units=2**40)
    case = open_case(native, heads, [Sequence(2, 60, policy)])
    native.decode_attention(case.q, case.pool, LAYER, case.batch, heads)
    assert float(stats_of(case.batch)[0, TOKENS]) == 2 * SEGMENT_TOKENS + 60


def test_parts_are_timed_only_when_asked(native: NativeKernels) -> None:
    heads = head_shape(3, 1, 64)
    case = open_case(native, heads, [Sequence(3, 64, FLAT)])
    part_ns = torch.zeros(NUM_LAYERS, len(ATTENTION_PARTS), dtype=torch.int64)
    timed = with_tiers(case.batch, part_ns=part_ns)
    native.decode_attention(case.q, case.pool, LAYER, timed, heads)
    assert (part_ns[LAYER] > 0).all()
    assert (part_ns[0] == 0).all()


@pytest.mark.parametrize("kind", ["zero", "tiny", "huge", "level"])
@pytest.mark.parametrize("shape", [(1, 2, 512), (7, 1, 96), (16, 1, 16)], ids=["512", "gqa96", "gqa16"])
def test_queries_of_any_size(
    native: NativeKernels, reference: ReferenceKernels, shape: tuple[int, int, int], kind: str
) -> None:
    """Nothing overflows: tiny ones have reciprocals past fp32; huge ones differ by more than a power can hold."""
    heads = head_shape(*shape)
    case = open_case(native, heads, [Sequence(3, 200, replace(FLAT, min_units=40)), Sequence(1, 70, FLAT)])
    if kind == "level":
        case.q.fill_(1.0)
    else:
        case.q.mul_({"zero": 0.0, "tiny": 2.0**-120, "huge": 2.0**7}[kind])
    theirs = with_tiers(case.batch, stats=torch.full((2, NUM_LAYERS, len(ATTENTION_STATS)), -1.0))
    got = native.decode_attention(case.q, case.pool, LAYER, case.batch, heads)
    expected = reference.decode_attention(case.q, case.pool, LAYER, theirs, heads)
    assert torch.isfinite(got).all()
    # A score of 500 with weights of 15 bits leaves errors that would matter to a softmax of small scores only.
    assert (got.float() - expected.float()).abs().mean() < (0.02 if kind == "huge" else 0.002)
    mine, want = stats_of(case.batch)[:, TOKENS], stats_of(theirs)[:, TOKENS]
    assert (mine - want).abs().max() <= 2 * UNIT_TOKENS, (mine, want)


@pytest.mark.parametrize("dim", [256, 512])
def test_scores_at_the_ends_of_their_range(native: NativeKernels, reference: ReferenceKernels, dim: int) -> None:
    """Level queries on level keys: all products of a unit's highest key have one sign and the largest codes."""
    heads = head_shape(1, 1, dim)
    case = open_case(native, heads, [Sequence(1, 70, replace(FLAT, sparse=False))])
    assert case.batch.segments is not None
    layout, slots = case.batch.segments.pool.layout, case.batch.segments.pool
    tokens = SEGMENT_TOKENS - SINK_TOKENS
    k = torch.linspace(0, 8, tokens)[None, :, None].expand(layout.records, -1, dim)
    v = torch.randn(layout.records, tokens, dim)
    slot = int(case.batch.segments.tables[0, 0])
    tier_reference.write_records(tier_reference.encode(k, v), slots, slot, 0)
    case.q.fill_(0.25)
    assert_same(native, reference, case, heads)


def test_a_row_without_numbers_harms_no_other(native: NativeKernels) -> None:
    heads = head_shape(3, 2, 64)
    case = open_case(native, heads, [Sequence(3, 300, FLAT), Sequence(3, 40, FLAT), Sequence(0, 50, FLAT)])
    whole = native.decode_attention(case.q, case.pool, LAYER, case.batch, heads)
    for value in (float("nan"), float("inf")):
        case.q[1] = value
        broken = native.decode_attention(case.q, case.pool, LAYER, case.batch, heads)
        assert torch.equal(broken[::2], whole[::2])
        assert broken[1].isnan().any()


def test_bits_depend_on_neither_threads_nor_statistics(native: NativeKernels) -> None:
    heads = head_shape(3, 2, 64)
    case = open_case(native, heads, [Sequence(6, 300, FLAT), Sequence(2, 40, replace(FLAT, sparse=False))])
    whole = native.decode_attention(case.q, case.pool, LAYER, case.batch, heads)
    stats = stats_of(case.batch).clone()
    silent = with_tiers(case.batch, stats=None)
    level = next(level for level, name in LEVEL_NAMES.items() if name in native.level_name)
    for threads in (1, 3, 5):
        other = load(threads, level=level)
        assert isinstance(other, NativeKernels)
        for batch in (case.batch, silent):
            assert torch.equal(other.decode_attention(case.q, case.pool, LAYER, batch, heads), whole), threads
        assert torch.equal(stats_of(case.batch), stats)


def test_whole_step_reads_segments(native: NativeKernels, reference: ReferenceKernels) -> None:
    """One step of two layers, against the reference's; one of the sequences has no segments."""
    heads = head_shape(3, 1, 64)
    rows = [Sequence(1, 100, FLAT), Sequence(0, 37, FLAT)]
    case = open_case(native, heads, rows)
    copy = KVPool(case.pool.layout, case.pool.data.clone())
    x = torch.randn(2, 192)
    results = []
    for kernels, pool in ((native, case.pool), (reference, copy)):
        model = random_model(kernels, heads, 192, 256, gemma=False, kinds=["int8"])
        results.append(kernels.decode_step(kernels.prepare_decode(model, pool), x.clone(), case.batch))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0.05)
