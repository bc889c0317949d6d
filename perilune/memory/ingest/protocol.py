"""What the service and a parser process say to each other: one job in, frames out. Stdlib only, no pickling.

A frame on the wire is two big-endian u32 lengths, a JSON object and a blob. The parent trusts nothing a parser
writes: lengths are bounded before they are read, and the JSON is validated into these types.

    {"kind": "opened", "pages_total": 1158 | null}
    {"kind": "batch", "pages": ["text", …], "passages": [[page, start, end], …], "language": "en" | null} + postings
    {"kind": "done"}
    {"kind": "failed", "message": "…", "hint": "…"}
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any

from perilune.memory.chunk import Span

LENGTHS = struct.Struct(">II")
MAX_JSON_BYTES = 64 * 1024**2
MAX_BLOB_BYTES = 64 * 1024**2
_MAX_MESSAGE_CHARS = 1_000


class ProtocolError(Exception):
    """The other side wrote something that isn't a frame."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to parse and within which limits. `offset_chars` is where `first_page` begins in the whole text."""

    path: str
    filename: str
    first_page: int
    offset_chars: int
    max_pages: int
    max_text_bytes: int
    memory_bytes: int
    cpu_s: int

    def encode(self) -> bytes:
        return frame(asdict(self))


@dataclass(frozen=True, slots=True)
class Opened:
    """The parser could open the document. `pages_total` is None where only reading to the end tells."""

    pages_total: int | None


@dataclass(frozen=True, slots=True)
class Batch:
    """The next pages in order, their passages and the passages' postings."""

    pages: tuple[str, ...]
    passages: tuple[Span, ...]
    postings: bytes
    language: str | None


@dataclass(frozen=True, slots=True)
class Done:
    """The document was read to its end."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The document can't be read; both texts are for people."""

    message: str
    hint: str


Frame = Opened | Batch | Done | Failed


def frame(body: dict[str, Any], blob: bytes = b"") -> bytes:
    """One frame's bytes."""
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    return LENGTHS.pack(len(data), len(blob)) + data + blob


def encode(message: Frame) -> bytes:
    match message:
        case Opened(pages_total):
            return frame({"kind": "opened", "pages_total": pages_total})
        case Batch(pages, spans, postings, language):
            passages = [(span.page, span.start, span.end) for span in spans]
            body = {"kind": "batch", "pages": pages, "passages": passages, "language": language}
            return frame(body, postings)
        case Done():
            return frame({"kind": "done"})
        case Failed(message_text, hint):
            return frame({"kind": "failed", "message": message_text, "hint": hint})


def lengths(head: bytes) -> tuple[int, int]:
    """Bytes of JSON and of blob that follow. Raises `ProtocolError` past the bounds."""
    json_bytes, blob_bytes = LENGTHS.unpack(head)
    if json_bytes > MAX_JSON_BYTES or blob_bytes > MAX_BLOB_BYTES:
        raise ProtocolError(f"a frame of {json_bytes} + {blob_bytes} bytes")
    return json_bytes, blob_bytes


def decode_job(data: bytes) -> Job:
    return Job(**json.loads(data))


def decode(data: bytes, blob: bytes) -> Frame:
    """Validate a frame. Raises `ProtocolError`."""
    try:
        body = json.loads(data)
        match body["kind"]:
            case "opened":
                total = body["pages_total"]
                return Opened(None if total is None else int(total))
            case "batch":
                spans = tuple(Span(int(page), int(start), int(end)) for page, start, end in body["passages"])
                language = body["language"]
                return Batch(
                    tuple(_text(page) for page in body["pages"]),
                    spans,
                    blob,
                    None if language is None else _text(language)[:16],
                )
            case "done":
                return Done()
            case "failed":
                return Failed(_text(body["message"])[:_MAX_MESSAGE_CHARS], _text(body["hint"])[:_MAX_MESSAGE_CHARS])
            case other:
                raise ProtocolError(f"unknown kind {other!r:.40}")
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(str(error)) from None


def _text(value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ProtocolError("text expected")
    return value
