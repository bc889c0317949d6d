"""KV that no model computed, for timing decode over contexts whose prefill would take hours.

Closed segments of random units, and random bf16 blocks. Which units a head selects follows from the spread of its
scores, so the spread is set until heads select as many as on real text (`Selection`; `bench.selection` measures).
Knows kernels and layouts; nothing of models, engines or figures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch

from perilune.kernels.interface import (
    ATTENTION_STATS,
    BLOCK_TOKENS,
    HeadBudgets,
    Kernels,
    KVLayout,
    KVPool,
    RaggedBatch,
    SegmentBatch,
    SegmentPool,
)
from perilune.kernels.memory import zeroed_bytes
from perilune.kernels.tiers import (
    SEGMENT_QUADS,
    SEGMENT_TOKENS,
    SEGMENT_UNITS,
    SINK_TOKENS,
    UNIT_TOKENS,
    AttentionPolicy,
    SegmentLayout,
)

SELECTION_FILE = Path(__file__).resolve().parent / "recorded" / "selection.json"

MEASURED_POLICY = AttentionPolicy(dense_layer_tokens=0)
"""The default with every layer sparse: what the first layers would select is wanted for contexts where they do."""

_DISTINCT = 16  # segments whose numbers are drawn; the others repeat them, in memory of their own


@dataclass(frozen=True, slots=True)
class Selection:
    """Units that a KV head selects. `layers`: by layer of the default model at `base_tokens` of context; `growth`:
    (context, factor over the first), from the model of the longer window. `shares`: by layer, the mean factor on
    the policy's units that a head profile gives; empty: heads alike."""

    layers: tuple[float, ...]
    base_tokens: int
    growth: tuple[tuple[int, float], ...]
    note: str
    shares: tuple[float, ...] = ()

    @classmethod
    def load(cls, file: Path = SELECTION_FILE, *, profiled: bool = False) -> Selection:
        """`profiled`: as the default model selects with its head profile. Raises KeyError where that isn't kept."""
        kept = json.loads(file.read_text(encoding="utf-8"))
        short, *longer = kept["models"]
        base_tokens, layers = next(iter((kept["profiled"] if profiled else short)["units"].items()))
        shares = tuple(kept["profiled"]["shares"]) if profiled else ()
        note = f"budgets as on real text, {kept['date']} (bench.selection)"
        growth: tuple[tuple[int, float], ...] = ((int(base_tokens), 1.0), (2 * int(base_tokens), 1.0))
        if longer:
            means = [(int(length), fmean(units)) for length, units in longer[0]["units"].items()]
            growth = tuple((length, mean / means[0][1]) for length, mean in means)
        else:
            note += "; how they grow with the context was NOT measured"
        if kept["policy"] != asdict(MEASURED_POLICY):
            note += "; of ANOTHER policy than today's default: record them again"
        return cls(tuple(layers), int(base_tokens), growth, note, shares)

    def at(self, context_tokens: int, *, first: int = 0) -> tuple[float, ...]:
        """Units by layer, from layer `first` on, at a context; within what the policy allows."""
        factor = self.factor(context_tokens)
        least, most = MEASURED_POLICY.min_units, MEASURED_POLICY.max_units
        return tuple(
            min(max(units * factor, least * scale), most * scale)
            for index, units in enumerate(self.layers)
            for scale in (self._scale(index),)
            if index >= first
        )

    def _scale(self, layer: int) -> float:
        """What the layer's limits are times."""
        if self.shares:
            return self.shares[layer]
        return 4.0 if layer < MEASURED_POLICY.dense_layers else 1.0

    def factor(self, context_tokens: int) -> float:
        """Growth since the first measured context; linear in the logarithms, past the last one too."""
        pairs = list(pairwise(self.growth))
        (low, one), (high, other) = next((p for p in pairs if context_tokens <= p[1][0]), pairs[-1])
        slope = math.log(other / one) / math.log(high / low)
        return one * math.exp(slope * math.log(max(context_tokens, self.base_tokens) / low))


@dataclass(frozen=True, slots=True)
class SyntheticKV:
    """One sequence's cache: room for `segments.num_slots` closed segments and for `pool.num_blocks` bf16 blocks."""

    pool: KVPool
    segments: SegmentPool
    payloads: torch.Tensor  # keeps what `segments` points to alive

    def batch(self, length: int, policy: AttentionPolicy, budgets: HeadBudgets | None = None) -> RaggedBatch:
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
            budgets=budgets,
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


def unmeasured(batch: RaggedBatch) -> RaggedBatch:
    """The same without statistics, as steps are taken unless somebody asks."""
    return batch if batch.segments is None else replace(batch, segments=replace(batch.segments, stats=None))


def units_read(batch: RaggedBatch) -> torch.Tensor:
    """fp32 [layers]: units that a KV head selected in each layer of the last step, mean over heads."""
    tiers = batch.segments
    if tiers is None or tiers.stats is None:
        raise ValueError("the batch has no segments or no statistics")
    closed = int(tiers.counts[0])
    others = SINK_TOKENS + int(batch.kv_lengths[0]) - closed * SEGMENT_TOKENS
    return (tiers.stats[0, :, ATTENTION_STATS.index("exact_tokens")] - others) / UNIT_TOKENS


def find_spread(
    wanted: Sequence[float], units: Callable[[torch.Tensor], torch.Tensor], *, low: float, high: float
) -> torch.Tensor:
    """Bisect each layer's spread of scores, fp32 [layers], until a step selects the `wanted` units of each.

    `units(spread)` applies a spread and says what a step then selects. The wider scores spread, the fewer units
    hold the mass.
    """
    target, layers = torch.tensor(wanted), len(wanted)
    least, most = torch.full((layers,), math.log(low)), torch.full((layers,), math.log(high))
    for _ in range(12):
        spread = (least + most) / 2
        too_many = units(spread.exp()) > target
        least, most = torch.where(too_many, spread, least), torch.where(too_many, most, spread)
    return spread.exp()


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
    """uint8 [records, summary_bytes]: unit means of variance one, keys that differ from them by about 0.3."""
    records, at = layout.records, layout.summary_offsets
    data = torch.randint(0, 256, (records, layout.summary_bytes), dtype=torch.uint8, generator=_generator(seed))
    _place(data, at["mean_scale"], torch.full((records, SEGMENT_UNITS), 1 / 4.6).half())
    _place(data, at["spread_scale"], torch.full((records, SEGMENT_UNITS), 0.3 / 8.5).half())
    _place(data, at["quad_v_scale"], torch.full((records, SEGMENT_QUADS), 1 / 127).half())
    _place(data, at["units"], torch.full((records, 1), SEGMENT_UNITS, dtype=torch.int16))
    return data
