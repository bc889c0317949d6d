"""PDF -> one text per page, through PDFium. Reads the text layer; recognises nothing in images.

PDFium returns text in the order it is drawn, which for typeset documents is reading order, and marks a
hyphen at a line's end as U+FFFE, which `unhyphenate` resolves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pypdfium2 as pdfium
import pypdfium2.raw as pdfium_c

from perilune.errors import UnsupportedDocument
from perilune.memory.ingest.pagination import Parsed, clean
from perilune.memory.ingest.protocol import Job

_TAIL_BYTES = 2_048
_LIGATURES = str.maketrans({"ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "st", "ﬆ": "st"})
_LINE_HYPHEN = re.compile(r"(\S*)\ufffe(\S*)")
_LEADERS = re.compile(r"(?: ?\.){5,}")  # the dots of a table of contents: they cost tokens and say nothing
_MIN_TEXT_CHARS = 2


def parse(job: Job) -> Parsed:
    """Raises `UnsupportedDocument`: encrypted, damaged, truncated, too many pages, no text at all."""
    path = Path(job.path)
    try:
        document = pdfium.PdfDocument(path)
    except pdfium.PdfiumError as error:
        raise _cannot_open(error, path) from None
    total = len(document)
    if total == 0:
        raise _damaged(path)
    if total > job.max_pages:
        raise UnsupportedDocument(
            f"The PDF has {total:,} pages; the limit is {job.max_pages:,}.",
            hint="Split it, or raise documents.max_pages.",
        )
    return Parsed(total, _pages(document, path, job.first_page, total))


def _pages(document: pdfium.PdfDocument, path: Path, first: int, total: int) -> Iterator[str]:
    has_text, unreadable = False, 0
    for index in range(first - 1, total):
        text = _page_text(document, index)
        if text is None:
            unreadable += 1
            if unreadable > total // 2:
                raise _damaged(path)
            text = f"[Page {index + 1} of this file is damaged and could not be read.]\n"
        elif not text and _has_image(document, index):
            text = f"[Page {index + 1} of this file is an image; its text could not be read (no OCR).]\n"
        elif not has_text:
            has_text = _says_something(text)
        yield text
    # A resumed parse has not seen the pages before; they count, too.
    if not (has_text or any(_says_something(_page_text(document, index) or "") for index in range(first - 1))):
        raise UnsupportedDocument(
            f"None of the {total:,} pages holds text: this is a scan or a drawing.",
            hint="Text recognition (OCR) isn't available yet. Add a text layer, for example with "
            "`ocrmypdf in.pdf out.pdf`, and upload the result.",
        )


def _page_text(document: pdfium.PdfDocument, index: int) -> str | None:
    """A page's text, ended by a line feed; None where PDFium can't load the page."""
    try:
        page = document[index]
    except pdfium.PdfiumError:
        return None
    try:
        textpage = page.get_textpage()
        raw = textpage.get_text_range()
        textpage.close()
    except pdfium.PdfiumError:
        return None
    finally:
        page.close()
    text = _LEADERS.sub(" ...", clean(unhyphenate(raw.translate(_LIGATURES)))).strip("\n")
    return f"{text}\n" if text else ""


def _says_something(text: str) -> bool:
    return sum(char.isalnum() for char in text) >= _MIN_TEXT_CHARS


def _has_image(document: pdfium.PdfDocument, index: int) -> bool:
    page = document[index]
    try:
        return any(True for _ in page.get_objects(filter=(pdfium_c.FPDF_PAGEOBJ_IMAGE,)))
    finally:
        page.close()


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


def _cannot_open(error: pdfium.PdfiumError, path: Path) -> UnsupportedDocument:
    code = error.err_code
    if code == pdfium_c.FPDF_ERR_PASSWORD:
        return UnsupportedDocument(
            "The PDF is encrypted and needs a password.",
            hint="Save it without a password (for example `qpdf --decrypt --password=… in.pdf out.pdf`) "
            "and upload that.",
        )
    if code == pdfium_c.FPDF_ERR_SECURITY:
        return UnsupportedDocument(
            "The PDF uses an encryption that can't be read.", hint="Print it to a new PDF and upload that."
        )
    return _damaged(path)


def _damaged(path: Path) -> UnsupportedDocument:
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        complete = b"%%EOF" in file.read()
    if not complete:
        return UnsupportedDocument(
            "The PDF is truncated: its end is missing.",
            hint="Download or export it again and upload the whole file.",
        )
    return UnsupportedDocument(
        "The PDF is damaged and can't be opened.",
        hint="Repair it (for example `qpdf in.pdf out.pdf`) or export it again.",
    )
