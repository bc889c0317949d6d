"""What every parser shares: its interface, clean-up of extracted text, and pages for text that has none.

Knows characters, not formats. The pages of a document, joined, are its whole text; so every page but the last
ends with white space or in the middle of a line that was too long.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

PAGE_CHARS = 3_000
_VERSION = b"1"  # change it whenever pages, passages or terms of the same content come out differently
_MIN_PAGE_CHARS = 1_500
_BORDERS = (re.compile(r"\n[ \t]*\n"), re.compile(r"\n"), re.compile(r"[。！？]|[.!?]\s"), re.compile(r"\s"))

_CONTROLS: dict[int, int | None] = dict.fromkeys(
    (*range(9), *range(11, 32), *range(0x7F, 0xA0), 0xFEFF, 0xFFFE, 0xFFFF)
)
_CONTROLS |= dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)
_DIRTY = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufeff\ufffe\uffff]")


@dataclass(frozen=True, slots=True)
class PageText:
    """One page as a parser found it; an empty page has an empty text.

    `anchor` says where it is in a file without pages ("slide 4"). `digest` is of what the text was made of: a
    parser sets it where that is cheaper to look at than the text is to make (a scan), the worker everywhere else.
    """

    text: str
    anchor: str = ""
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """An opened document. `pages` begins at the page that was asked for."""

    pages_total: int | None
    pages: Iterator[PageText]


def digest_of(*parts: bytes) -> str:
    """What identifies the content a page is made of, and the way it is read."""
    made = hashlib.blake2b(_VERSION, digest_size=16)
    for part in parts:
        made.update(len(part).to_bytes(8))
        made.update(part)
    return made.hexdigest()


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


def pages_of(texts: Iterable[str], first_page: int, anchor: str = "") -> Iterator[PageText]:
    """Running text as pages, from `first_page` on, all with one anchor."""
    return (PageText(text, anchor) for text in islice(paginate(texts), first_page - 1, None))


def _page_end(text: str, begin: int) -> int:
    for border in _BORDERS:
        ends = [match.end() for match in border.finditer(text, begin + _MIN_PAGE_CHARS, begin + PAGE_CHARS)]
        if ends:
            return ends[-1]
    return begin + PAGE_CHARS
