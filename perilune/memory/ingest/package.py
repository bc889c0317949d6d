"""ZIP packages (DOCX, PPTX, XLSX, EPUB): their parts, read within bounds, and what links them.

A part's declared size is checked before it is read, and zipfile never reads past it, so a bomb costs nothing.
Entities and external references of XML are never resolved. Macros are never run; only their presence is told.
"""

from __future__ import annotations

import posixpath
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any
from urllib.parse import unquote

from lxml import etree

from perilune.errors import Unreadable, UnsupportedDocument
from perilune.memory.ingest.source import FREE_BYTES, MAX_RATIO, Source

MACRO_NOTE = "[This file holds macros. They were not run and are not part of this text.]\n"
_MAX_XML_FACTOR = 4  # markup around a part's text
_RELATIONS = "{http://schemas.openxmlformats.org/package/2006/relationships}Relationship"
_LIMITS = {"resolve_entities": False, "no_network": True, "load_dtd": False, "huge_tree": False}
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    etree.XMLSyntaxError,
    EOFError,
    OSError,
    ValueError,
    KeyError,
    NotImplementedError,
    RuntimeError,  # an encrypted member
)


@contextmanager
def damage_told(what: str, program: str) -> Iterator[None]:
    """Any way in which a package can be broken becomes one `UnsupportedDocument`."""
    try:
        yield
    except _DAMAGE as error:
        raise UnsupportedDocument(
            f"The {what} file is damaged ({str(error)[:200]}).",
            hint=f"Open it in {program}, save it again and upload that.",
            why=Unreadable.DAMAGED,
        ) from None


class Package:
    """An open package. Methods raise what `damage_told` catches, and `UnsupportedDocument` for a bomb."""

    def __init__(self, source: Source, what: str) -> None:
        self._archive = zipfile.ZipFile(source.open())
        self._what = what
        self._limit_bytes = self._left_bytes = source.job.max_text_bytes * _MAX_XML_FACTOR
        self.names = frozenset(self._archive.namelist())
        self.has_macros = any(name.lower().endswith("vbaproject.bin") for name in self.names)

    def open(self, name: str) -> IO[bytes]:
        """A part's bytes as a stream. Raises `KeyError` where there is none."""
        info = self._archive.getinfo(name)
        check_ratio(info, self._what)
        self._left_bytes -= info.file_size
        if self._left_bytes < 0:
            raise bomb(self._what, self._limit_bytes)
        return self._archive.open(info)

    def xml(self, name: str) -> Any:
        """A part's root element."""
        with self.open(name) as part:
            return etree.parse(part, etree.XMLParser(**_LIMITS)).getroot()

    def elements(self, name: str, tags: tuple[str, ...]) -> Iterator[Any]:
        """Elements as they end, each forgotten after use: for parts of any size."""
        with self.open(name) as part:
            for _, element in etree.iterparse(part, tag=tags, **_LIMITS):
                yield element
                element.clear()
                while element.getprevious() is not None:
                    del element.getparent()[0]

    def relations(self, name: str) -> dict[str, str]:
        """Relation id -> name of the part in this package that it points to."""
        folder, base = posixpath.split(name)
        relations = f"{folder}/_rels/{base}.rels" if folder else f"_rels/{base}.rels"
        if relations not in self.names:
            return {}
        return {
            item.get("Id", ""): self.resolve(name, item.get("Target", ""))
            for item in self.xml(relations).iter(_RELATIONS)
            if item.get("TargetMode") != "External"
        }

    def resolve(self, name: str, target: str) -> str:
        """The part that a reference in part `name` means."""
        path = unquote(target.split("#")[0])
        return path.lstrip("/") if path.startswith("/") else posixpath.normpath(posixpath.join(name, "..", path))


def check_ratio(info: zipfile.ZipInfo, what: str) -> None:
    """Raises `UnsupportedDocument` for a member that unpacks to something suspiciously larger."""
    if info.file_size > max(FREE_BYTES, MAX_RATIO * info.compress_size):
        raise bomb(what, info.file_size)


def bomb(what: str, unpacked_bytes: int) -> UnsupportedDocument:
    return UnsupportedDocument(
        f"The {what} file unpacks to {unpacked_bytes / 1024**2:,.0f} MB or more, hundreds of times its size, which "
        "looks like a zip bomb.",
        hint="Save it again with the program that made it, and upload that; or split it.",
        why=Unreadable.TOO_MUCH,
    )
