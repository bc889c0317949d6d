"""Asks a haystack's questions under different readers, and counts the answers that change.

An answer counts as right if greedy decoding would give all its tokens: teacher forcing tells, since every token is
the argmax after the right ones before it. The question is read by the same reader as the answer (the hard set-up).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from perilune.runtime.evaluate.kv_forward import EvalModel, Reader, forward, logits_of
from perilune.runtime.evaluate.kv_tasks import Question

_TOGETHER = 12  # questions of one forward pass
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Flips:
    """Paired answers. `lost`: right in full precision, wrong here; `gained`: the reverse. Shares are of
    `dense_right`.

    `upper`: the one-sided 95 % bound of the share lost (Clopper-Pearson); None without a pair.
    """

    asked: int
    dense_right: int
    lost: int
    gained: int

    @property
    def lost_share(self) -> float:
        return self.lost / self.dense_right if self.dense_right else math.nan

    @property
    def net_share(self) -> float:
        """Lost less gained, over the pairs that full precision answers right: what McNemar's test looks at."""
        return (self.lost - self.gained) / self.dense_right if self.dense_right else math.nan

    @property
    def upper(self) -> float | None:
        return upper_bound(self.lost, self.dense_right) if self.dense_right else None


def ask(model: EvalModel, questions: Sequence[Question], start: int, reader: Reader) -> list[bool]:
    """Which questions are answered right after a context of `start` tokens."""
    order = sorted(range(len(questions)), key=lambda index: _rows(questions[index]))
    right = [False] * len(questions)
    for first in range(0, len(order), _TOGETHER):
        some = order[first : first + _TOGETHER]
        for index, answer in zip(some, _ask([questions[i] for i in some], model, start, reader), strict=True):
            right[index] = answer
    return right


def _ask(questions: Sequence[Question], model: EvalModel, start: int, reader: Reader) -> list[bool]:
    length = max(map(_rows, questions))
    token_ids = torch.zeros(len(questions), length, dtype=torch.int64)
    for row, question in zip(token_ids, questions, strict=True):
        known = torch.tensor(question.prompt + question.answer[:-1])
        row[: len(known)] = known  # what follows is never read: attention is causal
    hidden = forward(model, token_ids, start, reader)
    wanted = [hidden[index, len(question.prompt) - 1 : _rows(question)] for index, question in enumerate(questions)]
    best = torch.cat([logits.argmax(-1) for logits in logits_of(model, torch.cat(wanted))])
    answers = torch.split(best, [len(question.answer) for question in questions])
    return [tuple(a.tolist()) == question.answer for a, question in zip(answers, questions, strict=True)]


def _rows(question: Question) -> int:
    return len(question.prompt) + len(question.answer) - 1


def flips(dense: Sequence[bool], other: Sequence[bool]) -> Flips:
    """Pair the answers of the same questions."""
    pairs = list(zip(dense, other, strict=True))
    return Flips(
        asked=len(pairs),
        dense_right=sum(dense),
        lost=sum(was and not now for was, now in pairs),
        gained=sum(now and not was for was, now in pairs),
    )


def upper_bound(events: int, trials: int) -> float:
    """One-sided 95 % Clopper-Pearson bound of a share: the p under which `events` or fewer have a chance of 5 %."""
    if events >= trials:
        return 1.0
    low, high = events / trials, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        tail = sum(math.exp(_log_binomial(trials, count, middle)) for count in range(events + 1))
        low, high = (middle, high) if tail > 1 - _CONFIDENCE else (low, middle)
    return high


def _log_binomial(trials: int, events: int, share: float) -> float:
    ways = math.lgamma(trials + 1) - math.lgamma(events + 1) - math.lgamma(trials - events + 1)
    return ways + events * math.log(share) + (trials - events) * math.log1p(-share) if share > 0 else -math.inf
