"""Anthropic's dialect, asked by the unmodified Anthropic client, over a scripted service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest

from perilune.core import (
    ChoiceFinished,
    Completed,
    FilePart,
    FinishReason,
    GrammarKind,
    StageStarted,
    TextDelta,
    ToolCallDelta,
    ToolMode,
    Usage,
)
from perilune.errors import Overloaded
from perilune.service.ports import Caller

from .conftest import Serve, Server
from .fakes import CITATION, MODEL, WORDS, Fail, FakeService, opening, report

ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": "What is it?"}]}
TOOL: dict[str, Any] = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@asynccontextmanager
async def asked(server: Server, path: str = "", key: str = "any") -> AsyncIterator[anthropic.AsyncAnthropic]:
    base = f"http://{server.host}:{server.port}{path}"
    async with anthropic.AsyncAnthropic(base_url=base, api_key=key, max_retries=0, timeout=20) as client:
        yield client


@pytest.mark.parametrize("path", ["", "/anthropic"])
async def test_whole_and_streamed_answers_are_equal(serve: Serve, path: str) -> None:
    async with serve() as server, asked(server, path) as client:
        whole = await client.messages.create(**ASK)
        async with client.messages.stream(**ASK) as stream:
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            assert message.id.startswith("msg_")
            assert message.stop_reason == "end_turn"
            (block,) = message.content
            assert block.type == "text"
            assert block.text == "".join(WORDS)
            (where,) = block.citations or ()
            assert where.type == "page_location"
            assert (where.cited_text, where.start_page_number) == (CITATION.quote, CITATION.page)
            assert message.usage.input_tokens == 64
            assert message.usage.cache_read_input_tokens == 32
            assert message.usage.output_tokens == len(WORDS)
        assert (whole.model_extra or {})["perilune"]["plan"] == "full"


async def test_the_events_come_in_order(serve: Serve) -> None:
    async with serve() as server, server.http.post("/v1/messages", json={**ASK, "stream": True}) as reply:
        text = (await reply.read()).decode()
    kinds = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    deltas = ["content_block_delta"] * (len(WORDS) + 1)  # and a citation
    assert kinds == [
        "message_start",
        "ping",
        "content_block_start",
        *deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_what_is_asked_arrives(serve: Serve) -> None:
    async with serve() as server, asked(server) as client:
        await client.messages.create(
            model=MODEL,
            max_tokens=7,
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            stop_sequences=["END"],
            extra_body={"temperature": 0.5},
            tools=[TOOL],  # type: ignore[list-item]
            tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
            thinking={"type": "disabled"},
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "document", "source": {"type": "file", "file_id": "file-1"}},  # type: ignore[list-item, typeddict-item]
                        {
                            "type": "document",
                            "title": "a.txt",
                            "source": {"type": "text", "media_type": "text/plain", "data": "Seven."},
                        },
                        {"type": "text", "text": "How many?"},
                    ],
                },
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "1", "is_error": True},
                        {"type": "text", "text": "And?"},
                    ],
                },
            ],
        )
    (request,) = server.service.requests
    assert [message.role for message in request.messages] == ["system", "user", "assistant", "tool", "user"]
    assert request.messages[1].parts[0] == FilePart("file-1")
    assert request.messages[1].text == "Document 'a.txt':\nSeven.\n\nHow many?"
    assert request.messages[2].tool_calls[0].arguments == '{"a": 1}'
    assert (request.messages[3].text, request.messages[3].tool_call_id) == ("Error: 1", "toolu_1")
    assert (request.tools.mode, request.tools.name, request.tools.parallel) == (ToolMode.REQUIRED, "add", False)
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.stop, sampling.temperature) == (7, ("END",), 0.5)


async def test_a_form_is_asked_for(serve: Serve) -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    async with serve() as server, server.http.post("/v1/messages", json={**ASK, "output_config": form}) as reply:
        assert reply.status == 200
    grammar = server.service.requests[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.JSON_SCHEMA


async def test_calls(serve: Serve) -> None:
    script = [
        StageStarted("answering"),
        TextDelta(0, "Let me see."),
        ToolCallDelta(0, 0, call_id="call_1", name="add"),
        ToolCallDelta(0, 0, arguments='{"a"'),
        ToolCallDelta(0, 0, arguments=": 2}"),
        ToolCallDelta(0, 1, call_id="call_2", name="add"),
        ToolCallDelta(0, 1, arguments="{}"),
        ChoiceFinished(0, FinishReason.TOOL_CALLS),
        Completed(Usage(5, 3, 0), report()),
    ]
    async with serve(FakeService(script=script)) as server, asked(server) as client:
        whole = await client.messages.create(**ASK)
        async with client.messages.stream(**ASK) as stream:
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
        assert [block.input for block in message.content if block.type == "tool_use"] == [{"a": 2}, {}]


@pytest.mark.parametrize(
    ("finished", "reason", "sequence"),
    [
        (ChoiceFinished(0, FinishReason.LENGTH), "max_tokens", None),
        (ChoiceFinished(0, FinishReason.STOP, "END"), "stop_sequence", "END"),
    ],
)
async def test_why_it_ended(serve: Serve, finished: ChoiceFinished, reason: str, sequence: str | None) -> None:
    script = [TextDelta(0, "x"), finished, Completed(Usage(1, 1, 0), report())]
    async with serve(FakeService(script=script)) as server, asked(server) as client:
        message = await client.messages.create(**ASK)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


async def test_tokens_are_counted(serve: Serve) -> None:
    async with serve() as server, asked(server) as client:
        counted = await client.messages.count_tokens(model=MODEL, system="Be brief.", messages=ASK["messages"])
        assert counted.input_tokens == 5


async def test_errors_are_the_dialects(serve: Serve) -> None:
    service = FakeService(script=[*opening(), TextDelta(0, "x"), Fail(Overloaded("Full.", hint="Wait."))])
    async with serve() as server, asked(server) as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(**{**ASK, "model": "gpt-9"})
        assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        assert missing.value.request_id
        for field, value in (("max_tokens", 0), ("temperature", 3), ("tools", [{"type": "bash", "name": "b"}])):
            with pytest.raises(anthropic.BadRequestError):
                await client.messages.create(**ASK, extra_body={field: value})
        async with server.http.post(
            "/v1/messages", json={k: v for k, v in ASK.items() if k != "max_tokens"}
        ) as bare:
            assert (await bare.json())["error"]["type"] == "invalid_request_error"
        async with server.http.get("/v1/messages") as wrong:
            assert wrong.status == 405
            assert (await wrong.json())["type"] == "error"
    async with serve(service) as server, asked(server) as client:
        with pytest.raises(anthropic.APIStatusError) as cut:
            async with client.messages.stream(**ASK) as stream:
                await stream.get_final_message()
        assert "Full. Wait." in str(cut.value)


async def test_keys_in_either_header(serve: Serve) -> None:
    service = FakeService(keys={"secret": Caller("ada", "user")})
    async with serve(service) as server, asked(server, key="secret") as client:
        await client.messages.create(**ASK)
        assert service.requests[0].tenant == "ada"
        bearer = {"authorization": "Bearer secret"}
        async with server.http.post("/v1/messages", json=ASK, headers=bearer) as reply:
            assert reply.status == 200
    async with serve(service) as server, asked(server, key="wrong") as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(**ASK)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [IMAGE]},
        {"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "add", "input": {}}]},
        {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
        {"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "http://x"}}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "wizard", "content": "x"},
        {"role": "user", "content": 5},
    ],
)
async def test_what_cannot_be_read_is_named(serve: Serve, message: dict[str, Any]) -> None:
    async with serve() as server:
        async with server.http.post("/v1/messages", json={**ASK, "messages": [message]}) as reply:
            body = await reply.json()
        assert reply.status == 400
        assert "messages[0]" in body["error"]["message"]
        assert server.service.requests == []
