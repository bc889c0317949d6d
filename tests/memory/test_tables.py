"""Ruled tables in PDFs become rows of cells; frames, columns and drawings don't."""

from __future__ import annotations

import io
from collections.abc import Callable

import pypdfium2 as pdfium
import pytest
from reportlab.lib import colors
from reportlab.pdfgen import canvas
from reportlab.platypus import Table, TableStyle

from perilune.memory.ingest import tables
from perilune.memory.library import Library
from tests.memory.conftest import ingest

CELLS = [
    ["Port", "Height", "Time"],
    ["Saint-Malo", "13.5 m", "06:12"],
    ["", "2.1 m", "12:40"],
    ["Brest", "7 m", ""],
]


def page(draw: Callable[[canvas.Canvas], None]) -> bytes:
    buffer = io.BytesIO()
    drawing = canvas.Canvas(buffer)
    draw(drawing)
    drawing.save()
    return buffer.getvalue()


def text_of(data: bytes) -> str | None:
    with pdfium.PdfDocument(data) as document:
        first = document[0]
        return tables.page_text(first, first.get_textpage())


def ruled(drawing: canvas.Canvas, rows: list[list[str]], x: float = 72, y: float = 500) -> None:
    table = Table(rows, colWidths=100)
    table.setStyle(TableStyle([("GRID", (0, 0), (-1, -1), 0.5, colors.black)]))
    table.wrapOn(drawing, 0, 0)
    table.drawOn(drawing, x, y)


def test_a_ruled_table_becomes_rows(library: Library) -> None:
    def draw(drawing: canvas.Canvas) -> None:
        drawing.drawString(72, 750, "Tides of the coast")
        ruled(drawing, CELLS)
        drawing.drawString(72, 400, "Heights are above the chart datum.")

    record = ingest(library, page(draw), "tides.pdf")
    assert library.text("local", record.file_id) == (
        "Tides of the coast\nPort | Height | Time\nSaint-Malo | 13.5 m | 06:12\n | 2.1 m | 12:40\nBrest | 7 m | \n"
        "Heights are above the chart datum.\n"
    )


def test_rows_without_rules_between_them_and_wrapped_cells() -> None:
    def draw(drawing: canvas.Canvas) -> None:
        ruled(drawing, [["Name", "Value"], ["one\ntwo\nthree", "1\n2\n3"], ["a long\nname", "4"]])

    assert text_of(page(draw)) == "Name | Value\none | 1\ntwo | 2\nthree | 3\na long name | 4"


def test_two_tables_and_what_is_between() -> None:
    def draw(drawing: canvas.Canvas) -> None:
        ruled(drawing, CELLS, y=600)
        drawing.drawString(72, 550, "between")
        ruled(drawing, [["x", "y"], ["1", "2"]], y=450)

    text = text_of(page(draw)) or ""
    assert text.index("Brest | 7 m") < text.index("between") < text.index("x | y\n1 | 2")


def framed(drawing: canvas.Canvas) -> None:
    drawing.rect(60, 500, 300, 200)
    drawing.rect(60, 700, 300, 20)
    drawing.drawString(72, 650, "A note in a frame")


def beside(drawing: canvas.Canvas) -> None:
    ruled(drawing, [["x", "y"], ["1", "2"]], x=72)
    drawing.drawString(400, 510, "another column")


def boxes(drawing: canvas.Canvas) -> None:
    for x in range(8):
        for y in range(8):
            drawing.rect(100 + 30 * x, 300 + 30 * y, 30, 30)
    drawing.drawString(105, 305, "a")


@pytest.mark.parametrize("draw", [framed, beside, boxes, lambda drawing: drawing.drawString(72, 700, "plain")])
def test_what_is_no_table_stays_as_it_is(draw: Callable[[canvas.Canvas], None]) -> None:
    assert text_of(page(draw)) is None


def test_a_page_full_of_lines_is_given_up_early() -> None:
    def draw(drawing: canvas.Canvas) -> None:
        for n in range(3_000):
            drawing.line(n % 500, n // 10, n % 500 + 50, n // 10)
        ruled(drawing, CELLS)

    assert text_of(page(draw)) is None
