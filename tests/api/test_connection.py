"""Clients that connect and send nothing, too little, too slowly, or bytes that are no HTTP: over real sockets."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from perilune.api import limits
from perilune.api.connection import Connection

from .conftest import Serve, Server, eventually

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


def error_in(reply: bytes) -> dict[str, str]:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower(), reply
    error: dict[str, str] = json.loads(body)["error"]
    assert error["message"]
    return error


async def until_closed(reader: asyncio.StreamReader, within_s: float = 5.0) -> bytes:
    async with asyncio.timeout(within_s):
        return await reader.read()


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00 a TLS hello\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nx: a\x00b\r\n\r\n",
        POST + b"Content-Length: -5\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nabc\r\n",
        POST + b"Transfer-Encoding: gzip\r\n\r\nabc",
    ],
)
async def test_bytes_that_are_no_request_get_the_one_error_shape(serve: Serve, data: bytes) -> None:
    async with serve() as server:
        reply = await server.raw(data)
        assert reply.startswith(b"HTTP/1.1 400 ")
        assert "HTTP/1.1" in error_in(reply)["message"]
        assert (await server.http.get("/health")).status == 200


async def test_bytes_after_an_early_refusal_are_dropped(serve: Serve) -> None:
    """The answer was complete before the body came: nothing may be written behind it."""
    async with serve(max_body=2048) as server:
        reply = await server.raw(
            POST + b"Transfer-Encoding: chunked\r\n\r\nFFFF\r\n" + b"x" * 3000 + b"ZZ\r\nno chunk"
        )
        assert reply.count(b"HTTP/1.1 ") == 1
        assert b" 413 " in reply


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: local", b"GET /health HT"])
async def test_headers_must_end_in_time(serve: Serve, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(Connection, "headers_s", 0.3)
    async with serve() as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        begun_s = time.monotonic()
        writer.write(sent)
        for _ in range(4 if sent else 0):  # a byte now and then buys no time
            await asyncio.sleep(0.05)
            writer.write(b"x")
        reply = await until_closed(reader)
        assert time.monotonic() - begun_s < 2
        assert reply.startswith(b"HTTP/1.1 408 ")
        assert error_in(reply)["code"] == "request_timeout"
        writer.close()


async def test_headers_must_end_in_time_after_an_answer_too(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "headers_s", 0.3)
    async with serve() as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTTP/1.1\r\nHos")
        await asyncio.sleep(0.1)
        writer.write(b"t: local")
        reply = await until_closed(reader)
        assert reply.count(b"HTTP/1.1 200 ") == 1
        assert reply.count(b"HTTP/1.1 408 ") == 1
        writer.close()


async def test_a_long_answer_is_not_cut_by_the_bound_on_headers(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "headers_s", 0.1)
    async with serve() as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(POST + b"Content-Length: 2\r\n\r\n")
        await asyncio.sleep(0.3)  # headers came in time; the body has its own bound
        writer.write(b"{}")
        assert (await reader.read(20)).startswith(b"HTTP/1.1 400 ")
        writer.close()


async def test_a_body_must_come_at_a_rate(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each silence is short, and yet it ends: otherwise a byte now and then would hold a place for ever."""
    monkeypatch.setattr(limits.body_chunks, "__defaults__", ("request body", 0.3))
    monkeypatch.setattr(Connection, "linger_s", 0.5)  # what is sent after the refusal holds nothing either
    async with serve() as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(POST + b"Content-Length: 5000\r\n\r\n")
        trickling = asyncio.create_task(_trickle(writer))
        async with asyncio.timeout(20):
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 408 ")
        await eventually(lambda: not server.uvicorn.server_state.connections)  # although the client still sends
        trickling.cancel()
        writer.close()


async def _trickle(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"{")
        await asyncio.sleep(0.05)


async def test_connections_are_bounded_and_the_idlest_makes_room(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "max_connections", 5)
    async with serve() as server:
        lazy = [await asyncio.open_connection(server.host, server.port) for _ in range(5)]
        await eventually(lambda: len(server.uvicorn.server_state.connections) == 5)
        assert (await server.http.get("/health")).status == 200
        assert await _gone(lazy[0]) == b""
        assert len(server.uvicorn.server_state.connections) <= 5
        for _, writer in lazy:
            writer.close()


async def test_connections_at_work_are_not_closed_for_others(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "max_connections", 3)
    async with serve() as server:
        busy = [await _half_body(server) for _ in range(3)]
        reply = await server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 503 ")
        assert error_in(reply)["code"] == "overloaded"
        for _, writer in busy:
            writer.close()


async def test_a_peer_with_many_connections_pushes_out_only_its_own(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "max_connections", 5)
    async with serve() as server:
        honest = await asyncio.open_connection(server.host, server.port, local_addr=("127.0.0.2", 0))
        await eventually(lambda: len(server.uvicorn.server_state.connections) == 1)
        greedy = [await asyncio.open_connection(server.host, server.port) for _ in range(9)]
        await eventually(lambda: len(server.uvicorn.server_state.connections) == 5)
        assert await _gone(greedy[0]) == b"", "the idlest of the greedy peer made room"
        honest[1].write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await honest[0].read(20)).startswith(b"HTTP/1.1 200 ")
        for _, writer in (honest, *greedy):
            writer.close()


async def test_a_busy_peer_is_refused_before_an_honest_idle_one_is_closed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "max_connections", 4)
    async with serve() as server:
        honest = await asyncio.open_connection(server.host, server.port, local_addr=("127.0.0.2", 0))
        busy = [await _half_body(server) for _ in range(3)]
        reply = await server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 503 ")
        honest[1].write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await honest[0].read(20)).startswith(b"HTTP/1.1 200 ")
        for _, writer in (honest, *busy):
            writer.close()


async def test_the_request_after_a_refused_body_is_not_cut(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the body and the next request come in the same bytes, and that one's own body takes a while."""
    monkeypatch.setattr(Connection, "linger_s", 0.3)
    async with serve(max_body=2048) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(POST + b"Content-Length: 5000\r\n\r\n" + b"x" * 3000)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")
        writer.write(b"x" * 2000 + POST + b"Content-Length: 2\r\n\r\n{")
        await asyncio.sleep(0.6)
        writer.write(b"}")
        assert b"HTTP/1.1 400 " in await asyncio.wait_for(reader.readuntil(b"HTTP/1.1 400 "), 20)
        writer.close()


async def test_a_pipelined_request_is_not_taken_for_a_refused_body(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "linger_s", 0.3)
    async with serve() as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        writer.write(first + POST + b"Content-Length: 2\r\n\r\n{")
        await asyncio.sleep(0.6)
        writer.write(b"}")
        assert await asyncio.wait_for(reader.readuntil(b"HTTP/1.1 400 "), 20)
        writer.close()


async def _half_body(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(POST + b"Content-Length: 500\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.05)
    return reader, writer


async def _gone(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
    try:
        return await until_closed(streams[0])
    except ConnectionResetError:
        return b""
