"""The measured speeds of one engine, and the arithmetic of time to first token (TTFT) on top of them.

Plain data and pure functions: the planner, the predictor and the simulator share them. Knows nothing of requests,
clocks or files.

    TTFT = queue + load + prefill + first decode + overhead
    prefill(n tokens after c)  = a·n + b·n·(c + n/2)        weights are read per token, attention grows with context
    queue(q tokens ahead)      = a·q
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds in seconds per token (`a`, `b`, load), and what every request pays once.

    `error` is the mean relative error of past predictions. `p90` and `p99` are the factors by which predictions
    have to be stretched to hold in 90 and 99 % of cases (`calibration`); a plan meets a deadline only with that
    much room.
    """

    prefill_s_per_token: float = 2e-3
    prefill_s_per_token_context: float = 1e-7
    load_s_per_token: float = 3e-5
    decode_s: float = 0.03
    overhead_s: float = 0.03
    error: float = 0.1
    p90: float = 1.15
    p99: float = 1.4

    def factor(self, share: float) -> float:
        """By what a prediction is stretched to hold in at least this share of cases: as it is, 90 % or 99 %."""
        if share <= 0.5:
            return 1.0
        return self.p90 if share <= 0.9 else self.p99

    def prefill_s(self, tokens: int, start: int = 0) -> float:
        """Seconds to compute `tokens` after `start` tokens of context."""
        middle = start + tokens / 2
        return tokens * (self.prefill_s_per_token + self.prefill_s_per_token_context * middle)

    def ttft_s(self, uncached: int, start: int = 0, disk: int = 0, queued: int = 0) -> float:
        """Predicted seconds to the first token: `uncached` after `start`, of which `disk` come from disk."""
        return (
            queued * self.prefill_s_per_token
            + disk * self.load_s_per_token
            + self.prefill_s(uncached, start)
            + self.decode_s
            + self.overhead_s
        )

    def tokens_within(self, seconds: float) -> int:
        """Most tokens whose prefill from an empty context takes at most `seconds`: the root of prefill_s."""
        if seconds <= 0:
            return 0
        linear, square = self.prefill_s_per_token, self.prefill_s_per_token_context / 2
        if square * seconds < 1e-12 * linear * linear:
            return int(seconds / linear)
        root = (math.sqrt(linear * linear + 4 * square * seconds) - linear) / (2 * square)
        return int(root)
