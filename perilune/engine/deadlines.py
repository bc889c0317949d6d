"""Our scheduling policy: as many first tokens in time as can be, fairly between tenants (spec E2 to E5).

Knows classes, deadlines, predicted work and token service. Knows nothing of blocks but counts, and no clock.

By class; in the first class short prompts (`lane_tokens`) before longer ones that are no later: the fast lane of
chats (spec E10), which nobody's 128,000 tokens hold up. Inside a class, in this order:

    aged       late for more than `patience` deadlines; gets at most `aged_share` of the class's work: nobody
    starves in time    can still be in time; tenants that are ahead of others (`fairness`) behind those that are not
    late       can't be in time any more; the oldest first

Who can be in time: requests are taken by deadline, and while one would end too late the longest taken so far is
given up (Moore and Hodgson's rule, which loses the fewest); what is computed already counts for a request. Work is
stretched by what the class has been seen to take longer than alone. So nothing is computed in front of others for a
deadline that is lost, and who is late is known before it costs anything. Among those in time the short ones go
first (by arrival plus own work, a figure that is fixed while later arrivals' grow) as long as everybody keeps
`calm`; else whoever is due first.

Ageing moves a sequence inside its class only. Idle-only work (P2) waits for everybody else.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perilune.core import ServiceClass
from perilune.engine.fairness import TokenService
from perilune.engine.scheduling import due_s, held_by_others, reserved_quota
from perilune.engine.sequence import EngineSequence

REVIEW_S = 0.1
"""How old a judgement on who can be in time may become."""

_MEMORY_S = 30.0  # over which stretch is averaged
_BUSY_S = 1.0
_PRIOR_S = 2.0  # seconds of running undisturbed that it starts from
_MOST_STRETCH = 5.0
_CREDIT_S = 1.0  # most that may be saved up for aged ones, or owed


@dataclass(frozen=True, slots=True)
class DeadlineSettings:
    """`reserve`: of the blocks, kept for P0. `tenant_share`: of the blocks, for one tenant while others are there.
    `lead`: longest prompts that a tenant may be served more than another while somebody is late; twice that
    otherwise. `lane_tokens`: prompt tokens of the first class up to which the fast lane is taken; 0: there is none.
    `margin`: of a deadline, kept free by what isn't begun. `patience`: deadlines after which a late
    request ages. `calm`: of a deadline; short ones go first only as long as it leaves everybody so much. `late`:
    what becomes of requests that can't be in time: "serve" or "refuse"."""

    reserve: float = 0.1
    tenant_share: float = 0.7
    lead: float = 1.0
    lane_tokens: int = 4096
    margin: float = 0.1
    patience: float = 10.0
    aged_share: float = 0.2
    calm: float = 0.3
    late: str = "serve"


@dataclass(slots=True)
class _Band:
    """What is known of one class. Seconds of both averages fade alike."""

    busy_s: float = _PRIOR_S  # while it had more than a second's work
    done_s: float = _PRIOR_S  # of predicted work that was computed in that time
    busy: bool = False
    credit_s: float = 0.0
    urgent: bool = False  # in time only if whoever is due first goes first
    contended: bool = False  # somebody who could be in time alone can't be

    @property
    def stretch(self) -> float:
        return min(_MOST_STRETCH, max(1.0, self.busy_s / self.done_s))


class DeadlinePolicy:
    """Implements `scheduling.SchedulingPolicy`."""

    def __init__(self, settings: DeadlineSettings | None = None) -> None:
        self._settings = settings or DeadlineSettings()
        self.service = TokenService()
        self._bands = {service_class.value: _Band() for service_class in ServiceClass}
        self._unanswered: dict[str, EngineSequence] = {}  # whose first token, or whole prompt, isn't there yet
        self._tenants: Counter[str] = Counter()  # sequences of each
        self._now = 0.0
        self._reviewed_s = float("-inf")
        self._stale = False

    @property
    def _refuses(self) -> bool:
        return self._settings.late == "refuse"

    # ------------------------------------------------------------------------------- what happens

    def queued(self, sequence: EngineSequence) -> None:
        sequence.due_s = due_s(sequence)
        self._unanswered[sequence.seq_id] = sequence
        self._tenants[sequence.spec.tenant] += 1
        self.service.enter(self.band(sequence), sequence.spec.tenant, sequence.prompt_tokens)
        self._stale = True  # nothing is computed for it before it is judged
        if self._refuses:
            sequence.end_s = min(sequence.end_s, sequence.due_s)

    def served(self, sequence: EngineSequence, prompt_tokens: int, new_tokens: int) -> None:
        self.service.charge(self.band(sequence), sequence.spec.tenant, prompt_tokens, new_tokens)
        if self._taken_on(sequence):
            sequence.end_s = sequence.expiry_s
        if prompt_tokens and sequence.expected_tokens:
            work_s = sequence.work_s * prompt_tokens / sequence.expected_tokens
            band = self._bands[self.band(sequence)]
            band.done_s += work_s if band.busy else 0.0
            earned_s = -work_s if self._old(sequence) else self._settings.aged_share * work_s
            band.credit_s = max(-_CREDIT_S, min(_CREDIT_S, band.credit_s + earned_s))
        if sequence.generated_tokens or sequence.remaining == 0:
            self._answered(sequence)

    def left(self, sequence: EngineSequence) -> None:
        self._answered(sequence)
        self._tenants[sequence.spec.tenant] -= 1
        self._tenants += Counter()  # drops those at zero

    def _answered(self, sequence: EngineSequence) -> None:
        if self._unanswered.pop(sequence.seq_id, None) is not None:
            self.service.leave(self.band(sequence), sequence.spec.tenant)

    # ----------------------------------------------------------------------------------- decisions

    def band(self, sequence: EngineSequence) -> int:
        return sequence.service_class

    def idle_only(self, sequence: EngineSequence) -> bool:
        return sequence.service_class == ServiceClass.P2_BATCH

    def sacrifice(self, sequence: EngineSequence) -> tuple[int, int]:
        return sequence.service_class, sequence.serial

    def ordered(self, sequences: Iterable[EngineSequence], now: float) -> list[EngineSequence]:
        if self._stale or abs(now - self._reviewed_s) >= REVIEW_S:
            self._review(now)
        sequences = filter(self._runs, sequences)
        far = {number: self.service.ahead(number, 2 * self._settings.lead) for number in self._bands}
        near = {number: self._ahead(number) for number in self._bands}
        return sorted(sequences, key=lambda s: self._key(s, far[self.band(s)], near[self.band(s)]))

    def _runs(self, sequence: EngineSequence) -> bool:
        """It is computed at all."""
        return not sequence.late or self._taken_on(sequence)

    def _taken_on(self, sequence: EngineSequence) -> bool:
        """It may be late: where late ones are refused, once half of it is computed. To go on costs less then than
        was spent; before, more would be spent on a miss than is lost."""
        return not self._refuses or sequence.remaining_s <= sequence.work_s / 2

    def _key(
        self, sequence: EngineSequence, far: set[str], near: set[str]
    ) -> tuple[int, bool, int, bool, bool, float, int]:
        number, tenant = self.band(sequence), sequence.spec.tenant
        band, alone_s = self._bands[number], _alone_s(sequence)
        if sequence.late:
            place = 0 if self._old(sequence) and band.credit_s > 0 else 2
            return number, tenant in far, place, False, False, alone_s, sequence.serial
        first_s = sequence.due_s if band.urgent else alone_s
        return number, tenant in far, 1, tenant in near, self._is_long(sequence), first_s, sequence.serial

    def _is_long(self, sequence: EngineSequence) -> bool:
        """It waits behind the fast lane."""
        first = sequence.service_class == ServiceClass.P0_INTERACTIVE
        return first and sequence.prompt_tokens > self._settings.lane_tokens > 0

    def _ahead(self, number: int) -> set[str]:
        """Tenants that wait behind others."""
        lead = self._settings.lead * (1 if self._bands[number].contended else 2)
        return self.service.ahead(number, lead) | self.service.crowding(number)

    def _old(self, sequence: EngineSequence) -> bool:
        patience_s = self._settings.patience * (sequence.due_s - sequence.arrival_s)
        return sequence.late and self._now - sequence.arrival_s > patience_s

    def quota(self, sequence: EngineSequence, running: Sequence[EngineSequence], total_blocks: int) -> int:
        quota = reserved_quota(sequence, running, total_blocks, self._settings.reserve)
        if len(self._tenants) < 2:
            return quota
        held = held_by_others(sequence, (s for s in running if s.spec.tenant == sequence.spec.tenant))
        return min(quota, int(total_blocks * self._settings.tenant_share) - held) if held else quota

    def makes_way(self, running: EngineSequence, sequence: EngineSequence) -> bool:
        """One that only decodes, of a tenant that was served more: while the other one's prompt is computed it
        ends, or gives its blocks up."""
        band, mine, theirs = self.band(sequence), sequence.spec.tenant, running.spec.tenant
        if sequence.late or not running.decodes or self.band(running) != band or mine == theirs:
            return False
        return self.service.served(band, theirs) > self.service.served(band, mine)

    # -------------------------------------------------------------------------- who can be in time

    def _review(self, now: float) -> None:
        """Judge everybody again."""
        passed_s = now - self._reviewed_s if math.isfinite(self._reviewed_s) else 0.0
        self._reviewed_s, self._now, self._stale = now, now, False
        waiting: dict[int, list[EngineSequence]] = {band: [] for band in self._bands}
        for sequence in self._unanswered.values():
            waiting[self.band(sequence)].append(sequence)
        before_s = now
        for number, band in self._bands.items():
            fade = math.exp(-passed_s / _MEMORY_S)
            band.busy_s = _PRIOR_S + fade * (band.busy_s - _PRIOR_S) + (passed_s if band.busy else 0.0)
            band.done_s = _PRIOR_S + fade * (band.done_s - _PRIOR_S)
            before_s = self._review_band(number, waiting[number], now, before_s)
            # With less to do, waiting for the step that runs would look like work that takes longer; and so would
            # what isn't computed because it is given up: nothing would ever be believed to be in time again.
            band.busy = sum(s.remaining_s for s in waiting[number] if self._runs(s)) > _BUSY_S

    def _review_band(self, number: int, sequences: list[EngineSequence], now: float, before_s: float) -> float:
        """Returns when a next class would begin."""
        band = self._bands[number]
        possible: list[EngineSequence] = []
        for sequence in sorted(sequences, key=lambda s: (s.due_s, s.serial)):
            sequence.late = True
            if now + sequence.remaining_s < self._last_s(sequence):
                possible.append(sequence)
        everybody, _ = self._in_time(possible, band.stretch, before_s)
        band.contended = len(everybody) < len(possible)
        ahead = self._ahead(number)
        groups: dict[tuple[bool, bool], list[EngineSequence]] = {}
        for sequence in possible:
            groups.setdefault((sequence.spec.tenant in ahead, self._is_long(sequence)), []).append(sequence)
        end_s, band.urgent = before_s, False
        for place in sorted(groups):
            kept, kept_s = self._in_time(groups[place], band.stretch, end_s)
            for sequence in sorted(kept, key=_alone_s):
                sequence.late = False
                end_s += sequence.remaining_s * band.stretch
                slack_s = self._settings.calm * (sequence.due_s - sequence.arrival_s)
                band.urgent |= end_s > sequence.due_s - slack_s
            end_s = kept_s
        return end_s

    def _in_time(
        self, sequences: Sequence[EngineSequence], stretch: float, end_s: float
    ) -> tuple[list[EngineSequence], float]:
        """Of sequences in the order of deadlines, those to be in time, and when they end."""
        taken: list[tuple[float, int, EngineSequence]] = []  # a heap, the longest first
        for sequence in sequences:
            # What is computed already speaks for a sequence: else it would be for nothing.
            saved_s = 2 * sequence.remaining_s - sequence.work_s
            heapq.heappush(taken, (-saved_s, sequence.serial, sequence))
            end_s += sequence.remaining_s * stretch
            if end_s > self._last_s(sequence):
                end_s -= heapq.heappop(taken)[2].remaining_s * stretch
        return [sequence for _, _, sequence in taken], end_s

    def _last_s(self, sequence: EngineSequence) -> float:
        """When its prompt should be computed. Nothing is begun that may only just be in time."""
        if sequence.started or math.isinf(sequence.due_s):
            return sequence.due_s
        return sequence.due_s - self._settings.margin * (sequence.due_s - sequence.arrival_s)


def _alone_s(sequence: EngineSequence) -> float:
    """When it would have its first token had it been alone since it came."""
    return sequence.arrival_s + sequence.work_s
