"""KV that no model computed, for timing decode over contexts whose prefill would take hours.

Closed segments of random units, and random bf16 blocks. Which units a head selects follows from the spread of its
scores, so the spread is set until heads select as many as `BUDGETS` says. Knows kernels and layouts; nothing of
models, engines or figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from perilune.kernels.interface import (
    ATTENTION_STATS,
    BLOCK_TOKENS,
    Kernels,
    KVLayout,
    KVPool,
    RaggedBatch,
    SegmentBatch,
    SegmentPool,
)
from perilune.kernels.memory import zeroed_bytes
from perilune.kernels.tiers import (
    GROUP_UNITS,
    OUTLIERS,
    SEGMENT_GROUPS,
    SEGMENT_TOKENS,
    SEGMENT_UNITS,
    SINK_TOKENS,
    UNIT_TOKENS,
    AttentionPolicy,
    SegmentLayout,
)

BUDGETS = (32, 32, 40, 52, 64, 80, 110, 150, 256)
"""Units that KV heads select; layers take these in turn. An assumption around the default budget of 64 units."""

_DISTINCT = 16  # segments whose numbers are drawn; the others repeat them, in memory of their own
_GROUP_SHARE = 0.5  # of a unit key's variance: what its group has in common


@dataclass(frozen=True, slots=True)
class SyntheticKV:
    """One sequence's cache: room for `segments.num_slots` closed segments and for `pool.num_blocks` bf16 blocks."""

    pool: KVPool
    segments: SegmentPool
    payloads: torch.Tensor  # keeps what `segments` points to alive

    def batch(self, length: int, policy: AttentionPolicy) -> RaggedBatch:
        """The decode row at `length` - 1; segments that end before the local window are closed, as in use."""
        layout = self.segments.layout
        counts = max(0, (length - policy.window_tokens) // SEGMENT_TOKENS)
        blocks = torch.full((1, -(-length // BLOCK_TOKENS)), -1, dtype=torch.int32)
        sinks, tail = SINK_TOKENS // BLOCK_TOKENS, counts * SEGMENT_TOKENS // BLOCK_TOKENS
        kept = [block for block in range(blocks.shape[1]) if block < sinks or block >= tail]
        blocks[0, kept] = torch.randperm(self.pool.num_blocks, generator=_generator(1))[: len(kept)].int()
        tiers = SegmentBatch(
            self.segments,
            torch.randperm(self.segments.num_slots, generator=_generator(2))[None].int(),
            torch.tensor([counts], dtype=torch.int32),
            (policy,),
            torch.zeros(1, layout.num_layers, len(ATTENTION_STATS)),
        )
        lengths = torch.tensor([length], dtype=torch.int32)
        return RaggedBatch(torch.tensor([0, 1], dtype=torch.int32), lengths, blocks, tiers if counts else None)


def make_kv(kernels: Kernels, layout: SegmentLayout, max_tokens: int, tail_tokens: int) -> SyntheticKV:
    """Closed segments for `max_tokens` and bf16 blocks for `tail_tokens`. Every record's memory is its own."""
    slots = max_tokens // SEGMENT_TOKENS
    segments = kernels.allocate_segments(layout, slots)
    payloads = zeroed_bytes(slots * layout.segment_payload_bytes)
    payloads.view(-1, layout.payload_bytes)[:] = _payload(layout)
    segments.payloads.copy_(payloads.data_ptr() + layout.segment_payload_bytes * torch.arange(slots))
    records = segments.summaries.view(slots * layout.records, layout.summary_bytes)
    pieces = torch.split(records, layout.records)
    for slot, piece in enumerate(pieces):
        piece.copy_(_summaries(layout, slot) if slot < _DISTINCT else pieces[slot % _DISTINCT])
    return SyntheticKV(make_blocks(kernels, layout, tail_tokens), segments, payloads)


def make_blocks(kernels: Kernels, layout: SegmentLayout, tokens: int) -> KVPool:
    """A pool of random bf16 blocks for `tokens`; all blocks hold the same numbers."""
    shape = KVLayout(layout.num_layers, layout.num_kv_heads, layout.head_dim, "bf16")
    pool = kernels.allocate_pool(shape, -(-tokens // BLOCK_TOKENS))
    noise = torch.randn(1 << 20, generator=_generator(5)).bfloat16().view(torch.uint8)
    for piece in torch.split(pool.data, noise.numel()):
        piece.copy_(noise[: piece.numel()])
    return pool


def units_read(batch: RaggedBatch) -> torch.Tensor:
    """fp32 [layers]: units that a KV head selected in each layer of the last step, mean over heads."""
    tiers = batch.segments
    if tiers is None or tiers.stats is None:
        raise ValueError("the batch has no segments or no statistics")
    closed = int(tiers.counts[0])
    others = SINK_TOKENS + int(batch.kv_lengths[0]) - closed * (SEGMENT_TOKENS - OUTLIERS)
    return (tiers.stats[0, :, ATTENTION_STATS.index("exact_tokens")] - others) / UNIT_TOKENS


def find_spread(layers: int, units: Callable[[torch.Tensor], torch.Tensor], *, low: float, high: float) -> None:
    """Bisect each layer's spread of scores: `units(spread [layers])` applies it and says what a step then selects.

    The wider scores spread, the fewer units hold the mass.
    """
    wanted = torch.tensor([float(BUDGETS[layer % len(BUDGETS)]) for layer in range(layers)])
    least, most = torch.full((layers,), math.log(low)), torch.full((layers,), math.log(high))
    for _ in range(12):
        spread = (least + most) / 2
        too_many = units(spread.exp()) > wanted
        least, most = torch.where(too_many, spread, least), torch.where(too_many, most, spread)


# ------------------------------------------------------------------------------------------------- records


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _place(data: torch.Tensor, start: int, values: torch.Tensor) -> None:
    raw = values.contiguous().view(torch.uint8).reshape(data.shape[0], -1)
    data[:, start : start + raw.shape[1]] = raw


def _payload(layout: SegmentLayout) -> torch.Tensor:
    """One record's payload, uint8 [1, payload_bytes]: the same numbers in every record's own memory."""
    data = torch.randint(0, 256, (1, layout.payload_bytes), dtype=torch.uint8, generator=_generator(3))
    at, dim = layout.payload_offsets, layout.head_dim
    _place(data, at["k_scale"], torch.full((1, SEGMENT_UNITS // 2 * dim), 4 / 255).half())
    _place(data, at["k_zero"], torch.full((1, SEGMENT_UNITS // 2 * dim), -2.0).half())
    _place(data, at["v_scale"], torch.full((1, SEGMENT_UNITS * UNIT_TOKENS), 3 / 127).half())
    return data


def _summaries(layout: SegmentLayout, seed: int) -> torch.Tensor:
    """uint8 [records, summary_bytes]: unit keys of variance one, half of it common to a group of units."""
    records, dim, at = layout.records, layout.head_dim, layout.summary_offsets
    generator = _generator(seed)
    group = torch.randn(records, SEGMENT_GROUPS, 1, dim, generator=generator) * math.sqrt(_GROUP_SHARE)
    own = torch.randn(records, SEGMENT_GROUPS, GROUP_UNITS, dim, generator=generator) * math.sqrt(1 - _GROUP_SHARE)
    keys = ((group + own) * 32).round().clamp(-127, 127).to(torch.int8)
    values = torch.randint(-127, 128, (records, SEGMENT_UNITS * dim), generator=generator).to(torch.int8)
    data = torch.zeros(records, layout.summary_bytes, dtype=torch.uint8)
    _place(data, at["unit_k"], keys.view(records, SEGMENT_GROUPS, GROUP_UNITS, dim // 4, 4).transpose(2, 3))
    _place(data, at["unit_k_scale"], torch.full((records, SEGMENT_UNITS), 1 / 32).half())
    _place(data, at["unit_v"], values)
    _place(data, at["unit_v_scale"], torch.full((records, SEGMENT_UNITS), 1 / 127).half())
    units = torch.full((records, SEGMENT_UNITS), UNIT_TOKENS, dtype=torch.uint8)
    units[:, -1] = 0
    _place(data, at["unit_n"], units)
    _place(data, at["group_k"], group.half())
    _place(data, at["group_v"], torch.randn(records, SEGMENT_GROUPS * dim, generator=generator).half() * 0.2)
    tokens = torch.full((records, SEGMENT_GROUPS), GROUP_UNITS * UNIT_TOKENS, dtype=torch.int16)
    tokens[:, -1] -= UNIT_TOKENS
    _place(data, at["group_n"], tokens)
    outliers = torch.randn(records, 2 * OUTLIERS * dim, generator=generator).bfloat16()
    _place(data, at["outlier_k"], outliers[:, : OUTLIERS * dim])
    _place(data, at["outlier_v"], outliers[:, OUTLIERS * dim :])
    _place(data, at["outlier_n"], torch.full((records, 1), OUTLIERS, dtype=torch.int16))
    return data
