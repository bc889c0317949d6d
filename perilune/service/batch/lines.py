"""A batch's input, line by line: what a line must look like, and everything that is wrong with a file.

Knows the JSON Lines of OpenAI's batches; whether a body can be answered is its endpoint's to say, when it is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import orjson

from perilune.memory.batches import Line

MAX_ERRORS = 100
"""Errors that are told; the rest of the file isn't read then."""

MAX_CUSTOM_ID_CHARS = 512
MAX_EMBEDDING_INPUTS = 50_000
EMBEDDINGS = "/v1/embeddings"
_BOM = b"\xef\xbb\xbf"
_ELSEWHERE = {
    "stream": "A batch's answers are files; they can't be streamed.",
    "background": "A batch runs in the background anyway.",
}


@dataclass(frozen=True, slots=True)
class InputLimits:
    max_lines: int
    max_line_bytes: int
    max_bytes: int


@dataclass(slots=True)
class _Refused(Exception):
    """What is wrong with a line."""

    code: str
    message: str
    param: str | None = None


@dataclass(slots=True)
class InputCheck:
    """Reads an input. After `read`, `errors` says what is wrong, as the batch object tells it; the rest what was
    found. `model` is the one that all lines name."""

    endpoint: str
    limits: InputLimits
    errors: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    session_ids: set[str] = field(default_factory=set)
    _models: set[str] = field(default_factory=set)
    _custom_ids: set[str] = field(default_factory=set)
    _inputs: int = 0

    @property
    def model(self) -> str | None:
        return next(iter(self._models)) if len(self._models) == 1 else None

    def read(self, file: BinaryIO) -> Iterator[Line]:
        """The lines that hold a request, in order. Blank ones are left out. Blocks."""
        start, number = 0, 0
        while raw := file.readline(self.limits.max_line_bytes + 1):
            number += 1
            if len(raw) > self.limits.max_line_bytes:
                why = f"A line has at most {self.limits.max_line_bytes:,} bytes."
                self._add(_Refused("line_too_large", why), number)
                return
            begin = len(_BOM) if start == 0 and raw.startswith(_BOM) else 0
            if raw[begin:].strip():
                try:
                    custom_id = self._check(raw[begin:])
                except _Refused as refused:
                    self._add(refused, number)
                    if len(self.errors) >= MAX_ERRORS:
                        return
                else:
                    yield Line(self.total, custom_id, start + begin, len(raw) - begin)
                self.total += 1
            start += len(raw)
            if self.total > self.limits.max_lines:
                why = f"A batch has at most {self.limits.max_lines:,} requests."
                self._add(_Refused("too_many_tasks", why), None)
                return
        if not number or not self.total:
            self._add(_Refused("empty_file", "The input file holds no requests."), None)

    def _check(self, raw: bytes) -> str:
        """The line's custom id. Raises `_Refused`."""
        line = parsed(raw)
        custom_id = line.get("custom_id")
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
            why = f"custom_id is a text of 1 to {MAX_CUSTOM_ID_CHARS} characters."
            raise _Refused("missing_required_parameter", why, "custom_id")
        if custom_id in self._custom_ids:
            raise _Refused("duplicate_custom_id", "Another line has the same custom_id.", "custom_id")
        self._custom_ids.add(custom_id)
        if line.get("method") != "POST":
            raise _Refused("invalid_method", "method must be POST.", "method")
        if line.get("url") != self.endpoint:
            raise _Refused("invalid_url", f"url must be the batch's endpoint, {self.endpoint}.", "url")
        body = line.get("body")
        if not isinstance(body, dict):
            raise _Refused("missing_required_parameter", "body must be a JSON object.", "body")
        for name, why in _ELSEWHERE.items():
            if body.get(name):
                raise _Refused("unsupported_parameter", why, f"body.{name}")
        self._note(body)
        return custom_id

    def _note(self, body: dict[str, Any]) -> None:
        model, session_id, inputs = body.get("model"), body.get("session"), body.get("input")
        if isinstance(model, str):
            self._models.add(model[:256])
        if isinstance(session_id, str) and len(session_id) <= 64:
            self.session_ids.add(session_id)
        if self.endpoint == EMBEDDINGS:
            self._inputs += len(inputs) if isinstance(inputs, list) else 1
            if self._inputs > MAX_EMBEDDING_INPUTS:
                why = f"A batch embeds at most {MAX_EMBEDDING_INPUTS:,} inputs, all lines together."
                raise _Refused("too_many_inputs", why, "body.input")

    def _add(self, refused: _Refused, line: int | None) -> None:
        self.errors.append({"code": refused.code, "line": line, "message": refused.message, "param": refused.param})


def parsed(raw: bytes) -> dict[str, Any]:
    """A line as an object. Raises `_Refused` for anything else; invalid UTF-8 is no JSON."""
    try:
        line = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise _Refused("invalid_json_line", "The line isn't valid JSON in UTF-8.") from None
    if not isinstance(line, dict):
        raise _Refused("invalid_json_line", "The line must be a JSON object.")
    return line


def body_of(raw: bytes) -> bytes:
    """The request in a line that was checked: as batch work, without a deadline of its own."""
    body = parsed(raw)["body"]
    for name in ("deadline", "deadline_s"):
        body.pop(name, None)
    return orjson.dumps(body | {"service_tier": "batch"})
