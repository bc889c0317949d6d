"""Real files made by the tests: workbooks, slides, e-books, archives, images, ruled PDFs."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence

import openpyxl
import pptx
from PIL import Image, ImageDraw, ImageFont
from pptx.util import Inches
from reportlab.lib.utils import ImageReader
from reportlab.pdfgen import canvas

from perilune.core import FileStatus
from perilune.memory.library import Library
from tests.memory.conftest import ingest


def text_of(library: Library, data: bytes, name: str) -> str:
    record = ingest(library, data, name)
    assert record.error is None
    assert record.status is FileStatus.PREFILLING
    return library.text("local", record.file_id)


def error_of(library: Library, data: bytes, name: str) -> str:
    return failure_of(library, data, name)[0]


def failure_of(library: Library, data: bytes, name: str) -> tuple[str, str | None]:
    """What is said of a document that can't be read, and its code."""
    record = ingest(library, data, name)
    assert record.status is FileStatus.ERROR
    assert record.error is not None
    return record.error, record.error_code


def zipped(members: dict[str, bytes | str], **options: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, **options) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def repack(data: bytes, changes: dict[str, bytes]) -> bytes:
    """The package with parts replaced or added."""
    with zipfile.ZipFile(io.BytesIO(data)) as old:
        parts: dict[str, bytes | str] = {name: old.read(name) for name in old.namelist()}
    return zipped(parts | changes)


def workbook(**sheets: Sequence[Sequence[object]]) -> bytes:
    book = openpyxl.Workbook()
    book.remove(book.active)
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
    buffer = io.BytesIO()
    book.save(buffer)
    return buffer.getvalue()


def slides() -> bytes:
    """Three slides: a title with notes, a table, one that is empty."""
    show = pptx.Presentation()
    first = show.slides.add_slide(show.slide_layouts[0])
    first.shapes.title.text = "Tides"
    first.placeholders[1].text = "The moon pulls\nthe sea."
    first.notes_slide.notes_text_frame.text = "Mention the sun, too."
    second = show.slides.add_slide(show.slide_layouts[5])
    second.shapes.title.text = "Ports"
    table = second.shapes.add_table(2, 2, Inches(1), Inches(1), Inches(4), Inches(1)).table
    for row, cells in enumerate((("Port", "Height"), ("Saint-Malo", "13.5 m"))):
        for column, value in enumerate(cells):
            table.cell(row, column).text = value
    show.slides.add_slide(show.slide_layouts[6])
    buffer = io.BytesIO()
    show.save(buffer)
    return buffer.getvalue()


def book(chapters: dict[str, str], **extra: bytes) -> bytes:
    """An EPUB with these chapters (file name -> HTML) in this order."""
    items = "".join(
        f'<item id="c{i}" href="{name}" media-type="application/xhtml+xml"/>' for i, name in enumerate(chapters)
    )
    spine = "".join(f'<itemref idref="c{i}"/>' for i in range(len(chapters)))
    package = f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{spine}</spine></package>'
    container = (
        '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
    )
    parts: dict[str, bytes | str] = {"mimetype": "application/epub+zip", "META-INF/container.xml": container}
    parts["OEBPS/book.opf"] = package
    parts |= {f"OEBPS/{name}": html for name, html in chapters.items()}
    return zipped(parts | {name.replace("__", "/"): data for name, data in extra.items()})


def drawn(lines: Sequence[str], size: tuple[int, int] = (900, 300)) -> Image.Image:
    """Black text on white."""
    image = Image.new("RGB", size, "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(28)
    for number, line in enumerate(lines):
        pen.text((40, 30 + 50 * number), line, "black", font)
    return image


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def scanned(pages: Sequence[Image.Image | str]) -> bytes:
    """A PDF whose pages are images without a text layer, or text."""
    buffer = io.BytesIO()
    drawing = canvas.Canvas(buffer)
    for page in pages:
        if isinstance(page, str):
            drawing.drawString(72, 700, page)
        else:
            drawing.drawImage(ImageReader(page), 40, 400, 500, 500 * page.height / page.width)
        drawing.showPage()
    drawing.save()
    return buffer.getvalue()
