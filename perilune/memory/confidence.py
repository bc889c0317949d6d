"""How likely it is that the best hits hold what was asked: a number between 0 and 1.

Knows a ranking and the words of question and hits, no store. A logistic model over signs of a ranking. Its weights
are fitted by `python -m bench.memory_fit` on one half of the sources of `bench/data/memory`, English and Chinese
together; docs/log.md says how well calibrated it is on the other half.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import UTC, datetime

import numpy as np

from perilune.memory import scoring
from perilune.memory.entities import names
from perilune.memory.entries import Entry
from perilune.memory.rank import Numbers
from perilune.memory.timespan import Span, covered, spans

FITTED_MODEL = "multilingual-e5-small-q4"
"""The model whose cosines the weights know. With another one, or none, the number only orders searches."""

BEST = 5
"""Hits whose words count: a question is seldom answered by what stands further down."""

_COMMON_COSINE = 0.8
_MAX_TOLD_CHARS = 1_000
_TINY = 1e-6
_ASKS_NUMBER = re.compile(
    r"\bhow (?:many|much|long|far|old|often|big|high|deep|thick|heavy|wide)\b|\bwhen\b|"
    r"\bwhat (?:day|date|time|year|number)\b|"
    r"[几多]少?[^？?]{0,6}[？?]|多少|第几|什么时候|何时|哪天|哪一天|几[点号月日年]|多[长久高重大厚远宽深]",
    re.I,
)
_NUMBER = re.compile(
    r"\d|[一二三四五六七八九十百千万两半]|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|"
    r"forty|fifty|sixty|hundred|thousand|half|dozen|once|twice|first|second|third)\b",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Signs:
    """What the confidence is told from; each is 0 where it doesn't apply."""

    held: float = 0.0
    """Share of the question's informative words (by their weight) that one of the best hits holds, at most."""
    held_together: float = 0.0
    """The same of the best hits together."""
    rarest: float = 0.0
    """Whether the best hits hold the most informative word that is the question's own."""
    unknown: float = 0.0
    """Share of the question's own words that no entry holds."""
    near: float = 0.0
    """Cosine of the nearest of the best hits, in tenths above 0.8 (multilingual-e5 has nothing below)."""
    peak: float = 0.0
    """How far the best stands out of the pool, on a logarithmic scale."""
    gap: float = 0.0
    """How far the best stands before the second, likewise."""
    agree: float = 0.0
    """Whether words and meaning put the same hit first."""
    empty_time: float = 0.0
    """Whether the question names a time of which no best hit is, and none tells."""
    nameless: float = 0.0
    """Share of the names and codes in the question that the best hits lack."""
    kind_missing: float = 0.0
    """Whether the question asks for a number or a date and no best hit holds a digit or numeral."""


BIAS = -2.361
WEIGHTS = Signs(
    held=0.591,
    held_together=0.698,
    rarest=0.412,
    unknown=-1.136,
    near=2.552,
    peak=0.372,
    gap=-0.108,
    agree=0.103,
    empty_time=-2.927,
    nameless=0.191,
    kind_missing=-3.317,
)
ABSTAIN_BELOW = 0.122
"""A search of less confidence found nothing, as far as can be told; 5 % of the questions that the fitting sources
answer lie below."""


def confidence(signs: Signs) -> float:
    z = BIAS + sum(weight * sign for weight, sign in zip(astuple(WEIGHTS), astuple(signs), strict=True))
    return 1.0 / (1.0 + math.exp(-z))


@dataclass(frozen=True, slots=True)
class Ranking:
    """A ranked pool: `words` (BM25), `dense` (cosine or NaN) and `scores` of its entries, `order` best first."""

    pool: Sequence[Entry]
    words: Numbers
    dense: Numbers
    scores: Numbers
    order: Sequence[int]


def signs_of(
    question: str,
    own: Mapping[int, float],
    unknown: float,
    named: Sequence[Span],
    ranking: Ranking,
    texts: Sequence[str],
) -> Signs:
    """What a ranking tells. `own` are the question's own terms with the weight that BM25 gives them (also where no
    entry holds them), `unknown` the share of those, `named` its times, `texts` what the best hits say."""
    if not ranking.order:
        return Signs(unknown=1.0)
    best = list(ranking.order[:BEST])
    entries = [ranking.pool[at] for at in best]
    held = scoring.frequencies([entry.terms for entry in entries], list(own)) > 0
    weights = np.array(list(own.values()), np.float32)
    total = max(float(weights.sum()), _TINY)
    near = ranking.dense[best]
    known = near[~np.isnan(near)]
    asked = set(names(question))
    there = {name for entry in entries for name in entry.entities.split("\n")}
    peak, gap = _prominence(ranking.scores, ranking.order)
    return Signs(
        held=float((held @ weights).max()) / total,
        held_together=float(held.any(axis=0) @ weights) / total,
        rarest=float(held[:, int(weights.argmax())].any()) if len(weights) else 0.0,
        unknown=unknown,
        near=10 * (float(known.max()) - _COMMON_COSINE) if len(known) else 0.0,
        peak=peak,
        gap=gap,
        agree=float(int(ranking.words.argmax()) == int(np.nan_to_num(ranking.dense, nan=-1.0).argmax())),
        empty_time=float(bool(named) and not _in_time(named, entries, texts)),
        nameless=len(asked - there) / len(asked) if asked else 0.0,
        kind_missing=float(bool(_ASKS_NUMBER.search(question)) and not any(map(_NUMBER.search, texts))),
    )


def _in_time(named: Sequence[Span], found: Sequence[Entry], texts: Sequence[str]) -> bool:
    """Whether one of these entries was told in a named time, or its text names one that lies in it: a page has no
    time of its own, and some things are told weeks later. A date without a year is read as the last before the
    entry, or before the named time's end."""
    if any(covered(entry.at, named) for entry in found):
        return True
    end_s = max(span.until_s for span in named)
    return any(
        span.since_s <= told.since_s and told.until_s <= span.until_s
        for entry, text in zip(found, texts, strict=False)  # a text may be deleted meanwhile
        for told in spans(
            text[:_MAX_TOLD_CHARS], datetime.fromtimestamp(end_s if entry.at is None else entry.at, UTC)
        )
        for span in named
    )


def _prominence(scores: Numbers, order: Sequence[int]) -> tuple[float, float]:
    """(peak, gap)."""
    best = float(scores[order[0]])
    second = float(scores[order[1]]) if len(order) > 1 else best
    return math.log1p(max(0.0, best - float(np.median(scores)))), math.log1p(max(0.0, best - second))
