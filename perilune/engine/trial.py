"""Several policies on live requests: one acts, the others are computed beside it and compared (shadow), or they act
in turns (an experiment).

Requests of one engine wait for each other, so policies can't be given a share of them each: one arm's queue would
be the other's load. Instead the arms act in slots of time, each once in every round, in an order drawn by a seed (a
switchback); a request belongs to the arm that acted when it came and keeps it. Knows policies and what they may
read and set of a sequence; every arm has its own view of it, so that a shadow changes nothing.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from perilune.engine.scheduling import SchedulingPolicy, due_s
from perilune.engine.sequence import EngineSequence
from perilune.telemetry import Telemetry

COMPARE_S = 0.1
"""How often at most the shadows are asked."""

_log = logging.getLogger(__name__)
_OWN = ("due_s", "late", "end_s")


class _View:
    """A sequence as one arm sees it: what policies set is its own, all else the sequence's."""

    __slots__ = (*_OWN, "sequence")

    def __init__(self, sequence: EngineSequence) -> None:
        self.sequence = sequence
        self.due_s, self.late, self.end_s = sequence.due_s, sequence.late, sequence.end_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sequence, name)


class Trial:
    """Implements `scheduling.SchedulingPolicy` by `arms`: the first acts, or each in its slots of `slot_s` s."""

    def __init__(
        self,
        arms: Mapping[str, SchedulingPolicy],
        telemetry: Telemetry,
        clock: Callable[[], float],
        slot_s: float | None = None,
        seed: int = 0,
    ) -> None:
        self._arms = dict(arms)
        self._names = list(arms)
        self._telemetry = telemetry
        self._clock = clock
        self._slot_s = slot_s
        self._seed = seed
        self._views: dict[str, dict[str, _View]] = {name: {} for name in arms}
        self._arm_of: dict[str, str] = {}  # of requests without a first token yet
        self._compared_s = float("-inf")

    @property
    def acting(self) -> str:
        """Whose decisions count now."""
        if self._slot_s is None:
            return self._names[0]
        round_, place = divmod(int(self._clock() / self._slot_s), len(self._names))
        return random.Random(f"{self._seed} {round_}").sample(self._names, len(self._names))[place]

    # ------------------------------------------------------------------------------- what happens

    def queued(self, sequence: EngineSequence) -> None:
        acting = self.acting
        for name, policy in self._arms.items():
            view = self._views[name][sequence.seq_id] = _View(sequence)
            policy.queued(cast(EngineSequence, view))
        self._arm_of[sequence.seq_id] = acting
        self._act(acting)

    def served(self, sequence: EngineSequence, prompt_tokens: int, new_tokens: int) -> None:
        for name, policy in self._arms.items():
            policy.served(self._view(name, sequence), prompt_tokens, new_tokens)
        self._act(self.acting)
        if sequence.generated_tokens:
            self._tell(sequence, self._clock() - sequence.arrival_s)

    def left(self, sequence: EngineSequence) -> None:
        for name, policy in self._arms.items():
            policy.left(self._view(name, sequence))
            del self._views[name][sequence.seq_id]
        self._tell(sequence, None)

    def _tell(self, sequence: EngineSequence, ttft_s: float | None) -> None:
        """The first token, or the end without one, once for each request."""
        arm = self._arm_of.pop(sequence.seq_id, None)
        if arm is None:
            return
        kind = sequence.service_class.name.lower()
        if ttft_s is not None:
            self._telemetry.observe("scheduler_arm_ttft_seconds", ttft_s, arm=arm, service_class=kind)
        in_time = ttft_s is not None and sequence.arrival_s + ttft_s <= due_s(sequence)
        outcome = "in_time" if in_time else "none" if ttft_s is None else "late"
        self._telemetry.count("scheduler_arm_requests", outcome=outcome, arm=arm, service_class=kind)

    # ----------------------------------------------------------------------------------- decisions

    def band(self, sequence: EngineSequence) -> int:
        name = self.acting
        return self._arms[name].band(self._view(name, sequence))

    def idle_only(self, sequence: EngineSequence) -> bool:
        name = self.acting
        return self._arms[name].idle_only(self._view(name, sequence))

    def sacrifice(self, sequence: EngineSequence) -> tuple[int, int]:
        name = self.acting
        return self._arms[name].sacrifice(self._view(name, sequence))

    def quota(self, sequence: EngineSequence, running: Sequence[EngineSequence], total_blocks: int) -> int:
        name = self.acting
        views = [self._view(name, each) for each in running]
        return self._arms[name].quota(self._view(name, sequence), views, total_blocks)

    def makes_way(self, running: EngineSequence, sequence: EngineSequence) -> bool:
        name = self.acting
        return self._arms[name].makes_way(self._view(name, running), self._view(name, sequence))

    def ordered(self, sequences: Iterable[EngineSequence], now: float) -> list[EngineSequence]:
        given, acting = list(sequences), self.acting
        order = self._order(acting, given, now)
        self._act(acting)
        if self._slot_s is None and len(given) > 1 and now - self._compared_s >= COMPARE_S:
            self._compared_s = now
            for name in self._names[1:]:
                self._compare(name, order, self._order(name, given, now))
        return order

    def _order(self, name: str, sequences: Iterable[EngineSequence], now: float) -> list[EngineSequence]:
        views = [self._view(name, sequence) for sequence in sequences]
        return [cast(_View, view).sequence for view in self._arms[name].ordered(views, now)]

    def _compare(self, shadow: str, ours: list[EngineSequence], theirs: list[EngineSequence]) -> None:
        """Who would come first, and whom only one of them would leave out."""
        same = ours[:1] == theirs[:1]
        self._telemetry.count("scheduler_shadow", shadow=shadow, first="same" if same else "other")
        if not same:
            first, other = (each[0].seq_id if each else "nobody" for each in (ours, theirs))
            _log.debug("%s takes %s first; its shadow %s would take %s.", self._names[0], first, shadow, other)
        if left_out := len(ours) - len(theirs):
            self._telemetry.count(
                "scheduler_shadow_left_out", abs(left_out), by="shadow" if left_out > 0 else "acting", shadow=shadow
            )

    def _act(self, acting: str) -> None:
        """What the acting arm decided counts."""
        for view in self._views[acting].values():
            sequence = view.sequence
            sequence.due_s, sequence.late, sequence.end_s = view.due_s, view.late, view.end_s

    def _view(self, name: str, sequence: EngineSequence) -> EngineSequence:
        return cast(EngineSequence, self._views[name][sequence.seq_id])
