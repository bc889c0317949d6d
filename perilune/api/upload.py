"""Multipart uploads, streamed to a temporary file under a hard limit.

Knows multipart/form-data; doesn't know what files are for. Bytes over the limit are refused before they are stored
for good, and a body that ends before its last boundary is an error: a cut document must never look whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, cast

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Receive, Scope

from perilune.api.limits import body_chunks, declared_length, header, too_large
from perilune.errors import InvalidRequest, Overloaded

MAX_FIELD_BYTES = 4096
MAX_PARTS = 16
FRAME_BYTES = 64 * 1024
"""What boundaries, part headers and small fields may add to the file itself."""

_MEMORY_BYTES = 1024 * 1024
_MAX_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class Upload:
    """A received form: its one file, and its small text fields."""

    filename: str
    data: BinaryIO
    fields: dict[str, str]


@asynccontextmanager
async def received(
    scope: Scope, receive: Receive, max_bytes: int, folder: Path, part: str = "file"
) -> AsyncIterator[Upload]:
    """Read a form whose part of that name holds one file of at most `max_bytes`; temporary data lies in `folder`.

    Raises `TooLarge`, `InvalidRequest` (not multipart, cut off, no file), `Overloaded` when the disk is full, and
    what `body_chunks` raises. The temporary file is gone when the context ends.
    """
    boundary = _boundary(header(scope, b"content-type"))
    limit = max_bytes + FRAME_BYTES
    if (declared_length(scope) or 0) > limit:
        raise too_large(max_bytes, "file")
    with _spool(folder) as spool:
        form = _Form(boundary, max_bytes, part)
        async for chunk in body_chunks(scope, receive, limit, "file"):
            await _store(spool, form.feed(chunk))
        form.check_complete()
        spool.seek(0)
        yield Upload(form.filename or "", spool, form.fields)


@contextmanager
def _spool(folder: Path) -> Generator[BinaryIO]:
    # The folder of the store, because /tmp is often in memory.
    place = str(folder) if folder.is_dir() else None
    with SpooledTemporaryFile(max_size=_MEMORY_BYTES, dir=place) as spool:
        yield cast(BinaryIO, spool)


async def _store(spool: BinaryIO, data: bytes) -> None:
    if not data:
        return
    try:
        await asyncio.to_thread(spool.write, data)
    except OSError as error:
        raise Overloaded(
            f"The upload couldn't be stored ({error.strerror}).",
            hint="Free some disk space on the server and send it again.",
        ) from None


def _boundary(content_type: bytes | None) -> bytes:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidRequest(
            "An upload must be multipart/form-data with a boundary.",
            hint='With curl: -F purpose=user_data -F "file=@report.pdf".',
        )
    return boundary


class _Form:
    """Parser state. `feed` returns the file's bytes that a piece of the body held."""

    def __init__(self, boundary: bytes, max_bytes: int, part: str) -> None:
        self._part = part
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._max_bytes = max_bytes
        self._file_bytes = 0
        self._parts = 0
        self._complete = False
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._disposition = b""
        self._field: str | None = None
        self._value = bytearray()
        self._out: list[bytes] = []
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begin,
                    "on_part_data": self._part_data,
                    "on_part_end": self._part_end,
                    "on_header_field": lambda data, start, end: self._header_name.extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_finished,
                    "on_end": self._end,
                },
            )
        except FormParserError:
            raise _malformed() from None

    def feed(self, chunk: bytes) -> bytes:
        try:
            self._parser.write(chunk)
        except FormParserError:
            raise _malformed() from None
        out, self._out = b"".join(self._out), []
        return out

    def check_complete(self) -> None:
        if not self._complete:
            raise InvalidRequest("The upload ended before its last boundary.", hint="Send the file again.")
        if self.filename is None:
            raise InvalidRequest(
                "The form has no file.", hint=f"Send it in the part named {self._part}.", param=self._part
            )

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise InvalidRequest(f"The form has more than {MAX_PARTS} parts.", hint="Send file and purpose.")
        self._disposition = b""
        self._field = None

    def _header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", errors="replace")
        if name != self._part:
            self._field = name
            return
        if self.filename is not None:
            raise InvalidRequest("The form has two files.", hint="Upload them one by one.", param=name)
        if b"filename" not in options:
            raise InvalidRequest(f"The part {name} has no filename.", hint="Send it as a file.", param=name)
        self.filename = clean_filename(unescaped(options[b"filename"].decode("utf-8", errors="replace")))

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is not None:
            self._value += data[start:end]
            if len(self._value) > MAX_FIELD_BYTES:
                raise InvalidRequest("A field of the form is too long.", param=self._field[:64])
            return
        self._file_bytes += end - start
        if self._file_bytes > self._max_bytes:
            raise too_large(self._max_bytes, "file")
        self._out.append(data[start:end])

    def _part_end(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._value.decode("utf-8", errors="replace")
            self._value.clear()

    def _end(self) -> None:
        self._complete = True


def _malformed() -> InvalidRequest:
    return InvalidRequest("The body isn't well-formed multipart/form-data.", hint="Send the file again.")


def unescaped(name: str) -> str:
    """A file's name as it is, from how every browser, curl and httpx write it into a form.

    Source: the HTML standard, "multipart/form-data encoding algorithm". It leaves % alone, so that a name that
    truly holds %22 can't be told from one with a quote.
    """
    return name.replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")


def clean_filename(name: str) -> str:
    """The last path component, without control characters, at most 255 bytes: for showing, never for opening."""
    base = name.replace("\\", "/").rsplit("/", 1)[-1]
    shown = "".join(char for char in base if char.isprintable()).strip()
    stem, dot, suffix = shown.rpartition(".")
    if not dot or len(suffix) > 16:
        stem, dot, suffix = shown, "", ""
    room = _MAX_NAME_BYTES - len((dot + suffix).encode())
    stem = stem.encode()[:room].decode("utf-8", errors="ignore")
    return f"{stem}{dot}{suffix}" or "unnamed"
