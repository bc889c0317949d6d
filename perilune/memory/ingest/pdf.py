"""PDF -> one text per page, through PDFium: the text layer, ruled tables as rows, and OCR where there is no text.

PDFium returns text in the order it is drawn, which for typeset documents is reading order, and marks a
hyphen at a line's end as U+FFFE, which `unhyphenate` resolves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pypdfium2 as pdfium
import pypdfium2.raw as pdfium_c

from perilune.errors import Unreadable, UnsupportedDocument
from perilune.memory.ingest import tables
from perilune.memory.ingest.pagination import PageText, Parsed, clean
from perilune.memory.ingest.scan import has_picture, read_scan
from perilune.memory.ingest.source import Source

_TAIL_BYTES = 2_048
_LIGATURES = str.maketrans({"ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "st", "ﬆ": "st"})
_LINE_HYPHEN = re.compile(r"(\S*)\ufffe(\S*)")
_LEADERS = re.compile(r"(?: ?\.){5,}")  # the dots of a table of contents: they cost tokens and say nothing
_MIN_TEXT_CHARS = 2
_NO_TEXT = "[This page is an image in which no text was found.]\n"
_MIN_LAYER_CHARS = 20  # a page with fewer, and with a picture, is taken for a scan


def parse(source: Source) -> Parsed:
    """Raises `UnsupportedDocument`: encrypted, damaged, truncated, too many pages, no text at all."""
    job = source.job
    try:
        document = pdfium.PdfDocument(job.path if source.data is None else source.data)
    except pdfium.PdfiumError as error:
        raise _cannot_open(error, source) from None
    total = len(document)
    if total == 0:
        raise _damaged(source)
    if total > job.max_pages:
        raise UnsupportedDocument(
            f"The PDF has {total:,} pages; the limit is {job.max_pages:,}.",
            hint="Split it, or raise documents.max_pages.",
            why=Unreadable.TOO_MUCH,
        )
    return Parsed(total, _Pages(document, source).read())


class _Pages:
    """Pages in order, and what was found wrong with them."""

    def __init__(self, document: pdfium.PdfDocument, source: Source) -> None:
        self._document = document
        self._source = source
        self._total = len(document)
        self._has_text = False
        self._unreadable = 0
        self._unread: UnsupportedDocument | None = None  # why a scanned page was not recognised

    def read(self) -> Iterator[PageText]:
        first = self._source.first_page
        for number in range(first, self._total + 1):
            yield self._page(number)
        # A resumed parse doesn't know the pages before; it exists because those were stored.
        if self._has_text or first > 1:
            return
        if self._unread:
            raise UnsupportedDocument(
                f"None of the {self._total:,} pages holds text: this is a scan, and {self._unread.message}.",
                hint=self._unread.hint,
                why=Unreadable.SCAN,
            )
        raise UnsupportedDocument(
            f"None of the {self._total:,} pages holds text that can be read.",
            hint="Upload a document that holds text, or sharper scans.",
            why=Unreadable.NO_TEXT,
        )

    def _page(self, number: int) -> PageText:
        try:
            page = self._document[number - 1]
        except pdfium.PdfiumError:
            return self._damaged_page(number)
        try:
            text = _text_layer(page)
            # A scan may have a layer of its own, such as its page number.
            if _letters(text) < _MIN_LAYER_CHARS and has_picture(page):
                return self._scan(page, number, text)
        except pdfium.PdfiumError:
            return self._damaged_page(number)
        finally:
            page.close()
        self._has_text = self._has_text or _says_something(text)
        return PageText(text)

    def _scan(self, page: pdfium.PdfPage, number: int, layer: str) -> PageText:
        try:
            scan = read_scan(page, number, self._source)
        except UnsupportedDocument as error:
            self._unread = error
            self._has_text = self._has_text or _says_something(layer)
            return PageText(f"{layer}[Page {number} of this file is an image and was not read: {error.message}.]\n")
        text = layer if _letters(scan.text) < _letters(layer) else scan.text
        unchanged = scan.digest in self._source.job.known
        self._has_text = self._has_text or unchanged or _says_something(text)
        return PageText(text or ("" if unchanged else _NO_TEXT), digest=scan.digest)

    def _damaged_page(self, number: int) -> PageText:
        self._unreadable += 1
        if self._unreadable > self._total // 2:
            raise _damaged(self._source)
        return PageText(f"[Page {number} of this file is damaged and could not be read.]\n")


def _text_layer(page: pdfium.PdfPage) -> str:
    """A page's text, ended by a line feed; empty where it holds none."""
    textpage = page.get_textpage()
    try:
        raw = tables.page_text(page, textpage) or textpage.get_text_range()
    finally:
        textpage.close()
    text = _LEADERS.sub(" ...", clean(unhyphenate(raw.translate(_LIGATURES)))).strip("\n")
    return f"{text}\n" if text else ""


def _letters(text: str) -> int:
    return sum(char.isalnum() for char in text[: 10 * _MIN_LAYER_CHARS])


def _says_something(text: str) -> bool:
    return _letters(text) >= _MIN_TEXT_CHARS


def unhyphenate(text: str) -> str:
    """Resolve PDFium's marks of hyphens at line ends: the word is joined, an identifier keeps its hyphen."""
    return _LINE_HYPHEN.sub(_join, text) if "\ufffe" in text else text


def _join(match: re.Match[str]) -> str:
    left, right = match[1], match[2]
    while "\ufffe" in left:
        head, _, tail = left.partition("\ufffe")
        left = _joined(head, tail)
    return _joined(left, right)


def _joined(left: str, right: str) -> str:
    is_word = left[-2:].isalpha() and left[-1:].islower() and right[:1].islower()
    is_path = any(char in left + right for char in "/\\_@") or "." in left
    return left + right if is_word and not is_path else f"{left}-{right}"


def _cannot_open(error: pdfium.PdfiumError, source: Source) -> UnsupportedDocument:
    code = error.err_code
    if code == pdfium_c.FPDF_ERR_PASSWORD:
        return UnsupportedDocument(
            "The PDF is encrypted and needs a password.",
            hint="Save it without a password (for example `qpdf --decrypt --password=… in.pdf out.pdf`) "
            "and upload that.",
            why=Unreadable.LOCKED,
        )
    if code == pdfium_c.FPDF_ERR_SECURITY:
        return UnsupportedDocument(
            "The PDF uses an encryption that can't be read.",
            hint="Print it to a new PDF and upload that.",
            why=Unreadable.LOCKED,
        )
    return _damaged(source)


def _damaged(source: Source) -> UnsupportedDocument:
    with source.open() as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        complete = b"%%EOF" in file.read()
    if not complete:
        return UnsupportedDocument(
            "The PDF is truncated: its end is missing.",
            hint="Download or export it again and upload the whole file.",
            why=Unreadable.DAMAGED,
        )
    return UnsupportedDocument(
        "The PDF is damaged and can't be opened.",
        hint="Repair it (for example `qpdf in.pdf out.pdf`) or export it again.",
        why=Unreadable.DAMAGED,
    )
