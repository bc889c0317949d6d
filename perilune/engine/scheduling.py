"""Who comes first: the seam between the scheduler and a policy, and the three plain policies (spec E2, E3).

Knows classes, arrival, deadlines. Knows nothing of blocks but counts. The scheduler of the server and of the
simulator call the same objects; time is passed in. Ours is `deadlines.DeadlinePolicy`; the plain ones are what it
is compared with, and can be configured.

A band is served strictly before the next: a sequence of a lower band takes room, blocks and steps from those of
higher bands. Inside a band `ordered` decides, and the youngest gives way first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from perilune.core import ServiceClass
from perilune.engine.sequence import EngineSequence

FIRST_TOKEN_S = (5.0, 30.0, float("inf"))
"""When first tokens are due after arrival, by class, where a request doesn't say (spec C1, E2)."""


class SchedulingPolicy(Protocol):
    """Told of what happens to sequences, in this order: `queued`, `served` any number of times, `left`. One
    thread."""

    def queued(self, sequence: EngineSequence) -> None:
        """A new sequence; `expected_tokens` and `work_s` are set before it is asked for an order. Sets `due_s`; may
        set `end_s`."""
        ...

    def served(self, sequence: EngineSequence, prompt_tokens: int, new_tokens: int) -> None:
        """A step computed so much for it."""
        ...

    def left(self, sequence: EngineSequence) -> None: ...

    def band(self, sequence: EngineSequence) -> int: ...

    def idle_only(self, sequence: EngineSequence) -> bool:
        """It runs only where it keeps no other one waiting."""
        ...

    def ordered(self, sequences: Iterable[EngineSequence], now: float) -> list[EngineSequence]:
        """In the order of service, for admission and for prompt chunks; without those that shall not run. May set
        `late`."""
        ...

    def sacrifice(self, sequence: EngineSequence) -> tuple[int, int]:
        """Sort key of preemption: the highest gives way first. Its first part is the band."""
        ...

    def quota(self, sequence: EngineSequence, running: Sequence[EngineSequence], total_blocks: int) -> int:
        """Most blocks that it may hold, given what the others do. Not asked while nothing runs."""
        ...

    def makes_way(self, running: EngineSequence, sequence: EngineSequence) -> bool:
        """`sequence` doesn't wait until one that runs has given its blocks back: they count as free for it."""
        ...


def due_s(sequence: EngineSequence) -> float:
    """When its first token is due."""
    given = sequence.spec.deadline_s
    return sequence.arrival_s + (FIRST_TOKEN_S[sequence.service_class] if given is None else given)


def held_by_others(sequence: EngineSequence, running: Iterable[EngineSequence]) -> int:
    return sum(s.held_blocks for s in running if s is not sequence)


class FirstComeFirstServed:
    """All classes alike, in order of arrival."""

    def queued(self, sequence: EngineSequence) -> None:
        sequence.due_s = due_s(sequence)

    def served(self, sequence: EngineSequence, prompt_tokens: int, new_tokens: int) -> None:
        """Nothing depends on it."""

    def left(self, sequence: EngineSequence) -> None:
        """Nothing depends on it."""

    def band(self, sequence: EngineSequence) -> int:
        return 0

    def idle_only(self, sequence: EngineSequence) -> bool:
        return False

    def ordered(self, sequences: Iterable[EngineSequence], now: float) -> list[EngineSequence]:
        return sorted(sequences, key=lambda s: s.serial)

    def sacrifice(self, sequence: EngineSequence) -> tuple[int, int]:
        return self.band(sequence), sequence.serial

    def quota(self, sequence: EngineSequence, running: Sequence[EngineSequence], total_blocks: int) -> int:
        return total_blocks

    def makes_way(self, running: EngineSequence, sequence: EngineSequence) -> bool:
        return False


class EarliestDeadlineFirst(FirstComeFirstServed):
    """All classes alike, by when the first token is due; those without a deadline `patience_s` after they came."""

    def __init__(self, patience_s: float = 600.0) -> None:
        self._patience_s = patience_s

    def ordered(self, sequences: Iterable[EngineSequence], now: float) -> list[EngineSequence]:
        return sorted(sequences, key=lambda s: (min(s.due_s, s.arrival_s + self._patience_s), s.serial))


@dataclass(frozen=True, slots=True)
class StaticPriority:
    """By class, then in order of arrival. Classes below the first may hold all but `reserve` of the KV blocks: with
    that part tuned, the honest baseline."""

    reserve: float = 0.2

    def queued(self, sequence: EngineSequence) -> None:
        sequence.due_s = due_s(sequence)

    def served(self, sequence: EngineSequence, prompt_tokens: int, new_tokens: int) -> None:
        """Nothing depends on it."""

    def left(self, sequence: EngineSequence) -> None:
        """Nothing depends on it."""

    def band(self, sequence: EngineSequence) -> int:
        return sequence.service_class

    def idle_only(self, sequence: EngineSequence) -> bool:
        return False

    def ordered(self, sequences: Iterable[EngineSequence], now: float) -> list[EngineSequence]:
        return sorted(sequences, key=lambda s: (s.service_class, s.serial))

    def sacrifice(self, sequence: EngineSequence) -> tuple[int, int]:
        return sequence.service_class, sequence.serial

    def quota(self, sequence: EngineSequence, running: Sequence[EngineSequence], total_blocks: int) -> int:
        return reserved_quota(sequence, running, total_blocks, self.reserve)

    def makes_way(self, running: EngineSequence, sequence: EngineSequence) -> bool:
        return False


def reserved_quota(
    sequence: EngineSequence, running: Sequence[EngineSequence], total_blocks: int, reserve: float
) -> int:
    """All but the reserve, for all classes below the first together; for one of them alone all there is."""
    if sequence.service_class == ServiceClass.P0_INTERACTIVE:
        return total_blocks
    lower = [s for s in running if s.service_class > ServiceClass.P0_INTERACTIVE]
    held = held_by_others(sequence, lower)
    return total_blocks if held == 0 else int(total_blocks * (1 - reserve)) - held
