"""Bytes -> characters: finds a text file's encoding, refuses what isn't text. Reads in blocks of bounded size.

Order: byte-order mark, strict UTF-8 over the whole file, UTF-16 without a mark, GB 18030 where it yields everyday
Chinese, then charset-normalizer on a sample. What isn't text in any of them is refused.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

from perilune.errors import Unreadable, UnsupportedDocument
from perilune.memory.ingest.pagination import clean
from perilune.memory.ingest.sniff import SUPPORTED
from perilune.memory.ingest.source import Source

BLOCK_BYTES = 1024**2
SAMPLE_BYTES = 256 * 1024
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_EVERYDAY_CHINESE = frozenset("的一是不了在人有我他这中大来上个国到说们为子和你地出时年得就那要下以生会")
_CHINESE = re.compile("[\u4e00-\u9fff]")
_MIN_EVERYDAY_SHARE = 0.05
_MAX_CONTROL_SHARE = 0.01
_CONTROL_BYTES = bytes((*range(8), 14, 15, *range(16, 27), *range(28, 32), 127))


def read_text(source: Source) -> Iterator[str]:
    """The file's characters in blocks, cleaned. Raises `UnsupportedDocument` for what isn't text."""
    decoder = codecs.getincrementaldecoder(find_encoding(source))(errors="replace")
    pending = ""
    with source.open() as file:
        while block := file.read(BLOCK_BYTES):
            text = pending + decoder.decode(block)
            # A carriage return at the end waits for its line feed, so that the pair stays one line end.
            pending = "\r" if text.endswith("\r") else ""
            yield clean(text[: len(text) - len(pending)])
        yield clean(pending + decoder.decode(b"", final=True))


def find_encoding(source: Source) -> str:
    """A Python codec name. Raises `UnsupportedDocument` for binary data."""
    with source.open() as file:
        sample = file.read(SAMPLE_BYTES)
    for mark, name in _MARKS:
        if sample.startswith(mark):
            return name
    if (wide := _unmarked_utf16(sample)) is not None:
        return wide
    controls = len(sample) - len(sample.translate(None, _CONTROL_BYTES))
    if controls > _MAX_CONTROL_SHARE * len(sample):
        raise not_text()
    if _is_utf8(source):
        return "utf-8"
    if _is_chinese(sample):
        return "gb18030"
    from charset_normalizer import from_bytes

    best = from_bytes(sample).best()
    if best is None:
        raise not_text()
    return best.encoding


def not_text() -> UnsupportedDocument:
    return UnsupportedDocument(
        "The file holds binary data that is no known document.",
        hint=f"Upload {SUPPORTED}.",
        why=Unreadable.UNKNOWN_KIND,
    )


def _is_utf8(source: Source) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with source.open() as file:
            while block := file.read(BLOCK_BYTES):
                decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _unmarked_utf16(sample: bytes) -> str | None:
    """Mostly-Latin UTF-16 has a zero in nearly every other byte, and none in between."""
    even, odd = sample[0::2], sample[1::2]
    if len(odd) < 8:
        return None
    even_zeros, odd_zeros = even.count(0) / len(even), odd.count(0) / len(odd)
    if odd_zeros > 0.5 and even_zeros < 0.02:
        return "utf-16-le"
    return "utf-16-be" if even_zeros > 0.5 and odd_zeros < 0.02 else None


def _is_chinese(sample: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("gb18030")().decode(sample)  # may end inside a character
    except UnicodeDecodeError:
        return False
    chinese = _CHINESE.findall(text)
    everyday = sum(char in _EVERYDAY_CHINESE for char in chinese)
    return len(chinese) > 1 and everyday >= _MIN_EVERYDAY_SHARE * len(chinese)
