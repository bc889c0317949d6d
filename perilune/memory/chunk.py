"""Pages -> passages of about 1,000 characters (400 in Chinese) that end where a paragraph, sentence or line ends.

Knows characters only. Every passage lies on one page, so that it can be cited by page; passages don't overlap
(ranking looks at neighbours instead), and `text[start:end]` of the whole text is the passage, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from perilune.memory.writing import UNSPACED

TARGET_CHARS = 1_000
UNSPACED_TARGET_CHARS = 400  # a Chinese character says, and costs in tokens, about as much as 2.5 letters
_MAX_SHARE = 1.2
_SLACK_SHARE = 0.25
_UNSPACED = re.compile(f"[{UNSPACED}]")

# From the best place to cut to the worst; each match ends where the next passage may begin.
_BORDERS = (
    re.compile(r"\n[ \t]*\n\s*"),
    re.compile(r"[.!?:;。！？；][\"'”’）)\]]*[ \t]*\n"),
    re.compile(r"[。！？]|[.!?][\"'”’)\]]*\s+"),
    re.compile(r"\n"),
    re.compile(r"[，、；]|\s+"),
)
_LEADER_LINE = re.compile(r"\.{3,}[ \t]*[\dIVXLCivxlc, ]*$", re.MULTILINE)
_MIN_LEADER_LINES = 4


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `start`:`end` of the document's whole text, on page `page`."""

    page: int
    start: int
    end: int


def passages(page: int, text: str, offset: int) -> Iterator[Span]:
    """Cut one page whose text begins at `offset` of the whole text. White space at both ends is left out."""
    begin, stop = 0, len(text.rstrip())
    share = len(_UNSPACED.findall(text)) / max(1, stop)
    target = round(TARGET_CHARS + share * (UNSPACED_TARGET_CHARS - TARGET_CHARS))
    while begin < stop:
        while text[begin].isspace():
            begin += 1
        end = _cut(text, begin, stop, target)
        kept = begin + len(text[begin:end].rstrip())
        yield Span(page, offset + begin, offset + kept)
        begin = end


def _cut(text: str, begin: int, stop: int, target: int) -> int:
    """Where the passage that begins at `begin` ends: near an equal share of what the page still holds."""
    left = stop - begin
    most, slack = round(_MAX_SHARE * target), round(_SLACK_SHARE * target)
    if left <= most:
        return stop
    ideal = begin + left // -(-left // target)
    low, high = ideal - slack, min(ideal + slack, begin + most, stop)
    for border in _BORDERS:
        ends = [match.end() for match in border.finditer(text, low, high)]
        if ends:
            return min(ends, key=lambda end: abs(end - ideal))
    return min(ideal, high)


def is_listing(text: str) -> bool:
    """Whether a passage is part of a table of contents or an index: lines that end in dots and page numbers."""
    return len(_LEADER_LINE.findall(text)) >= _MIN_LEADER_LINES
