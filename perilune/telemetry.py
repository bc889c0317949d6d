"""Telemetry: count, observe, gauge, span. The only way any layer reports numbers. No-op without a sink.

Knows nothing of exporters. Names are `snake_case` with units (`ttft_seconds`); labels are few and bounded;
no prompt text ever passes through here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Sink(Protocol):
    """Where numbers go. Calls come from any thread and must not block."""

    def count(self, name: str, value: float, labels: dict[str, str]) -> None: ...
    def observe(self, name: str, value: float, labels: dict[str, str]) -> None: ...
    def gauge(self, name: str, value: float, labels: dict[str, str]) -> None: ...


class NullSink:
    """Drops everything."""

    def count(self, name: str, value: float, labels: dict[str, str]) -> None: ...
    def observe(self, name: str, value: float, labels: dict[str, str]) -> None: ...
    def gauge(self, name: str, value: float, labels: dict[str, str]) -> None: ...


class Telemetry:
    """Handed down by `build`; holds the sink it was made with."""

    def __init__(self, sink: Sink | None = None) -> None:
        self._sink: Sink = sink or NullSink()

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        self._sink.count(name, value, labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._sink.observe(name, value, labels)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self._sink.gauge(name, value, labels)

    @contextmanager
    def span(self, name: str, **labels: str) -> Iterator[None]:
        """Observe the wall time of a block as `<name>_seconds`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._sink.observe(f"{name}_seconds", time.perf_counter() - start, labels)
