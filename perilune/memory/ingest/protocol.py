"""What the service, a starter and a parser process say to each other. Stdlib only, no pickling.

A parser gets one job and answers with frames.

A frame on the wire is two big-endian u32 lengths, a JSON object and a blob. The parent trusts nothing a parser
writes: lengths are bounded before they are read, and the JSON is validated into these types.

    {"kind": "opened", "pages_total": 1158 | null}
    {"kind": "batch", "pages": [["text", "anchor", "digest"], …], "passages": [[page, start, end], …],
     "language": "en" | null} + postings
    {"kind": "unchanged", "pages": [["digest", "anchor"], …]}
    {"kind": "picture"} + PNG
    {"kind": "done"}
    {"kind": "failed", "message": "…", "hint": "…"}
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from perilune.errors import Unreadable
from perilune.memory.chunk import Span
from perilune.memory.ingest.pagination import PageText

LENGTHS = struct.Struct(">II")
START, STOP = b"s", b"k"
"""Orders to a starter: run a parser with the stdin, stdout and stderr that come along; kill it."""

STATUS = struct.Struct(">i")
"""A starter's answer to each START, when its parser has ended: the exit status as `subprocess` counts it."""

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_JSON_BYTES = 64 * 1024**2
MAX_BLOB_BYTES = 64 * 1024**2
_MAX_MESSAGE_CHARS = 1_000
_MAX_ANCHOR_CHARS = 500
_DIGEST_CHARS = 32


class ProtocolError(Exception):
    """The other side wrote something that isn't a frame."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to parse and within which limits. `offset_chars` is where `first_page` begins in the whole text.

    With a `picture_width`, `first_page` is drawn so many pixels wide, and nothing is read.
    `ocr_pages` is how many images are read at most. `known` holds what an earlier version of the document consists
    of: the digests of its pages, with their text's length in characters.
    """

    path: str
    filename: str
    first_page: int
    offset_chars: int
    max_pages: int
    max_text_bytes: int
    memory_bytes: int
    cpu_s: int
    ocr_pages: int = 0
    known: Mapping[str, int] = field(default_factory=dict)
    picture_width: int = 0

    def encode(self) -> bytes:
        return frame(asdict(self))


@dataclass(frozen=True, slots=True)
class Opened:
    """The parser could open the document. `pages_total` is None where only reading to the end tells."""

    pages_total: int | None


@dataclass(frozen=True, slots=True)
class Batch:
    """The next pages in order, each with its digest, their passages and the passages' postings."""

    pages: tuple[PageText, ...]
    passages: tuple[Span, ...]
    postings: bytes
    language: str | None


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The next pages in order are those of the earlier version with these digests; anchors may have moved."""

    pages: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A page as a PNG."""

    png: bytes


@dataclass(frozen=True, slots=True)
class Done:
    """The document was read to its end."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The document can't be read; both texts are for people, `why` is for programs."""

    message: str
    hint: str
    why: Unreadable | None = None


Frame = Opened | Batch | Unchanged | Picture | Done | Failed


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
            texts = [(page.text, page.anchor, page.digest) for page in pages]
            body = {"kind": "batch", "pages": texts, "passages": passages, "language": language}
            return frame(body, postings)
        case Unchanged(references):
            return frame({"kind": "unchanged", "pages": references})
        case Picture(png):
            return frame({"kind": "picture"}, png)
        case Done():
            return frame({"kind": "done"})
        case Failed(message_text, hint, why):
            return frame({"kind": "failed", "message": message_text, "hint": hint, "why": why})


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
                    tuple(_page(*page) for page in body["pages"]),
                    spans,
                    blob,
                    None if language is None else _text(language)[:16],
                )
            case "unchanged":
                pages = (_page("", anchor, digest) for digest, anchor in body["pages"])
                return Unchanged(tuple((page.digest, page.anchor) for page in pages))
            case "picture":
                if not blob.startswith(PNG_SIGNATURE):
                    raise ProtocolError("a PNG expected")
                return Picture(blob)
            case "done":
                return Done()
            case "failed":
                message, hint = (_text(body[name])[:_MAX_MESSAGE_CHARS] for name in ("message", "hint"))
                why = body.get("why")
                return Failed(message, hint, None if why is None else Unreadable(why))
            case other:
                raise ProtocolError(f"unknown kind {other!r:.40}")
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(str(error)) from None


def _page(text: object, anchor: object, digest: object) -> PageText:
    return PageText(_text(text), _text(anchor)[:_MAX_ANCHOR_CHARS], _text(digest)[:_DIGEST_CHARS])


def _text(value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ProtocolError("text expected")
    return value
