"""ZIP files: every file with its path, what can't be read told, and nothing that unpacks without end."""

from __future__ import annotations

import io
import random
import zipfile

from perilune.memory.ingest.archive import safe_name
from perilune.memory.ingest.source import MAX_MEMBERS
from perilune.memory.library import Library
from tests.memory.conftest import ingest
from tests.memory.made import error_of, slides, text_of, workbook, zipped
from tests.memory.test_formats import pdf


def test_every_file_has_its_path(library: Library) -> None:
    data = zipped(
        {
            "src/a.py": "import os\n\n\ndef tide():\n    return 'high'\n",
            "docs/manual.pdf": pdf(["First page.", "The moon is on the second page."]),
            "docs/shop.xlsx": workbook(Prices=[["Lamp", 7]]),
            "talk.pptx": slides(),
            "inner.zip": zipped({"notes.md": "# Deep\n\nA nested whale.\n"}),
            "中文/说明.txt": "命名管道是一种文件。".encode("gbk"),
            ".git/config": "hidden",
            "__MACOSX/._a.py": "hidden",
            "empty.txt": "",
        }
    )
    record = ingest(library, data, "all.zip")
    assert record.error is None
    text = library.text("local", record.file_id)
    assert "===== src/a.py =====\nimport os" in text
    assert "hidden" not in text
    for question, anchor in (
        ("tide high", "src/a.py, Python, lines 1-5"),
        ("moon second", "docs/manual.pdf, page 2"),
        ("lamp", "docs/shop.xlsx, sheet Prices, row 1"),
        ("Saint-Malo", "talk.pptx, slide 2"),
        ("nested whale", "inner.zip, notes.md, lines 1-3"),
        ("命名管道", "中文/说明.txt, line 1"),
    ):
        assert library.search("local", [record.file_id], question, 1)[0].anchor == anchor


def test_what_cannot_be_read_is_told(library: Library) -> None:
    data = zipped({"good.txt": "good text", "bad.docx": b"PK\x03\x04junk", "a.out": b"\x7fELF" + bytes(99)})
    text = text_of(library, data, "mixed.zip")
    assert "2 of the archive's files could not be read and are left out" in text
    assert "- bad.docx: The file is a damaged or incomplete ZIP" in text
    assert "- a.out: This is a program" in text
    assert "Nothing in the ZIP file can be read" in error_of(library, zipped({"a.out": b"\x7fELF"}), "bad.zip")
    assert "it is empty" in error_of(library, zipped({}), "empty.zip")


def test_nested_archives_end(library: Library) -> None:
    data: bytes = zipped({"end.txt": "the bottom"})
    for _ in range(3):
        data = zipped({"x.txt": "some text", "deeper.zip": data})
    text = text_of(library, data, "deep.zip")
    assert text.count("some text") == 2
    assert "the bottom" not in text
    assert "more than 2 archives deep" in text


def test_bombs_are_refused(library: Library) -> None:
    bomb = zipped({"zeros.txt": bytes(100 * 1024**2)})
    assert "zip bomb" in error_of(library, bomb, "bomb.zip")
    # Each file is small enough; all of them together, in archives that share their bytes, aren't.
    block = zipped({f"{i}.txt": bytes(30 * 1024**2) for i in range(4)})
    text = text_of(library, zipped({"a.txt": "words"} | {f"{i}.zip": block for i in range(20)}), "many.zip")
    assert "zip bomb" in text
    many = zipped({f"{i}.txt": "x" for i in range(MAX_MEMBERS + 1)})
    assert "more than 5,000 files" in error_of(library, many, "many.zip")


def test_a_ratio_alone_is_refused(library: Library) -> None:
    """Below every bound in bytes: what the archive, or a file in it, unpacks to is too big for its size."""

    def program(megabytes: int) -> bytes:  # is told apart by its first bytes, so that nothing reads the rest
        return b"\x7fELF" + bytes(megabytes * 1024**2)

    noise = program(0) + random.Random(1).randbytes(200_000)  # 250 times that is 48 MB
    together: dict[str, bytes | str] = {"a.txt": "words", "1": program(20), "2": program(20)}
    text = text_of(library, zipped(together), "together.zip")
    assert "- 1: This is a program" in text
    assert "- 2: The ZIP file unpacks to 32 MB or more" in text
    assert "bomb" not in text_of(library, zipped(together | {"3": noise}), "larger.zip")
    alone = zipped({"a.txt": "words", "1": program(34), "2": noise})
    assert "- 1: The ZIP file unpacks to 34 MB or more" in text_of(library, alone, "alone.zip")
    assert "bomb" not in text_of(library, zipped({"a.txt": "words", "1": program(30)}), "free.zip")


def test_encrypted_files_are_told(library: Library) -> None:
    data = bytearray(zipped({"a.txt": "open", "b.txt": "closed"}))
    for at in (data.rfind(b"PK\x03\x04") + 6, data.rfind(b"PK\x01\x02") + 8):
        data[at] |= 1
    assert "- b.txt: It is encrypted." in text_of(library, bytes(data), "a.zip")


def test_names_are_harmless() -> None:
    def name(text: str, flags: int = 0x800) -> str:
        info = zipfile.ZipInfo(text)
        info.flag_bits = flags
        return safe_name(info)

    assert name("../../etc/passwd") == "etc/passwd"
    assert name("/abs/./x\x1b[31m.txt") == "abs/x[31m.txt"
    assert name("C:\\Users\\x.txt") == "C:/Users/x.txt"
    assert name("命名.txt".encode("gbk").decode("cp437"), 0) == "命名.txt"
    assert name("é.txt".encode().decode("cp437"), 0) == "é.txt"
    assert len(name("x" * 5000)) == 200


def test_symbolic_links_are_not_followed(library: Library) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        link = zipfile.ZipInfo("link.txt")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
        archive.writestr("a.txt", "real")
    text = text_of(library, buffer.getvalue(), "links.zip")
    assert "link.txt" not in text
    assert "passwd" not in text
