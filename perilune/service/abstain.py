"""What is said where the sources don't hold an answer. Plain sentences; `answer` decides when.

Knows languages by code, files by name and pages, and the words with which somebody asks for what was said before;
no search. A language without a sentence of its own gets English.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum

from perilune.core import Degradation, FileRecord, SearchResult

CODE = "not_in_sources"
_NAMED = 3
_NOT_THERE = {
    "en": "The sources don't contain this, as far as the search can tell. Searched: {searched}.",
    "zh": "就检索所及，资料中没有这方面的内容。已检索：{searched}。",
}
_NOT_SAID = {
    "en": "No earlier turn contains this, as far as the search can tell. Searched: {searched}.",
    "zh": "就检索所及，之前的对话里没有提到过。已检索：{searched}。",
}
_SESSIONS = {"en": ("one conversation", "{count} conversations"), "zh": ("1个对话", "{count}个对话")}
_PAGES = {"en": "{name} ({pages} pages)", "zh": "{name}（{pages}页）"}
_MORE = {"en": "{count} more", "zh": "另外{count}份"}

# Somebody asks for what was said, or for something of their own that only they can have told. "What should I cook?"
# and "How do I …?" ask for advice.
_BACK_EN = re.compile(
    r"\b(?:do you (?:still )?(?:remember|recall)|remind me|(?:did|have|had) (?:i|we) (?:ever |already )?"
    r"(?:say|said|tell|told|mention\w*|talk\w*|discuss\w*|agree\w*|decide\w*)|"
    r"(?:i|we) (?:said|told you|mentioned|agreed|decided)|"
    r"you (?:said|told me|mentioned|promised|suggested)|(?:earlier|previous) (?:conversation|message|chat)s?)\b|"
    r"\b(?:what|which|who|whom|whose|when|where|how (?:many|much|long|often|old))\b(?:'s|\b)"
    r"(?![^?.!]*\b(?:should|could|would|can|may|might|must) (?:i|we)\b)(?![^?.!]*\bdo (?:i|we) need\b)"
    r"[^?.!]*\b(?:my|our|did (?:i|we)|do (?:i|we)|have (?:i|we)|was i|were we|am i)\b",
    re.I,
)
_BACK_ZH = re.compile(
    r"记得|提醒我|(?:之前|以前|上次|上回|先前|刚才)[^，。？！]{0,12}(?:说|提|聊|讲|告诉|讨论|约定|商量)|(?:说|提|聊|讲|告诉|讨论)(?:到)?过|"
    r"(?:我|咱)们?(?!.{0,6}(?:应该|该|怎么|如何|可以|能|要怎|需要))[^，。？！]{0,24}(?:什么|多少|几|谁|哪|何时|多久|多大)|"
    r"(?:什么|多少|几|谁|哪)[^，。？！]{0,16}(?:我|咱)们?的"
)


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


def asks_back(question: str) -> bool:
    """Whether only an earlier turn can answer: it asks what was said, or for something of the user's own."""
    return bool(_BACK_EN.search(question) or _BACK_ZH.search(question))


def not_said(language: str | None, sessions: int) -> str:
    """That no earlier turn contains it, and how many conversations were searched."""
    known = language if language in _NOT_SAID else "en"
    one, many = _SESSIONS[known]
    return _NOT_SAID[known].format(searched=one if sessions == 1 else many.format(count=sessions))


def disclosed(found: SearchResult | None, what: str = "documents") -> Degradation:
    """The same for the `perilune` object; `what` was searched."""
    sure = f" ({found.confidence:.2f})" if found and found.confidence is not None else ""
    return Degradation(CODE, f"The search's confidence that the {what} contain what was asked is low{sure}.")
