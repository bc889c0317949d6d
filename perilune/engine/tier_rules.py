"""Where tiered sequences read what: pure functions of position, shared with the simulator (spec R4).

Knows a `TierSpec` and the size of the WARM tier. Knows nothing of slots, blocks or sequences. What a row reads
depends on its position (and, while decoding, on its window) alone, never on load, chunking or what was cached: so
KV stays a function of tokens and policy.
"""

from __future__ import annotations

from dataclasses import dataclass

from perilune.core import BLOCK_TOKENS
from perilune.runtime.kv.spec import TierSpec


@dataclass(frozen=True, slots=True)
class TierRules:
    """`warm_tokens`: the newest closed tokens, whose payload stays in RAM."""

    spec: TierSpec
    warm_tokens: int

    def to_border(self, position: int) -> int:
        """Tokens from `position` to the end of its segment: a prefill chunk doesn't cross it."""
        return self.spec.segment_tokens - position % self.spec.segment_tokens

    def complete(self, tokens: int) -> int:
        """Segments that lie within the first `tokens`."""
        return tokens // self.spec.segment_tokens

    def prefill_reads(self, position: int) -> int:
        """Leading segments that a prefill row at `position` reads closed."""
        return max(0, (position // self.spec.segment_tokens) - self.spec.hot_tokens // self.spec.segment_tokens)

    def decode_reads(self, position: int, window_tokens: int) -> int:
        """Leading segments that a decode row at `position` reads closed: those before its local window, which can't
        reach behind the hot zone, where no blocks are."""
        window = max(1, min(window_tokens, self.spec.hot_tokens))
        return max(0, position + 1 - window) // self.spec.segment_tokens

    def released(self, computed: int) -> int:
        """Leading segments whose blocks no row from position `computed` on reads."""
        return max(0, computed - self.spec.hot_tokens) // self.spec.segment_tokens

    def cold(self, computed: int) -> int:
        """Leading segments behind the WARM tier."""
        return max(0, self.complete(computed) - self.warm_tokens // self.spec.segment_tokens)

    def blocks_needed(self, tokens: int) -> int:
        """Most blocks that a sequence holds at once on its way to `tokens`."""
        longest = self.spec.sink_tokens + self.spec.hot_tokens + self.spec.segment_tokens + BLOCK_TOKENS
        return -(-min(tokens, longest) // BLOCK_TOKENS)
