"""Who comes first, and how much one step takes: pure rules, shared with the simulator.

Knows classes, arrival and measured rates. Knows nothing of blocks or threads.

Order (spec E2, E3): by class, then by the time a sequence would have ended had it run alone since its arrival.
So short questions pass long prompts, and nobody starves: a sequence's own figure is fixed, while later
arrivals' grow.

Step size (spec E1, E6), the rule: a step takes as many prompt tokens as fit `guard_s` while somebody decodes or
only batch work runs, else `solo_s`; seconds a token are measured by context length. One layer of a solo step
stays under 20 ms (design: cancellation), so `solo_s` is 20 ms × layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perilune.core import BLOCK_TOKENS, ServiceClass
from perilune.engine.sequence import EngineSequence

_LEAST_S = 1e-7  # seconds a token, of a step too short to measure

LAYER_S = 0.02
"""Longest time between two polls of the cancel flag that chunk sizes aim at."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of the engine. A step holds at most `chunk_tokens` of prompt and one decoded token for each of
    `batch` sequences; `queue` sequences of each class may wait."""

    batch: int = 16
    chunk_tokens: int = 4096
    queue: int = 48
    guard_s: float = 0.15
    solo_s: float | None = None  # None: `LAYER_S` for each layer of the model
    load_floor_s: float = 1.0  # a load may take this long even where computing would be faster
    save_share: float = 0.25  # of the pool that may be held by unfinished saves


def rank(sequence: EngineSequence) -> tuple[int, float, int]:
    """Sort key of service: lowest first."""
    return (sequence.service_class, sequence.priority_s, sequence.serial)


def sacrifice(sequence: EngineSequence) -> tuple[int, int]:
    """Sort key of preemption: highest first. Lowest class, then youngest."""
    return (sequence.service_class, sequence.serial)


def is_batch(sequence: EngineSequence) -> bool:
    """Idle priority: runs only while nothing else is there."""
    return sequence.service_class == ServiceClass.P2_BATCH


class ChunkController:
    """Learns seconds per prompt token by context length (powers of two), and seconds of a decode step."""

    def __init__(self, limits: EngineLimits, num_layers: int, initial_tokens_per_s: float = 400.0) -> None:
        self._guard_s = limits.guard_s
        self._solo_s = limits.solo_s or max(limits.guard_s, LAYER_S * num_layers)
        self._initial = 1.0 / initial_tokens_per_s
        self._prefill_s: dict[int, float] = {}
        self._decode_s = 0.0

    def prefill_s(self, context_tokens: int) -> float:
        """Seconds per prompt token at a context length: measured there, else at the nearest shorter, else
        longer."""
        bucket = context_tokens.bit_length()
        if bucket in self._prefill_s:
            return self._prefill_s[bucket]
        known = sorted(self._prefill_s, key=lambda b: (b > bucket, abs(b - bucket)))
        return self._prefill_s[known[0]] if known else self._initial

    def predict_s(self, start: int, tokens: int) -> float:
        """Seconds to prefill `tokens` from `start` on."""
        seconds, position = 0.0, start
        while position < start + tokens:  # one term a bucket
            end = min(start + tokens, max(1 << position.bit_length(), position + 1))
            seconds += (end - position) * self.prefill_s(position)
            position = end
        return seconds

    def budget_s(self, decoding: int, prefilling: Sequence[EngineSequence]) -> float:
        """Seconds of prefill that this step may take."""
        if decoding:
            return max(0.0, self._guard_s - self._decode_s)
        return self._guard_s if all(map(is_batch, prefilling)) else self._solo_s

    def chunk(self, context_tokens: int, seconds: float) -> int:
        """Prompt tokens that fit `seconds`: whole blocks, at least one."""
        blocks = int(seconds / self.prefill_s(context_tokens)) // BLOCK_TOKENS
        return max(1, blocks) * BLOCK_TOKENS

    def observe(self, prefilled: Sequence[tuple[int, int]], decoding: int, seconds: float) -> None:
        """A step took `seconds`: `prefilled` are (start, tokens) of its chunks, `decoding` its decode rows."""
        if not prefilled:
            self._decode_s = _blend(self._decode_s or seconds, seconds)
            return
        spent = seconds - self._decode_s if decoding else seconds
        predicted = sum(tokens * self.prefill_s(start) for start, tokens in prefilled)
        error = max(spent, 0.1 * seconds) / predicted
        for start, tokens in prefilled:
            if tokens >= BLOCK_TOKENS:  # a ragged tail says little about whole chunks
                bucket, measured = start.bit_length(), max(_LEAST_S, self.prefill_s(start) * error)
                self._prefill_s[bucket] = _blend(self._prefill_s.get(bucket, measured), measured)


def _blend(old: float, new: float) -> float:
    return 0.7 * old + 0.3 * new
