"""Prefill over closed segments: native equals the reference, whatever the chunks; released blocks are not read."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perilune.kernels.interface import HeadShape, KVPool, RaggedBatch, SegmentBatch
from perilune.kernels.native import NativeKernels
from perilune.kernels.reference import ReferenceKernels
from perilune.kernels.tiers import SEGMENT_TOKENS, AttentionPolicy, SegmentLayout
from perilune.runtime.mri import CancelFlag
from tests.kernels.cases import Case, block_tables, head_shape, ragged, random_pool, random_rows

RELAXED = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LAYER = 1
SEGMENT_BLOCKS = SEGMENT_TOKENS // 32


@dataclass(frozen=True)
class Tiered:
    """Sequences of which `closed` segments each are closed, and their blocks, but the sinks', released."""

    q: torch.Tensor
    pool: KVPool
    heads: HeadShape
    batch: RaggedBatch
    plain: RaggedBatch  # the same sequences, nothing closed
    payloads: torch.Tensor  # kept alive here


@st.composite
def shapes(draw: st.DrawFn) -> tuple[HeadShape, tuple[tuple[int, int, int], ...]]:
    """Heads, and (closed segments, tokens after them, rows) of each sequence."""
    heads = head_shape(
        draw(st.sampled_from([1, 2, 3, 4, 7])),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([16, 64, 80, 128, 256])),
    )
    sequences = []
    for _ in range(draw(st.integers(1, 3))):
        tail = draw(st.integers(1, 150))
        sequences.append((draw(st.integers(0, 3)), tail, draw(st.integers(1, min(tail, 90)))))
    return heads, tuple(sequences)


def open_case(
    native: NativeKernels, heads: HeadShape, sequences: tuple[tuple[int, int, int], ...], shift: float = 0.0
) -> Tiered:
    """Normal KV around `shift`, closed by `close_records` (another suite checks its bytes)."""
    generator = torch.Generator().manual_seed(len(sequences) + heads.head_dim)
    lengths = tuple(closed * SEGMENT_TOKENS + tail for closed, tail, _ in sequences)
    case = Case(heads, tuple(rows for _, _, rows in sequences), lengths)
    pool, tables = random_pool(native, case, generator), block_tables(lengths, generator)
    pool.data.view(torch.bfloat16).add_(shift)
    counts = torch.tensor([closed for closed, _, _ in sequences], dtype=torch.int32)
    layout = SegmentLayout(pool.layout.num_layers, heads.num_kv_heads, heads.head_dim)
    total = int(counts.sum())
    slots = native.allocate_segments(layout, total + 1)
    payloads = torch.zeros((total + 1) * layout.segment_payload_bytes + 64, dtype=torch.uint8)
    start = payloads.data_ptr() + -payloads.data_ptr() % 64
    order = torch.randperm(total + 1, generator=generator).tolist()  # one slot stays empty
    table, released = torch.full((len(sequences), 9), -1, dtype=torch.int32), tables.clone()
    for row, (closed, _, _) in enumerate(sequences):
        for segment in range(closed):
            slot = order.pop()
            slots.payloads[slot] = start + slot * layout.segment_payload_bytes
            blocks = tables[row, segment * SEGMENT_BLOCKS : (segment + 1) * SEGMENT_BLOCKS].clone()
            blocks[: 0 if segment else 2] = -1
            first, heads_here = LAYER * heads.num_kv_heads, heads.num_kv_heads
            native.close_records(pool, blocks, slots, slot, first, heads_here)
            table[row, segment] = slot
        released[row, 2 : closed * SEGMENT_BLOCKS] = -1
    policies = tuple(AttentionPolicy() for _ in sequences)
    plain = ragged(case.counts, lengths, tables)
    tiered = replace(plain, block_tables=released, segments=SegmentBatch(slots, table, counts, policies))
    return Tiered(random_rows(case, generator), pool, heads, tiered, plain, payloads)


def attend(native: NativeKernels, case: Tiered, batch: RaggedBatch, window: int | None = None) -> torch.Tensor:
    return native.attention(case.q, case.pool, LAYER, batch, case.heads, window=window)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """bf16 output, probabilities, and dequantised K and V: about 2^-8 of values of size 1."""
    assert torch.isfinite(got).all()
    error = (got.float() - expected.float()).abs()
    assert error.max() < 0.02, error.max()
    assert error.mean() < 0.0015, error.mean()


@RELAXED
@given(shape=shapes())
def test_equals_reference(
    native: NativeKernels,
    reference: ReferenceKernels,
    shape: tuple[HeadShape, tuple[tuple[int, int, int], ...]],
) -> None:
    case = open_case(native, *shape)
    got = attend(native, case, case.batch)
    assert_close(got, reference.attention(case.q, case.pool, LAYER, case.batch, case.heads))


def test_is_near_what_was_closed(native: NativeKernels) -> None:
    case = open_case(native, head_shape(3, 2, 64), ((3, 100, 50),))
    exact, got = attend(native, case, case.plain).float(), attend(native, case, case.batch).float()
    assert (got - exact).norm() < 0.02 * exact.norm()


def test_slots_that_no_unit_fills_weigh_nothing(native: NativeKernels) -> None:
    """Every key scores far below 0, every value is near 1: a stray zero key would take all the weight."""
    case = open_case(native, head_shape(1, 1, 64), ((1, 40, 10),), shift=3.0)
    case.q.fill_(-2.0)
    assert (attend(native, case, case.plain).float() > 2.5).all()
    assert (attend(native, case, case.batch).float() > 2.5).all()


def test_sequences_without_closed_segments_are_as_before(native: NativeKernels) -> None:
    case = open_case(native, head_shape(3, 2, 64), ((0, 300, 90), (1, 70, 20)))
    got, plain = attend(native, case, case.batch), attend(native, case, case.plain)
    assert torch.equal(got[:90], plain[:90])
    assert not torch.equal(got[90:], plain[90:])


def test_released_blocks_are_not_read(native: NativeKernels) -> None:
    case = open_case(native, head_shape(2, 1, 64), ((2, 40, 10),))
    kept = replace(case.batch, block_tables=case.plain.block_tables)
    poisoned = KVPool(case.pool.layout, case.pool.data.clone())
    blocks = case.plain.block_tables[0, 2 : 2 * SEGMENT_BLOCKS].long()
    poisoned.data.view(torch.bfloat16).view(case.pool.num_blocks, -1)[blocks] = float("nan")
    got = native.attention(case.q, poisoned, LAYER, kept, case.heads)
    assert torch.equal(got, attend(native, case, case.batch))


@RELAXED
@given(
    rows=st.integers(2, 200),
    cuts=st.lists(st.integers(1, 199), max_size=4),
    group=st.sampled_from([1, 3, 7]),
    closed=st.integers(1, 2),
)
def test_rows_do_not_depend_on_chunks(
    native: NativeKernels, rows: int, cuts: list[int], group: int, closed: int
) -> None:
    case = open_case(native, head_shape(group, 1, 64), ((closed, rows + 70, rows),))
    whole = attend(native, case, case.batch)
    start = closed * SEGMENT_TOKENS + 70
    edges = sorted({0, rows, *(cut for cut in cuts if cut < rows)})
    for begin, end in itertools.pairwise(edges):
        chunk = ragged((end - begin,), (start + end,), case.batch.block_tables)
        part = case.q[begin:end].contiguous()
        batch = replace(chunk, segments=case.batch.segments)
        assert torch.equal(native.attention(part, case.pool, LAYER, batch, case.heads), whole[begin:end])


def test_layers_with_a_window_read_blocks_only(native: NativeKernels) -> None:
    case = open_case(native, head_shape(2, 1, 64), ((1, 200, 30),))
    assert torch.equal(attend(native, case, case.batch, 100), attend(native, case, case.plain, 100))
    with pytest.raises(ValueError, match="blocks or positions"):  # the first row's window reaches a released block
        attend(native, case, case.batch, 180)


def test_bad_segments_are_refused(native: NativeKernels) -> None:
    case = open_case(native, head_shape(1, 1, 64), ((2, 40, 10),))
    segments = case.batch.segments
    assert segments is not None
    empty = int((segments.pool.payloads == 0).nonzero()[0, 0])
    for slot in (-1, segments.pool.num_slots, empty):
        tables = segments.tables.clone()
        tables[0, 1] = slot
        with pytest.raises(ValueError, match="blocks or positions"):
            attend(native, case, replace(case.batch, segments=replace(segments, tables=tables)))
    for count in (1, 3, 10):  # blocks missing; after the rows; more than the table holds
        counts = torch.tensor([count], dtype=torch.int32)
        with pytest.raises(ValueError, match="blocks or positions"):
            attend(native, case, replace(case.batch, segments=replace(segments, counts=counts)))
    tables = case.batch.block_tables.clone()
    tables[0, 0] = -1
    with pytest.raises(ValueError, match="blocks or positions"):  # a sink
        attend(native, case, replace(case.batch, block_tables=tables))


def test_cancel_stops_it(native: NativeKernels) -> None:
    case = open_case(native, head_shape(3, 3, 64), ((8, 2048, 2048),))
    flag = CancelFlag()
    set_at: list[float] = []

    def stop() -> None:
        flag.set()
        set_at.append(time.process_time())  # CPU time of all threads: neighbours on the machine don't count

    timer = threading.Timer(0.02, stop)
    timer.start()
    native.attention(case.q, case.pool, LAYER, case.batch, case.heads, cancel_address=flag.address)
    ended = time.process_time()
    timer.join()
    assert set_at, "all of it took less than 20 ms"
    assert ended - set_at[0] < 0.05
