"""Less work for each request while more wait than the machine can do (spec E10), with hysteresis.

Knows how long the queue is expected to take, and classes; doesn't know requests, plans or attention. Used from the
event loop and its threads: a reading that is a moment old does no harm.
"""

from __future__ import annotations

from collections.abc import Collection

from perilune.core import Degradation, ServiceClass
from perilune.telemetry import Telemetry

END_SHARE = 0.5
"""The peak is over when the queue has shrunk to so much of what began it."""

BUDGET_SHARE = 0.5
"""Of its passages and turns, what a refined context keeps then."""


class Peak:
    """`begins_s`: the work in the queue that begins a peak; `classes`: whose work is then cut."""

    def __init__(self, begins_s: float, classes: Collection[ServiceClass], telemetry: Telemetry) -> None:
        self._begins_s = begins_s
        self._classes = frozenset(classes)
        self._telemetry = telemetry
        self._now = False

    def cuts(self, service_class: ServiceClass, queued_s: float) -> bool:
        """Whether a request of a class gets less, with so many seconds of work before it."""
        if not self._classes:
            return False
        self._now = queued_s >= self._begins_s * (END_SHARE if self._now else 1.0)
        self._telemetry.gauge("at_peak", float(self._now))
        return self._now and service_class in self._classes


def cut_by_peak(queued_s: float) -> Degradation:
    """What an answer says of it."""
    return Degradation(
        "peak",
        f"The server is at its peak ({queued_s:.0f} s of work wait): the context of passages and turns, and what "
        "attention reads of it, are cut.",
    )
