"""A scripted upstream on a loopback socket: whatever bytes a test wants, and a record of what came."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

Write = Callable[[bytes], Awaitable[None]]
Script = Callable[["Seen", Write], Awaitable[None]]


@dataclass
class Seen:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the client has closed the connection."""


@dataclass
class Upstream:
    """`script` answers a chat; `models` what the probe sees."""

    script: Script
    models: bytes = b'{"object": "list", "data": []}'
    port: int = 0
    seen: list[Seen] = field(default_factory=list)
    probes: int = 0
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        pairs = (line.partition(":") for line in head[1:] if line)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET":
            self.probes += 1
            writer.write(response(200, self.models))
            await writer.drain()
            return True
        request = Seen(method, path, headers, json.loads(body))
        self.seen.append(request)

        async def watch() -> None:
            with suppress(ConnectionError):
                await reader.read(1)
            request.gone.set()

        watcher = asyncio.create_task(watch())

        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        try:
            await self.script(request, write)
        finally:
            watcher.cancel()
        return False  # one chat for each connection: what follows a script isn't HTTP any more


def response(status: int, body: bytes, kind: str = "application/json", **headers: str) -> bytes:
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def chunk(text: str = "", reason: str | None = None, index: int = 0, **more: Any) -> bytes:
    delta = {"content": text} if text else {}
    choice = {"index": index, "delta": delta, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def thought_chunk(text: str, field: str = "reasoning_content") -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {field: text}}]}).encode() + b"\n\n"


def usage_chunk(prompt: int, completion: int, cached: int = 0) -> bytes:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"


def saying(*words: str, pause_s: float = 0.0) -> Script:
    """A well-behaved answer."""

    async def script(request: Seen, write: Write) -> None:
        await write(STREAM_HEAD)
        for word in words:
            await asyncio.sleep(pause_s)
            await write(chunk(word))
        await write(chunk(reason="stop") + usage_chunk(7, len(words)))

    return script


def calling(*pieces: tuple[int, str], name: str = "look", text: str = "") -> Script:
    """Calls of a tool, as (number of the call, piece of its arguments)."""

    async def script(request: Seen, write: Write) -> None:
        await write(STREAM_HEAD + (chunk(text) if text else b""))
        begun: set[int] = set()
        for number, piece in pieces:
            call: dict[str, Any] = {"index": number, "function": {"arguments": piece}}
            if number not in begun:
                begun.add(number)
                call |= {"id": f"theirs-{number}", "type": "function"}
                call["function"]["name"] = name
            choice = {"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}
            await write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        await write(chunk(reason="tool_calls") + usage_chunk(7, len(pieces)))

    return script


def answering(data: bytes) -> Script:
    """Fixed bytes, then the connection is closed."""

    async def script(request: Seen, write: Write) -> None:
        await write(data)

    return script


def hanging(*first: bytes) -> Script:
    """Some bytes, then silence until the client leaves."""

    async def script(request: Seen, write: Write) -> None:
        for piece in first:
            await write(piece)
        await request.gone.wait()

    return script


@asynccontextmanager
async def upstream(script: Script) -> AsyncIterator[Upstream]:
    made = Upstream(script)
    open_now: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_now.add(task)
        try:
            await made.handle(reader, writer)
        finally:
            open_now.discard(task)

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 24)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for task in set(open_now):
            task.cancel()
