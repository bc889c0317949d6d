"""`OpenAIBackend` against scripted sockets: faults of every kind, cancellation, and what leaves."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from perilune.core import ReasoningDelta, SamplingParams, TextDelta, Usage
from perilune.errors import ConfigError, ContextTooLong, Forbidden, Overloaded, Unreachable
from perilune.service.backends.departure import Departed, Leaving, Stream
from perilune.service.backends.openai import Address, OpenAIBackend, retry_after_s
from perilune.service.backends.protocol import (
    BackendDone,
    BackendFault,
    Call,
    ChatMessage,
    FaultKind,
)
from perilune.service.backends.sse import EventReader
from tests.contracts.backend import collect, text_of
from tests.service.backends.upstream import (
    STREAM_HEAD,
    Script,
    Seen,
    Upstream,
    Write,
    answering,
    chunk,
    hanging,
    response,
    saying,
    thought_chunk,
    upstream,
    usage_chunk,
)

CALL = Call("req-1", "acme", (ChatMessage("user", "Who is Ada?"),))


def backend_of(up: Upstream, **more: Any) -> OpenAIBackend:
    fields: dict[str, Any] = {"connect_s": 1.0, "silence_s": 0.3, "probe_s": 0.3} | more
    return OpenAIBackend(Address("up", up.url, "their-model", 4096, **fields))


async def fault_of(script: Script, call: Call = CALL) -> BackendFault:
    async with upstream(script) as up:
        backend = backend_of(up)
        with pytest.raises(BackendFault) as caught:
            await collect(backend, call)
        await backend.close()
    return caught.value


async def test_an_answer_with_its_usage() -> None:
    async with upstream(saying("Ada ", "wrote.")) as up:
        backend = backend_of(up, key="secret")
        events = await collect(backend, CALL)
        assert text_of(events) == "Ada wrote."
        assert events[-1] == BackendDone(Usage(7, 2, 0))
        sent = up.seen[0]
        assert (sent.path, sent.headers["authorization"]) == ("/v1/chat/completions", "Bearer secret")
        assert sent.body["model"] == "their-model"
        assert sent.body["stream_options"] == {"include_usage": True}
        assert sent.body["messages"] == [{"role": "user", "content": "Who is Ada?"}]
        await backend.close()


async def test_only_what_differs_from_the_usual_is_sent() -> None:
    async with upstream(saying("x")) as up:
        backend = backend_of(up)
        await collect(backend, CALL)
        assert set(up.seen[0].body) == {"model", "messages", "stream", "stream_options", "temperature", "top_p"}
        sampling = SamplingParams(max_tokens=5, seed=1, stop=("\n",), logit_bias=((3, -1.0),), top_k=4, logprobs=2)
        await collect(backend, replace(CALL, sampling=sampling, continues=True))
        body = up.seen[1].body
        wanted = {
            "max_tokens": 5,
            "seed": 1,
            "stop": ["\n"],
            "logit_bias": {"3": -1.0},
            "top_k": 4,
            "logprobs": True,
            "top_logprobs": 2,
            "continue_final_message": True,
        }
        assert wanted.items() <= body.items()
        await backend.close()


REFUSALS: list[tuple[bytes, FaultKind]] = [
    (response(429, b"{}", retry_after="7"), FaultKind.LIMITED),
    (response(500, b"boom"), FaultKind.OVERLOADED),
    (response(503, b"{}", retry_after="7"), FaultKind.OVERLOADED),
    (response(401, b"{}"), FaultKind.DENIED),
    (response(404, b"{}"), FaultKind.DENIED),
    (response(307, b"", location="http://127.0.0.1:1/"), FaultKind.DENIED),
    (response(400, b'{"error": {"code": "context_length_exceeded"}}'), FaultKind.TOO_LONG),
    (response(400, b'{"error": {"type": "exceed_context_size_error", "code": 400}}'), FaultKind.TOO_LONG),
    (response(413, b"{}"), FaultKind.TOO_LONG),
    (response(400, b'{"error": {"message": "This model\'s maximum context length is 2048 tokens.", "code": 400}}'),
     FaultKind.TOO_LONG),
    (response(400, b'{"error": {"code": "bad_thing"}}'), FaultKind.REFUSED),
    (response(422, b"not json"), FaultKind.REFUSED),
    (b"", FaultKind.UNREACHABLE),
    (b"garbage\r\n\r\n\x00\xff", FaultKind.BROKEN),
    (response(200, b'{"choices": []}'), FaultKind.BROKEN),
    (STREAM_HEAD + b"data: not json\n\n", FaultKind.BROKEN),
    (STREAM_HEAD + b'data: {"choices": [{"index": 9}]}\n\n', FaultKind.BROKEN),
    (STREAM_HEAD + b'data: {"choices": [{"delta": {"content": 7}}]}\n\n', FaultKind.BROKEN),
    (STREAM_HEAD + b'data: {"usage": {"prompt_tokens": -1, "completion_tokens": 1}}\n\n', FaultKind.BROKEN),
    (STREAM_HEAD + b'data: {"error": {"code": "overloaded"}}\n\n', FaultKind.OVERLOADED),
    (STREAM_HEAD + chunk("half"), FaultKind.BROKEN),
    (STREAM_HEAD + chunk("half") + b"data: [DONE]\n\n", FaultKind.BROKEN),
    (STREAM_HEAD + b"data: " + b"x" * (1 << 21), FaultKind.BROKEN),
    (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 999\r\n\r\n" + chunk("a"),
     FaultKind.UNREACHABLE),
]  # fmt: skip


@pytest.mark.parametrize(("data", "kind"), REFUSALS)
async def test_each_fault_has_its_kind(data: bytes, kind: FaultKind) -> None:
    fault = await fault_of(answering(data))
    assert fault.kind is kind
    assert fault.backend == "up"
    if b"retry-after" in data or b"retry_after" in data:
        assert fault.retry_after_s == 7.0
    assert str(fault.shown())


@pytest.mark.parametrize("first", [(), (STREAM_HEAD,), (STREAM_HEAD, chunk("half"))])
async def test_silence_is_given_up_in_every_phase(first: tuple[bytes, ...]) -> None:
    start_s = time.monotonic()
    fault = await fault_of(hanging(*first))
    assert fault.kind is FaultKind.TIMED_OUT
    assert time.monotonic() - start_s < 5


async def test_nobody_listens() -> None:
    backend = OpenAIBackend(Address("gone", "http://127.0.0.1:9/v1", "m", 4096))
    for ask in (collect(backend, CALL), backend.probe()):
        with pytest.raises(BackendFault) as caught:
            await ask
        assert caught.value.kind is FaultKind.UNREACHABLE
    await backend.close()
    await backend.close()


async def test_a_refusal_says_nothing_of_what_the_backend_wrote() -> None:
    body = b'{"error": {"message": "key sk-123 of Ada", "code": "sk-123 of Ada"}}'
    fault = await fault_of(answering(response(400, body)))
    assert "Ada" not in str(fault.shown())
    assert "sk-" not in str(fault.shown())


async def test_errors_people_see() -> None:
    assert isinstance(BackendFault(FaultKind.TOO_LONG, "b", "x").shown(), ContextTooLong)
    assert isinstance(BackendFault(FaultKind.LIMITED, "b", "x").shown(), Overloaded)
    assert isinstance(BackendFault(FaultKind.BROKEN, "b", "x").shown(), Unreachable)


async def test_leaving_closes_the_connection_to_the_upstream() -> None:
    async with upstream(hanging(STREAM_HEAD, chunk("a"))) as up:
        backend = backend_of(up, silence_s=30.0)
        async with aclosing(backend.chat(CALL)) as events:
            assert isinstance(await anext(events), TextDelta)
        await asyncio.wait_for(up.seen[0].gone.wait(), 20)
        task = asyncio.create_task(collect(backend, CALL))
        while len(up.seen) < 2:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait({task})
        await asyncio.wait_for(up.seen[1].gone.wait(), 20)
        await backend.close()


async def test_a_connection_that_died_in_the_pool_costs_no_request() -> None:
    async with upstream(saying("x")) as up:
        backend = backend_of(up)
        await backend.probe()  # leaves a connection in the pool
        tries = 0

        async def first_closes(request: Seen, write: Write) -> None:
            nonlocal tries
            tries += 1
            if tries > 1:
                await saying("x")(request, write)

        up.script = first_closes
        assert text_of(await collect(backend, CALL)) == "x"
        assert tries == 2
        await backend.close()


async def test_a_connection_that_was_reset_in_the_pool_costs_no_request() -> None:
    """As llama.cpp's server does it: an answer came whole, and the next request meets a reset."""
    answer = STREAM_HEAD.replace(b"connection: close", b"transfer-encoding: chunked")
    body = chunk("x", "stop") + usage_chunk(7, 1)
    asked = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        for again in (False, True):
            head = await reader.readuntil(b"\r\n\r\n")
            size = next(
                int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
            )
            await reader.readexactly(size)
            asked += 1
            if again:
                linger = struct.pack("ii", 1, 0)  # close with a reset
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
                return
            writer.write(answer + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
            await writer.drain()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    backend = OpenAIBackend(Address("up", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "m", 4096))
    for _ in range(2):
        assert text_of(await collect(backend, CALL)) == "x"
    assert asked == 3
    await backend.close()
    server.close()


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_what_a_backend_thinks_is_no_text(field: str) -> None:
    data = STREAM_HEAD + thought_chunk("hm", field) + chunk("yes", "stop") + usage_chunk(3, 9)
    async with upstream(answering(data)) as up:
        backend = backend_of(up)
        events = await collect(backend, CALL)
        assert events[0] == ReasoningDelta(0, "hm")
        assert text_of(events) == "yes"
        await backend.close()


async def test_without_usage_pieces_are_counted_and_it_is_said() -> None:
    async with upstream(answering(STREAM_HEAD + chunk("a") + chunk("b", "stop"))) as up:
        backend = backend_of(up)
        assert (await collect(backend, CALL))[-1] == BackendDone(Usage(0, 2, 0), counted=False)
        await backend.close()


class Names:
    """Replaces a name, and holds back the letters that may be its beginning."""

    def __init__(self) -> None:
        self.seen: list[Leaving] = []
        self.held = ""

    async def leave(self, leaving: Leaving) -> Departed:
        self.seen.append(leaving)
        texts = [text.replace("Ada", "P1") for text in leaving.said.texts()]
        return Departed(leaving.said.rewritten(texts), self, altered=True)

    def push(self, stream: Stream, text: str) -> str:
        text = (self.held + text).replace("P1", "Ada")
        self.held = "P" if text.endswith("P") else ""
        return text.removesuffix("P")

    def flush(self, stream: Stream) -> str:
        held, self.held = self.held, ""
        return held


async def test_all_text_passes_the_departure_and_is_reversed() -> None:
    names = Names()
    async with upstream(saying("P", "1 wrote to P")) as up:
        backend = OpenAIBackend(Address("up", up.url, "m", 4096), names)
        events = await collect(backend, replace(CALL, sampling=SamplingParams(stop=("Ada:",))))
        assert text_of(events) == "Ada wrote to P"
        assert "Ada" not in str(up.seen[0].body)
        assert up.seen[0].body["stop"] == ["P1:"]
        assert (names.seen[0].tenant, names.seen[0].backend) == ("acme", "up")
        await backend.close()


async def test_what_is_thought_is_reversed_too() -> None:
    """Also what was held back when the thoughts ended."""
    data = STREAM_HEAD + thought_chunk("Of P") + thought_chunk("1 or P") + chunk("P1.", "stop") + usage_chunk(3, 9)
    async with upstream(answering(data)) as up:
        backend = OpenAIBackend(Address("up", up.url, "m", 4096), Names())
        events = await collect(backend, CALL)
        thought = [event.text for event in events if isinstance(event, ReasoningDelta)]
        assert ("".join(thought), text_of(events)) == ("Of Ada or P", "Ada.")
        await backend.close()


async def test_what_may_not_leave_does_not() -> None:
    class Nothing:
        async def leave(self, leaving: Leaving) -> Departed:
            raise Forbidden("This tenant's memory is local only.")

    async with upstream(saying("x")) as up:
        backend = OpenAIBackend(Address("up", up.url, "m", 4096), Nothing())
        with pytest.raises(BackendFault) as caught:
            await collect(backend, CALL)
        assert caught.value.kind is FaultKind.KEPT
        assert up.connections == 0


@pytest.mark.parametrize("url", ["ftp://x/v1", "nonsense", "http://user:pw@host/v1", "http://h/v1?key=1"])
def test_a_bad_url_is_a_clear_error(url: str) -> None:
    with pytest.raises(ConfigError, match="Backend b"):
        Address("b", url, "m", 4096)


def test_events_however_they_are_cut() -> None:
    stream = b": hi\r\n\r\ndata: one\r\n\r\nevent: x\ndata: two\ndata: three\n\ndata:four\n\n"
    for size in range(1, len(stream)):
        reader = EventReader()
        pieces = (stream[at : at + size] for at in range(0, len(stream), size))
        assert [data for piece in pieces for data in reader.feed(piece)] == [b"one", b"two\nthree", b"four"]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("3", 3.0), ("-1", 0.0), ("1e9", 86400.0), ("nan", None), ("soon", None), (None, None),
     ("Thu, 01 Jan 1970 00:01:40 GMT", 60.0)],
)  # fmt: skip
def test_retry_after(value: str | None, seconds: float | None) -> None:
    assert retry_after_s(value, 40.0) == seconds
