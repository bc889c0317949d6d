"""How much one step takes: bounds and the size of prompt chunks, shared with the simulator.

Knows measured rates. Knows nothing of blocks, order (`scheduling`) or threads.

Step size (spec E1, E6), the rule: a step takes as many prompt tokens as fit `guard_s` (150 ms) while somebody
decodes, several sequences prefill or only batch work runs, else `solo_s` (800 ms: fewer, longer steps cost a lone
prompt less overhead). So a stream stutters by at most the one, and a new question waits for at most the other.
Cancelling one's own step doesn't depend on it: the runtime polls its flag inside a step. Idle-only work runs beside
others only for `idle_s` a step, and only where no prompt of theirs is waiting; 0, the default, lets it wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from perilune.core import BLOCK_TOKENS

_LEAST_S = 1e-7  # seconds a token, of a step too short to measure
_MOST_SURPRISE = 3.0
"""Most that one step is believed to be slower than is known: a machine that stood still a minute isn't slow, and
whoever is refused for it could never show that it isn't."""

STRETCH = 1.25
"""How much longer than its budget a lone step may take, to spare the prompt another step."""

SOLO_BLOCKS = 4
"""Least blocks of a solo chunk: on a slow or busy machine smaller ones would be all overhead."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of the engine. A step holds at most `chunk_tokens` of prompt and one decoded token for each of
    `batch` sequences; `queue` sequences of each class may wait."""

    batch: int = 16
    chunk_tokens: int = 4096
    queue: int = 48
    guard_s: float = 0.15
    solo_s: float = 0.8
    idle_s: float = 0.0
    load_floor_s: float = 1.0  # a load may take this long even where computing would be faster
    save_share: float = 0.25  # of the pool that may be held by unfinished saves


@dataclass(frozen=True, slots=True)
class ChunkBudget:
    """What prompt chunks of one step may take. `least_blocks` run whatever they take; `solo`: nobody is kept
    waiting."""

    seconds: float
    least_blocks: int
    solo: bool


@dataclass(frozen=True, slots=True)
class _Chunk:
    context_tokens: int
    tokens: int
    seconds: float


class ChunkController:
    """Sizes chunks to a time: the last size, corrected by how long it took and by the growth of the context.

    Correcting the size itself (at most ×2 down, ×1.5 up a step) finds the right one whatever part of a step is
    fixed cost; a rate alone settles on chunks that are too small. Rates, seconds per prompt token by context
    length in powers of two, serve for predictions and for first sizes.
    """

    def __init__(self, limits: EngineLimits, initial_tokens_per_s: float = 400.0) -> None:
        self._limits = limits
        self._initial_s = 1.0 / initial_tokens_per_s
        self._prefill_s: dict[int, float] = {}
        self._decode_s = 0.0
        self._last: dict[bool, _Chunk] = {}  # by `ChunkBudget.solo`
        self._proposed: tuple[bool, int, int] | None = None

    def prefill_s(self, context_tokens: int) -> float:
        """Seconds per prompt token at a context length: measured there, else at the nearest one, shorter
        first."""
        bucket = context_tokens.bit_length()
        if bucket in self._prefill_s:
            return self._prefill_s[bucket]
        known = sorted(self._prefill_s, key=lambda b: (b > bucket, abs(b - bucket)))
        return self._prefill_s[known[0]] if known else self._initial_s

    def predict_s(self, start: int, tokens: int) -> float:
        """Seconds to prefill `tokens` from `start` on."""
        seconds, position = 0.0, start
        while position < start + tokens:  # one term a bucket
            end = min(start + tokens, max(1 << position.bit_length(), position + 1))
            seconds += (end - position) * self.prefill_s(position)
            position = end
        return seconds

    def budget(self, decoding: int, prefilling: int) -> ChunkBudget:
        """What the next step's prompt chunks may take, with so many sequences to decode and to prefill; idle-only
        ones don't count."""
        if decoding:
            return ChunkBudget(max(0.0, self._limits.guard_s - self._decode_s), 1, solo=False)
        if prefilling != 1:
            return ChunkBudget(self._limits.guard_s, 1, solo=False)
        return ChunkBudget(self._limits.solo_s, SOLO_BLOCKS, solo=True)

    def chunk(self, context_tokens: int, budget: ChunkBudget, remaining: int | None = None) -> int:
        """Prompt tokens that fit a budget, in whole blocks.

        Where nobody waits, the `remaining` tokens are cut evenly, at up to `STRETCH` times the budget: a small last
        step costs nearly as much as a large one (2,048 tokens as 1,056 + 768 + 224 took 5 % longer than as
        1,280 + 768, in single readings).
        """
        rate = self.prefill_s(context_tokens)
        last = self._last.get(budget.solo)
        if last is None:
            tokens = budget.seconds / rate
        else:
            change = min(1.5, max(0.5, budget.seconds / last.seconds))
            tokens = last.tokens * change * self.prefill_s(last.context_tokens) / rate
        size = max(budget.least_blocks, round(tokens / BLOCK_TOKENS)) * BLOCK_TOKENS
        if budget.solo and remaining is not None:
            steps = max(1, ceil(remaining / (STRETCH * size)))
            size = ceil(remaining / steps / BLOCK_TOKENS) * BLOCK_TOKENS
        self._proposed = (budget.solo, context_tokens, size)
        return size

    def observe(self, prefilled: Sequence[tuple[int, int]], decoding: int, seconds: float) -> None:
        """A step took `seconds`: `prefilled` are (start, tokens) of its chunks, `decoding` its decode rows."""
        if not prefilled:
            self._decode_s = _blend(self._decode_s or seconds, seconds)
            return
        spent = max(seconds - self._decode_s, 0.1 * seconds) if decoding else seconds
        error = spent / sum(tokens * self.prefill_s(start) for start, tokens in prefilled)
        for start, tokens in prefilled:
            if tokens >= BLOCK_TOKENS:  # a ragged tail says little about whole chunks
                bucket = start.bit_length()
                known = min(error, _MOST_SURPRISE) if bucket in self._prefill_s else error
                measured = max(_LEAST_S, self.prefill_s(start) * known)
                self._prefill_s[bucket] = _blend(self._prefill_s.get(bucket, measured), measured)
        start, tokens = prefilled[0]
        if len(prefilled) == 1 and self._proposed is not None and self._proposed[1:] == (start, tokens):
            self._last[self._proposed[0]] = _Chunk(start, tokens, max(_LEAST_S * tokens, spent))


def _blend(old: float, new: float) -> float:
    return 0.7 * old + 0.3 * new
