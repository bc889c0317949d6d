"""Bytes + name -> the kind of a document: "pdf", "docx", "html" or "text"; or a clear refusal.

Content decides; the extension only breaks ties (HTML without a doctype). Knows signatures, parses nothing.
"""

from __future__ import annotations

import zipfile
from pathlib import Path, PurePath

from perilune.errors import UnsupportedDocument

HEAD_BYTES = 4_096
SUPPORTED = "PDF, DOCX, HTML, Markdown, plain text and source code"
_HTML_NAMES = {".html", ".htm", ".xhtml"}
_HTML_STARTS = (b"<!doctype html", b"<html", b"<?xml")

_REFUSED: tuple[tuple[bytes, str, str], ...] = (
    (
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
        "an old Office file (.doc, .xls, .ppt) or a password-protected one",
        "Remove the password, save it as .docx or PDF and upload that.",
    ),
    (b"{\\rtf", "rich text (RTF)", "Save it as .docx or PDF and upload that."),
    (b"\x89PNG", "an image (PNG)", "Text recognition (OCR) isn't available yet; upload a file with text."),
    (b"\xff\xd8\xff", "an image (JPEG)", "Text recognition (OCR) isn't available yet; upload a file with text."),
    (b"GIF8", "an image (GIF)", "Text recognition (OCR) isn't available yet; upload a file with text."),
    (b"II*\0", "an image (TIFF)", "Text recognition (OCR) isn't available yet; upload a file with text."),
    (b"MM\0*", "an image (TIFF)", "Text recognition (OCR) isn't available yet; upload a file with text."),
    (b"\x1f\x8b", "a gzip archive", "Unpack it and upload the files."),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "Unpack it and upload the files."),
    (b"Rar!", "a RAR archive", "Unpack it and upload the files."),
    (b"\x7fELF", "a program", "Upload its source code instead."),
    (b"SQLite format 3\0", "a SQLite database", "Export the tables as text and upload that."),
    (b"GGUF", "a model file", "Use it with --model instead of as a document."),
)


def kind_of(path: Path, filename: str) -> str:
    """Raises `UnsupportedDocument` naming what the file is and what to do."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if b"%PDF-" in head[:1024]:
        return "pdf"
    if head.startswith(b"PK\x03\x04"):
        return _zip_kind(path)
    for signature, what, hint in _REFUSED:
        if head.startswith(signature):
            raise UnsupportedDocument(f"This is {what}, which can't be read; supported are {SUPPORTED}.", hint=hint)
    suffix = PurePath(filename).suffix.lower()
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:512].lower()
    if start.startswith(_HTML_STARTS[:2]) or (start.startswith(_HTML_STARTS[2]) and b"<html" in start):
        return "html"
    return "html" if suffix in _HTML_NAMES else "text"


def _zip_kind(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise UnsupportedDocument(
            f"The file is a damaged or incomplete ZIP or Office file ({error}).",
            hint="Download or export it again and upload the whole file.",
        ) from None
    if "word/document.xml" in names or any(n.startswith("word/document") and n.endswith(".xml") for n in names):
        return "docx"
    what, hint = "a ZIP archive", "Unpack it and upload the files, or give `perilune ask` the folder."
    if any(name.startswith("xl/") for name in names):
        what, hint = "an Excel workbook", "Save it as CSV or PDF and upload that."
    elif any(name.startswith("ppt/") for name in names):
        what, hint = "a PowerPoint file", "Save it as PDF and upload that."
    elif "content.xml" in names:
        what, hint = "an OpenDocument file", "Save it as .docx or PDF and upload that."
    elif "META-INF/container.xml" in names:
        what, hint = "an e-book (EPUB)", "Convert it to HTML or PDF and upload that."
    raise UnsupportedDocument(f"This is {what}, which can't be read; supported are {SUPPORTED}.", hint=hint)
