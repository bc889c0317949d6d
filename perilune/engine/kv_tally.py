"""What became of KV since the start, for the health view: totals of a few of the counters that pass by.

Knows names of metrics only. Nearly all are counted on the engine thread; any thread reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from perilune.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class KVTally:
    """Totals since the engine was made. Tokens are of prompts: found in RAM, brought back from disk, computed."""

    segments_closed: int = 0
    demoted: int = 0
    promoted: int = 0
    move_failures: int = 0
    hit_tokens: int = 0
    rehydrated_tokens: int = 0
    computed_tokens: int = 0
    cold_steps_hit: int = 0
    cold_steps_missed: int = 0
    cold_stall_s: float = 0.0


_FIELDS = {
    ("kv_segments_closed_total", ""): "segments_closed",
    ("kv_tier_moves_total", "cold"): "demoted",
    ("kv_tier_moves_total", "warm"): "promoted",
    ("kv_tier_move_failures_total", ""): "move_failures",
    ("kv_reused_tokens_total", "ram"): "hit_tokens",
    ("kv_reused_tokens_total", "disk"): "rehydrated_tokens",
    ("engine_prefill_tokens_total", ""): "computed_tokens",
    ("kv_cold_steps_total", "hit"): "cold_steps_hit",
    ("kv_cold_steps_total", "miss"): "cold_steps_missed",
    ("kv_cold_stall_seconds", ""): "cold_stall_s",
}


class TallySink:
    """A `telemetry.Sink` that passes everything on to `onward`."""

    def __init__(self, onward: Telemetry) -> None:
        self._onward = onward
        self._totals = dict.fromkeys(_FIELDS.values(), 0.0)

    def count(self, name: str, value: float, labels: dict[str, str]) -> None:
        self._add(name, value, labels)
        self._onward.count(name, value, **labels)

    def observe(self, name: str, value: float, labels: dict[str, str]) -> None:
        self._add(name, value, labels)
        self._onward.observe(name, value, **labels)

    def gauge(self, name: str, value: float, labels: dict[str, str]) -> None:
        self._onward.gauge(name, value, **labels)

    def tally(self) -> KVTally:
        """From any thread."""
        totals = dict(self._totals)
        return KVTally(cold_stall_s=totals.pop("cold_stall_s"), **{name: int(n) for name, n in totals.items()})

    def _add(self, name: str, value: float, labels: dict[str, str]) -> None:
        field = _FIELDS.get((name, next(iter(labels.values()), "")))
        if field is not None:
            self._totals[field] += value
