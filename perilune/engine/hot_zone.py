"""The adaptive window of one decoding sequence (spec R7).

Knows what decode steps report of their attention (`kernels.interface.ATTENTION_STATS`); knows nothing of tensors
or KV. The rule: attention that is narrow, three times running, with mass missing just outside the exact zone,
widens the window by 512; attention that is spread far, or that the exact zone holds anyway, takes it back. A window
changes how a row is attended, never KV of a prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

STEP_TOKENS = 512
MOST_TOKENS = 4096
NARROW, WIDE = 0.3, 0.7
HELD = 0.95
TOKENS = 10
"""Entropy is averaged over this many tokens."""

TIMES = 3


class HotZone:
    """`base_tokens` is the preset's window; `window_tokens` what the next step should use."""

    def __init__(self, base_tokens: int) -> None:
        self.base_tokens = self.window_tokens = base_tokens
        self._entropy: deque[float] = deque(maxlen=TOKENS)
        self._narrow = 0

    def observe(self, layers: Sequence[Sequence[float]]) -> int:
        """Take one step's figures, a row a layer (zeros: no closed segments there). Returns the window."""
        rows = [row for row in layers if any(row)]
        if not rows:
            return self.window_tokens
        exact, selected, summary, border, entropy, _ = (
            sum(column) / len(rows) for column in zip(*rows, strict=True)
        )
        self._entropy.append(entropy)
        if len(self._entropy) < TOKENS:
            return self.window_tokens
        mean = sum(self._entropy) / TOKENS
        self._narrow = self._narrow + 1 if mean < NARROW else 0
        if mean > WIDE or exact > HELD:
            self.shrink()
        elif self._narrow >= TIMES and 2 * border > summary > 0 and selected + summary > 1 - HELD:
            self.window_tokens = max(self.base_tokens, min(MOST_TOKENS, self.window_tokens + STEP_TOKENS))
            self._narrow = 0
        return self.window_tokens

    def shrink(self) -> None:
        """Back to the preset's window: also what KV pressure asks for."""
        self.window_tokens, self._narrow = self.base_tokens, 0
