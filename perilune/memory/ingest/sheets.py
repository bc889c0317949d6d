"""XLSX -> pages of rows, sheet by sheet: cells joined by ` | `, the first row repeated on every page as columns.

Reads rows as a stream, so that empty ones cost nothing but time; formulas count by their stored results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from perilune.errors import Unreadable, UnsupportedDocument
from perilune.memory.ingest.cells import S, column_of, date_styles, epoch_of, one_line, shown, text_of
from perilune.memory.ingest.package import MACRO_NOTE, Package, damage_told
from perilune.memory.ingest.pagination import PAGE_CHARS, PageText, Parsed, clean
from perilune.memory.ingest.source import Source

_R_ID = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"
_WORKBOOK = "xl/workbook.xml"
_STRINGS, _STYLES = "xl/sharedStrings.xml", "xl/styles.xml"
_MAX_GAP = 50
_MAX_HEADING_CHARS = 400


@dataclass(frozen=True, slots=True)
class _Sheet:
    name: str
    part: str


def parse(source: Source) -> Parsed:
    """Raises `UnsupportedDocument`: damaged, no cell with content, packed like a bomb."""
    with damage_told("XLSX", "Excel"):
        package = Package(source, "XLSX")
        relations = package.relations(_WORKBOOK)
        workbook = package.xml(_WORKBOOK)
        sheets = [
            _Sheet(one_line(clean(item.get("name", ""))), relations[item.get(_R_ID, "")])
            for item in workbook.iter(f"{S}sheet")
            if relations.get(item.get(_R_ID, "")) in package.names
        ]
        pages = _pages(package, workbook, [sheet for sheet in sheets if "worksheets/" in sheet.part])
    return Parsed(None, islice(pages, source.first_page - 1, None))


def _pages(package: Package, workbook: Any, sheets: list[_Sheet]) -> Iterator[PageText]:
    found = False
    with damage_told("XLSX", "Excel"):
        show = _reader(package, workbook)
        for sheet in sheets:
            for page in _sheet_pages(sheet.name, _rows(package, sheet.part, show)):
                found = True
                yield page
    if not found:
        raise UnsupportedDocument(
            "The XLSX file holds no filled cells.", hint="Upload a file that holds text.", why=Unreadable.NO_TEXT
        )
    if package.has_macros:
        yield PageText(MACRO_NOTE)


def _reader(package: Package, workbook: Any) -> Callable[[Any], str]:
    """What turns a cell into its text."""
    strings = package.elements(_STRINGS, (f"{S}si",)) if _STRINGS in package.names else ()
    shared = [one_line(clean(text_of(item))) for item in strings]
    dates = date_styles(package.xml(_STYLES)) if _STYLES in package.names else frozenset()
    epoch = epoch_of(workbook)
    return lambda cell: clean(shown(cell, shared, dates, epoch))


def _rows(package: Package, part: str, show: Callable[[Any], str]) -> Iterator[tuple[int, str]]:
    """(number, text) of every row with content. Cells stand in their columns, as far as gaps stay small."""
    number = 0
    for row in package.elements(part, (f"{S}row",)):
        number = int(row.get("r", number + 1))
        cells: list[str] = []
        for cell in row.iterchildren(f"{S}c"):
            text = show(cell)
            if text:
                column = column_of(cell.get("r", ""))
                gap = 0 if column is None else column - len(cells)
                cells.extend([""] * (gap if 0 < gap <= _MAX_GAP else 0))
                cells.append(text)
        if cells:
            yield number, " | ".join(cells)


def _sheet_pages(name: str, rows: Iterator[tuple[int, str]]) -> Iterator[PageText]:
    """Pages of whole rows. `text` begins with the sheet's name and its columns, and ends with a line end."""
    heading, columns = f"Sheet: {name}\n", ""
    lines: list[str] = []
    first = last = size = 0
    for number, text in rows:
        if lines and size + len(text) > PAGE_CHARS:
            yield _page(heading + columns, lines, name, first, last)
            if not columns and len(lines[0]) <= _MAX_HEADING_CHARS:
                columns = f"Columns: {lines[0]}\n"
            lines, size = [], 0
        first = first if lines else number
        last = number
        lines.append(text)
        size += len(text) + 1
    if lines:
        yield _page(heading + columns, lines, name, first, last)


def _page(heading: str, lines: list[str], name: str, first: int, last: int) -> PageText:
    rows = f"row {first}" if first == last else f"rows {first}-{last}"
    text = "\n".join(lines)
    return PageText(f"{heading}{text}\n\n", f"sheet {name}, {rows}")
