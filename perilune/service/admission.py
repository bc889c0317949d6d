"""Admission: how many requests may be inside at once.

Knows a bound and a count. A request over it is refused at once, before it has cost anything (spec E4, E9).
Used from the event loop only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from perilune.errors import EngineBusy
from perilune.telemetry import Telemetry


class Admission:
    """At most `limit` requests inside (those running and those waiting)."""

    def __init__(self, limit: int, telemetry: Telemetry) -> None:
        self._limit = limit
        self._inside = 0
        self._telemetry = telemetry

    @property
    def inside(self) -> int:
        return self._inside

    @contextmanager
    def enter(self, weight: int = 1) -> Iterator[None]:
        """Hold `weight` places (a request with n choices takes n). Raises `EngineBusy`."""
        if self._inside + weight > self._limit:
            self._telemetry.count("requests_refused", reason="queue_full")
            raise EngineBusy(
                f"{self._inside} answers are running or waiting and {self._limit} may.",
                hint="Try again in a few seconds.",
            )
        self._inside += weight
        self._telemetry.gauge("requests_inside", float(self._inside))
        try:
            yield
        finally:
            self._inside -= weight
            self._telemetry.gauge("requests_inside", float(self._inside))
