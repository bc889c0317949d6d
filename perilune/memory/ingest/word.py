"""DOCX -> pages: paragraphs, headings, lists, tables, text boxes and footnotes, in document order.

Reads only the text parts of the package. Word's own page breaks give page numbers where the file records them;
otherwise pages are cut by length. Deleted (tracked) text is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from perilune.errors import Unreadable, UnsupportedDocument
from perilune.memory.ingest.package import MACRO_NOTE, Package, damage_told
from perilune.memory.ingest.pagination import PageText, Parsed, clean, pages_of
from perilune.memory.ingest.source import Source

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
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


def parse(source: Source) -> Parsed:
    """Raises `UnsupportedDocument`: damaged, no text, a part too large or packed like a bomb."""
    with damage_told("DOCX", "Word"):
        package = Package(source, "DOCX")
        main = "word/document.xml"
        if main not in package.names:
            main = next(n for n in sorted(package.names) if n.startswith("word/document") and n.endswith(".xml"))
        body = package.xml(main)
        rendered = next(body.iter(f"{_W}lastRenderedPageBreak"), None) is not None
        text = "".join(_blocks(body, rendered))
        if "word/footnotes.xml" in package.names:
            notes = "".join(_blocks(package.xml("word/footnotes.xml"), rendered)).strip()
            text += f"\n{notes}\n" if notes else ""
    return _paged(text, source, MACRO_NOTE if package.has_macros else "")


def _paged(text: str, source: Source, note: str) -> Parsed:
    pages = [clean(page) for page in text.split(_PAGE)]
    if not any(page.strip() for page in pages):
        raise UnsupportedDocument(
            "The DOCX file holds no text.",
            hint="Pictures in DOCX files are not read; upload them as images or the file as PDF.",
            why=Unreadable.NO_TEXT,
        )
    pages[-1] += note
    if len(pages) == 1:
        return Parsed(None, pages_of(pages, source.first_page))
    if len(pages) > source.job.max_pages:
        raise UnsupportedDocument(
            f"The DOCX file has {len(pages):,} pages; the limit is {source.job.max_pages:,}.",
            hint="Split it, or raise documents.max_pages.",
            why=Unreadable.TOO_MUCH,
        )
    return Parsed(len(pages), map(PageText, pages[source.first_page - 1 :]))


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
