"""Images and scanned pages: what OCR reads, within which limits, and what is said where it may not or can't."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import pypdfium2 as pdfium
import pytest
from PIL import Image

from perilune.config import DocumentSettings
from perilune.memory.ingest.layout import Box, text_of
from perilune.memory.library import Library
from perilune.memory.store import Store
from tests.memory.conftest import DEBIAN_ZH, ingest
from tests.memory.made import drawn, encoded, error_of, scanned, zipped
from tests.memory.made import text_of as read

LINES = ["Invoice 4711 of 12 March 2026", "Total amount: 1,234.56 EUR"]


def huge_png(side: int) -> bytes:
    """A valid header for an image of `side` x `side`; a decoder that believes it allocates gigabytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes(1 + side // 8) * 100)
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_an_image_is_read(library: Library) -> None:
    assert read(library, encoded(drawn(LINES)), "invoice.png") == "\n".join(LINES) + "\n"


def test_scanned_pages_are_read_among_others(library: Library) -> None:
    record = ingest(library, scanned(["A page with a text layer of its own.", drawn(LINES)]), "scan.pdf")
    assert [page.text for page in library.pages("local", record.file_id)] == [
        "A page with a text layer of its own.\n",
        "\n".join(LINES) + "\n",
    ]
    assert library.search("local", [record.file_id], "invoice 4711", 1)[0].page == 2


def test_chinese_is_read(library: Library) -> None:
    with pdfium.PdfDocument(DEBIAN_ZH) as document:
        page = document[40]
        image = page.render(scale=150 / 72).to_pil().crop((0, 0, 1241, 700))
        layer = page.get_textpage().get_text_bounded(bottom=page.get_height() - 700 * 72 / 150)
    text = read(library, encoded(image.convert("RGB"), "JPEG", quality=85), "page.jpg")
    chinese = {char for char in layer if "\u4e00" <= char <= "\u9fff"}
    found = sum(char in text for char in chinese)
    assert found > 0.8 * len(chinese)


def test_limits_are_told(store: Store, tmp_path: Path) -> None:
    off = Library(store, tmp_path, DocumentSettings(ocr_pages=0))
    assert "recognition (OCR) is off" in error_of(off, encoded(drawn(LINES)), "a.png")
    assert "this is a scan, and text recognition (OCR) is off" in error_of(off, scanned([drawn(LINES)]), "a.pdf")
    one = Library(store, tmp_path, DocumentSettings(ocr_pages=1))
    pages = [drawn(["first page of the scan"]), drawn(["second page of the scan"])]
    text = read(one, scanned(pages), "two.pdf")
    assert text.startswith("first page of the scan\n")
    assert "[Page 2 of this file is an image and was not read: text recognition (OCR) has read 1 images" in text


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: huge_png(30_000), "30,000 x 30,000 pixels; the limit is 100 million"),
        (lambda: encoded(drawn(LINES))[:2000], "image is damaged"),
        (lambda: encoded(Image.new("RGB", (200, 200), "white")), "No text was found in this image"),
    ],
)
def test_bad_images(library: Library, make: object, says: str) -> None:
    assert says in error_of(library, make(), "bad.png")  # type: ignore[operator]


def test_an_unreadable_image_does_not_tell_where_the_server_keeps_it(library: Library, tmp_path: Path) -> None:
    says = error_of(library, huge_png(0), "zero.png")
    assert "of an unknown kind" in says
    assert str(tmp_path) not in says
    assert "/files/" not in says


def test_a_huge_image_in_an_archive_spoils_nothing(library: Library) -> None:
    text = read(library, zipped({"a.txt": "words", "huge.png": huge_png(30_000)}), "a.zip")
    assert "- huge.png: The image has 30,000 x 30,000 pixels" in text


def test_a_huge_image_on_a_pdf_page_is_not_decoded(library: Library) -> None:
    from reportlab.lib.utils import ImageReader
    from reportlab.pdfgen import canvas

    buffer = io.BytesIO()
    drawing = canvas.Canvas(buffer)
    drawing.drawString(72, 720, "A page with a text layer of its own.")
    drawing.showPage()
    drawing.drawImage(ImageReader(Image.new("L", (64, 64), 9)), 0, 0, 500, 700)
    drawing.save()
    data = buffer.getvalue().replace(b"/Height 64", b"/Height 90000").replace(b"/Width 64", b"/Width 90000")
    text = read(library, data, "huge.pdf")
    assert "[Page 2 of this file is an image and was not read: its image has 8,100 million pixels" in text


def test_layout_reads_columns_cells_and_paragraphs() -> None:
    left = [Box(0, 20 * n, 190, 20 * n + 10, f"left {n}") for n in range(2, 9)]
    right = [Box(210, 20 * n, 400, 20 * n + 10, f"right {n}") for n in range(2, 9)]
    title = Box(20, 0, 380, 12, "Title over both")
    text = text_of([*right, title, *left])
    assert text.index("Title") < text.index("left 2") < text.index("left 8") < text.index("right 2")
    row = [Box(0, 0, 40, 10, "Port"), Box(100, 1, 150, 11, "Height"), Box(155, 0, 160, 10, "m")]
    assert text_of([*reversed(row), Box(0, 40, 50, 50, "next")]) == "Port | Height m\n\nnext"
    assert text_of([]) == ""
