"""A `FakeRuntime` with tiers: closed segments hold what their blocks held, so that any mistake of the engine shows.

Segments are four blocks long, so that a few hundred tokens exercise everything. Which segments a slice reads closed
is worked out here again, from the brief's rule and not from the engine's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from perilune.core import BLOCK_TOKENS
from perilune.errors import InvalidStateError, Overloaded
from perilune.runtime.kv.spec import TierSpec
from perilune.runtime.mri import PayloadMove, SequenceSlice
from tests.fakes import TINY_SPEC, FakeRuntime, _Context

SEGMENT = 128
HOT = 128
SINKS = 64
FAKE_WINDOW = 40
"""Local window of the fake's decode rows."""

_BLOCK = TINY_SPEC.block_bytes
_TOKEN = TINY_SPEC.token_bytes
_RECORDS = SEGMENT // BLOCK_TOKENS


class FakeTiers:
    """`KVTiers`: record r of a segment is a copy of its block r; the summary is a byte a record."""

    def __init__(self, warm: int = 6, cold: int = 4) -> None:
        payload = _RECORDS * _BLOCK
        self.spec = TierSpec(
            records=_RECORDS,
            summary_bytes=_RECORDS,
            payload_bytes=payload,
            slots=warm + cold,
            warm_frames=warm,
            cold_frames=cold,
            hot_tokens=HOT,
            segment_tokens=SEGMENT,
            sink_tokens=SINKS,
        )
        self._frames = {
            True: [bytearray(payload) for _ in range(cold)],
            False: [bytearray(payload) for _ in range(warm)],
        }
        self._free = {True: list(range(cold)), False: list(range(warm))}
        self._places: dict[int, tuple[bool, int]] = {}
        self._summaries = [bytearray(_RECORDS) for _ in range(warm + cold)]
        self._runtime: FakeRuntime | None = None
        self.closed: list[tuple[int, int, int]] = []
        self.moves = 0

    def attach(self, runtime: FakeRuntime) -> None:
        self._runtime, runtime.tiers = runtime, self

    @property
    def warm_free(self) -> int:
        return len(self._free[False])

    @property
    def cold_free(self) -> int:
        return len(self._free[True])

    def open(self, slot: int, *, cold: bool = False) -> None:
        if slot in self._places:
            raise InvalidStateError("opened twice")
        tier = cold if self._free[cold] else not cold
        if not self._free[tier]:
            raise Overloaded("no frame")
        self._places[slot] = (tier, self._free[tier].pop())
        self._summaries[slot][:] = bytes(_RECORDS)

    def is_cold(self, slot: int) -> bool:
        return self._places[slot][0]

    def close_records(self, slot: int, blocks: Sequence[int], first: int, count: int) -> None:
        assert self._runtime is not None
        assert len(blocks) == _RECORDS
        frame = self.frame(slot)
        self.closed.append((slot, first, count))
        for record in range(first, first + count):
            source = blocks[record]
            data = bytes(_BLOCK) if source < 0 else bytes(self._runtime.block_view(source))
            frame[record * _BLOCK : (record + 1) * _BLOCK] = data
            self._summaries[slot][record] = 1

    def views(self, slot: int) -> list[memoryview]:
        return [memoryview(self._summaries[slot]), memoryview(self.frame(slot))]

    def begin_move(self, slot: int, *, to_cold: bool) -> PayloadMove | None:
        assert self._places[slot][0] != to_cold
        if not self._free[to_cold]:
            return None
        target = self._free[to_cold].pop()
        return PayloadMove(slot, to_cold, target, partial(self._copy, self._places[slot], (to_cold, target)))

    def _copy(self, source: tuple[bool, int], target: tuple[bool, int]) -> None:
        self._frames[target[0]][target[1]][:] = self._frames[source[0]][source[1]]

    def end_move(self, move: PayloadMove) -> None:
        tier, frame = self._places[move.slot]
        self._give(tier, frame)
        self._places[move.slot] = (move.to_cold, move.frame)
        self.moves += 1

    def abandon_move(self, move: PayloadMove) -> None:
        self._give(move.to_cold, move.frame)

    def prefetch(self, slots: Sequence[int]) -> None:
        assert all(slot in self._places for slot in slots)

    fetch = prefetch

    def drop(self, slots: Sequence[int]) -> None:
        for slot in slots:
            place = self._places.pop(slot, None)
            if place is not None:
                self._give(*place)

    def _give(self, tier: bool, frame: int) -> None:
        """Free frames are overwritten: whoever still reads one sees it."""
        self._frames[tier][frame][:] = b"\xdd" * len(self._frames[tier][frame])
        self._free[tier].append(frame)

    def frame(self, slot: int) -> bytearray:
        tier, frame = self._places[slot]
        return self._frames[tier][frame]

    def whole(self, slot: int) -> bool:
        return slot in self._places and all(self._summaries[slot])

    def check_frames(self, cached: int) -> None:
        """Nothing runs: the slots that have a frame are those that the cache holds."""
        assert len(self._places) == cached
        for tier, frames in self._frames.items():
            used = [frame for t, frame in self._places.values() if t == tier]
            assert sorted(used + self._free[tier]) == list(range(len(frames)))


class TieredRuntime(FakeRuntime):
    """Reads closed segments where a slice says so, and notes every slice that reads the wrong ones."""

    def _compute_kv(self, piece: SequenceSlice) -> bool:
        tiers = self.tiers
        assert isinstance(tiers, FakeTiers)
        if piece.attention is not None:
            if piece.start // SEGMENT != (piece.end - 1) // SEGMENT:
                self.faults.append(f"{piece.seq_id}: {piece.start}…{piece.end} crosses a segment's end")
            decodes = len(piece.token_ids) == 1 and piece.sample and piece.start > 0
            reads = (
                (piece.start + 1 - FAKE_WINDOW) // SEGMENT if decodes else piece.start // SEGMENT - HOT // SEGMENT
            )
            if len(piece.segments) != max(0, reads):
                self.faults.append(f"{piece.seq_id}: {len(piece.segments)} segments at {piece.start}, not {reads}")
        if not all(tiers.whole(slot) for slot in piece.segments):
            self.faults.append(f"{piece.seq_id}: reads a segment that is not closed")
        return super()._compute_kv(piece)

    def _may_decode(self, context: _Context, position: int) -> bool:
        alone = position % SEGMENT == 0 and position == context.prompt_tokens - 1
        return alone or super()._may_decode(context, position)

    def _at(self, piece: SequenceSlice, position: int) -> memoryview:
        index = position // SEGMENT
        if position < SINKS or index >= len(piece.segments):
            return super()._at(piece, position)
        tiers = self.tiers
        assert isinstance(tiers, FakeTiers)
        start = (position % SEGMENT) // BLOCK_TOKENS * _BLOCK + position % BLOCK_TOKENS * _TOKEN
        return memoryview(tiers.frame(piece.segments[index]))[start : start + _TOKEN]
