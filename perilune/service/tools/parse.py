"""Reads calls out of an answer's text while it arrives.

Knows one notation; doesn't know tools or dialects. Text that may begin a call is held back until it is known not to
be one. What looks like a call and turns out not to be is text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from perilune.service.tools.formats import ToolFormat

MAX_HEAD_CHARS = 512
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]{1,128})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


@dataclass(frozen=True, slots=True)
class Said:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallWrote:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


Piece = Said | CallBegan | CallWrote


class _At(Enum):
    TEXT = auto()
    HEAD = auto()
    ARGUMENTS = auto()
    TAIL = auto()


class CallParser:
    """One answer. Feed `push`, then `flush` at its end."""

    def __init__(self, notation: ToolFormat) -> None:
        self._notation = notation
        self._at = _At.TEXT
        self._held = ""
        self._json = _JsonEnd()
        self._fresh = True  # nothing was said yet
        self.calls = 0

    @property
    def whole(self) -> bool:
        """Whether calls were made, and the last one's arguments have come to their end."""
        return self.calls > 0 and self._at is not _At.ARGUMENTS

    def push(self, text: str) -> Iterator[Piece]:
        self._held += text
        while True:
            before = (self._at, len(self._held))
            yield from self._step()
            if (self._at, len(self._held)) == before or not self._held:
                return

    def flush(self) -> Iterator[Piece]:
        """What was held back. A call that was cut off keeps what it wrote."""
        rest, self._held = self._held, ""
        if self._at is _At.HEAD:
            rest = (self._notation.marker if not self._notation.is_bare else "") + rest
        if self._at in (_At.TEXT, _At.HEAD) and (rest.strip() or (rest and not self.calls)):
            yield Said(rest)

    def _step(self) -> Iterator[Piece]:
        match self._at:
            case _At.TEXT:
                yield from self._text()
            case _At.HEAD:
                yield from self._head()
            case _At.ARGUMENTS:
                yield from self._arguments()
            case _At.TAIL:
                self._tail()

    def _text(self) -> Iterator[Piece]:
        marker, bare = self._notation.marker, self._notation.is_bare
        found = self._held.find(marker) if not bare or self._fresh else -1
        if bare and found >= 0 and self._held[:found].strip():
            found = -1
        if found >= 0:
            yield from self._say(self._held[:found].rstrip())
            self._held = self._held[found if bare else found + len(marker) :]
            self._at = _At.HEAD
            return
        keep = 0 if bare and not self._fresh else _overlap(self._held, marker)
        sure = self._held[: len(self._held) - keep]
        shown = sure.rstrip()  # white space before a call is no text
        yield from self._say(shown)
        self._held = self._held[len(shown) :]

    def _say(self, text: str) -> Iterator[Piece]:
        if text:
            self._fresh = False
            yield Said(text)

    def _head(self) -> Iterator[Piece]:
        found = _HEAD.match(self._held)
        if found:
            self._held = self._held[found.end() :]
            self._at, self._json = _At.ARGUMENTS, _JsonEnd()
            yield CallBegan(self.calls, found[1])
            self.calls += 1
        elif len(self._held) > MAX_HEAD_CHARS or self._held.lstrip()[:1] not in ("", "{"):
            self._at = _At.TEXT
            if self._notation.is_bare:
                said, self._held = self._held, ""
            else:  # the marker was text; behind it a call may begin
                said = self._notation.marker
            yield from self._say(said)

    def _arguments(self) -> Iterator[Piece]:
        end = self._json.find(self._held)
        part = self._held if end is None else self._held[:end]
        self._held = self._held[len(part) :]
        if part:
            yield CallWrote(self.calls - 1, part)
        if end is not None:
            self._at = _At.TAIL

    def _tail(self) -> None:
        close = "}" + self._notation.close
        if len(self._held) < len(close) and close.startswith(self._held):
            return
        self._held = (
            self._held.removeprefix(close) if self._held.startswith(close) else self._held.removeprefix("}")
        )
        self._at, self._fresh = _At.TEXT, False


class _JsonEnd:
    """Finds where an object ends that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = self._escaped = False

    def find(self, text: str) -> int | None:
        """Index behind the object's last brace in this piece; None while it goes on."""
        for index, char in enumerate(text):
            if self._in_text:
                self._in_text = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_text = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        return None


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    return next((size for size in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:size])), 0)
