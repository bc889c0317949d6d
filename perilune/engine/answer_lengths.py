"""How long the newest answers became, beside the prompts they follow: for the health view (spec R11).

Knows counts; nothing of text. The engine thread writes, any thread reads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from perilune.core import FinishReason
from perilune.engine.sequence import EngineSequence

KEPT_ANSWERS = 256


@dataclass(frozen=True, slots=True)
class AnswerLength:
    """One answer. `cut`: it ended for want of room in the window or in KV, before its own limit."""

    prompt_tokens: int
    tokens: int
    cut: bool


class AnswerLengths:
    """Answers that came to an end by themselves or by lack of room. Those that the caller's own limit or a cancel
    ended say nothing about length."""

    def __init__(self) -> None:
        self._kept: deque[AnswerLength] = deque(maxlen=KEPT_ANSWERS)

    def add(self, sequence: EngineSequence, reason: FinishReason) -> None:
        tokens = sequence.generated_tokens
        cut = reason is FinishReason.LENGTH and tokens < sequence.spec.max_new_tokens
        if sequence.samples and (cut or reason is FinishReason.STOP):
            self._kept.append(AnswerLength(sequence.prompt_tokens, tokens, cut))

    def newest(self) -> tuple[AnswerLength, ...]:
        """Oldest first. From any thread."""
        return tuple(self._kept.copy())  # one call, which no append can break into
