"""Chat completions over a real socket with the unmodified OpenAI client, against a scripted service."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise
from typing import Any

import openai
import pytest

from perilune.core import (
    ChoiceFinished,
    Completed,
    ContextPolicy,
    FinishReason,
    Planned,
    PrefillProgress,
    ServiceClass,
    StageStarted,
    TextDelta,
    Usage,
)
from perilune.errors import ContextTooLong, Overloaded

from .conftest import Serve, Server, eventually
from .fakes import MODEL, PLAN, WORDS, Fail, FakeService, Pause, Step, opening, report

TEXT = "".join(WORDS)
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "why?"}]}


async def test_plain_answer(serve: Serve) -> None:
    async with serve() as server:
        raw = await server.client.chat.completions.with_raw_response.create(**ASK)
        done = raw.parse()
        assert done.choices[0].message.content == TEXT
        assert done.choices[0].finish_reason == "stop"
        assert done.usage is not None
        assert (done.usage.prompt_tokens, done.usage.total_tokens) == (96, 101)
        assert done.usage.prompt_tokens_details is not None
        assert done.usage.prompt_tokens_details.cached_tokens == 32
        assert done.usage.model_extra == {"cached_tokens": 32}
        assert done.model_extra is not None
        assert done.model_extra["perilune"]["plan"] == "full"
        assert done.model_extra["perilune"]["citations"][0]["page"] == 3
        assert done.system_fingerprint
        assert done.service_tier == "default"
        request_id = raw.headers["x-request-id"]
        assert done.id == "chatcmpl-" + request_id.removeprefix("req_")
        assert int(raw.headers["openai-processing-ms"]) >= 0


async def test_stream_of_an_unmodified_client_sees_text_only(serve: Serve) -> None:
    async with serve() as server:
        chunks = [chunk async for chunk in await server.client.chat.completions.create(**ASK, stream=True)]
        assert all(len(chunk.choices) == 1 for chunk in chunks)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert chunks[-1].model_extra is not None
        assert chunks[-1].model_extra["perilune"]["tokens"]["offered"] == 96
        assert len({chunk.id for chunk in chunks}) == 1


async def test_stream_with_usage_and_progress(serve: Serve) -> None:
    async with serve() as server:
        stream = await server.client.chat.completions.create(
            **ASK,
            stream=True,
            stream_options={"include_usage": True, "include_progress": True},  # type: ignore[typeddict-unknown-key]
        )
        chunks = [chunk async for chunk in stream]
        last = chunks[-1]
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == 5
        assert all(chunk.usage is None for chunk in chunks[:-1])
        progress = [chunk.model_extra["perilune"] for chunk in chunks[:-1] if not chunk.choices]  # type: ignore[index]
        assert [item["stage"] for item in progress] == [
            "composing",
            "planned",
            "citation",
            "prefilling",
            "prefilling",
            "prefilling",
            "answering",
        ]
        assert progress[1]["predicted_ttft_s"] == 0.25
        assert progress[4] == {"stage": "prefilling", "processed": 32, "total": 96, "cached": 32, "eta_s": 0.2}


async def test_stream_ends_with_done_and_shows_progress_as_comments(serve: Serve) -> None:
    async with serve() as server, server.http.post("/v1/chat/completions", json={**ASK, "stream": True}) as reply:
        text = await reply.text()
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert text.endswith("data: [DONE]\n\n")
        assert ": prefilling 32/96 tokens, 32 cached, 0.2 s to go" in text


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_and_logprobs(serve: Serve, stream: bool) -> None:
    async with serve() as server:
        ask = {**ASK, "n": 2, "logprobs": True, "top_logprobs": 2}
        texts = {0: "", 1: ""}
        tokens: dict[int, list[Any]] = {0: [], 1: []}
        if stream:
            async for chunk in await server.client.chat.completions.create(**ask, stream=True):
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    tokens[choice.index] += (choice.logprobs and choice.logprobs.content) or []
        else:
            done = await server.client.chat.completions.create(**ask)
            for whole in done.choices:
                texts[whole.index] = whole.message.content or ""
                tokens[whole.index] = (whole.logprobs and whole.logprobs.content) or []
        assert texts == {0: TEXT, 1: TEXT}
        for found in tokens.values():
            assert [token.token for token in found] == list(WORDS)
            assert [len(token.top_logprobs) for token in found] == [2] * 5
            assert bytes(found[0].bytes) == b"The "
            assert found[-1].logprob == -9999.0  # minus infinity has no JSON


async def test_every_field_reaches_the_service(serve: Serve) -> None:
    async with serve() as server:
        extra = {
            "top_k": 40,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "deadline": 2.5,
            "context_policy": "refined",
            "service_tier": "flex",
        }
        content = [
            {"type": "text", "text": "see "},
            {"type": "file", "file": {"file_id": "file-7"}},
            {"type": "input_file", "file_id": "file-8"},
        ]
        await server.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": content}],  # type: ignore[typeddict-item]
            max_completion_tokens=7,
            n=1,
            stop=["a", "b"],
            seed=3,
            temperature=0.5,
            top_p=0.9,
            presence_penalty=0.1,
            frequency_penalty=-0.1,
            logit_bias={"5": -100},
            user="someone",
            metadata={"a": "b"},
            extra_body=extra,
        )
        request = server.service.requests[0]
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, -0.1)
        assert (sampling.repetition_penalty, sampling.seed, sampling.max_tokens) == (1.1, 3, 7)
        assert (sampling.stop, sampling.logit_bias) == (("a", "b"), ((5, -100.0),))
        assert (request.deadline_s, request.context_policy) == (2.5, ContextPolicy.REFINED)
        assert request.service_class is ServiceClass.P1_DOCUMENT
        assert request.file_ids == ("file-7", "file-8")
        assert [message.role for message in request.messages] == ["system", "user"]
        assert request.messages[1].text == "see "


async def test_unknown_model_is_404_before_the_stream_starts(serve: Serve) -> None:
    async with serve() as server:
        for stream in (False, True):
            with pytest.raises(openai.NotFoundError) as caught:
                await server.client.chat.completions.create(
                    model="other", messages=[{"role": "user", "content": "hi"}], stream=stream
                )
            assert caught.value.code == "model_not_found"
            assert caught.value.param == "model"
            assert caught.value.request_id is not None


async def test_error_found_while_composing_keeps_its_status(serve: Serve) -> None:
    error = ContextTooLong("9,000 tokens don't fit.", hint="Use refined.", param="messages")
    service = FakeService([StageStarted("composing"), Pause(0.05), Fail(error)])
    async with serve(service) as server:
        with pytest.raises(openai.BadRequestError) as caught:
            await server.client.chat.completions.create(**ASK, stream=True)
        assert caught.value.code == "context_length_exceeded"


async def test_error_in_the_stream_is_an_event(serve: Serve) -> None:
    service = FakeService([*opening(), TextDelta(0, "half"), Fail(Overloaded("No block is free."))])
    async with serve(service) as server:
        seen = ""

        async def read() -> None:
            nonlocal seen
            async for chunk in await server.client.chat.completions.create(**ASK, stream=True):
                seen += chunk.choices[0].delta.content or ""

        with pytest.raises(openai.APIError, match="No block is free") as caught:
            await read()
        assert seen == "half"
        assert caught.value.code == "overloaded"
        assert "[DONE]" not in (
            await (await server.http.post("/v1/chat/completions", json={**ASK, "stream": True})).text()
        )


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_exception_tells_nothing(
    serve: Serve, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "prompt: my diary"
    for script in ([Fail(ValueError(secret))], [*opening(), TextDelta(0, "x"), Fail(ValueError(secret))]):
        async with serve(FakeService(script)) as server:
            reply = await server.http.post("/v1/chat/completions", json={**ASK, "stream": stream})
            text = await reply.text()
            request_id = reply.headers["x-request-id"]
            assert secret not in text
            assert request_id in text
            assert reply.status == (200 if stream and len(script) > 1 else 500)
            logged = [r for r in caplog.records if getattr(r, "fields", {}).get("request_id") == request_id]
            assert any(r.fields.get("exception") == "ValueError" for r in logged)  # type: ignore[attr-defined]
    assert not any(secret in str(record.__dict__) for record in caplog.records if record.levelname != "DEBUG")


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.ERROR])
async def test_a_cut_answer_never_looks_complete(serve: Serve, reason: FinishReason) -> None:
    script: list[Step] = [
        *opening(),
        TextDelta(0, "half"),
        ChoiceFinished(0, reason),
        Completed(Usage(1, 1, 0), report()),
    ]
    for steps in (script, script[:-2]):
        async with serve(FakeService(steps)) as server:
            reply = await server.http.post("/v1/chat/completions", json=ASK)
            assert reply.status == 500
            streamed = await server.http.post("/v1/chat/completions", json={**ASK, "stream": True})
            text = await streamed.text()
            assert '"error"' in text
            assert "[DONE]" not in text


async def _arrivals(server: Server, body: dict[str, Any]) -> list[tuple[float, bytes]]:
    start = time.monotonic()
    got: list[tuple[float, bytes]] = []
    async with server.http.post("/v1/chat/completions", json=body) as reply:
        got += [(time.monotonic() - start, chunk) async for chunk in reply.content.iter_any()]
    return got


async def test_a_silent_service_still_shows_life(serve: Serve) -> None:
    """First bytes within 200 ms and never a second of silence, while the service says nothing for 2.2 s."""
    service = FakeService([StageStarted("composing"), Pause(2.2), *opening(), Completed(Usage(1, 0, 0), report())])
    async with serve(service) as server:
        got = await _arrivals(server, {**ASK, "stream": True})
        assert got[0][0] < 0.2
        assert b'"role":"assistant"' in got[0][1]
        times = [at for at, _ in got]
        assert max(b - a for a, b in pairwise(times)) < 1.0
        assert sum(chunk.count(b": keep-alive") for _, chunk in got) >= 3


async def test_progress_is_not_delayed(serve: Serve) -> None:
    steps: list[Step] = [StageStarted("composing"), Planned(PLAN)]
    for i in range(1, 6):
        steps += [Pause(0.05), PrefillProgress(i * 100, 500, 0, 0.05 * (5 - i))]
    service = FakeService(
        [*steps, TextDelta(0, "x"), ChoiceFinished(0, FinishReason.LENGTH), Completed(Usage(1, 1, 0), report())]
    )
    async with serve(service) as server:
        got = await _arrivals(server, {**ASK, "stream": True, "stream_options": {"include_progress": True}})
        assert got[0][0] < 0.2
        assert len(got) >= 5  # each piece went out on its own


PHASES: dict[str, list[Step]] = {
    "composing": [StageStarted("composing")],
    "queued": [*opening()[:3], StageStarted("queued")],
    "prefill": opening()[:5],
    "decode": [*opening(), TextDelta(0, "The ")],
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_cancels_in_every_phase(serve: Serve, phase: str, stream: bool) -> None:
    """From the client's close to the close of the service's generator: 50 ms, in the median of five."""
    service = FakeService([*PHASES[phase], Pause(3600)])
    async with serve(service) as server:
        delays = []
        for _ in range(5):
            service.reached.clear()
            body = json.dumps({**ASK, "stream": stream}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(head.encode() + body)
            await asyncio.wait_for(service.reached.wait(), 5)
            if stream:
                await asyncio.wait_for(reader.read(1), 5)
            count = len(service.closed_at)
            left_at = time.monotonic()
            writer.close()
            while len(service.closed_at) == count:
                await asyncio.sleep(0.001)
            delays.append(service.closed_at[-1] - left_at)
        assert sorted(delays)[2] <= 0.05, delays
        assert service.open == 0
        await eventually(lambda: 'perilune_answers_total{outcome="disconnected"} 5.0' in server.shown_metrics())


async def test_openai_client_cancels_by_closing(serve: Serve) -> None:
    service = FakeService([*opening(), TextDelta(0, "The "), Pause(3600)])
    async with serve(service) as server:
        stream = await server.client.chat.completions.create(**ASK, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await eventually(lambda: service.open == 0)


async def test_a_client_that_does_not_read_is_given_up(serve: Serve) -> None:
    """The write buffer fills, the server waits, and the generator is closed when the client leaves."""
    service = FakeService([*opening(), *[TextDelta(0, "x" * 65536) for _ in range(400)], Pause(3600)])
    async with serve(service) as server:
        body = json.dumps({**ASK, "stream": True}).encode()
        _, writer = await asyncio.open_connection(server.host, server.port, limit=1024)
        writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await asyncio.sleep(0.5)
        assert service.open == 1
        assert not service.reached.is_set(), "everything was written to a client that reads nothing"
        writer.transport.abort()
        await eventually(lambda: service.open == 0)
        assert not service.reached.is_set(), "an answer without a reader was made to its end"


async def test_stopping_server_tells_open_streams(serve: Serve) -> None:
    service = FakeService([*opening(), TextDelta(0, "half"), Pause(3600)])
    async with serve(service) as server:
        async with server.http.post("/v1/chat/completions", json={**ASK, "stream": True}) as reply:
            await asyncio.wait_for(service.reached.wait(), 5)
            server.uvicorn.should_exit = True
            text = await asyncio.wait_for(reply.text(), 8)
        assert "The server is shutting down." in text
        assert service.open == 0


async def test_many_streams_at_once(serve: Serve) -> None:
    async with serve() as server:

        async def one() -> str:
            text = ""
            async for chunk in await server.client.chat.completions.create(**ASK, stream=True):
                text += chunk.choices[0].delta.content or ""
            return text

        assert set(await asyncio.gather(*[one() for _ in range(40)])) == {TEXT}
