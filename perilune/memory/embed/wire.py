"""What an embedder process and its client say to each other: length-prefixed frames. Stdlib only, no pickling.

A request is a u32 length and JSON {"id", "role", "texts"}. An answer is two u32 lengths, JSON {"id", "rows",
"width", "error"} and rows × width float32, little-endian. Answers come in the order in which work ends, so they
carry the id.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

REQUEST = struct.Struct("<I")
ANSWER = struct.Struct("<II")
COUNT = "count-"
"""Before a role: not vectors are wanted but each text's number of tokens, as one float each."""

MAX_BYTES = 64 * 1024**2

Read = Callable[[int], bytes]


class WireError(Exception):
    """The other side ended or wrote something else."""


def request(number: int, role: str, texts: list[str]) -> bytes:
    body = json.dumps({"id": number, "role": role, "texts": texts}).encode()
    return REQUEST.pack(len(body)) + body


def read_request(read: Read) -> dict[str, Any] | None:
    """The next request; None at the end of the stream."""
    head = read(REQUEST.size)
    if not head:
        return None
    body: dict[str, Any] = json.loads(read(*REQUEST.unpack(head)))
    return body


def answer(number: int, rows: int, width: int, data: bytes, error: str = "") -> bytes:
    body = json.dumps({"id": number, "rows": rows, "width": width, "error": error}).encode()
    return ANSWER.pack(len(body), len(data)) + body + data


def read_answer(read: Read) -> tuple[dict[str, Any], bytes]:
    """The next answer. Raises `WireError` at the end of the stream or for something that is no answer."""
    head = read(ANSWER.size)
    if len(head) < ANSWER.size:
        raise WireError("it ended")
    json_bytes, data_bytes = ANSWER.unpack(head)
    if max(json_bytes, data_bytes) > MAX_BYTES:
        raise WireError("it wrote something that is no answer")
    body, data = read(json_bytes), read(data_bytes)
    if len(body) < json_bytes or len(data) < data_bytes:
        raise WireError("it ended")
    said = _answer(body)
    if data_bytes != 4 * said["rows"] * said["width"]:
        raise WireError("it wrote a wrong number of vectors")
    return said, data


def _answer(body: bytes) -> dict[str, Any]:
    """The JSON of an answer. Raises `WireError` for anything else."""
    try:
        said: Any = json.loads(body)
    except ValueError:
        said = None
    form = {"id": int, "rows": int, "width": int, "error": str}
    if not isinstance(said, dict) or not all(type(said.get(name)) is kind for name, kind in form.items()):
        raise WireError("it wrote something that is no answer")
    if min(said["rows"], said["width"]) < 0:
        raise WireError("it wrote something that is no answer")
    return said
