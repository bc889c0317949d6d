"""Streams read byte by byte, as no client does: cut anywhere, or timed."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

from .conftest import MODEL, Server

Sse = dict[str, Any]

FIRST_S, SILENCE_S = 0.2, 1.0
"""What is promised of every streamed request (spec C5): its first bytes, and the longest silence after them."""


class Lateness:
    """How much too late this machine lets a thread go on that has slept, meanwhile: what a busy machine, and no
    fault of the server, adds to a time measured here. Use as a context manager."""

    _PAUSE_S = 0.02

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def allowed_s(self) -> float:
        """What may be added to a promise: the server and its reader may both have had the worst of it."""
        return 2 * self.worst_s + 0.05

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._over.wait(self._PAUSE_S):
            now = time.monotonic()
            self.worst_s = max(self.worst_s, now - last - self._PAUSE_S)
            last = now


def opened(server: Server, method: str, path: str, body: Any = None) -> tuple[http.client.HTTPConnection, Any]:
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    headers = {"content-type": "application/json", "authorization": f"Bearer {server.key}"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    return connection, connection.getresponse()


def cut_after(server: Server, most_bytes: int | None, method: str, path: str, body: Any = None) -> list[Sse]:
    """The whole data events among the first bytes of a stream, which is then cut; None: of all of it."""
    connection, reply = opened(server, method, path, body)
    assert reply.status == 200, reply.read()
    data = b""
    while (most_bytes is None or len(data) < most_bytes) and (byte := reply.read1(1 if most_bytes else 65536)):
        data += byte
    connection.close()
    return list(events_in(data))


def events_in(data: bytes) -> Iterator[Sse]:
    for piece in data.decode(errors="ignore").split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in piece.split("\n") if not line.startswith(":"))
        if "data" in lines:
            payload = lines["data"]
            yield {"id": lines.get("id"), "data": None if payload == "[DONE]" else json.loads(payload)}


@dataclass
class Timed:
    """When a stream's bytes came: seconds from the request's end to the first, the longest silence, and to the
    end."""

    dialect: str
    first_s: float = 0.0
    silence_s: float = 0.0
    total_s: float = 0.0
    text: str = field(default="", repr=False)


def long_prompt(number: int, words: int) -> str:
    return " ".join(f"w{number}x{word * 7919 % 9973}" for word in range(words)) + " Say yes."


def requests_of(prompt: str, deadline_s: float) -> dict[str, tuple[str, Any]]:
    """One streamed request in each dialect."""
    messages = [{"role": "user", "content": prompt}]
    base = {"model": MODEL, "stream": True, "temperature": 0}
    return {
        "chat": ("/v1/chat/completions", base | {"messages": messages, "max_tokens": 2, "deadline_s": deadline_s}),
        "responses": ("/v1/responses", base | {"input": prompt, "max_output_tokens": 2, "deadline_s": deadline_s}),
        "messages": ("/v1/messages", base | {"messages": messages, "max_tokens": 2}),
        "completions": ("/v1/completions", base | {"prompt": prompt, "max_tokens": 2, "deadline_s": deadline_s}),
    }


def timed(server: Server, dialect: str, path: str, body: Any, until_s: float = float("inf")) -> Timed:
    """Read a stream to its end, or to the monotonic time `until_s`, and then leave it."""
    found = Timed(dialect)
    start = last = time.monotonic()
    connection, reply = opened(server, "POST", path, body)
    data = b""
    with contextlib.closing(connection):
        assert reply.status == 200, reply.read()
        while last < until_s and (chunk := reply.read1(65536)):
            now = time.monotonic()
            if not data:
                found.first_s = now - start
            else:
                found.silence_s = max(found.silence_s, now - last)
            last = now
            data += chunk
    found.total_s, found.text = last - start, data.decode(errors="ignore")
    return found
