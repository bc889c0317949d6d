"""How much memory KV takes, and what is done when it is too much (spec R12).

Knows bytes by tier, the memory the system has left, and four levels. Limits come from that measurement, never from
a constant: KV's limit is what it occupies now plus what is free. Asked a few times a second at most; the arithmetic
is plain data for `/metrics` and for the scheduler.

    green    nothing to do
    yellow   WARM compresses worse than it should: a sign of a wrong setting, nothing is done
    orange   full-precision tokens hold more than their share: windows shrink to their preset
    red      KV is over `RED_SHARE` of its limit: demote what can be, prefetch nothing, refuse new work
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum

from perilune.core import BLOCK_TOKENS
from perilune.runtime.kv.spec import KVSpec, TierSpec

WARM_COMPRESSION = 0.65
HOT_SHARE = 0.15
RED_SHARE = 0.81
CALM_SHARE = 0.76
"""Red ends below this, so that it doesn't flicker."""

EVERY_S = 0.5


class Pressure(IntEnum):
    GREEN = 0
    YELLOW = 1
    ORANGE = 2
    RED = 3


@dataclass(frozen=True, slots=True)
class KVUse:
    """Bytes by tier, as counted. `hot_bytes` are blocks, shared ones once; `idle_bytes` is the part of them that is
    cached and that nobody uses."""

    hot_bytes: int = 0
    warm_bytes: int = 0
    cold_bytes: int = 0
    summary_bytes: int = 0
    idle_bytes: int = 0
    warm_compression: float = 1.0
    fragmentation: float = 0.0
    limit_bytes: int = 0
    level: Pressure = Pressure.GREEN

    @property
    def resident_bytes(self) -> int:
        """RAM: all but the COLD payloads."""
        return self.hot_bytes + self.warm_bytes + self.summary_bytes

    @property
    def share(self) -> float:
        """Of the limit."""
        return (self.resident_bytes - self.idle_bytes) / self.limit_bytes if self.limit_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Counts:
    """What the pools hold: blocks in use and cached, slots by the tier of their payload, tokens in used blocks."""

    used_blocks: int
    cached_blocks: int
    warm_segments: int = 0
    cold_segments: int = 0
    used_tokens: int = 0


class PressureGauge:
    """`free_bytes` says what the system has left; `clock` is monotonic seconds."""

    def __init__(
        self, kv: KVSpec, tiers: TierSpec | None, free_bytes: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self._kv = kv
        self._tiers = tiers
        self._free_bytes = free_bytes
        self._clock = clock
        self._next_s = float("-inf")
        self._most_hot_bytes = self._most_warm_bytes = 0  # pages once written stay this process's, for reuse
        self.use = KVUse()

    def due(self) -> bool:
        return self._clock() >= self._next_s

    def measure(self, counts: Counts) -> KVUse:
        """Take stock; the result stays in `use` until the next time."""
        self._next_s = self._clock() + EVERY_S
        block = self._kv.block_bytes
        warm = counts.warm_segments * (self._tiers.payload_bytes if self._tiers else 0)
        cold = counts.cold_segments * (self._tiers.payload_bytes if self._tiers else 0)
        summaries = (counts.warm_segments + counts.cold_segments) * (
            self._tiers.summary_bytes if self._tiers else 0
        )
        hot = (counts.used_blocks + counts.cached_blocks) * block
        self._most_hot_bytes = max(self._most_hot_bytes, hot)
        self._most_warm_bytes = max(self._most_warm_bytes, warm)
        limit = self._most_hot_bytes + self._most_warm_bytes + summaries + self._free_bytes()
        used_tokens = counts.used_blocks * BLOCK_TOKENS
        measured = KVUse(
            hot,
            warm,
            cold,
            summaries,
            counts.cached_blocks * block,
            self._compression(),
            1 - min(1.0, counts.used_tokens / used_tokens) if used_tokens else 0.0,
            limit,
        )
        self.use = replace(measured, level=self._level(measured, counts.used_blocks * block))
        return self.use

    def _compression(self) -> float:
        """1 - WARM bytes over fp32 bytes of the same tokens, summaries counted."""
        if self._tiers is None:
            return 1.0
        plain = self._tiers.segment_tokens * self._kv.token_bytes * 4 // self._kv.element_bytes
        plain = plain * self._tiers.records // (self._kv.num_layers * self._kv.num_kv_heads)
        return 1 - (self._tiers.payload_bytes + self._tiers.summary_bytes) / plain

    def _level(self, use: KVUse, used_hot_bytes: int) -> Pressure:
        calm = CALM_SHARE if self.use.level is Pressure.RED else RED_SHARE
        if use.share > calm:
            return Pressure.RED
        if self._tiers is not None and used_hot_bytes > HOT_SHARE * use.limit_bytes:
            return Pressure.ORANGE
        return Pressure.YELLOW if use.warm_compression < WARM_COMPRESSION else Pressure.GREEN
