"""EPUB -> pages of its chapters, in reading order. Chapters are HTML and read as such; nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from perilune.errors import Unreadable, UnsupportedDocument
from perilune.memory.ingest.package import Package, damage_told
from perilune.memory.ingest.pagination import PageText, Parsed, paginate
from perilune.memory.ingest.source import Source
from perilune.memory.ingest.web import read_html

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_C = "{urn:oasis:names:tc:opendocument:xmlns:container}"
_OPF = "{http://www.idpf.org/2007/opf}"
_CIPHER = "{http://www.w3.org/2001/04/xmlenc#}CipherReference"
_HTML_TYPES = {"application/xhtml+xml", "text/html"}
_MAX_TITLE_CHARS = 80


def parse(source: Source) -> Parsed:
    """Raises `UnsupportedDocument`: damaged, copy-protected, no text, packed like a bomb."""
    with damage_told("EPUB", "an e-book program"):
        package = Package(source, "EPUB")
        root = next(package.xml(_CONTAINER).iter(f"{_C}rootfile")).get("full-path", "")
        chapters = _reading_order(package, root)
        if _ENCRYPTION in package.names:
            locked = {item.get("URI", "") for item in package.xml(_ENCRYPTION).iter(_CIPHER)}
            if locked & set(chapters):
                raise UnsupportedDocument(
                    "The e-book is copy-protected (DRM).",
                    hint="Upload an edition without copy protection.",
                    why=Unreadable.LOCKED,
                )
    return Parsed(None, islice(_pages(package, chapters), source.first_page - 1, None))


def _reading_order(package: Package, root: str) -> list[str]:
    book = package.xml(root)
    items = {
        item.get("id"): package.resolve(root, item.get("href", ""))
        for item in book.iter(f"{_OPF}item")
        if item.get("media-type") in _HTML_TYPES
    }
    spine = [items.get(item.get("idref"), "") for item in book.iter(f"{_OPF}itemref")]
    return [part for part in spine if part in package.names]


def _pages(package: Package, chapters: list[str]) -> Iterator[PageText]:
    found = False
    for number, part in enumerate(chapters, 1):
        with damage_told("EPUB", "an e-book program"), package.open(part) as file:
            title, text = read_html(file.read().decode("utf-8", errors="replace"))
        if not text:
            continue
        found = True
        name = f"chapter {number}" + (f", {title[:_MAX_TITLE_CHARS]}" if title else "")
        for page in paginate([f"{text}\n\n"]):
            yield PageText(page, name)
    if not found:
        raise UnsupportedDocument(
            "The EPUB file holds no text.", hint="Upload a file that holds text.", why=Unreadable.NO_TEXT
        )
