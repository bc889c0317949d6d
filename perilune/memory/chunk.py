"""Pages -> passages of about 1,000 characters that end where a paragraph, sentence or line ends.

Knows characters only. Every passage lies on one page, so that it can be cited by page; passages don't overlap
(ranking looks at neighbours instead), and `text[start:end]` of the whole text is the passage, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

TARGET_CHARS = 1_000
MAX_CHARS = 1_200
_SLACK_CHARS = 250

# From the best place to cut to the worst; each match ends where the next passage may begin.
_BORDERS = (
    re.compile(r"\n[ \t]*\n\s*"),
    re.compile(r"[.!?:;。！？；][\"'”’）)\]]*[ \t]*\n"),
    re.compile(r"[。！？]|[.!?][\"'”’)\]]*\s+"),
    re.compile(r"\n"),
    re.compile(r"[，、；]|\s+"),
)


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `start`:`end` of the document's whole text, on page `page`."""

    page: int
    start: int
    end: int


def passages(page: int, text: str, offset: int) -> Iterator[Span]:
    """Cut one page whose text begins at `offset` of the whole text. White space at both ends is left out."""
    begin, stop = 0, len(text.rstrip())
    while begin < stop:
        while text[begin].isspace():
            begin += 1
        end = _cut(text, begin, stop)
        kept = begin + len(text[begin:end].rstrip())
        yield Span(page, offset + begin, offset + kept)
        begin = end


def _cut(text: str, begin: int, stop: int) -> int:
    """Where the passage that begins at `begin` ends: near an equal share of what the page still holds."""
    left = stop - begin
    if left <= MAX_CHARS:
        return stop
    ideal = begin + left // -(-left // TARGET_CHARS)
    low, high = ideal - _SLACK_CHARS, min(ideal + _SLACK_CHARS, begin + MAX_CHARS, stop)
    for border in _BORDERS:
        ends = [match.end() for match in border.finditer(text, low, high)]
        if ends:
            return min(ends, key=lambda end: abs(end - ideal))
    return min(ideal, high)
