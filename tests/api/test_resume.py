"""Streams that outlive their connection: resumed without a gap, by their tenant only, and never for long."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from perilune.api.resume import Resumables, StreamLog
from perilune.core import ChoiceFinished, Completed, FinishReason, TextDelta, Usage
from perilune.errors import Conflict, ModelNotFound, NotFound, Overloaded
from perilune.service.archive import Archive
from perilune.service.ports import Caller

from .conftest import Serve, Server, eventually
from .fakes import MODEL, Fail, FakeService, Pause, Step, opening, report

ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "why?"}],
    "stream": True,
    "stream_options": {"resumable": True},
}
SLOW: list[Step] = [
    *opening(),
    TextDelta(0, "one "),
    TextDelta(0, "two "),
    Pause(0.4),
    TextDelta(0, "three"),
    ChoiceFinished(0, FinishReason.STOP),
    Completed(Usage(3, 3, 0), report()),
]


def words(text: str) -> str:
    return "".join(re.findall(r'"content":"([^"]*)"', text))


def ids(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"^id: (\d+)$", text, re.MULTILINE)]


async def read_some(server: Server, until: str) -> tuple[str, str]:
    """Start a stream, read up to `until` and hang up; the text and the completion's id."""
    text = ""
    async with server.http.post("/v1/chat/completions", json=ASK) as reply:
        async for chunk in reply.content.iter_any():
            text += chunk.decode()
            if until in text:
                break
        reply.close()
    found = re.search(r'"id":"(chatcmpl-\w+)"', text)
    assert found is not None
    return text, found[1]


async def test_a_dropped_stream_is_resumed_without_a_gap(serve: Serve) -> None:
    async with serve(FakeService(SLOW)) as server:
        text, key = await read_some(server, "two ")
        last = ids(text)[-1]
        reply = await server.http.get(f"/v1/chat/completions/{key}?starting_after={last}")
        rest = await reply.text()
        assert words(text + rest) == "one two three"
        assert ids(text + rest) == list(range(len(ids(text + rest))))
        assert rest.endswith("data: [DONE]\n\n")
        again = await server.http.get(f"/v1/chat/completions/{key}", headers={"last-event-id": str(last)})
        assert ids(await again.text()) == ids(rest)  # after the end too
        whole = await (await server.http.get(f"/v1/chat/completions/{key}")).text()
        assert words(whole) == "one two three"


def events(data: bytes) -> list[bytes]:
    """The whole events among bytes that may be cut off anywhere, without comments."""
    return [piece for piece in data.split(b"\n\n")[:-1] if not piece.startswith(b":")]


async def cut_everywhere(server: Server, path: str, body: dict[str, Any], place: Callable[[bytes], str]) -> None:
    """Cut a stream behind each of its bytes and go on where it was cut: nothing is lost, nothing comes twice.
    What a client has got of an event that was cut is worth nothing: it goes on behind the last whole one."""
    async with server.http.post(path, json=body) as reply:
        whole = await reply.read()
    rests: dict[bytes, list[bytes]] = {}
    for cut in range(len(whole) + 1):
        if not (got := events(whole[:cut])):
            continue
        last = re.findall(rb"^id: (\d+)$", got[-1], re.MULTILINE)[0]
        if last not in rests:
            async with server.http.get(place(whole) + last.decode()) as reply:
                rests[last] = events(await reply.read())
        assert got + rests[last] == events(whole), cut
    assert len(rests) == len(events(whole)) > 5


async def test_a_chat_cut_behind_any_byte_goes_on(serve: Serve) -> None:
    def place(whole: bytes) -> str:
        key = re.findall(rb'"id":"(chatcmpl-\w+)"', whole)[0].decode()
        return f"/v1/chat/completions/{key}?starting_after="

    async with serve() as server:
        for options in ({}, {"include_usage": True, "include_progress": True, "include_obfuscation": True}):
            body = {**ASK, "n": 2, "stream_options": {"resumable": True, **options}}
            await cut_everywhere(server, "/v1/chat/completions", body, place)


async def test_a_response_cut_behind_any_byte_goes_on(serve: Serve, archive: Archive) -> None:
    def place(whole: bytes) -> str:
        key = re.findall(rb'"id":"(resp_\w+)"', whole)[0].decode()
        return f"/v1/responses/{key}?stream=true&starting_after="

    async with serve(FakeService(responses=archive)) as server:
        body = {"model": MODEL, "input": "why?", "stream": True, "background": True}
        await cut_everywhere(server, "/v1/responses", body, place)


async def test_the_openai_client_reads_numbered_events(serve: Serve) -> None:
    async with serve(FakeService(SLOW)) as server:
        stream = await server.client.chat.completions.create(**ASK)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "one two three"


async def test_delete_stops_the_answer(serve: Serve) -> None:
    service = FakeService([*opening(), TextDelta(0, "one "), Pause(3600)])
    async with serve(service) as server:
        _, key = await read_some(server, "one ")
        await asyncio.sleep(0.1)
        assert service.open == 1  # still running without a reader
        reply = await server.http.delete(f"/v1/chat/completions/{key}")
        assert (await reply.json())["deleted"]
        assert service.open == 0
        assert (await server.http.get(f"/v1/chat/completions/{key}")).status == 404


async def test_stopping_the_server_stops_it_too(serve: Serve) -> None:
    service = FakeService([*opening(), TextDelta(0, "one "), Pause(3600)])
    async with serve(service) as server:
        await read_some(server, "one ")
    assert service.open == 0


async def test_only_the_tenant_finds_it(serve: Serve) -> None:
    keys = {"alpha": Caller("a", "user"), "beta": Caller("b", "user")}
    service = FakeService(SLOW, keys)
    async with serve(service) as server:
        headers = {"authorization": "Bearer alpha"}
        text = await (await server.http.post("/v1/chat/completions", json=ASK, headers=headers)).text()
        found = re.search(r'"id":"(chatcmpl-\w+)"', text)
        assert found is not None
        path = f"/v1/chat/completions/{found[1]}"
        assert (await server.http.get(path, headers=headers)).status == 200
        other = {"authorization": "Bearer beta"}
        assert (await server.http.get(path, headers=other)).status == 404
        assert (await server.http.delete(path, headers=other)).status == 404
        for value in ("x", "-2", "1" * 30):
            assert (await server.http.get(f"{path}?starting_after={value}", headers=headers)).status == 400


async def test_errors_keep_their_status_or_become_events(serve: Serve) -> None:
    async with serve(FakeService([Fail(ModelNotFound("No such model."))])) as server:
        assert (await server.http.post("/v1/chat/completions", json=ASK)).status == 404
    async with serve(FakeService([*opening(), Fail(Overloaded("No block is free."))])) as server:
        text = await (await server.http.post("/v1/chat/completions", json=ASK)).text()
        assert "No block is free." in text
        assert "[DONE]" not in text


async def test_nobody_reads_for_long() -> None:
    resumables = Resumables(resume_s=0.1)
    stopped = asyncio.Event()

    async def write(log: StreamLog) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.set()

    log = resumables.start("key", "t", write)
    reader = log.read(-1)
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0.3)
    assert resumables.find("key", "t") is log  # kept while it is read
    waiting.cancel()
    await asyncio.wait({waiting})
    await eventually(stopped.is_set)
    with pytest.raises(NotFound):
        resumables.find("key", "t")


async def test_a_long_log_forgets_its_beginning() -> None:
    log = StreamLog("t", max_bytes=200)
    for i in range(50):
        log.add(b'data: {"n":%d}\n\n: a comment\n\n' % i, settled=True)
    log.finish(None)
    with pytest.raises(Conflict):
        await anext(log.read(-1))
    kept = [event async for event, _ in log.read(41)]
    assert kept[0] == b'id: 42\ndata: {"n":42}\n\n'
    assert len(kept) == 8
    assert log.readers == 0
