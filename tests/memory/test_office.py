"""PPTX, XLSX and EPUB: content in order with its place, macros told and never run, damage and bombs refused."""

from __future__ import annotations

import datetime

import pytest

from perilune.memory.library import Library
from tests.memory.conftest import ingest
from tests.memory.made import book, error_of, repack, slides, text_of, workbook, zipped

MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
EXPANDING = "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 10))
LAUGHS = f'<!DOCTYPE d [<!ENTITY a0 "haha">{EXPANDING}<!ENTITY f SYSTEM "file:///etc/passwd">]>'


# --------------------------------------------------------------------------------------------- slides


def test_slides_are_pages(library: Library) -> None:
    record = ingest(library, slides(), "tides.pptx")
    pages = library.pages("local", record.file_id)
    assert [(page.text.strip(), page.anchor) for page in pages] == [
        ("# Tides\nThe moon pulls\nthe sea.\nNotes: Mention the sun, too.", "slide 1"),
        ("# Ports\nPort | Height\nSaint-Malo | 13.5 m", "slide 2"),
        ("", "slide 3"),
    ]
    found = library.search("local", [record.file_id], "Saint-Malo", 1)[0]
    assert (found.page, found.anchor) == (2, "slide 2")


def test_macros_are_told_and_not_read(library: Library) -> None:
    for data, name in ((slides(), "a.pptm"), (workbook(Data=[["x", 1]]), "a.xlsm")):
        folder = "ppt" if name.endswith("pptm") else "xl"
        with_macros = repack(data, {f"{folder}/vbaProject.bin": b'Sub AutoOpen() Shell "rm" End Sub'})
        text = text_of(library, with_macros, name)
        assert "holds macros. They were not run" in text
        assert "AutoOpen" not in text


# ------------------------------------------------------------------------------------------- workbooks


def test_cells_are_shown_as_they_are_read(library: Library) -> None:
    rows = [
        ["Item", "Price", "Sold", "On"],
        ["Lamp 灯", 12.5, True, datetime.date(2026, 3, 1)],
        [None, None, None, None],
        ["Rope", 1234567890123, False, datetime.datetime(2026, 3, 2, 14, 30)],
        ["a\nb", None, "=B2*2", datetime.time(6, 45)],
    ]
    record = ingest(library, workbook(Prices=rows, Empty=[], More=[["last"]]), "shop.xlsx")
    pages = library.pages("local", record.file_id)
    assert [page.text for page in pages] == [
        "Sheet: Prices\n"
        "Item | Price | Sold | On\n"
        "Lamp 灯 | 12.5 | TRUE | 2026-03-01\n"
        "Rope | 1234567890123 | FALSE | 2026-03-02 14:30:00\n"
        "a b |  | =B2*2 | 06:45:00\n\n",
        "Sheet: More\nlast\n\n",
    ]
    assert [page.anchor for page in pages] == ["sheet Prices, rows 1-5", "sheet More, row 1"]


def test_every_page_of_a_sheet_says_its_columns(library: Library) -> None:
    rows = [["name", "city"]] + [[f"person {i}", f"city number {i} of many"] for i in range(400)]
    record = ingest(library, workbook(People=rows), "people.xlsx")
    pages = library.pages("local", record.file_id)
    assert len(pages) > 3
    assert all("name | city" in page.text for page in pages)
    found = library.search("local", [record.file_id], "person 333", 1)[0]
    assert "person 333 | city number 333 of many" in found.text
    assert found.anchor.startswith("sheet People, rows ")


def sheet_with(body: bytes, head: str = "") -> bytes:
    xml = f'{head}<worksheet xmlns="{MAIN}"><sheetData>'.encode() + body + b"</sheetData></worksheet>"
    return repack(workbook(A=[["x"]]), {"xl/worksheets/sheet1.xml": xml})


def test_a_million_empty_rows_cost_no_text(library: Library) -> None:
    empty = b"".join(b'<row r="%d"><c r="A%d" s="0"/></row>' % (n, n) for n in range(2, 1_000_001))
    row = b'<row r="%d"><c r="A%d" t="inlineStr"><is><t>%s</t></is></c></row>'
    data = sheet_with(row % (1, 1, b"first") + empty + row % (1_000_001, 1_000_001, b"last"))
    record = ingest(library, data, "empty.xlsx")
    assert record.error is None
    assert library.text("local", record.file_id) == "Sheet: A\nfirst\nlast\n\n"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: workbook(A=[]), "no filled cells"),
        (lambda: workbook(A=[["x"]])[:-700], "damaged or incomplete"),
        (lambda: sheet_with(b"<row"), "damaged"),
        (lambda: sheet_with(b'<row r="1"><c t="s"><v>seven</v></c></row>'), "damaged"),
        (lambda: sheet_with(b" " * (80 * 1024**2)), "zip bomb"),
    ],
)
def test_bad_workbooks(library: Library, make: object, says: str) -> None:
    assert says in error_of(library, make(), "bad.xlsx")  # type: ignore[operator]


def test_entities_are_not_expanded(library: Library) -> None:
    cell = b'<row r="1"><c r="A1" t="inlineStr"><is><t>before&a9;&f;after</t></is></c></row>'
    record = ingest(library, sheet_with(cell, LAUGHS), "laughs.xlsx")
    text = library.text("local", record.file_id)
    assert "haha" not in text
    assert "root:" not in text
    evil = f"{LAUGHS}<html><head><title>t</title></head><body><p>chapter &a9; &f;</p></body></html>"
    text = text_of(library, book({"1.xhtml": evil}), "laughs.epub")
    assert "haha" not in text
    assert "root:" not in text


# --------------------------------------------------------------------------------------------- e-books


def chapter(title: str, text: str) -> str:
    return (
        f'<html xmlns="http://www.w3.org/1999/xhtml"><head><title>{title}</title></head><body>{text}</body></html>'
    )


def test_chapters_in_reading_order(library: Library) -> None:
    chapters = {
        "z first.xhtml": chapter("One", "<h1>One</h1><p>The whale surfaced.</p>"),
        "a.xhtml": chapter("Two", "<p>בראשית ברא אלהים</p><p>كان البحر هادئا</p>"),
        "cover.xhtml": chapter("", "<img src='x.png'/>"),
    }
    record = ingest(library, book(chapters), "book.epub")
    pages = library.pages("local", record.file_id)
    assert [(page.text, page.anchor) for page in pages] == [
        ("# One\n\nThe whale surfaced.\n\n", "chapter 1, One"),
        ("בראשית ברא אלהים\n\nكان البحر هادئا\n\n", "chapter 2, Two"),
    ]
    assert library.search("local", [record.file_id], "البحر", 1)[0].anchor == "chapter 2, Two"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: book({"1.xhtml": chapter("t", "text " * 9000)})[:-300], "damaged or incomplete"),
        (lambda: book({"1.xhtml": chapter("", "")}), "holds no text"),
        (lambda: zipped({"META-INF/container.xml": "<container"}), "damaged"),
        (lambda: zipped({"META-INF/container.xml": "<container/>"}), "damaged"),
        (
            lambda: book(
                {"1.xhtml": chapter("t", "secret")},
                **{
                    "META-INF__encryption.xml": b'<encryption xmlns:e="http://www.w3.org/2001/04/xmlenc#">'
                    b'<e:CipherReference URI="OEBPS/1.xhtml"/></encryption>'
                },
            ),
            "copy-protected",
        ),
    ],
)
def test_bad_books(library: Library, make: object, says: str) -> None:
    assert says in error_of(library, make(), "bad.epub")  # type: ignore[operator]
