"""Closing segments natively: the reference's bytes on every CPU level, whatever the threads and the calls."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from perilune.kernels.interface import Kernels, KVLayout, KVPool, SegmentPool
from perilune.kernels.native import NativeKernels
from perilune.kernels.reference import ReferenceKernels, kv_views
from perilune.kernels.select import load
from perilune.kernels.tiers import SEGMENT_TOKENS, SegmentLayout

RELAXED = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
BLOCKS = SEGMENT_TOKENS // 32
SLOT = 1
GARBAGE = 0xA5


@dataclass(frozen=True)
class Slots:
    """A pool whose slot 1 has a payload; both start full of garbage."""

    pool: SegmentPool
    payload: torch.Tensor

    @property
    def bytes(self) -> torch.Tensor:
        return torch.cat([self.pool.summaries[self.pool.layout.segment_summary_bytes :], self.payload])


def open_slots(kernels: Kernels, source: KVPool) -> Slots:
    layout = SegmentLayout(source.layout.num_layers, source.layout.num_kv_heads, source.layout.head_dim)
    pool = kernels.allocate_segments(layout, 2)
    pool.summaries.fill_(GARBAGE)
    payload = torch.full((layout.segment_payload_bytes + 64,), GARBAGE, dtype=torch.uint8)
    aligned = payload[-payload.data_ptr() % 64 :][: layout.segment_payload_bytes]
    pool.payloads[SLOT] = aligned.data_ptr()
    return Slots(pool, aligned)


def themed(blocks: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Keys like real ones, fp32 [blocks * 32, D]: themes, a large common part, two wide channels."""
    themes = torch.randn(60, dim, generator=generator)
    chosen = torch.randint(0, 60, (blocks * 32,), generator=generator)
    keys = themes[chosen] + 0.4 * torch.randn(blocks * 32, dim, generator=generator)
    keys[:, :2] *= 8
    return keys + 3 * torch.randn(dim, generator=generator)


def source_pool(kernels: Kernels, layers: int, heads: int, dim: int, kind: str, seed: int = 0) -> KVPool:
    """70 blocks. `kind`: themed; equal (every key the same); twins (32 keys, again and again); noise."""
    generator = torch.Generator().manual_seed(seed)
    pool = kernels.allocate_pool(KVLayout(layers, heads, dim, "bf16"), BLOCKS + 6)
    numbers = pool.data.view(torch.bfloat16)
    numbers.copy_(torch.randn(numbers.numel(), generator=generator))
    if kind == "noise":
        return pool
    for layer in range(layers):
        k, _ = kv_views(pool, layer)
        for head in range(heads):
            keys = themed(pool.num_blocks, dim, generator)
            if kind == "equal":
                keys[:] = keys[0].clone()
            elif kind == "twins":
                keys[:] = keys[:32].repeat(pool.num_blocks, 1)
            k[:, head] = keys.to(torch.bfloat16).view(-1, 32, dim // 2, 2)
    return pool


def block_table(pool: KVPool, *, first: bool, seed: int = 0) -> torch.Tensor:
    blocks = torch.randperm(pool.num_blocks, generator=torch.Generator().manual_seed(seed))[:BLOCKS].int()
    if first:
        blocks[:2] = -1
    return blocks


def expect_reference(
    native: NativeKernels, reference: ReferenceKernels, source: KVPool, blocks: torch.Tensor
) -> None:
    mine, theirs = open_slots(native, source), open_slots(native, source)
    records = mine.pool.layout.records
    native.close_records(source, blocks, mine.pool, SLOT, 0, records)
    reference.close_records(source, blocks, theirs.pool, SLOT, 0, records)
    assert torch.equal(mine.bytes, theirs.bytes)


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("first", [False, True])
def test_bytes_are_the_references(
    native: NativeKernels, reference: ReferenceKernels, dim: int, first: bool
) -> None:
    source = source_pool(native, 1, 2, dim, "themed")
    expect_reference(native, reference, source, block_table(source, first=first))


@RELAXED
@given(
    dim=st.sampled_from([16, 48, 64, 96]),
    kind=st.sampled_from(["themed", "equal", "twins", "noise"]),
    first=st.booleans(),
    seed=st.integers(0, 99),
)
@example(dim=16, kind="noise", first=True, seed=49)  # a centroid at half way between two whole numbers
def test_bytes_are_the_references_for_any_keys(
    native: NativeKernels, reference: ReferenceKernels, dim: int, kind: str, first: bool, seed: int
) -> None:
    """Many ties among them: equal keys, clusters that stay empty."""
    source = source_pool(native, 1, 1, dim, kind, seed)
    expect_reference(native, reference, source, block_table(source, first=first, seed=seed))


@pytest.mark.parametrize("value", [0.0, 1.0, 1e30, 1e-30])
def test_constant_and_extreme_keys(native: NativeKernels, reference: ReferenceKernels, value: float) -> None:
    source = source_pool(native, 1, 1, 64, "noise")
    k, _ = kv_views(source, 0)
    k.fill_(value)
    expect_reference(native, reference, source, block_table(source, first=False))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_keys_that_are_no_numbers_harm_no_other_record(native: NativeKernels, value: float) -> None:
    source = source_pool(native, 1, 2, 64, "themed")
    blocks, whole, broken = block_table(source, first=False), open_slots(native, source), open_slots(native, source)
    native.close_records(source, blocks, whole.pool, SLOT, 0, 2)
    for half in kv_views(source, 0):
        half[::3, 0] = value
    native.close_records(source, blocks, broken.pool, SLOT, 0, 2)
    layout = whole.pool.layout
    for slots in (whole, broken):
        slots.pool.summaries[: -layout.summary_bytes] = 0
        slots.payload[: layout.payload_bytes] = 0
    assert torch.equal(broken.bytes, whole.bytes)


def test_bytes_depend_on_neither_threads_nor_calls(native: NativeKernels) -> None:
    source = source_pool(native, 2, 3, 64, "themed")
    blocks = block_table(source, first=True)
    whole = open_slots(native, source)
    native.close_records(source, blocks, whole.pool, SLOT, 0, 6)
    for threads in (1, 3):
        other, slots = load(threads), open_slots(native, source)
        assert isinstance(other, NativeKernels)
        for first, count in ((3, 2), (0, 1), (5, 1), (1, 2)):
            other.close_records(source, blocks, slots.pool, SLOT, first, count)
        assert torch.equal(slots.bytes, whole.bytes)


def test_only_the_records_asked_for_are_written(native: NativeKernels) -> None:
    source = source_pool(native, 2, 2, 64, "noise")
    slots = open_slots(native, source)
    native.close_records(source, block_table(source, first=False), slots.pool, SLOT, 1, 2)
    layout = slots.pool.layout
    summaries = slots.pool.summaries.view(2, 4, layout.summary_bytes)
    payload = slots.payload.view(4, layout.payload_bytes)
    assert (summaries[0] == GARBAGE).all()
    for record, written in enumerate([False, True, True, False]):
        assert bool((summaries[SLOT, record] != GARBAGE).any()) == written
        assert bool((payload[record] != GARBAGE).any()) == written


def test_what_does_not_exist_is_refused(native: NativeKernels) -> None:
    source = source_pool(native, 1, 2, 64, "noise")
    slots, blocks = open_slots(native, source), block_table(source, first=False)
    for slot, first, count in ((0, 0, 1), (2, 0, 1), (SLOT, 1, 2), (SLOT, -1, 1)):
        with pytest.raises(ValueError, match="don't exist"):
            native.close_records(source, blocks, slots.pool, slot, first, count)
    for stray in (-1, source.num_blocks):
        broken = blocks.clone()
        broken[5] = stray
        with pytest.raises(ValueError, match="don't exist"):
            native.close_records(source, broken, slots.pool, SLOT, 0, 1)
    other = native.allocate_segments(SegmentLayout(1, 2, 80), 1)
    with pytest.raises(ValueError, match="doesn't fit"):
        native.close_records(source, blocks, other, 0, 0, 1)
    assert (slots.bytes == GARBAGE).all()
