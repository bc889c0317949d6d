"""Text -> sentences, as character ranges: what is copied instead of being rewritten.

Knows punctuation of English and of scripts without spaces, no grammar. Never cuts inside a number, an
abbreviation, a URL or a list's number. Code between fences and quoted lines (`> …`) hold no sentences. Linear
in the text's length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_TEXT_CHARS = 4_000
"""What is read of one turn or passage; a pasted log isn't summarised to its end."""

MAX_SENTENCE_CHARS = 400
"""A longer one is no sentence but a table or a log, and is left out."""

_FENCE = re.compile(r"^[ \t]*(?:```|~~~).*?(?:^[ \t]*(?:```|~~~)[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"[^\n]+")
_QUOTED = re.compile(r"\s*>")
_END = re.compile(r"[。！？!?]+[\"'”’」』）)\]]*|\.+[\"'”’)\]]*(?=\s|$)|…+(?=\s|$)")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(])(?:[A-Z]|[a-z](?:\.[a-z])+|Mrs?|Ms|Drs?|Prof|St|Mt|vs|etc|approx|ca|no|nos|No|Nos|vol|Vol|pp?|Fig|"
    r"fig|Eq|eq|Sec|sec|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec|Inc|Ltd|Co|Corp|Tel|tel|ext|Ext|e\.g|i\.e)$"
)
_AFTER_LATIN = re.compile(r"\s*[a-z]")
_UNSPACED_ENDS = "。！？"


def sentences(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of every sentence of the text's first `MAX_TEXT_CHARS` characters, without white space
    around."""
    read = text[:MAX_TEXT_CHARS]
    if "```" in read or "~~~" in read:
        read = _FENCE.sub(lambda match: "\n" * len(match[0]), read)
    for line in _LINE.finditer(read):
        if not _QUOTED.match(line[0]):
            yield from _of_line(line[0], line.start())


def _of_line(line: str, offset: int) -> Iterator[tuple[int, int]]:
    begin = 0
    for match in _END.finditer(line):
        if _ends(line, begin, match):
            yield from _trimmed(line, begin, match.end(), offset)
            begin = match.end()
    yield from _trimmed(line, begin, len(line), offset)


def _ends(line: str, begin: int, match: re.Match[str]) -> bool:
    """Whether this mark ends a sentence."""
    if match[0][0] in _UNSPACED_ENDS:
        return True
    after = line[match.end() : match.end() + 8]
    if match[0][0] in "!?":
        return not after or not after[0].isascii() or after[0].isspace()
    if _AFTER_LATIN.match(after):
        return False
    if len(match[0]) > 1 or not after.strip():
        return True
    before = line[max(begin, match.start() - 16) : match.start()]
    if before.strip().isdigit():  # "2. Second": the number belongs to what follows; "in 2019. Then" ends
        return bool(line[begin : match.start() - len(before)].strip())
    return not _ABBREVIATION.search(before)


def _trimmed(line: str, begin: int, end: int, offset: int) -> Iterator[tuple[int, int]]:
    piece = line[begin:end]
    start = begin + len(piece) - len(piece.lstrip())
    stop = begin + len(piece.rstrip())
    if 0 < stop - start <= MAX_SENTENCE_CHARS and any(char.isalnum() for char in line[start:stop]):
        yield offset + start, offset + stop
