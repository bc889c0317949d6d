"""What every parser shares: its interface, clean-up of extracted text, and pages for text that has none.

Knows characters, not formats. The pages of a document, joined, are its whole text; so every page but the last
ends with white space or in the middle of a line that was too long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PAGE_CHARS = 3_000
_MIN_PAGE_CHARS = 1_500
_BORDERS = (re.compile(r"\n[ \t]*\n"), re.compile(r"\n"), re.compile(r"[。！？]|[.!?]\s"), re.compile(r"\s"))

_CONTROLS: dict[int, int | None] = dict.fromkeys(
    (*range(9), *range(11, 32), *range(0x7F, 0xA0), 0xFEFF, 0xFFFE, 0xFFFF)
)
_CONTROLS |= dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)
_DIRTY = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufeff\ufffe\uffff]")


@dataclass(frozen=True, slots=True)
class Parsed:
    """An opened document. `pages` begins at the page that was asked for; an empty page is an empty string."""

    pages_total: int | None
    pages: Iterator[str]


def clean(text: str) -> str:
    """Without control characters, byte-order marks and lone surrogates; lines end in `\\n`."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.translate(_CONTROLS) if _DIRTY.search(text) else text


def paginate(pieces: Iterable[str]) -> Iterator[str]:
    """Cut running text into pages of 1,500-3,000 characters, at a paragraph, line, sentence or word border."""
    rest = ""
    for piece in pieces:
        buffer, at = rest + piece, 0
        while len(buffer) - at > PAGE_CHARS:
            end = _page_end(buffer, at)
            yield buffer[at:end]
            at = end
        rest = buffer[at:]
    if rest:
        yield rest


def _page_end(text: str, begin: int) -> int:
    for border in _BORDERS:
        ends = [match.end() for match in border.finditer(text, begin + _MIN_PAGE_CHARS, begin + PAGE_CHARS)]
        if ends:
            return ends[-1]
    return begin + PAGE_CHARS
