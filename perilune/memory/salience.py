"""How much a sentence says: which ones a summary copies.

Knows words and how rare they are, nothing of trees or tables. Numbers, dates, names and decisions count,
questions and phrases don't. Scores are about 0 to 2 and compare across sources, so that levels of a summary can
be made of others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perilune.memory.analyse import Analyser
from perilune.memory.entities import names
from perilune.memory.postings import term_hash
from perilune.memory.writing import UNSPACED

_FIGURE = re.compile(r"[A-Za-z]*\d[\w.,:/-]*")
_DAY = re.compile(
    r"\b(?:monday|tuesday|wednesday|thursday|friday|saturday|sunday|january|february|march|april|june|july|august|"
    r"september|october|november|december|tomorrow)\b|[一二三四五六七八九十]+月|周[一二三四五六日]|"
    r"星期[一二三四五六日天]|明天|后天",
    re.I,
)
_DECISION = re.compile(
    r"\b(?:decid\w+|agreed?|must|deadline|due|cancel\w*|moved to|changed to|instead|ordered|booked|promis\w+|"
    r"confirm\w*|"
    r"important|remember|never|always|allergic|name is|called)\b|决定|确定|必须|截止|取消|改成|改到|改为|订了|"
    r"预订|约好|答应|"
    r"确认|重要|记住|记得|从不|一直|过敏|叫做",
    re.I,
)
_QUESTION = re.compile(r"[?？]\s*[\"'”’)）]*$|[吗呢][。！!]?$")
_UNSPACED = re.compile(f"[{UNSPACED}]")
_UNSPACED_COST = 2.5
LEAST_SCORE = 0.25
"""What says less isn't worth its room, even where there is some."""

_FEW_TERMS = 3
_MANY_TERMS = 12


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sentence that could be copied: where it stands, what it costs in letters, and its terms' hashes."""

    number: int
    start: int
    end: int
    score: float
    cost: float
    terms: frozenset[int]


def cost_of(text: str) -> float:
    """Letters, a Chinese character for 2.5: about proportional to tokens."""
    return len(text) + (_UNSPACED_COST - 1) * len(_UNSPACED.findall(text))


def terms_of(text: str, analyser: Analyser) -> frozenset[int]:
    return frozenset(map(term_hash, analyser.terms(text)))


def score(text: str, terms: frozenset[int], by_user: bool, rarity: Callable[[int], float]) -> float:
    """How much a sentence says. `rarity` of a term is 0 (everywhere) to 1 (nowhere else)."""
    if not terms:
        return 0.0
    rare = sum(map(rarity, terms)) / len(terms)
    length = min(1.0, math.sqrt(len(terms) / _MANY_TERMS))
    figures = len({*_FIGURE.findall(text), *_DAY.findall(text)})
    value = rare * length + 0.3 * min(figures, 3) + 0.1 * min(len(names(text)), 3)
    value += 0.2 * (_DECISION.search(text) is not None) + 0.15 * by_user
    value -= 0.6 * (_QUESTION.search(text) is not None) + 0.4 * (len(terms) < _FEW_TERMS and not figures)
    return max(0.0, value)


def choose(candidates: Sequence[Candidate], budget: float) -> list[Candidate]:
    """The best that fit `budget` letters, each saying something that the ones before don't; in the order of the
    text."""
    chosen: list[Candidate] = []
    left = budget
    for each in sorted(candidates, key=lambda one: (-one.score, one.number, one.start)):
        if (
            each.score >= LEAST_SCORE
            and each.cost <= left
            and not any(each.terms <= other.terms for other in chosen)
        ):
            chosen.append(each)
            left -= each.cost
    return sorted(chosen, key=lambda one: (one.number, one.start))
