"""Payloads between WARM and COLD, in the background (spec R4).

Knows which segments are old enough for COLD, how many frames are free, and the few moves that are under way. A move
copies beside the steps, which go on reading the old place; between two steps the slot is switched over. So a move
never changes a byte, and nobody waits for one. Touched by the engine thread, but for the copy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from perilune.engine.residency import Post, Worker
from perilune.engine.segments import Segments
from perilune.engine.sequence import EngineSequence
from perilune.runtime.mri import KVTiers, PayloadMove, StepPlan
from perilune.telemetry import Telemetry

MOVES = 2
"""Moves at once: more would only queue for memory bandwidth that steps need."""

RESERVE_FRAMES = 2
"""WARM frames kept free for segments that close next."""

EVERY_STEPS = 16
"""Steps between two looks at all segments."""

_LOG = logging.getLogger(__name__)


class TierMoves:
    """`lost(slot, error)` is told of a slot whose bytes are in doubt after a move."""

    def __init__(
        self,
        segments: Segments,
        tiers: KVTiers,
        worker: Worker,
        post: Post,
        lost: Callable[[int, Exception], None],
        telemetry: Telemetry,
    ) -> None:
        self._segments = segments
        self._tiers = tiers
        self._worker = worker
        self._post = post
        self._lost = lost
        self._telemetry = telemetry
        self._under_way = 0
        self._steps = 0
        self.pressed = False  # demote whatever is idle, promote nothing

    def balance(self, running: Sequence[EngineSequence]) -> None:
        """Start the moves that are due. Cheap in most steps."""
        self._steps += 1
        if self._tiers.warm_free >= RESERVE_FRAMES and self._steps % EVERY_STEPS and not self.pressed:
            return
        tiered = [sequence for sequence in running if sequence.tiered]
        for slot in self._demotions(tiered):
            if not self._start(slot, to_cold=True):
                return
        if not self.pressed:
            for slot in self._promotions(tiered):
                if self._tiers.warm_free <= RESERVE_FRAMES or not self._start(slot, to_cold=False):
                    return

    def reads_cold(self, plan: StepPlan) -> bool:
        """A step reads segments that lie on disk."""
        return any(self._tiers.is_cold(slot) for piece in plan.slices for slot in piece.segments)

    def fetch(self, slots: Sequence[int]) -> None:
        """A prefill step reads every unit: have COLD payloads in RAM before it, and note how long that took."""
        cold = [slot for slot in slots if self._tiers.is_cold(slot)]
        if cold:
            start = time.perf_counter()
            self._tiers.fetch(cold)
            self._telemetry.observe("kv_cold_stall_seconds", time.perf_counter() - start)

    def _demotions(self, tiered: Sequence[EngineSequence]) -> Iterator[int]:
        """What is too old for WARM; then, where frames run short, what nobody uses, and what is oldest."""
        for sequence in tiered:
            old = self._segments.rules.cold(sequence.computed)
            yield from self._movable(sequence.segments[:old], sequence, cold=False)
        if self._tiers.warm_free < RESERVE_FRAMES or self.pressed:
            yield from (slot for slot in self._segments.pool.idle() if self._may_move(slot, cold=False))
        if self._tiers.warm_free < RESERVE_FRAMES:
            for sequence in tiered:
                yield from self._movable(sequence.segments[:1], sequence, cold=False)
                yield from self._movable(sequence.segments[1:-1], sequence, cold=False)

    def _promotions(self, tiered: Sequence[EngineSequence]) -> Iterator[int]:
        """What a running sequence has in its WARM zone: the newest first."""
        for sequence in tiered:
            old = self._segments.rules.cold(sequence.computed)
            yield from self._movable(sequence.segments[: old - 1 if old else None : -1], sequence, cold=True)

    def _movable(self, slots: Sequence[int], sequence: EngineSequence, *, cold: bool) -> Iterator[int]:
        closing = {sequence.segments[index] for index in sequence.closing}
        return (slot for slot in slots if slot not in closing and self._may_move(slot, cold=cold))

    def _may_move(self, slot: int, *, cold: bool) -> bool:
        return not self._segments.busy(slot) and self._tiers.is_cold(slot) == cold

    def _start(self, slot: int, *, to_cold: bool) -> bool:
        """False when no more moves may start now."""
        if self._under_way >= MOVES:
            return False
        idle = self._segments.pool.references(slot) == 0
        move = self._tiers.begin_move(slot, to_cold=to_cold)
        if move is None:
            return False
        self._segments.borrow([slot])
        self._under_way += 1
        self._worker.submit(partial(self._copy, move, idle))
        return True

    def _copy(self, move: PayloadMove, idle: bool) -> None:
        copied = False
        try:
            move.copy()
            copied = True
        except Exception:  # the slot stays where it is, and as it is
            _LOG.exception("a payload couldn't be moved")
            self._telemetry.count("kv_tier_move_failures_total")
        self._post(partial(self._moved, move, idle, copied))

    def _moved(self, move: PayloadMove, idle: bool, copied: bool) -> None:
        self._under_way -= 1
        try:
            if copied:
                self._tiers.end_move(move)
                self._telemetry.count("kv_tier_moves_total", to="cold" if move.to_cold else "warm")
            else:
                self._tiers.abandon_move(move)
        except Exception as error:
            _LOG.exception("a payload is lost: its move couldn't be completed")
            self._telemetry.count("kv_tier_move_failures_total")
            self._segments.distrust(move.slot)
            self._lost(move.slot, error)
        finally:
            self._segments.give_back([move.slot], oldest=idle)
