"""Boxes of text on a page -> text in reading order: columns, lines, cells. Knows geometry only, y grows downward.

A gap inside a line that is wider than a space could be is a border between cells, shown as ` | `.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

_CELL_GAP = 1.6  # in line heights
_GUTTER = 1.0
_PARAGRAPH_GAP = 1.1
_MIN_COLUMN_BOXES = 6
_MIN_COLUMN_FILL = 0.6  # a column of prose is filled by its lines; one of a table isn't


@dataclass(frozen=True, slots=True)
class Box:
    left: float
    top: float
    right: float
    bottom: float
    text: str

    @property
    def middle(self) -> float:
        return (self.top + self.bottom) / 2

    @property
    def height(self) -> float:
        return self.bottom - self.top


def text_of(boxes: Sequence[Box]) -> str:
    """Lines joined by line ends, paragraphs by an empty line; empty without boxes."""
    if not boxes:
        return ""
    height = median(box.height for box in boxes)
    return "\n\n".join("\n".join(_lines(part, height)) for part in _parts(boxes, height))


def _parts(boxes: Sequence[Box], height: float) -> Iterator[list[Box]]:
    """Columns one after another, where there are two of prose; what spans both divides them."""
    gutter = _gutter(boxes, height)
    if gutter is None:
        yield list(boxes)
        return
    spanning = sorted((box for box in boxes if box.left < gutter < box.right), key=lambda box: box.top)
    top = float("-inf")
    for border in [*spanning, None]:
        bottom = border.top if border else float("inf")
        between = [b for b in boxes if b not in spanning and top <= b.middle < bottom]
        for column in ([b for b in between if b.right <= gutter], [b for b in between if b.left >= gutter]):
            if column:
                yield column
        if border:
            yield [border]
            top = border.middle


def _gutter(boxes: Sequence[Box], height: float) -> float | None:
    """The x between two columns: nearly no box crosses it, and both sides are filled by lines of text."""
    left, right = min(box.left for box in boxes), max(box.right for box in boxes)
    for edge in sorted({box.right for box in boxes}, key=lambda x: abs(x - (left + right) / 2)):
        if not left + 0.3 * (right - left) < edge < left + 0.7 * (right - left):
            return None
        x = edge + _GUTTER * height / 2
        before = [box for box in boxes if box.right <= x]
        after = [box for box in boxes if box.left >= x]
        crossing = len(boxes) - len(before) - len(after)
        if min(len(before), len(after)) < _MIN_COLUMN_BOXES or crossing > 0.15 * len(boxes):
            continue
        start = min(box.left for box in after)
        if start - edge >= _GUTTER * height and _is_filled(before, left, edge) and _is_filled(after, start, right):
            return x
    return None


def _is_filled(column: Sequence[Box], left: float, right: float) -> bool:
    return median(box.right - box.left for box in column) >= _MIN_COLUMN_FILL * (right - left)


def _lines(boxes: Sequence[Box], height: float) -> Iterator[str]:
    rows: list[list[Box]] = []
    for box in sorted(boxes, key=lambda b: b.middle):
        if rows and box.middle - rows[-1][0].middle < 0.5 * min(box.height, rows[-1][0].height):
            rows[-1].append(box)
        else:
            rows.append([box])
    bottom: float | None = None
    for row in rows:
        row.sort(key=lambda b: b.left)
        if bottom is not None and row[0].top - bottom > _PARAGRAPH_GAP * height:
            yield ""
        bottom = max(box.bottom for box in row)
        yield _joined(row)


def _joined(row: Sequence[Box]) -> str:
    text = row[0].text
    for before, box in pairwise(row):
        text += f"{' | ' if box.left - before.right > _CELL_GAP * box.height else ' '}{box.text}"
    return text
