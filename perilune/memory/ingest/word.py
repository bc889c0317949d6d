"""DOCX -> pages: paragraphs, headings, lists, tables, text boxes and footnotes, in document order.

Reads only the text parts of the package, each through a bounded reader, so a zip bomb or a large picture costs
nothing. Word's own page breaks give page numbers where the file records them; otherwise pages are cut by length.
Entities and external references are never resolved. Deleted (tracked) text is left out.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

from lxml import etree

from perilune.errors import UnsupportedDocument
from perilune.memory.ingest.pagination import Parsed, clean, paginate
from perilune.memory.ingest.protocol import Job

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
_MAX_XML_FACTOR = 4
_MAX_RATIO = 250
_RATIO_FROM_BYTES = 32 * 1024**2
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    etree.XMLSyntaxError,
    EOFError,
    OSError,
    ValueError,
    RuntimeError,  # an encrypted member
)
_PAGE = "\f"
_PARAGRAPH, _TABLE = f"{_W}p", f"{_W}tbl"
_MARKS = {
    f"{_W}tab": "\t",
    f"{_W}ptab": "\t",
    f"{_W}noBreakHyphen": "-",
    f"{_W}cr": "\n",
    f"{_W}lastRenderedPageBreak": _PAGE,
}
_SKIPPED = {_FALLBACK, f"{_W}sectPr", f"{_W}pPr", f"{_W}rPr", f"{_W}instrText", f"{_W}delText"}


def parse(job: Job) -> Parsed:
    """Raises `UnsupportedDocument`: damaged, no text, a part too large or packed like a bomb."""
    try:
        with zipfile.ZipFile(job.path) as package:
            names = package.namelist()
            main = "word/document.xml"
            if main not in names:
                main = next(n for n in names if n.startswith("word/document") and n.endswith(".xml"))
            body = _read_part(package, main, job)
            rendered = next(body.iter(f"{_W}lastRenderedPageBreak"), None) is not None
            text = "".join(_blocks(body, rendered))
            if "word/footnotes.xml" in names:
                notes = "".join(_blocks(_read_part(package, "word/footnotes.xml", job), rendered)).strip()
                text += f"\n{notes}\n" if notes else ""
    except _DAMAGE as error:
        raise UnsupportedDocument(
            f"The DOCX file is damaged ({str(error)[:200]}).",
            hint="Open it in Word, save it again and upload that.",
        ) from None
    return _paged(text, job)


def _paged(text: str, job: Job) -> Parsed:
    pages = [clean(page) for page in text.split(_PAGE)]
    if not any(page.strip() for page in pages):
        raise UnsupportedDocument(
            "The DOCX file holds no text.",
            hint="Text in pictures can't be read yet (no OCR); upload a file with text.",
        )
    if len(pages) == 1:
        return Parsed(None, islice(paginate(pages), job.first_page - 1, None))
    if len(pages) > job.max_pages:
        raise UnsupportedDocument(
            f"The DOCX file has {len(pages):,} pages; the limit is {job.max_pages:,}.",
            hint="Split it, or raise documents.max_pages.",
        )
    return Parsed(len(pages), iter(pages[job.first_page - 1 :]))


def _read_part(package: zipfile.ZipFile, name: str, job: Job) -> Any:
    """A part's XML root. The declared size is checked first; zipfile never reads past it."""
    info = package.getinfo(name)
    limit = job.max_text_bytes * _MAX_XML_FACTOR
    ratio = info.file_size / max(1, info.compress_size)
    if info.file_size > limit or (info.file_size > _RATIO_FROM_BYTES and ratio > _MAX_RATIO):
        raise UnsupportedDocument(
            f"The DOCX file unpacks to {info.file_size / 1024**2:,.0f} MB of text ({ratio:,.0f} times its size), "
            "which looks like a zip bomb.",
            hint="Open it in Word, save it again and upload that.",
        )
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False)
    with package.open(info) as part:
        return etree.parse(part, parser).getroot()


def _blocks(root: Any, rendered: bool) -> Iterator[str]:
    """Text of paragraphs and tables in order; a form feed begins a page."""
    for element in root:
        tag = element.tag
        if tag == _PARAGRAPH:
            yield f"{''.join(_inline(element, rendered))}\n"
        elif tag == _TABLE:
            for row in element.iterchildren(f"{_W}tr"):
                yield f"{_row(row, rendered)}\n"
            yield "\n"
        elif tag not in _SKIPPED:
            yield from _blocks(element, rendered)


def _row(row: Any, rendered: bool) -> str:
    cells = (" ".join("".join(_blocks(cell, rendered)).split("\n")) for cell in row.iterchildren(f"{_W}tc"))
    return " | ".join(cell.strip(" ") for cell in cells)


def _inline(element: Any, rendered: bool) -> Iterator[str]:
    for child in element:
        tag = child.tag
        if tag == f"{_W}t":
            yield child.text or ""
        elif tag in _MARKS:
            yield _MARKS[tag]
        elif tag == f"{_W}br" and child.get(f"{_W}type") == "page":
            yield "" if rendered else _PAGE
        elif tag == f"{_W}br":
            yield "\n"
        elif tag == _PARAGRAPH:
            yield f"\n{''.join(_inline(child, rendered))}"
        elif tag not in _SKIPPED:
            yield from _inline(child, rendered)
