"""Tables with ruled lines on a PDF page -> rows of cells joined by ` | `. Lines are read from the page's drawing.

Knows PDFium's page objects. A table without lines is left as PDFium reads it, which is mostly row by row. Work on
one page is bounded, some 50 ms at most, and a page without ruled lines costs a count of its objects.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pypdfium2 as pdfium
import pypdfium2.raw as pdfium_c

# Counts, not seconds: a page's text, and with it its digest, must not depend on how busy the machine is.
_MAX_OBJECTS = 5_000
_MAX_CHARS = 20_000
_MAX_RULES = 2_000
_MIN_RULES = 4
_MAX_CELLS = 2_000
_THICKNESS = 3.0  # points: a rule is thinner
_SNAP = 2.0  # rules closer than this are one
_MIN_LENGTH = 8.0
_MIN_FILLED_SHARE = 0.3
_SPACE, _CARRIAGE_RETURN, _HYPHEN = 0x20, 0x0D, 0x02  # U+0002 is a hyphen at a line end; PDFium's text has U+FFFE


@dataclass(frozen=True, slots=True)
class _Rule:
    """A thin line: at `at` across, from `start` to `end` along."""

    at: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class _Grid:
    """Borders of columns from left to right, and of rows from top to bottom."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]


def page_text(page: pdfium.PdfPage, textpage: pdfium.PdfTextPage) -> str | None:
    """The page's text with its tables as rows; None where there is no ruled table that could be told apart."""
    flat, upright = _rules(page)
    if len(flat) + len(upright) < _MIN_RULES or min(len(flat), len(upright)) < 2:
        return None
    grids = list(_grids(flat, upright))
    if not grids or textpage.count_chars() > _MAX_CHARS:
        return None
    letters = list(_letters(textpage))
    while grids:
        filled = _Filled(grids, letters)
        tables = [grid for number, grid in enumerate(grids) if filled.is_table(number)]
        if len(tables) == len(grids):
            return filled.text()
        grids = tables
    return None


@dataclass(frozen=True, slots=True)
class _Letter:
    char: str
    x: float
    y: float
    height: float  # 0 for a space or line end that PDFium made up


def _letters(textpage: pdfium.PdfTextPage) -> Iterator[_Letter]:
    """The page's characters in PDFium's order; coordinates are of their middles."""
    raw = textpage.raw
    box = [ctypes.c_double() for _ in range(4)]
    x = y = 0.0
    for index in range(textpage.count_chars()):
        code = pdfium_c.FPDFText_GetUnicode(raw, index)
        height = 0.0
        if code > _SPACE and pdfium_c.FPDFText_GetCharBox(raw, index, *box):
            left, right, bottom, top = (value.value for value in box)
            x, y, height = (left + right) / 2, (top + bottom) / 2, max(top - bottom, 1.0)
        if code != _CARRIAGE_RETURN:
            yield _Letter("\ufffe" if code == _HYPHEN else chr(code), x, y, height)


class _Filled:
    """A page's characters in the cells of its grids, and between them. Every character is in one place."""

    def __init__(self, grids: Sequence[_Grid], letters: Sequence[_Letter]) -> None:
        self._grids = grids
        self._cells: list[dict[tuple[int, int], list[_Letter]]] = [{} for _ in grids]
        self._between: list[list[str]] = [[] for _ in range(len(grids) + 1)]
        self._beside: set[int] = set()  # grids that have other text at their side
        for letter in letters:
            self._put(letter)

    def _put(self, letter: _Letter) -> None:
        for number, grid in enumerate(self._grids):
            if grid.ys[-1] <= letter.y <= grid.ys[0]:
                if grid.xs[0] <= letter.x <= grid.xs[-1]:
                    row = sum(letter.y < y for y in grid.ys[1:-1])
                    column = sum(letter.x > x for x in grid.xs[1:-1])
                    self._cells[number].setdefault((row, column), []).append(letter)
                else:
                    if letter.height:
                        self._beside.add(number)
                    self._between[number].append(letter.char)
                return
        above = sum(grid.ys[0] > letter.y for grid in self._grids)
        self._between[above].append(letter.char)

    def is_table(self, number: int) -> bool:
        """A frame around text, or the boxes of a drawing, aren't; nor is what has a column of text beside it."""
        grid, cells = self._grids[number], self._cells[number]
        rows, columns = len(grid.ys) - 1, len(grid.xs) - 1
        filled = sum(any(letter.height for letter in cell) for cell in cells.values())
        return number not in self._beside and columns > 1 and filled >= max(_MIN_FILLED_SHARE * rows * columns, 3)

    def text(self) -> str:
        parts = ["".join(self._between[0])]
        for number, between in enumerate(self._between[1:]):
            parts += ["\n".join(self._rows(number)), "".join(between)]
        return "\n".join(part for part in (part.strip("\n") for part in parts) if part)

    def _rows(self, number: int) -> Iterator[str]:
        grid, cells = self._grids[number], self._cells[number]
        for row in range(len(grid.ys) - 1):
            lines = [_lines(cells.get((row, column), ())) for column in range(len(grid.xs) - 1)]
            counts = {len(each) for each in lines if each}
            if not counts:
                continue
            if len(counts) == 1 and sum(map(bool, lines)) > 1:
                # Rows without a rule between them: the cells have as many lines as one another.
                for line in range(counts.pop()):
                    yield " | ".join(each[line] if each else "" for each in lines)
            else:
                yield " | ".join(" ".join(each) for each in lines)


def _lines(letters: Sequence[_Letter]) -> list[str]:
    """A cell's lines of text, from top to bottom as they were drawn."""
    lines: list[str] = []
    before: _Letter | None = None
    for letter in letters:
        if letter.char == "\ufffe":
            continue
        if not letter.height:
            lines[-1:] = [f"{lines[-1]} "] if lines else []
            continue
        if before is None or abs(before.y - letter.y) > max(before.height, letter.height):
            lines.append("")
        lines[-1] += letter.char
        before = letter
    return [" ".join(line.split()) for line in lines]


def _rules(page: pdfium.PdfPage) -> tuple[list[_Rule], list[_Rule]]:
    """Horizontal and vertical lines: thin paths, and the sides of boxes."""
    raw = page.raw
    count = pdfium_c.FPDFPage_CountObjects(raw)
    get, kind_of, path = pdfium_c.FPDFPage_GetObject, pdfium_c.FPDFPageObj_GetType, pdfium_c.FPDF_PAGEOBJ_PATH
    flat: list[_Rule] = []
    upright: list[_Rule] = []
    if count > _MAX_OBJECTS:
        return flat, upright
    box = [ctypes.c_float() for _ in range(4)]
    for index in range(count):
        item = get(raw, index)
        if kind_of(item) != path or not pdfium_c.FPDFPageObj_GetBounds(item, *box):
            continue
        left, bottom, right, top = (value.value for value in box)
        wide, high = right - left >= _MIN_LENGTH, top - bottom >= _MIN_LENGTH
        if wide and top - bottom <= _THICKNESS:
            flat.append(_Rule((top + bottom) / 2, left, right))
        elif high and right - left <= _THICKNESS:
            upright.append(_Rule((left + right) / 2, bottom, top))
        elif wide and high:
            flat += [_Rule(bottom, left, right), _Rule(top, left, right)]
            upright += [_Rule(left, bottom, top), _Rule(right, bottom, top)]
        if len(flat) + len(upright) > _MAX_RULES:
            return [], []
    return flat, upright


def _grids(flat: Sequence[_Rule], upright: Sequence[_Rule]) -> Iterator[_Grid]:
    """Groups of rules that touch one another, from the top of the page down."""
    groups: list[tuple[float, float, list[_Rule]]] = []  # (bottom, top, uprights) of what overlaps in height
    for rule in sorted(upright, key=lambda r: -r.end):
        if groups and rule.end >= groups[-1][0] - _SNAP:
            bottom, top, members = groups[-1]
            groups[-1] = (min(bottom, rule.start), top, [*members, rule])
        else:
            groups.append((rule.start, rule.end, [rule]))
    for bottom, top, members in groups:
        xs = _snapped(rule.at for rule in members)
        if len(xs) < 3:
            continue
        ys = _snapped(
            rule.at
            for rule in flat
            if bottom - _SNAP <= rule.at <= top + _SNAP and rule.start <= xs[-1] and rule.end >= xs[0]
        )
        if len(ys) >= 2 and (len(xs) - 1) * (len(ys) - 1) <= _MAX_CELLS:
            yield _Grid(tuple(xs), tuple(reversed(ys)))


def _snapped(values: Iterator[float]) -> list[float]:
    kept: list[float] = []
    for value in sorted(values):
        if not kept or value - kept[-1] > _SNAP:
            kept.append(value)
    return kept
