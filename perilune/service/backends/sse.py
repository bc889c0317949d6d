"""Server-sent events as they come from an untrusted server: bytes in, the data of each event out.

Knows the framing and its bounds; doesn't know what the data means.
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_EVENT_BYTES = 1 << 20
"""Longest event. Chunks of an answer take some hundred bytes, with twenty alternatives a token some thousand."""


class EventTooLong(Exception):
    """The server sent more than `MAX_EVENT_BYTES` without ending an event."""


class EventReader:
    """Feed it pieces, however they are cut. Comments and fields other than `data` are dropped."""

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest = b""
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of every event that is complete now. Raises `EventTooLong`."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) + self._data_bytes > self._max_bytes:
            raise EventTooLong
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._data_bytes += len(line)
                if self._data_bytes > self._max_bytes:
                    raise EventTooLong
            elif not line and self._data:
                data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                self._data, self._data_bytes = [], 0
                yield data
