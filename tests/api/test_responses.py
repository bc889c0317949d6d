"""The Responses API, asked by the unmodified OpenAI client, over a scripted service and a real database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from perilune.core import (
    ChoiceFinished,
    Completed,
    FilePart,
    FinishReason,
    GrammarKind,
    KeyLimits,
    TextDelta,
    ToolCallDelta,
    ToolMode,
    Usage,
)
from perilune.errors import InvalidRequest, NotFound, Overloaded
from perilune.memory import responses
from perilune.memory.entries import remove_tenant
from perilune.memory.responses import Made, ResponseStore
from perilune.memory.store import Store
from perilune.service.archive import Archive
from perilune.service.ports import Caller

from .conftest import Serve
from .fakes import CITATION, MODEL, WORDS, Fail, FakeService, opening, report

ASK: dict[str, Any] = {"model": MODEL, "input": "What is it?"}
TOOL: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
SAID = "".join(WORDS)


def keep(store: ResponseStore, tenant: str, items: list[dict[str, Any]], body: dict[str, Any]) -> None:
    body = {"status": "completed", **body}
    store.begin(tenant, items, body)
    assert store.finish(tenant, Made(body))


async def test_whole_and_streamed_answers_are_equal(serve: Serve) -> None:
    async with serve() as server:
        whole = await server.client.responses.create(**ASK)
        events = [event async for event in await server.client.responses.create(**ASK, stream=True)]
    last = events[-1]
    assert last.type == "response.completed"
    for answer in (whole, last.response):
        assert answer.status == "completed"
        assert answer.output_text == SAID
        message = answer.output[0]
        assert message.type == "message"
        (cited,) = message.content[0].annotations  # type: ignore[union-attr]
        assert cited.type == "file_citation"
        assert (cited.file_id, cited.model_extra["quote"]) == (CITATION.file_id, CITATION.quote)  # type: ignore[index]
        assert answer.usage is not None
        assert (answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens) == (96, 32)
        assert answer.model_extra["perilune"]["plan"] == "full"  # type: ignore[index]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == SAID
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * len(WORDS),
        "output_text.annotation.added",  # behind the sentence that it supports, or all of them
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


async def test_an_answer_is_gone_on_from(serve: Serve, archive: Archive) -> None:
    async with serve(FakeService(responses=archive)) as server:
        create = server.client.responses.create
        first = await create(**ASK, instructions="Be brief.")
        second = await create(model=MODEL, input="And then?", previous_response_id=first.id)
        await create(model=MODEL, input="So?", previous_response_id=second.id)
        messages = server.service.requests[-1].messages
        assert [(message.role, message.text) for message in messages] == [
            ("user", "What is it?"),
            ("assistant", SAID),
            ("user", "And then?"),
            ("assistant", SAID),
            ("user", "So?"),
        ]
        kept = await server.client.responses.retrieve(second.id)
        assert kept.previous_response_id == first.id
        assert kept.output_text == SAID
        items = await server.client.responses.input_items.list(second.id)
        assert items.data[0].content[0].text == "And then?"  # type: ignore[union-attr]

        await server.client.responses.delete(first.id)
        for call in (
            server.client.responses.retrieve(first.id),
            create(model=MODEL, input="So?", previous_response_id=second.id),
            create(model=MODEL, input="So?", previous_response_id="resp_none"),
        ):
            with pytest.raises(openai.NotFoundError):
                await call


async def test_streams_are_kept_and_store_false_is_not(serve: Serve, archive: Archive) -> None:
    async with serve(FakeService(responses=archive)) as server:
        events = [event async for event in await server.client.responses.create(**ASK, stream=True)]
        response = events[-1].response  # type: ignore[union-attr]
        assert (await server.client.responses.retrieve(response.id)).output_text == SAID
        unkept = await server.client.responses.create(**ASK, store=False)
        with pytest.raises(openai.NotFoundError):
            await server.client.responses.retrieve(unkept.id)


async def test_another_tenants_answer_is_not_found(serve: Serve, archive: Archive) -> None:
    keys = {"any": Caller("local", "user"), "other": Caller("bob", "user"), "reader": Caller("local", "read-only")}
    async with serve(FakeService(responses=archive, keys=keys)) as server:
        first = await server.client.responses.create(**ASK)
        other = server.client.with_options(api_key="other")
        for call in (
            other.responses.retrieve(first.id),
            other.responses.delete(first.id),
            other.responses.create(**ASK, previous_response_id=first.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        reader = server.client.with_options(api_key="reader")
        unkept = await reader.responses.create(**ASK)
        with pytest.raises(openai.NotFoundError):
            await reader.responses.retrieve(unkept.id)
        with pytest.raises(openai.PermissionDeniedError):
            await reader.responses.delete(first.id)


async def test_calls_and_their_results(serve: Serve, archive: Archive) -> None:
    script = [
        TextDelta(0, "Let me see."),
        ToolCallDelta(0, 0, call_id="call_1", name="add"),
        ToolCallDelta(0, 0, arguments='{"a"'),
        ToolCallDelta(0, 0, arguments=": 2}"),
        ToolCallDelta(0, 1, call_id="call_2", name="add", arguments="{}"),
        ChoiceFinished(0, FinishReason.TOOL_CALLS),
        Completed(Usage(5, 3, 0), report()),
    ]
    service = FakeService(script=script, responses=archive)
    async with serve(service) as server:
        create = server.client.responses.create
        whole = await create(**ASK, tools=[TOOL], tool_choice="required")
        events = [event async for event in await create(**ASK, tools=[TOOL], stream=True)]
        for answer in (whole, events[-1].response):  # type: ignore[union-attr]
            calls = [item for item in answer.output if item.type == "function_call"]
            assert [(call.call_id, call.name, call.arguments) for call in calls] == [
                ("call_1", "add", '{"a": 2}'),
                ("call_2", "add", "{}"),
            ]
        assert service.requests[0].tools.mode is ToolMode.REQUIRED
        service.script = None
        results: Any = [
            {"type": "function_call_output", "call_id": "call_1", "output": "2"},
            {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "0"}]},
        ]
        await create(model=MODEL, input=results, tools=[TOOL], previous_response_id=whole.id)
    _, made, first, second = service.requests[-1].messages
    assert made.text == "Let me see."
    assert [call.call_id for call in made.tool_calls] == ["call_1", "call_2"]
    assert [(each.role, each.tool_call_id, each.text) for each in (first, second)] == [
        ("tool", "call_1", "2"),
        ("tool", "call_2", "0"),
    ]


async def test_what_is_asked_arrives(serve: Serve) -> None:
    async with serve() as server:
        await server.client.responses.create(
            model=MODEL,
            instructions="Be brief.",
            input=[
                {"role": "developer", "content": "Be kind."},
                {
                    "role": "user",
                    "content": [
                        {"type": "input_file", "file_id": "file-1"},
                        {"type": "input_text", "text": "How many?"},
                    ],
                },
            ],
            max_output_tokens=7,
            temperature=0.5,
            text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
            tools=[TOOL],  # type: ignore[list-item]
            tool_choice={"type": "function", "name": "add"},
        )
    (request,) = server.service.requests
    assert [message.role for message in request.messages] == ["system", "system", "user"]
    assert request.messages[2].parts[0] == FilePart("file-1")
    assert (request.sampling.max_tokens, request.sampling.temperature) == (7, 0.5)
    assert request.sampling.grammar is not None
    assert request.sampling.grammar.kind is GrammarKind.JSON_SCHEMA
    assert request.tools.name == "add"


async def test_a_keys_limits_hold_here_too(serve: Serve) -> None:
    limits = KeyLimits(concurrency=1)
    async with serve(
        FakeService(keys={"k": Caller("a", "user", key_id="key-1", limits=limits)}), key="k"
    ) as server:
        await server.client.responses.create(**ASK)
        names = [{"type": "function", "name": "add"}]
        await server.client.responses.create(
            **ASK,
            tools=[TOOL],  # type: ignore[list-item]
            tool_choice={"type": "allowed_tools", "mode": "auto", "tools": names},  # type: ignore[arg-type]
        )
    assert [request.limits for request in server.service.requests] == [limits, limits]
    assert server.service.requests[-1].tools.allowed == ("add",)


async def test_an_answer_that_is_cut_is_incomplete(serve: Serve) -> None:
    script = [TextDelta(0, "x"), ChoiceFinished(0, FinishReason.LENGTH), Completed(Usage(1, 1, 0), report())]
    async with serve(FakeService(script=script)) as server:
        whole = await server.client.responses.create(**ASK)
        events = [event async for event in await server.client.responses.create(**ASK, stream=True)]
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert events[-1].type == "response.incomplete"


async def test_errors(serve: Serve) -> None:
    service = FakeService(script=[*opening(), TextDelta(0, "x"), Fail(Overloaded("Full.", hint="Wait."))])
    async with serve(service) as server:
        events = [event async for event in await server.client.responses.create(**ASK, stream=True)]
    assert events[-1].type == "error"
    assert (events[-1].code, events[-1].message) == ("overloaded", "Full. Wait.")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "["}]}, "input[0]"),
        ({"background": True, "store": False}, "store"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
        ({"truncation": "disabled", "context_policy": "refined"}, "truncation"),
        ({"include": ["message.everything"]}, "include[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ],
)
async def test_mistakes_are_told(serve: Serve, body: dict[str, Any], param: str) -> None:
    async with serve() as server, server.http.post("/v1/responses", json={**ASK, **body}) as reply:
        assert reply.status == 400
        found = (await reply.json())["error"]["param"]
        assert found.startswith(param)
        assert server.service.requests == []


async def test_tokens_are_counted_with_what_a_question_goes_on_from(serve: Serve, archive: Archive) -> None:
    async with serve(FakeService(responses=archive)) as server:
        first = await server.client.responses.create(**ASK)
        asked = await server.client.responses.input_tokens.count(**ASK)
        more = await server.client.responses.input_tokens.count(**ASK, previous_response_id=first.id)
        assert more.input_tokens == 2 * asked.input_tokens + len(SAID.split())
        with pytest.raises(openai.NotFoundError):
            await server.client.responses.input_tokens.count(**ASK, previous_response_id="resp_none")


async def test_what_nobody_reads_isnt_kept(serve: Serve, archive: Archive) -> None:
    content = [{"type": "input_text", "text": "What?", "junk": "x" * 1000}]
    items: Any = [{"role": "user", "content": content, "more": "x" * 1000}]
    async with serve(FakeService(responses=archive)) as server:
        answer = await server.client.responses.create(model=MODEL, input=items)
    kept = await archive.get("local", answer.id)
    assert kept.items == ({"role": "user", "content": [{"type": "input_text", "text": "What?"}]},)


def test_a_chain_is_bounded_in_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_CHAIN_CHARS", 1000)
    store = Store(tmp_path / "database")
    kept = ResponseStore(store)
    for index in range(10):
        before = f"resp_{index - 1}" if index else None
        keep(kept, "local", [{"content": "x" * 200}], {"id": f"resp_{index}", "previous_response_id": before})
    assert len(kept.chain("local", "resp_2")) == 3
    with pytest.raises(InvalidRequest, match="characters"):
        kept.chain("local", "resp_9")
    store.close()


def test_what_is_old_goes_unless_a_younger_answer_goes_on_from_it(tmp_path: Path) -> None:
    now_s = 0.0
    store = Store(tmp_path / "database")
    kept = ResponseStore(store, lambda: now_s)
    for name, before in (("a", None), ("b", "a"), ("alone", None), ("alone_2", "alone")):
        keep(kept, "local", [], {"id": name, "previous_response_id": before})
    now_s = 10.0
    keep(kept, "local", [], {"id": "c", "previous_response_id": "b"})
    assert kept.expire(5.0) == 2
    assert len(kept.chain("local", "c")) == 3
    for gone in ("alone", "alone_2"):
        with pytest.raises(NotFound):
            kept.get("local", gone)
    assert kept.expire(11.0) == 3
    store.close()


def test_what_is_deleted_takes_its_answers_along(tmp_path: Path) -> None:
    store = Store(tmp_path / "database")
    kept = ResponseStore(store)
    quoting = {"id": "quoting", "perilune": {"citations": [{"file_id": "file-1", "quote": "A secret."}]}}
    keep(kept, "local", [], quoting)
    keep(kept, "local", [{"content": [{"type": "input_file", "file_id": "file-1"}]}], {"id": "naming"})
    keep(kept, "local", [], {"id": "plain"})
    keep(kept, "other", [], quoting | {"id": "theirs"})
    with store.write() as connection:
        responses.forget_quotes(connection, "local", "file-1")
    for gone in ("quoting", "naming"):
        with pytest.raises(NotFound):
            kept.get("local", gone)
    with pytest.raises(NotFound):  # it was deleted meanwhile
        keep(kept, "local", [], {"id": "late", "previous_response_id": "quoting"})
    kept.get("local", "plain")
    with store.write() as connection:
        remove_tenant(connection, "local")
    with pytest.raises(NotFound):
        kept.get("local", "plain")
    kept.get("other", "theirs")
    store.close()
