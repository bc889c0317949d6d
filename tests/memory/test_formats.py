"""Every supported format, its structure and its encodings; every unsupported one, with a sentence that helps."""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import docx
import pytest
from docx.enum.text import WD_BREAK
from hypothesis import given, settings
from hypothesis import strategies as st
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.pdfgen import canvas

from perilune.config import DocumentSettings
from perilune.memory.ingest import encoding
from perilune.memory.ingest.encoding import read_text
from perilune.memory.ingest.pagination import PAGE_CHARS, PageText, clean, paginate
from perilune.memory.ingest.pdf import parse as parse_pdf
from perilune.memory.ingest.pdf import unhyphenate
from perilune.memory.ingest.protocol import Job
from perilune.memory.ingest.source import Source
from perilune.memory.library import Library
from perilune.memory.store import Store
from tests.memory.conftest import OCTAVE, ingest
from tests.memory.made import error_of, failure_of, text_of

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


# -------------------------------------------------------------------------------------------------- PDF


def pdf(pages: list[str], **options: object) -> bytes:
    buffer = io.BytesIO()
    drawing = canvas.Canvas(buffer, **options)
    for text in pages:
        for number, line in enumerate(text.split("\n")):
            drawing.drawString(72, 720 - 14 * number, line)
        drawing.showPage()
    drawing.save()
    return buffer.getvalue()


def test_pdf_keeps_pages(library: Library) -> None:
    record = ingest(library, pdf(["First page about tides.", "", "Third page about the moon."]), "a.pdf")
    pages = library.pages("local", record.file_id)
    assert [page.text for page in pages] == ["First page about tides.\n", "", "Third page about the moon.\n"]
    assert library.search("local", [record.file_id], "moon", 1)[0].page == 3


@pytest.mark.parametrize(
    ("raw", "joined"),
    [
        ("con\ufffeditions", "conditions"),
        ("Re\ufffesearch Program", "Research Program"),
        ("MS\ufffeDOS", "MS-DOS"),
        ("org/debian/debian\ufffesecurity/", "org/debian/debian-security/"),
        ("page 3\ufffe4", "page 3-4"),
        ("plain", "plain"),
    ],
)
def test_hyphens_at_line_ends(raw: str, joined: str) -> None:
    assert unhyphenate(raw) == joined


def image_only_pdf() -> bytes:
    from PIL import Image
    from reportlab.lib.utils import ImageReader

    buffer = io.BytesIO()
    drawing = canvas.Canvas(buffer)
    for shade in (10, 200):
        drawing.drawImage(ImageReader(Image.new("L", (64, 64), shade)), 0, 0, 500, 700)
        drawing.showPage()
    drawing.save()
    return buffer.getvalue()


def test_scanned_page_among_others_says_so(library: Library) -> None:
    from PIL import Image
    from reportlab.lib.utils import ImageReader

    buffer = io.BytesIO()
    drawing = canvas.Canvas(buffer)
    drawing.drawImage(ImageReader(Image.new("L", (64, 64), 9)), 0, 0, 500, 700)
    drawing.showPage()
    drawing.drawString(72, 700, "A page of text.")
    drawing.save()
    text = text_of(library, buffer.getvalue(), "mixed.pdf")
    assert text == "[This page is an image in which no text was found.]\nA page of text.\n"


def test_a_resumed_parse_may_end_in_empty_pages(tmp_path: Path) -> None:
    path = tmp_path / "x.pdf"
    path.write_bytes(pdf(["Words here.", "", ""]))
    job = Job(str(path), path.name, 3, 20, 100, 10**7, 2**30, 60)
    assert list(parse_pdf(Source.of(job)).pages) == [PageText("")]


def cut(fraction: float) -> Callable[[], bytes]:
    return lambda: OCTAVE.read_bytes()[: int(OCTAVE.stat().st_size * fraction)]


@pytest.mark.parametrize(
    ("make", "says", "code"),
    [
        (lambda: pdf(["secret"], encrypt=StandardEncryption("pass", strength=128)), "password", "locked"),
        (cut(0.001), "truncated", "damaged"),
        (cut(0.5), "truncated", "damaged"),
        (cut(0.999), "truncated", "damaged"),
        (lambda: b"%PDF-1.7\n" + b"garbage " * 500 + b"\n%%EOF", "damaged", "damaged"),
        (image_only_pdf, "holds text that can be read", "no_text"),
        (lambda: pdf([""]), "holds text that can be read", "no_text"),
    ],
)
def test_bad_pdf(library: Library, make: Callable[[], bytes], says: str, code: str) -> None:
    said, told = failure_of(library, make(), "bad.pdf")
    assert says in said
    assert told == code


def test_limits_of_pages_and_text(store: Store, tmp_path: Path) -> None:
    library = Library(store, tmp_path, DocumentSettings(max_pages=3, max_text=2048))
    said, code = failure_of(library, pdf(["x"] * 4), "long.pdf")
    assert "4 pages; the limit is 3" in said
    assert code == "too_much"
    assert "text" in error_of(library, b"word " * 1000, "long.txt")


# ------------------------------------------------------------------------------------------------- DOCX


def save(document: object) -> bytes:
    buffer = io.BytesIO()
    document.save(buffer)  # type: ignore[attr-defined]
    return buffer.getvalue()


def test_docx_in_order_with_tables(library: Library) -> None:
    document = docx.Document()
    document.add_heading("Agreement", 1)
    document.add_paragraph("The parties\tagree.")
    table = document.add_table(2, 2)
    for cell, value in zip(
        (c for row in table.rows for c in row.cells), ("Item", "Price", "Moon", "7 €"), strict=True
    ):
        cell.text = value
    document.add_paragraph("After the table. 中文。")
    text = text_of(library, save(document), "a.docx")
    assert text.index("Agreement") < text.index("Item | Price\nMoon | 7 €") < text.index("After the table. 中文。")
    assert "parties\tagree." in text


def test_docx_page_breaks_are_pages(library: Library) -> None:
    document = docx.Document()
    document.add_paragraph("first page")
    document.add_paragraph().add_run().add_break(WD_BREAK.PAGE)
    document.add_paragraph("second page about tides")
    record = ingest(library, save(document), "a.docx")
    assert record.pages_total == 2
    assert library.search("local", [record.file_id], "tides", 1)[0].page == 2


def repack(data: bytes, **parts: bytes) -> bytes:
    """The package with some parts replaced; `/` is written `__` in the names."""
    buffer = io.BytesIO()
    changes = {name.replace("__", "/"): part for name, part in parts.items()}
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, changes.get(name, old.read(name)))
    return buffer.getvalue()


def docx_with(body: str) -> bytes:
    document = save(docx.Document())
    xml = f'<w:document xmlns:w="{W}"><w:body>{body}</w:body></w:document>'
    return repack(document, **{"word__document.xml": xml.encode()})


def test_docx_details(library: Library) -> None:
    text = text_of(
        library,
        docx_with(
            "<w:p><w:ins><w:r><w:t>kept</w:t></w:r></w:ins><w:del><w:r><w:delText>gone</w:delText></w:r></w:del>"
            "<w:hyperlink><w:r><w:t> link</w:t></w:r></w:hyperlink><w:r><w:br/><w:t>next</w:t></w:r></w:p>"
            "<w:sdt><w:sdtContent><w:p><w:r><w:t>in a field</w:t></w:r></w:p></w:sdtContent></w:sdt>"
        ),
        "a.docx",
    )
    assert text == "kept link\nnext\nin a field\n"


def test_docx_entities_are_not_expanded(library: Library) -> None:
    bomb = '<!DOCTYPE d [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;"><!ENTITY f SYSTEM "file:///etc/passwd">]>'
    xml = f'{bomb}<w:document xmlns:w="{W}"><w:body><w:p><w:r><w:t>x&f;&b;y</w:t></w:r></w:p></w:body></w:document>'
    data = repack(save(docx.Document()), **{"word__document.xml": xml.encode()})
    record = ingest(library, data, "a.docx")
    assert "root:" not in library.text("local", record.file_id)
    assert "haha" not in library.text("local", record.file_id)


def zip_bomb() -> bytes:
    """80 MB of text in 80 KB."""
    return docx_with("<w:p><w:r><w:t>" + "a" * (80 * 1024**2) + "</w:t></w:r></w:p>")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (zip_bomb, "zip bomb"),
        (lambda: save(docx.Document())[:2000], "damaged or incomplete"),
        (lambda: docx_with("<w:p>"), "damaged"),
        (lambda: docx_with("<w:p/>"), "holds no text"),
        (lambda: b"PK\x03\x04" + b"junk" * 100, "damaged or incomplete"),
    ],
)
def test_bad_docx(library: Library, make: Callable[[], bytes], says: str) -> None:
    assert says in error_of(library, make(), "bad.docx")


def test_docx_whose_size_lies_is_bounded(library: Library) -> None:
    data = bytearray(zip_bomb())
    real = (80 * 1024**2).to_bytes(4, "little")[1:]
    at = data.rfind(b"PK\x01\x02")
    names = [i for i in range(len(data) - 4) if data[i : i + 4] == b"PK\x01\x02"]
    for at in names:  # the central directory claims 1,000 bytes
        if data[at + 25 : at + 28] == real or int.from_bytes(data[at + 24 : at + 28], "little") > 10**7:
            data[at + 24 : at + 28] = (1000).to_bytes(4, "little")
    assert "damaged" in error_of(library, bytes(data), "liar.docx")


# ------------------------------------------------------------------------------------------------- HTML


HTML = """<!doctype html><html><head><title>Tides &amp; Moons</title><style>p{color:red}</style></head><body>
<script>alert("no")</script><h2>Intro</h2><p>The <b>moon</b> pulls
the sea.</p><ul><li>one<li>two</ul><table><tr><td>a</td><td>b</td></tr><tr><td></td><td>d</td></tr></table>
<pre>x = 1
  y = 2</pre><!-- comment --><div>last<br>line</div></body></html>"""


def test_html_structure(library: Library) -> None:
    text = text_of(library, HTML.encode(), "a.html")
    assert text == (
        "Tides & Moons\n\n## Intro\n\nThe moon pulls the sea.\n\n- one\n- two\n\na | b\n | d\n\n"
        "x = 1\n  y = 2\n\nlast\nline"
    )


def test_html_encoding_and_depth(library: Library) -> None:
    chinese = '<html><meta charset="gb2312"><body>命名管道的内容</body></html>'.encode("gb18030")
    assert "命名管道的内容" in text_of(library, chinese, "a.html")
    deep = "<div>" * 10_000 + "bottom" + "</div>" * 10_000
    assert text_of(library, f"<html><body>{deep}</body></html>".encode(), "deep.html").strip() == "bottom"
    assert "shows no text" in error_of(library, b"<html><body><script>x</script></body></html>", "js.html")


# ------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_unicode_encodings(library: Library, encoding: str) -> None:
    text = "The moon, la lune à l'œuvre.\nSecond line with enough letters to be sure.\n"
    assert text_of(library, text.encode(encoding), "a.txt") == text


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("命名管道是一个像管道一样的文件。你把内容放进了文件，它从另一端出来。", "gbk"),
        ("Größe und Straße sind schöne Wörter für die Prüfung der Übertragung. " * 5, "cp1252"),
        ("Именованный канал работает как обычный канал, но имеет имя в системе. " * 5, "cp1251"),
    ],
)
def test_legacy_encodings(library: Library, text: str, encoding: str) -> None:
    assert text_of(library, text.encode(encoding), "a.txt") == text


def test_places_in_text_are_lines(library: Library) -> None:
    record = ingest(library, "".join(f"def f{n}(): return {n}\n" for n in range(400)).encode(), "many.py")
    pages = library.pages("local", record.file_id)
    assert pages[0].anchor.startswith("Python, lines 1-")
    first = int(pages[1].anchor.split("lines ")[1].split("-")[0])
    assert pages[1].text.startswith(f"def f{first - 1}()")
    assert pages[-1].anchor.endswith("-400")
    assert library.search("local", [record.file_id], "f399", 1)[0].anchor == pages[-1].anchor


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "name;city\nMüller;Köln\n"),
        ("a.json", '{"moon": ["tide", 1.5]}'),
        ("arabic.txt", "كان البحر هادئا تحت ضوء القمر."),
        ("hebrew.md", "# בראשית\n\nברא אלהים את השמים\n"),
    ],
)
def test_plain_formats_and_right_to_left(library: Library, name: str, text: str) -> None:
    assert text_of(library, text.encode(), name) == text


def test_a_wrong_extension_does_not_matter(library: Library) -> None:
    document = docx.Document()
    document.add_paragraph("A letter about tides.")
    for data, name in (
        (save(document), "letter.pdf"),
        (pdf(["A letter about tides."]), "letter.docx"),
        (b"A letter about tides.\n", "letter.xlsx"),
        ("<html><body>A letter about tides.</body></html>".encode("utf-16"), "letter.pptx"),
    ):
        assert "A letter about tides." in text_of(library, data, name)


def test_ten_thousand_pages(library: Library, store: Store, tmp_path: Path) -> None:
    pages = [""] * 10_000
    pages[0], pages[-1] = "The first page.", "The whale is on the last page."
    data = pdf(pages)
    record = ingest(library, data, "long.pdf")
    assert (record.error, record.pages_parsed) == (None, 10_000)
    assert library.search("local", [record.file_id], "whale", 1)[0].page == 10_000
    small = Library(store, tmp_path, DocumentSettings(max_pages=9_999))
    assert "10,000 pages; the limit is 9,999" in error_of(small, data, "long.pdf")


def test_source_code_is_kept_as_it_is(library: Library) -> None:
    source = Path(__file__).read_bytes()
    record = ingest(library, source, "tests/test_formats.py")
    assert library.text("local", record.file_id) == source.decode()
    pages = library.pages("local", record.file_id)
    assert len(pages) > 3
    assert all(page.text.endswith("\n") for page in pages)


def test_line_ends_become_line_feeds(library: Library) -> None:
    assert text_of(library, b"one\r\ntwo\rthree\n", "a.txt") == "one\ntwo\nthree\n"


@pytest.mark.parametrize("megabytes", [4, pytest.param(50, marks=pytest.mark.soak)])
def test_one_line_of_many_megabytes(library: Library, megabytes: int) -> None:
    data = b"moon tide " + b"0123456789abcdef" * (megabytes * 1024**2 // 16)
    record = ingest(library, data, "line.txt")
    assert record.error is None
    assert record.pages_parsed > megabytes * 1024**2 // PAGE_CHARS
    assert library.search("local", [record.file_id], "tide", 1)[0].page == 1


@pytest.mark.parametrize(
    ("data", "name", "says", "code"),
    [
        (b"\x7fELF" + bytes(100), "a.out", "a program", "unknown_kind"),
        (bytes(range(256)) * 40, "noise.bin", "binary data", "unknown_kind"),
        (bytes(5000), "zeros.txt", "binary data", "unknown_kind"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "scan.png", "image is damaged", "damaged"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(50), "old.doc", "old Office", "unknown_kind"),
        (b"\x1f\x8b\x08" + bytes(50), "a.txt.gz", "gzip", "unknown_kind"),
        (b"   \n\t\n", "blank.txt", "holds no text", "no_text"),
    ],
)
def test_other_kinds_are_refused_by_name(library: Library, data: bytes, name: str, says: str, code: str) -> None:
    said, told = failure_of(library, data, name)
    assert says in said
    assert told == code


@given(st.lists(st.text(max_size=2_000), max_size=12))
def test_pages_joined_are_the_text(pieces: list[str]) -> None:
    pages = list(paginate(pieces))
    assert "".join(pages) == "".join(pieces)
    assert all(0 < len(page) <= PAGE_CHARS for page in pages)


@given(st.text())
@settings(max_examples=50)
def test_cut_characters_and_line_ends_survive_blocks(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.txt"
        path.write_bytes(text.encode())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(encoding, "BLOCK_BYTES", 3)
            patch.setattr(encoding, "find_encoding", lambda _source: "utf-8")
            source = Source.of(Job(str(path), path.name, 1, 0, 100, 10**7, 2**30, 60))
            assert "".join(read_text(source)) == clean(text)


def test_clean_removes_what_harms() -> None:
    assert clean("a\0b\x1b[31m\ud800\ufeffc\td\n") == "ab[31m\ufffdc\td\n"
