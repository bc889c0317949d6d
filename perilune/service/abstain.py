"""What is said where the sources don't hold an answer. Plain sentences; `answer` decides when.

Knows languages by code and files by name and pages, no search. A language without a sentence of its own gets
English.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from perilune.core import Degradation, FileRecord, SearchResult

CODE = "not_in_sources"
_NAMED = 3
_NOT_THERE = {
    "en": "The sources don't contain this, as far as the search can tell. Searched: {searched}.",
    "zh": "就检索所及，资料中没有这方面的内容。已检索：{searched}。",
}
_PAGES = {"en": "{name} ({pages} pages)", "zh": "{name}（{pages}页）"}
_MORE = {"en": "{count} more", "zh": "另外{count}份"}


class Abstain(StrEnum):
    """OFF: nothing is said. SAY: the answer begins with it, and the model goes on from the nearest passages.
    REFUSE: it is the whole answer."""

    OFF = "off"
    SAY = "say"
    REFUSE = "refuse"


def sentence(language: str | None, records: Sequence[FileRecord]) -> str:
    """That the sources don't contain it, and what was searched."""
    known = language if language in _NOT_THERE else "en"
    named = [_PAGES[known].format(name=r.filename, pages=f"{r.pages_parsed:,}") for r in records[:_NAMED]]
    if len(records) > _NAMED:
        named.append(_MORE[known].format(count=len(records) - _NAMED))
    return _NOT_THERE[known].format(searched=("、" if known == "zh" else ", ").join(named))


def disclosed(found: SearchResult | None) -> Degradation:
    """The same for the `perilune` object."""
    sure = f" ({found.confidence:.2f})" if found and found.confidence is not None else ""
    return Degradation(CODE, f"The search's confidence that the documents contain what was asked is low{sure}.")
