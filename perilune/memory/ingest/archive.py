"""ZIP -> the pages of its files, one after another, each with its path. Nothing is written to disk.

Bounded in files, bytes, depth and ratio. A file that can't be read is left out, and a last page says which and why.
Names are only ever shown: they are cleaned, and reach no file system.
"""

from __future__ import annotations

import stat
import zipfile
import zlib
from collections.abc import Iterator
from itertools import islice

from perilune.errors import Unreadable, UnsupportedDocument
from perilune.memory.ingest.formats import open_document
from perilune.memory.ingest.package import bomb, check_ratio
from perilune.memory.ingest.pagination import PageText, Parsed, clean
from perilune.memory.ingest.source import MAX_MEMBERS, Source

MAX_DEPTH = 2
MAX_MEMBER_BYTES = 128 * 1024**2
_MAX_NAME_CHARS = 200
_MAX_TOLD = 50
_ENCRYPTED, _UTF8_NAME = 0x1, 0x800  # flag bits of a member
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError)


def parse(source: Source) -> Parsed:
    """Raises `UnsupportedDocument`: nested too deep, too many files, a bomb, nothing that can be read."""
    if source.depth >= MAX_DEPTH:
        raise UnsupportedDocument(
            f"The archive lies more than {MAX_DEPTH} archives deep.",
            hint="Unpack it and upload the files.",
            why=Unreadable.TOO_MUCH,
        )
    return Parsed(None, islice(_pages(source), source.first_page - 1, None))


def _pages(source: Source) -> Iterator[PageText]:
    left_out: list[str] = []
    found = False
    with source.open() as file, zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            name = safe_name(info)
            if not _is_wanted(info, name):
                continue
            source.allowance.members -= 1
            if source.allowance.members < 0:
                raise UnsupportedDocument(
                    f"The ZIP file holds more than {MAX_MEMBERS:,} files.",
                    hint="Split it, or upload what you mean.",
                    why=Unreadable.TOO_MUCH,
                )
            try:
                for page in _member(source, archive, info, name):
                    found = True
                    yield page
            except UnsupportedDocument as error:
                left_out.append(f"- {name}: {error.message}")
    if not found:
        why = left_out[0].removeprefix("- ") if left_out else "it is empty"
        raise UnsupportedDocument(
            f"Nothing in the ZIP file can be read ({why}).",
            hint="Upload the files themselves.",
            why=Unreadable.NO_TEXT,
        )
    if left_out:
        yield PageText(_note(left_out), "files that were left out")


def _member(source: Source, archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> Iterator[PageText]:
    """A file's pages; the first begins with its path, so that the whole text says it, too."""
    heading = f"\n\n===== {name} =====\n"
    member = source.member(name, _unpack(source, archive, info))
    parsed = open_document(member)
    for number, page in enumerate(parsed.pages, 1):
        place = page.anchor or (f"page {number}" if parsed.pages_total != 1 else "")
        # A page that is taken over from an earlier version has its text, and the path in it, there.
        text = page.text if page.digest in source.job.known else heading + page.text
        heading = ""
        yield PageText(text, f"{name}, {place}" if place else name, page.digest)


def _unpack(source: Source, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.flag_bits & _ENCRYPTED:
        raise UnsupportedDocument("It is encrypted.", hint="Save it without a password.", why=Unreadable.LOCKED)
    check_ratio(info, "ZIP")
    if info.file_size > MAX_MEMBER_BYTES:
        raise UnsupportedDocument(
            f"It is larger than {MAX_MEMBER_BYTES / 1024**2:,.0f} MB.",
            hint="Upload it by itself.",
            why=Unreadable.TOO_MUCH,
        )
    source.allowance.unpacked_bytes -= info.file_size
    if source.allowance.unpacked_bytes < 0:
        raise bomb("ZIP", source.allowance.limit_bytes)
    try:
        return archive.read(info)
    except _DAMAGE as error:
        raise UnsupportedDocument(
            f"It is damaged ({str(error)[:100]}).", hint="Pack it again.", why=Unreadable.DAMAGED
        ) from None


def safe_name(info: zipfile.ZipInfo) -> str:
    """A member's path, to be shown: relative, without control characters, in the encoding it most likely has."""
    name = info.filename
    if not info.flag_bits & _UTF8_NAME:  # zipfile took it for code page 437
        raw = name.encode("cp437", errors="replace")
        for encoding in ("utf-8", "gb18030"):
            try:
                name = raw.decode(encoding)
                break
            except UnicodeDecodeError:
                continue
    parts = (clean(part).strip() for part in name.replace("\\", "/").split("/"))
    path = "/".join(" ".join(part.split()) for part in parts if part not in ("", ".", ".."))
    return path[-_MAX_NAME_CHARS:]


def _is_wanted(info: zipfile.ZipInfo, name: str) -> bool:
    """Not folders, links, empty files, hidden files, or what macOS adds."""
    is_link = stat.S_ISLNK(info.external_attr >> 16)
    parts = name.split("/")
    hidden = any(part.startswith((".", "__MACOSX")) for part in parts)
    return bool(name) and not (info.is_dir() or is_link or info.file_size == 0 or hidden)


def _note(left_out: list[str]) -> str:
    told = left_out[:_MAX_TOLD]
    if len(left_out) > _MAX_TOLD:
        told.append(f"- and {len(left_out) - _MAX_TOLD:,} more")
    reasons = "\n".join(told)
    return f"\n\n[{len(left_out):,} of the archive's files could not be read and are left out:\n{reasons}]\n"
