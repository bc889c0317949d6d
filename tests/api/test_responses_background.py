"""Answers in the background, their streams and their end, over a scripted service and a real database."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import openai
import pytest
import sqlalchemy as sa
from starlette.types import Receive

from perilune.api import limits
from perilune.core import Request
from perilune.errors import EngineBusy, Overloaded
from perilune.memory.schema import RESPONSES
from perilune.service.archive import Archive

from .conftest import Serve, Server, eventually
from .fakes import MODEL, WORDS, Fail, FakeService, Pause, Step, answer, opening

ASK: dict[str, Any] = {"model": MODEL, "input": "What is it?", "background": True}
SAID = "".join(WORDS)


def slowly() -> list[Step]:
    """An answer that comes to no end."""
    return [*opening(), Pause(60.0)]


async def until(server: Server, response_id: str, *status: str) -> Any:
    async with asyncio.timeout(10):
        while True:
            found = await server.client.responses.retrieve(response_id)
            if found.status in status:
                return found
            await asyncio.sleep(0.02)


async def test_it_is_made_though_nobody_waits(serve: Serve, archive: Archive) -> None:
    async with serve(FakeService(responses=archive)) as server:
        queued = await server.client.responses.create(**ASK)
        assert (queued.status, queued.background, queued.output) == ("queued", True, [])
        made = await until(server, queued.id, "completed")
        assert made.output_text == SAID
        follows = await server.client.responses.create(model=MODEL, input="So?", previous_response_id=queued.id)
        assert follows.output_text == SAID
        (first, _) = server.service.requests
        assert first.deadline_s == 600.0  # nobody waits: nothing is left out to be in time


async def test_it_outlives_its_client_and_is_cancelled_by_name(serve: Serve, archive: Archive) -> None:
    async with serve(FakeService(script=slowly(), responses=archive)) as server:
        stream = await server.client.responses.create(**ASK, stream=True)
        kinds = []
        async for event in stream:
            kinds.append(event.type)
            if event.type == "response.in_progress":
                break
        assert kinds == ["response.created", "response.queued", "response.in_progress"]
        await stream.close()
        response_id = event.response.id  # type: ignore[union-attr]
        await server.service.reached.wait()
        assert (await server.client.responses.retrieve(response_id)).status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="isn't finished"):
            await server.client.responses.create(model=MODEL, input="So?", previous_response_id=response_id)
        assert server.service.open == 1

        for _ in range(2):  # the second time it is cancelled already
            assert (await server.client.responses.cancel(response_id)).status == "cancelled"
        assert server.service.open == 0
        assert (await server.client.responses.retrieve(response_id)).status == "cancelled"
        last = [event async for event in await server.client.responses.retrieve(response_id, stream=True)][-1]
        assert (last.type, last.response.status) == ("response.failed", "cancelled")  # type: ignore[union-attr]


async def test_only_the_background_can_be_cancelled_and_streamed_again(serve: Serve, archive: Archive) -> None:
    async with serve(FakeService(responses=archive)) as server:
        whole = await server.client.responses.create(model=MODEL, input="What?")
        with pytest.raises(openai.BadRequestError, match="background"):
            await server.client.responses.cancel(whole.id)
        with pytest.raises(openai.BadRequestError, match="background"):
            await server.client.responses.retrieve(whole.id, stream=True)
        async with server.http.get(f"/v1/responses/{whole.id}?stream=maybe") as reply:
            assert (reply.status, (await reply.json())["error"]["param"]) == (400, "stream")
        for call in (
            server.client.responses.cancel("resp_x"),
            server.client.responses.retrieve("resp_x", stream=True),
        ):
            with pytest.raises(openai.NotFoundError):
                await call


async def test_a_failure_is_told(serve: Serve, archive: Archive) -> None:
    script = [*opening(), Fail(Overloaded("Full.", hint="Wait."))]
    async with serve(FakeService(script=script, responses=archive)) as server:
        queued = await server.client.responses.create(**ASK)
        failed = await until(server, queued.id, "failed")
        assert (failed.error.code, failed.error.message) == ("server_error", "Full. Wait.")


async def test_it_waits_while_the_queue_is_full(
    serve: Serve, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perilune.api.responses_background.ROOM_S", 0.01)
    service = FakeService(script=[Fail(EngineBusy("Full."))], responses=archive)
    async with serve(service) as server:
        queued = await server.client.responses.create(**ASK)
        await eventually(lambda: len(service.requests) > 3)
        assert (await server.client.responses.retrieve(queued.id)).status == "queued"
        service.script = answer(service.requests[0])
        assert (await until(server, queued.id, "completed")).output_text == SAID


async def test_what_is_deleted_is_made_no_further(serve: Serve, archive: Archive) -> None:
    async with serve(FakeService(script=slowly(), responses=archive)) as server:
        queued = await server.client.responses.create(**ASK)
        await server.service.reached.wait()
        await server.client.responses.delete(queued.id)
        assert server.service.open == 0
        with pytest.raises(openai.NotFoundError):
            await server.client.responses.retrieve(queued.id)


async def test_a_server_that_stops_says_so(serve: Serve, archive: Archive) -> None:
    async with serve(FakeService(script=slowly(), responses=archive)) as server:
        queued = await server.client.responses.create(**ASK)
        await server.service.reached.wait()
    stopped = (await archive.get("local", queued.id)).body
    assert stopped["status"] == "failed"
    # one that was killed had no time to say it
    body = {**stopped, "id": "resp_killed", "status": "queued", "error": None}
    await archive.begin("local", [], body)
    async with serve(FakeService(responses=archive)) as server:
        killed = await server.client.responses.retrieve("resp_killed")
        assert killed.status == "failed"
        assert killed.error is not None
        assert "server stopped" in killed.error.message


async def test_an_answer_that_was_left_or_failed_isnt_kept(serve: Serve, archive: Archive) -> None:
    service = FakeService(script=slowly(), responses=archive)
    async with serve(service) as server:
        stream = await server.client.responses.create(model=MODEL, input="What?", stream=True)
        async for event in stream:
            if event.type == "response.created":
                response_id = event.response.id
                break
        await service.reached.wait()
        assert (await server.client.responses.retrieve(response_id)).status == "in_progress"
        await stream.close()
        await eventually(lambda: service.open == 0)
        async with asyncio.timeout(20):
            while True:
                try:
                    await server.client.responses.retrieve(response_id)
                except openai.NotFoundError:
                    break
                await asyncio.sleep(0.01)


async def events_of(server: Server, response_id: str, after: int, most_bytes: int | None) -> list[bytes]:
    """The whole events among the first bytes of a stream that is then cut."""
    path = f"/v1/responses/{response_id}?stream=true&starting_after={after}"
    data = b""
    async with server.http.get(path) as reply:
        assert reply.status == 200, await reply.text()
        async for chunk in reply.content.iter_any():
            data += chunk
            if most_bytes is not None and len(data) >= most_bytes:
                data = data[:most_bytes]
                break
    pieces = data.split(b"\n\n")[:-1]  # the last is cut, or empty
    return [piece for piece in pieces if not piece.startswith(b":")]


async def check_cuts(server: Server, response_id: str) -> None:
    """Cut everywhere, and once more behind the cut."""
    whole = await events_of(server, response_id, -1, None)
    numbers = [int(event.split(b"\n", 1)[0].removeprefix(b"id: ")) for event in whole]
    assert numbers == list(range(len(whole)))
    length = sum(len(event) + 2 for event in whole)
    for cut in range(1, length + 1, 13):
        first = await events_of(server, response_id, -1, cut)
        second = await events_of(server, response_id, len(first) - 1, cut)
        rest = await events_of(server, response_id, len(first) + len(second) - 1, None)
        assert first + second + rest == whole, cut
    again = [event async for event in await server.client.responses.retrieve(response_id, stream=True)]
    assert "".join(event.delta for event in again if event.type == "response.output_text.delta") == SAID
    tail = await server.client.responses.retrieve(response_id, stream=True, starting_after=len(whole) - 2)
    assert [event.type async for event in tail] == ["response.completed"]


async def test_a_stream_cut_at_any_byte_goes_on_where_it_was_cut(serve: Serve, archive: Archive) -> None:
    async with serve(FakeService(responses=archive)) as server:
        queued = await server.client.responses.create(**ASK)
        await until(server, queued.id, "completed")
        await check_cuts(server, queued.id)
    async with serve(FakeService(responses=archive)) as server:  # from the database
        await check_cuts(server, queued.id)


async def test_a_stream_that_is_being_made_goes_on_where_it_was_cut(serve: Serve, archive: Archive) -> None:
    script = answer(Request("", "", MODEL, (), 0.0))
    halves = [*script[:9], Pause(0.3), *script[9:]]
    async with serve(FakeService(script=halves, responses=archive)) as server:
        queued = await server.client.responses.create(**ASK)
        await server.service.reached.wait()
        said = ""
        async for event in await server.client.responses.retrieve(queued.id, stream=True):
            if event.type == "response.output_text.delta":
                said, last = said + event.delta, event.sequence_number
                break
        async for event in await server.client.responses.retrieve(queued.id, stream=True, starting_after=last):
            said += event.delta if event.type == "response.output_text.delta" else ""
    assert said == SAID


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"background": True}, {"background": True, "stream": True}])
async def test_who_leaves_while_the_row_is_written_leaves_none(
    serve: Serve, archive: Archive, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    kept = archive._kept
    assert kept is not None
    begin, wait_gone = kept.begin, limits._wait_gone
    writing, may_write, written, gone = (threading.Event() for _ in range(4))

    def slowly_begun(*row: Any) -> None:
        writing.set()
        may_write.wait(10)
        begin(*row)
        written.set()

    async def told(receive: Receive) -> None:
        await wait_gone(receive)
        gone.set()

    def none_kept() -> bool:
        with kept._store.read() as connection:
            return not connection.execute(sa.select(RESPONSES.c.id)).all()

    monkeypatch.setattr(kept, "begin", slowly_begun)
    monkeypatch.setattr(limits, "_wait_gone", told)
    async with serve(FakeService(script=slowly(), responses=archive)) as server:

        async def ask() -> None:
            async with server.http.post("/v1/responses", json={"model": MODEL, "input": "Why?", **more}) as reply:
                await reply.read()

        asking = asyncio.create_task(ask())
        await asyncio.to_thread(writing.wait, 10)
        asking.cancel()
        await asyncio.to_thread(gone.wait, 10)
        may_write.set()
        await asyncio.to_thread(written.wait, 10)
        await eventually(none_kept)
        assert server.service.open == 0
