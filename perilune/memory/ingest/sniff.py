"""Bytes + name -> the kind of a document ("pdf", "docx", "image", …), or a clear refusal.

Content decides; the extension only breaks ties (HTML without a doctype). Knows signatures, parses nothing.
"""

from __future__ import annotations

import zipfile

from perilune.errors import Unreadable, UnsupportedDocument
from perilune.memory.ingest.source import Source

HEAD_BYTES = 4_096
SUPPORTED = (
    "PDF, DOCX, PPTX, XLSX, EPUB, HTML, Markdown, CSV, JSON, text, source code, images, and ZIP files of these"
)
_HTML_NAMES = {".html", ".htm", ".xhtml"}
_HTML_STARTS = (b"<!doctype html", b"<html", b"<?xml")
_IMAGES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"II*\0", b"MM\0*", b"BM")
_BMP_HEADER = slice(14, 18)  # the size of the header that follows "BM…" tells a bitmap from text
_BMP_HEADERS = {size.to_bytes(4, "little") for size in (12, 40, 52, 56, 64, 108, 124)}

_REFUSED: tuple[tuple[bytes, str, str], ...] = (
    (
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
        "an old Office file (.doc, .xls, .ppt) or a password-protected one",
        "Remove the password, save it as .docx, .xlsx, .pptx or PDF and upload that.",
    ),
    (b"{\\rtf", "rich text (RTF)", "Save it as .docx or PDF and upload that."),
    (b"\x1f\x8b", "a gzip archive", "Unpack it and upload the files, or a ZIP of them."),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "Unpack it and upload the files, or a ZIP of them."),
    (b"Rar!", "a RAR archive", "Unpack it and upload the files, or a ZIP of them."),
    (b"\x7fELF", "a program", "Upload its source code instead."),
    (b"SQLite format 3\0", "a SQLite database", "Export the tables as text and upload that."),
    (b"GGUF", "a model file", "Use it with --model instead of as a document."),
)


def has_pictures(head: bytes) -> bool:
    """Whether a file that begins so is a PDF or an image: its pages can be drawn."""
    return b"%PDF-" in head[:1024] or _is_image(head)


def kind_of(source: Source) -> str:
    """Raises `UnsupportedDocument` naming what the file is and what to do."""
    with source.open() as file:
        head = file.read(HEAD_BYTES)
    if b"%PDF-" in head[:1024]:
        return "pdf"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip_kind(source)
    if _is_image(head):
        return "image"
    for signature, what, hint in _REFUSED:
        if head.startswith(signature):
            raise UnsupportedDocument(
                f"This is {what}, which can't be read; supported are {SUPPORTED}.",
                hint=hint,
                why=Unreadable.UNKNOWN_KIND,
            )
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:512].lower()
    if start.startswith(_HTML_STARTS[:2]) or (start.startswith(_HTML_STARTS[2]) and b"<html" in start):
        return "html"
    return "html" if source.suffix in _HTML_NAMES else "text"


def _is_image(head: bytes) -> bool:
    if head.startswith(b"RIFF"):
        return head[8:12] == b"WEBP"
    if head.startswith(b"BM"):
        return head[_BMP_HEADER] in _BMP_HEADERS
    return head.startswith(_IMAGES)


def _zip_kind(source: Source) -> str:
    try:
        with source.open() as file, zipfile.ZipFile(file) as archive:
            names = set(archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise UnsupportedDocument(
            f"The file is a damaged or incomplete ZIP, Office or EPUB file ({error}).",
            hint="Download or export it again and upload the whole file.",
            why=Unreadable.DAMAGED,
        ) from None
    if "word/document.xml" in names or any(n.startswith("word/document") and n.endswith(".xml") for n in names):
        return "docx"
    for part, kind in (
        ("xl/workbook.xml", "xlsx"),
        ("ppt/presentation.xml", "pptx"),
        ("META-INF/container.xml", "epub"),
    ):
        if part in names:
            return kind
    if "xl/workbook.bin" in names:
        raise _refused("a binary Excel workbook (.xlsb)", "Save it as .xlsx or CSV and upload that.")
    if "content.xml" in names and "META-INF/manifest.xml" in names:
        raise _refused("an OpenDocument file", "Save it as .docx, .xlsx, .pptx or PDF and upload that.")
    return "zip"


def _refused(what: str, hint: str) -> UnsupportedDocument:
    return UnsupportedDocument(
        f"This is {what}, which can't be read; supported are {SUPPORTED}.", hint=hint, why=Unreadable.UNKNOWN_KIND
    )
