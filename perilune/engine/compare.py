"""Scheduling policies side by side: the same simulated requests for each, several seeds, means with intervals.

Knows the simulator, policies by name and what is counted. Everything it returns is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from perilune.core import FinishReason, ServiceClass
from perilune.engine.deadlines import DeadlinePolicy, DeadlineSettings
from perilune.engine.policy import EngineLimits
from perilune.engine.scheduling import (
    EarliestDeadlineFirst,
    FirstComeFirstServed,
    SchedulingPolicy,
    StaticPriority,
)
from perilune.engine.simulator import Machine, Outcome
from perilune.engine.step_cost import A100_8B
from perilune.errors import InvalidRequest

P0, P1, P2 = ServiceClass.P0_INTERACTIVE, ServiceClass.P1_DOCUMENT, ServiceClass.P2_BATCH

POLICIES: Mapping[str, Callable[[], SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "edf": EarliestDeadlineFirst,
    "static": StaticPriority,
    "deadline": DeadlinePolicy,
    "deadline-refuse": lambda: DeadlinePolicy(DeadlineSettings(late="refuse")),
}

MACHINES: Mapping[str, Machine] = {
    "a100-8b": Machine(
        "a100-8b",
        A100_8B,
        blocks=12_500,
        window_tokens=131_072,
        limits=EngineLimits(batch=64, chunk_tokens=8192, queue=1_000_000, guard_s=0.1, solo_s=0.2, idle_s=0.05),
    )
}
"""Machines that can be simulated without being fitted: 400,000 tokens of KV, queues without bounds."""

_T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for a 95 % interval of 2, 3, … readings."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % interval over seeds; equal bounds for a single reading."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ±{self.high - self.mean:.3f}"


def interval(values: Sequence[float]) -> Interval:
    """Of independent readings."""
    middle = mean(values)
    if len(values) < 2:
        return Interval(middle, middle, middle)
    t = _T_975[len(values) - 2] if len(values) - 2 < len(_T_975) else 2.0
    half = t * stdev(values) / math.sqrt(len(values))
    return Interval(middle, middle - half, middle + half)


def policy_named(name: str) -> SchedulingPolicy:
    """A new one. Raises `InvalidRequest`."""
    if name not in POLICIES:
        raise InvalidRequest(f"There is no policy {name!r}.", hint=f"Use one of {', '.join(POLICIES)}.")
    return POLICIES[name]()


def figures(outcomes: Sequence[Outcome], p0_s: float = 3.0, p1_s: float = 30.0) -> dict[str, float]:
    """What became of requests, as shares of all of them.

    `p0_in_time`, `p1_in_time`: first token within the class's seconds. `p2_done`: complete answers. `shed`: refused
    or expired. `missed_tokens`: of all tokens computed, those of requests that missed their deadline;
    `missed_untold_tokens`: those of them whose miss wasn't known before anything was computed.
    A class without requests counts as 1.
    """
    of_class = {c: [o for o in outcomes if o.request.service_class is c] for c in ServiceClass}
    limits = {P0: p0_s, P1: p1_s}
    missed = [o for c, seconds in limits.items() for o in of_class[c] if not o.within(seconds)]
    spent = max(1, sum(o.spent_tokens for o in outcomes))
    found = {
        "p0_in_time": _share(o.within(p0_s) for o in of_class[P0]),
        "p1_in_time": _share(o.within(p1_s) for o in of_class[P1]),
        "p2_done": _share(o.done for o in of_class[P2]),
        "shed": 1 - _share(not (o.refused or o.reason is FinishReason.EXPIRED) for o in outcomes),
        "missed_tokens": sum(o.spent_tokens for o in missed) / spent,
        "missed_untold_tokens": sum(o.spent_tokens for o in missed if not o.told_late) / spent,
    }
    for service_class in (P0, P1):
        ttft = sorted(o.ttft_s for o in of_class[service_class] if o.ttft_s is not None)
        for percent in (50, 99):
            key = f"p{service_class.value}_ttft_p{percent}_s"
            found[key] = ttft[min(len(ttft) - 1, len(ttft) * percent // 100)] if ttft else 0.0
    return found


def _share(truths: Iterable[bool]) -> float:
    told = list(truths)
    return sum(told) / len(told) if told else 1.0


def summarise(runs: Sequence[Mapping[str, float]]) -> dict[str, Interval]:
    """Figures of several seeds, each with its interval."""
    return {key: interval([run[key] for run in runs]) for key in runs[0]}


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index: 1 where all are equal."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))
