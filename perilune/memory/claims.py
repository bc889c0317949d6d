"""Whether a text says what a sentence claims, as far as words tell: each claim of an answer against its sources.

Knows writing of English and of scripts without spaces; no model, so a claim in altogether other words isn't judged
true. What a claim is caught by is what small models get wrong: a number, a code or a name that the source doesn't
have beside these words, a negation that it has or lacks, and words that it doesn't hold. Compared is a window of
three sentences, not a page: a page holds most numbers somewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from perilune.memory.analyse import Analyser, normalise
from perilune.memory.entities import names
from perilune.memory.sentences import sentences

WINDOW_SENTENCES = 3
SUPPORTED_SHARE = 0.6
"""Share of a claim's terms that a window must hold to support it,"""

UNKNOWN_SHARE = 0.35
"""and below which the source says something else."""

MIN_TERMS = 2
"""A sentence of fewer terms ("Yes.", "Here it is:") claims nothing that words could tell."""

_NUMBER = re.compile(r"\d+(?:[.,:/-]\d+)*")
_NEGATION = re.compile(
    r"\b(?:not|no|never|none|neither|nor|cannot|without|\w+n['’]t)\b|[不没未无非莫勿]", re.IGNORECASE
)


class Verdict(StrEnum):
    SUPPORTED = "supported"
    UNCLEAR = "unclear"  # some of it is there, or its figure stands beside the sentence that comes nearest
    UNSUPPORTED = "unsupported"


_RANK = {Verdict.SUPPORTED: 2.0, Verdict.UNCLEAR: 1.0, Verdict.UNSUPPORTED: 0.0}


@dataclass(frozen=True, slots=True)
class Judgement:
    """`source` is the index of the text that comes nearest; None where none shares a word with the claim."""

    verdict: Verdict
    source: int | None = None


class ClaimJudge:
    """Finds and judges claims. Holds an analyser, so it belongs to one thread."""

    def __init__(self) -> None:
        self._terms = Analyser().terms

    def claims(self, text: str) -> Iterator[tuple[int, int]]:
        """(start, end) of the sentences that claim something; questions don't."""
        for start, end in sentences(text):
            said = text[start:end]
            if not said.endswith(("?", "？")) and len(set(self._terms(said))) >= MIN_TERMS:
                yield start, end

    def judge(self, claim: str, sources: Sequence[str]) -> Judgement:
        """What the sources say of a claim: the best verdict of any of their windows."""
        wanted, best = frozenset(self._terms(claim)), (0.0, -1, Verdict.UNSUPPORTED)
        for index, source in enumerate(sources):
            for window in _windows(source):
                share = self._share(wanted, window)
                verdict = self._verdict(claim, wanted, window, share)
                rank = _RANK[verdict] + share
                if share and rank > best[0]:
                    best = (rank, index, verdict)
        return Judgement(best[2], best[1] if best[1] >= 0 else None)

    def _share(self, wanted: frozenset[str], text: str) -> float:
        return len(wanted.intersection(self._terms(text))) / len(wanted) if wanted else 0.0

    def _verdict(self, claim: str, wanted: frozenset[str], window: str, share: float) -> Verdict:
        if share < UNKNOWN_SHARE or not _numbers(claim) | _names(claim) <= _numbers(window) | _words(window):
            return Verdict.UNSUPPORTED
        said = [window[start:end] for start, end in sentences(window)] or [window]
        nearest = max(said, key=lambda sentence: self._share(wanted, sentence))
        alike = _negated(claim) == _negated(nearest) and _numbers(claim) <= _numbers(nearest)
        return Verdict.SUPPORTED if alike and share >= SUPPORTED_SHARE else Verdict.UNCLEAR


def _windows(text: str) -> Iterator[str]:
    """Every three sentences in a row; what has no sentence (a table's row) is read as it is."""
    found = list(sentences(text))
    if len(found) <= WINDOW_SENTENCES:
        yield text
        return
    for first in range(len(found) - WINDOW_SENTENCES + 1):
        yield text[found[first][0] : found[first + WINDOW_SENTENCES - 1][1]]


def _negated(text: str) -> bool:
    return _NEGATION.search(text) is not None


def _numbers(text: str) -> frozenset[str]:
    """Without separators of thousands."""
    return frozenset(match[0].replace(",", "").rstrip(".") for match in _NUMBER.finditer(normalise(text)))


def _names(text: str) -> frozenset[str]:
    """Names and codes; the first word has its capital anyway."""
    plain = normalise(text)
    first = plain.split(maxsplit=1)[0].casefold() if plain.strip() else ""
    return frozenset(name for name in names(plain) if name != first)


def _words(text: str) -> frozenset[str]:
    """Every word and every two or three in a row: a name may stand in the source as a part of a longer one."""
    plain = normalise(text).casefold()
    words = re.findall(r"[\w-]+", plain)
    pairs = (" ".join(words[at : at + size]) for size in (2, 3) for at in range(len(words) - size + 1))
    return frozenset(words) | frozenset(pairs)
