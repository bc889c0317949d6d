"""Hostile input in every dialect: the dialect's own error, in bounded memory and time, and the server goes on.

Grammars that explode are in tests/runtime/test_grammar_trial.py; slow and cut connections in test_connection.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from perilune.core import DEFAULT_TENANT
from perilune.service.archive import Archive
from perilune.service.ports import Caller

from .conftest import Serve, Server
from .fakes import MODEL, FakeService

MIB = 1 << 20
SMALL = ("/v1/memory/search",)
"""Its bodies may have 64 KB."""

LIMIT_S = 20.0
"""Refusals take milliseconds; machines that run tests are slow."""


@dataclass(frozen=True)
class Ask:
    """One way to ask. `many` holds so many messages; `tokens` names what bounds the answer."""

    path: str
    body: Mapping[str, Any]
    many: Callable[[int], Mapping[str, Any]] | None
    tokens: str | None
    anthropic: bool = False


USER = {"role": "user", "content": "why?"}
ASKS = {
    "chat": Ask(
        "/v1/chat/completions",
        {"model": MODEL, "messages": [USER]},
        lambda count: {"model": MODEL, "messages": [USER] * count},
        "max_tokens",
    ),
    "completions": Ask("/v1/completions", {"model": MODEL, "prompt": "why?"}, None, "max_tokens"),
    "responses": Ask(
        "/v1/responses",
        {"model": MODEL, "input": "why?"},
        lambda count: {"model": MODEL, "input": [USER] * count},
        "max_output_tokens",
    ),
    "messages": Ask(
        "/v1/messages",
        {"model": MODEL, "messages": [USER], "max_tokens": 9},
        lambda count: {"model": MODEL, "max_tokens": 9, "messages": [USER] * count},
        "max_tokens",
        anthropic=True,
    ),
    "messages under /anthropic": Ask(
        "/anthropic/v1/messages", {"model": MODEL, "messages": [USER], "max_tokens": 9}, None, "max_tokens", True
    ),
    "count_tokens": Ask(
        "/v1/messages/count_tokens",
        {"model": MODEL, "messages": [USER]},
        lambda count: {"model": MODEL, "messages": [USER] * count},
        None,
        anthropic=True,
    ),
    "input_tokens": Ask(
        "/v1/responses/input_tokens",
        {"model": MODEL, "input": "why?"},
        lambda count: {"model": MODEL, "input": [USER] * count},
        None,
    ),
    "estimate-token-count": Ask(
        "/v1/tokenizers/estimate-token-count",
        {"model": MODEL, "messages": [USER]},
        lambda count: {"model": MODEL, "messages": [USER] * count},
        None,
    ),
    "estimate": Ask(
        "/v1/estimate",
        {"model": MODEL, "messages": [USER]},
        lambda count: {"model": MODEL, "messages": [USER] * count},
        "max_tokens",
    ),
    "embeddings": Ask(
        "/v1/embeddings",
        {"model": MODEL, "input": "why?"},
        lambda count: {"model": MODEL, "input": ["why?"] * count},
        None,
    ),
    "compact": Ask(
        "/v1/responses/compact",
        {"model": MODEL, "input": "why?"},
        lambda count: {"model": MODEL, "input": [USER] * count},
        None,
    ),
    "conversations": Ask(
        "/v1/conversations", {}, lambda count: {"items": [{"type": "message", **USER}] * count}, None
    ),
    "vector stores": Ask(
        "/v1/vector_stores", {}, lambda count: {"file_ids": [f"file-{at}" for at in range(count)]}, None
    ),
    "search": Ask(
        "/v1/memory/search", {"query": "why?"}, lambda count: {"query": "x", "sessions": ["s"] * count}, None
    ),
    "batches": Ask("/v1/batches", {}, None, None),
    "uploads": Ask("/v1/uploads", {}, None, None),
    "feedback": Ask("/v1/feedback", {}, None, None),
}
MAY_BE_EMPTY = ("/v1/conversations", "/v1/vector_stores")
EVERY = pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)


async def refused(
    server: Server, ask: Ask, data: Any, status: int, code: str = "invalid_request"
) -> dict[str, Any]:
    """The dialect's own error, in time."""
    began_s = time.monotonic()
    headers = {"content-type": "application/json"}
    async with server.http.post(ask.path, data=data, headers=headers) as reply:
        body = await reply.json()
    assert time.monotonic() - began_s < LIMIT_S
    assert reply.status == status, body
    if ask.anthropic:
        assert set(body) == {"type", "error", "request_id"}
        assert (body["type"], set(body["error"])) == ("error", {"type", "message"})
        assert body["error"]["type"] == ("request_too_large" if status == 413 else "invalid_request_error")
        assert body["request_id"] == reply.headers["request-id"]
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["code"] == code
    assert server.service.requests == []
    error: dict[str, Any] = body["error"]
    return error


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@EVERY
async def test_200_mb_of_body(serve: Serve, ask: Ask) -> None:
    """Declared, it is refused unread. In pieces, at the limit: never more than that is held."""
    piece, sent = b" " * MIB, 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(200):
            sent += 1
            yield piece

    async with serve() as server:
        before = resident_bytes()
        head = f"POST {ask.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {200 * MIB}\r\n\r\n"
        assert b" 413 " in await server.raw(head.encode())
        with contextlib.suppress(aiohttp.ClientConnectionError):  # it may close while the client still sends
            await refused(server, ask, pieces(), 413, "too_large")
        assert sent < 200
        assert resident_bytes() - before < 160 * MIB  # 32 are held, and joined


@EVERY
async def test_json_that_is_a_thousand_deep(serve: Serve, ask: Ask) -> None:
    async with serve() as server:
        for opening, closing in (('{"a":', "}"), ("[", "]")):
            deep = opening * 1000 + "1" + closing * 1000
            await refused(
                server, ask, json.dumps(dict(ask.body))[:-1] + f', "x": {deep}}}' if ask.body else deep, 400
            )


@EVERY
@pytest.mark.parametrize(
    "data",
    [
        b'{"model": "\xff\xfe"}',
        b'{"model": "\xed\xa0\x80"}',
        b'{"model": "\\ud800"}',
        b"\xef\xbb\xbf\x00",
        b"{",
        b"",
        b"null",
        b"[]",
        b'{"model": NaN}',
        b'{"model": 1e999}',
    ],
)
async def test_bytes_that_are_no_json(serve: Serve, ask: Ask, data: bytes) -> None:
    if data == b"" and not ask.body and ask.path in MAY_BE_EMPTY:
        return
    async with serve() as server:
        await refused(server, ask, data, 400)


MANY = {name: ask for name, ask in ASKS.items() if ask.many is not None}


@pytest.mark.parametrize("ask", MANY.values(), ids=MANY)
async def test_a_hundred_thousand_messages(serve: Serve, ask: Ask) -> None:
    assert ask.many is not None
    async with serve() as server:
        before = resident_bytes()
        data = io.BytesIO(json.dumps(ask.many(100_000)).encode())
        small = ask.path.startswith(SMALL)
        await refused(server, ask, data, 413 if small else 400, "too_large" if small else "invalid_request")
        assert resident_bytes() - before < 200 * MIB


BOUNDED = {name: ask for name, ask in ASKS.items() if ask.tokens is not None}


@pytest.mark.parametrize("ask", BOUNDED.values(), ids=BOUNDED)
@pytest.mark.parametrize("value", ["1000000000", "1e9", "-1", "0", "99999999999999999999999", '"9"', "true", "1.5"])
async def test_answers_of_a_billion_tokens(serve: Serve, ask: Ask, value: str) -> None:
    if value == "0" and ask.path == "/v1/completions":
        return  # there it means no answer at all
    async with serve() as server:
        body = json.dumps({**ask.body, ask.tokens: None}).replace(
            f'"{ask.tokens}": null', f'"{ask.tokens}": {value}'
        )
        error = await refused(server, ask, body, 400)
        assert ask.tokens is not None
        assert ask.anthropic or error["param"] == ask.tokens or value.startswith("999")


KEYS = {"mine": Caller(DEFAULT_TENANT, "user"), "theirs": Caller("bob", "user")}


async def test_another_tenants_ids_dont_exist(serve: Serve, archive: Archive) -> None:
    """Whatever is named, and however: the answer is that of an id that never was."""
    async with serve(FakeService(keys=KEYS, responses=archive), key="mine") as server:
        file = await server.client.files.create(file=("a.txt", b"secret"), purpose="user_data")
        answer = await server.client.responses.create(model=MODEL, input="why?")
        for path in (
            f"/v1/files/{file.id}",
            f"/v1/files/{file.id}/content",
            f"/v1/files/{file.id}/pages/1",
            f"/v1/responses/{answer.id}",
            f"/v1/responses/{answer.id}/input_items",
        ):
            theirs = await _get(server, path, "theirs")
            unknown = await _get(
                server, path.replace(file.id, "file-none").replace(answer.id, "resp_none"), "theirs"
            )
            assert theirs[0] == unknown[0] == 404, path
            assert _named(theirs[1], file.id, answer.id) == _named(unknown[1], "file-none", "resp_none"), path
            assert (await _get(server, path, "mine"))[0] == 200, path
        body = {"model": MODEL, "input": "why?", "previous_response_id": answer.id}
        headers = {"authorization": "Bearer theirs"}
        assert (await server.http.post("/v1/responses", json=body, headers=headers)).status == 404
        for path in (f"/v1/files/{file.id}", f"/v1/responses/{answer.id}"):
            assert (await server.http.delete(path, headers=headers)).status == 404
            assert (await _get(server, path, "mine"))[0] == 200


async def _get(server: Server, path: str, key: str) -> tuple[int, str]:
    async with server.http.get(path, headers={"authorization": f"Bearer {key}"}) as reply:
        return reply.status, await reply.text(errors="replace")


def _named(text: str, *ids: str) -> str:
    for each in ids:
        text = text.replace(each, "ID")
    return text


async def test_the_same_upload_ten_times(serve: Serve) -> None:
    """Each is a file of its own to its owner; none is lost with another."""
    async with serve() as server:
        made = [await server.client.files.create(file=("a.txt", b"one"), purpose="user_data") for _ in range(10)]
        assert len({file.id for file in made}) == 10
        await server.client.files.delete(made[0].id)
        for file in made[1:]:
            assert (await server.client.files.content(file.id)).content == b"one"
