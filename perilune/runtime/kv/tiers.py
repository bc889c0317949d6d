"""Closed segments of a `TorchRuntime`: the MRI's `KVTiers` over the kernels' segment pool.

Knows which frame holds each slot's payload, and which records a segment has: those of layers that attend to
everything. Layers with a sliding window of their own have none, so their part of a frame is never touched. Knows
nothing of sequences: which slots are whose, and which are COLD, is the engine's decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from perilune.errors import InvalidStateError, Overloaded
from perilune.kernels.interface import Kernels, KVPool, SegmentPool
from perilune.kernels.tiers import SEGMENT_TOKENS, SegmentLayout
from perilune.runtime.kv.cold import SpillFile
from perilune.runtime.kv.spec import TierSpec
from perilune.runtime.kv.warm import WarmFrames
from perilune.runtime.mri import PayloadMove


@dataclass(frozen=True, slots=True)
class TierSize:
    """How many segments a runtime holds, and where. `spill_folder` is a folder on the disk that COLD may use."""

    slots: int
    warm_frames: int
    cold_frames: int = 0
    spill_folder: Path | None = None
    hot_tokens: int = SEGMENT_TOKENS


@dataclass(slots=True)
class _Place:
    cold: bool
    frame: int


class SegmentTiers:
    """See `mri.KVTiers`. `tiered_layers` are the layers whose KV is closed; at least one."""

    def __init__(
        self,
        kernels: Kernels,
        source: KVPool,
        layout: SegmentLayout,
        tiered_layers: Sequence[int],
        size: TierSize,
    ) -> None:
        self._kernels = kernels
        self._source = source
        self._layout = layout
        heads = layout.num_kv_heads
        self._runs = [(first * heads, (end - first) * heads) for first, end in _runs(tiered_layers)]
        records = sum(count for _, count in self._runs)
        self._pool = kernels.allocate_segments(layout, size.slots)
        self._summaries = self._pool.summaries.numpy().data
        frame_bytes = layout.segment_payload_bytes
        self._warm = WarmFrames(size.warm_frames, frame_bytes)
        self._cold: SpillFile | None = None
        if size.cold_frames:
            if size.spill_folder is None:
                raise ValueError("COLD frames need a folder")
            used = [_span(run, layout.payload_bytes) for run in self._runs]
            self._cold = SpillFile(size.spill_folder, size.cold_frames, frame_bytes, used)
        self._places: dict[int, _Place] = {}
        self._spec = TierSpec(
            records=records,
            summary_bytes=records * layout.summary_bytes,
            payload_bytes=records * layout.payload_bytes,
            slots=size.slots,
            warm_frames=size.warm_frames,
            cold_frames=size.cold_frames,
            parts=2 * len(self._runs),
            hot_tokens=size.hot_tokens,
        )

    @property
    def spec(self) -> TierSpec:
        return self._spec

    @property
    def pool(self) -> SegmentPool:
        """What the kernels read."""
        return self._pool

    @property
    def warm_free(self) -> int:
        return len(self._warm.free)

    @property
    def cold_free(self) -> int:
        return len(self._cold.free) if self._cold is not None else 0

    # --------------------------------------------------------------------------------------------- slots

    def open(self, slot: int, *, cold: bool = False) -> None:
        if slot in self._places:
            raise InvalidStateError(f"Segment slot {slot} has a payload already.", hint="Drop it first.")
        if not 0 <= slot < self._spec.slots:
            raise ValueError(f"slot {slot} is outside the {self._spec.slots} slots")
        for tier in (cold, not cold):
            frame = self._take(tier)
            if frame is not None:
                self._put(slot, _Place(tier, frame))
                return
        raise Overloaded("Every frame for closed segments is taken.", hint="Raise kv_cache.ram or kv_cache.spill.")

    def is_cold(self, slot: int) -> bool:
        return self._place(slot).cold

    def drop(self, slots: Sequence[int]) -> None:
        for slot in slots:
            place = self._places.pop(slot, None)
            if place is not None:
                self._give(place)
                self._pool.payloads[slot] = 0

    def holds(self, slot: int) -> bool:
        """Whether the slot may be read."""
        return slot in self._places

    # ------------------------------------------------------------------------------------------- content

    def close_records(self, slot: int, blocks: Sequence[int], first: int, count: int) -> None:
        self._place(slot)
        table = torch.tensor(list(blocks), dtype=torch.int32)
        before = 0
        for start, length in self._runs:
            lower, upper = max(first, before), min(first + count, before + length)
            if lower < upper:
                record = start + lower - before
                self._kernels.close_records(self._source, table, self._pool, slot, record, upper - lower)
            before += length

    def views(self, slot: int) -> list[memoryview]:
        frame = self._view(self._place(slot))
        base = slot * self._layout.segment_summary_bytes
        summary = self._summaries[base : base + self._layout.segment_summary_bytes]
        parts = []
        for whole, record_bytes in ((summary, self._layout.summary_bytes), (frame, self._layout.payload_bytes)):
            for run in self._runs:
                start, end = _span(run, record_bytes)
                parts.append(whole[start:end])
        return parts

    # --------------------------------------------------------------------------------------------- moves

    def begin_move(self, slot: int, *, to_cold: bool) -> PayloadMove | None:
        place = self._place(slot)
        if place.cold == to_cold:
            raise InvalidStateError(f"Segment slot {slot} is in that tier already.")
        frame = self._take(to_cold)
        if frame is None:
            return None
        source, target = self._view(place), self._view(_Place(to_cold, frame))

        def copy() -> None:
            for run in self._runs:
                start, end = _span(run, self._layout.payload_bytes)
                target[start:end] = source[start:end]

        return PayloadMove(slot, to_cold, frame, copy)

    def end_move(self, move: PayloadMove) -> None:
        self._give(self._place(move.slot))
        self._put(move.slot, _Place(move.to_cold, move.frame))

    def abandon_move(self, move: PayloadMove) -> None:
        self._give(_Place(move.to_cold, move.frame))

    def prefetch(self, slots: Sequence[int]) -> None:
        for place in self._cold_places(slots):
            assert self._cold is not None
            self._cold.prefetch(place.frame)

    def fetch(self, slots: Sequence[int]) -> None:
        for place in self._cold_places(slots):
            assert self._cold is not None
            self._cold.fetch(place.frame)

    def _cold_places(self, slots: Sequence[int]) -> list[_Place]:
        return [place for slot in slots if (place := self._place(slot)).cold]

    # -------------------------------------------------------------------------------------------- frames

    def _place(self, slot: int) -> _Place:
        place = self._places.get(slot)
        if place is None:
            raise InvalidStateError(f"Segment slot {slot} is empty.", hint="Open it first.")
        return place

    def _put(self, slot: int, place: _Place) -> None:
        self._places[slot] = place
        tier = self._tier(place.cold)
        self._pool.payloads[slot] = tier.address(place.frame)

    def _take(self, cold: bool) -> int | None:
        if cold and self._cold is None:
            return None
        return self._tier(cold).free.take()

    def _give(self, place: _Place) -> None:
        self._tier(place.cold).free.give(place.frame)

    def _view(self, place: _Place) -> memoryview:
        return self._tier(place.cold).view(place.frame)

    def _tier(self, cold: bool) -> WarmFrames | SpillFile:
        if cold:
            assert self._cold is not None
            return self._cold
        return self._warm


def _runs(layers: Sequence[int]) -> list[tuple[int, int]]:
    """Half-open ranges of consecutive layers."""
    starts = [i for i, layer in enumerate(layers) if i == 0 or layers[i - 1] != layer - 1]
    return [(layers[first], layers[end - 1] + 1) for first, end in pairwise([*starts, len(layers)])]


def _span(run: tuple[int, int], record_bytes: int) -> tuple[int, int]:
    first, count = run
    return first * record_bytes, (first + count) * record_bytes
