"""Tools and forms of answers over a backend: what is sent, what comes back, and that de-identification holds for
both."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from perilune.core import (
    ChoiceFinished,
    FinishReason,
    Grammar,
    GrammarKind,
    SamplingParams,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolMode,
    Tools,
)
from perilune.errors import Forbidden
from perilune.service.backends.departure import mended
from perilune.service.backends.openai import Address, OpenAIBackend
from perilune.service.backends.protocol import Call, ChatMessage, FaultKind
from perilune.service.privacy.departure import Deidentified, Policy
from perilune.telemetry import Telemetry
from tests.contracts.backend import SCHEMA, arguments_of, collect, text_of
from tests.service.backends.test_openai import CALL, backend_of, fault_of
from tests.service.backends.upstream import STREAM_HEAD, answering, calling, chunk, saying, upstream
from tests.service.harness import request
from tests.service.test_routed import report_of, routed

PERSON, PHONE = "Margaret Whitcombe", "+44 20 7946 0958"
LOOK = Tool("look", "Looks up a person.", SCHEMA, strict=True)
OTHER = Tool("other")


def asked(**tools: Any) -> Call:
    return replace(CALL, tools=Tools((LOOK, OTHER), **tools))


async def body_of(call: Call) -> dict[str, Any]:
    async with upstream(saying("x")) as up:
        backend = backend_of(up)
        await collect(backend, call)
        await backend.close()
        return up.seen[0].body


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ({}, None),
        ({"mode": ToolMode.NONE}, "none"),
        ({"mode": ToolMode.REQUIRED}, "required"),
        ({"mode": ToolMode.REQUIRED, "name": "look"}, {"type": "function", "function": {"name": "look"}}),
    ],
)
async def test_tools_are_told(tools: dict[str, Any], choice: object) -> None:
    body = await body_of(asked(**tools))
    assert [each["function"]["name"] for each in body["tools"]] == ["look", "other"]
    assert body["tools"][0]["function"]["parameters"] == json.loads(SCHEMA)
    assert body["tools"][0]["function"]["strict"] is True
    assert body.get("tool_choice") == choice
    assert "parallel_tool_calls" not in body


async def test_tools_that_may_not_be_called_are_not_told() -> None:
    body = await body_of(asked(allowed=("other",), parallel=False))
    assert [each["function"]["name"] for each in body["tools"]] == ["other"]
    assert body["parallel_tool_calls"] is False


async def test_calls_results_and_a_form_are_told() -> None:
    talk = (
        ChatMessage("user", "Who?"),
        ChatMessage("assistant", "", (ToolCall("call_1", "look", '{"n": 1}'),)),
        ChatMessage("tool", "Nobody.", (), "call_1"),
    )
    form = SamplingParams(grammar=Grammar(GrammarKind.JSON_SCHEMA, SCHEMA))
    body = await body_of(replace(CALL, messages=talk, sampling=form))
    assert body["messages"][1]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"n": 1}'}
    assert body["messages"][1]["content"] is None
    assert body["messages"][2]["tool_call_id"] == "call_1"
    assert body["response_format"]["json_schema"]["schema"] == json.loads(SCHEMA)


async def test_calls_come_back_in_pieces_and_side_by_side() -> None:
    async with upstream(calling((0, '{"n"'), (1, '{"n": '), (0, ": 1}"), (1, "2}"), text="Well. ")) as up:
        backend = backend_of(up)
        events = await collect(backend, asked())
        await backend.close()
    assert text_of(events) == "Well. "
    assert arguments_of(events) == {0: '{"n": 1}', 1: '{"n": 2}'}
    begun = [(e.call_id, e.name) for e in events if isinstance(e, ToolCallDelta) and e.name]
    assert begun == [("theirs-0", "look"), ("theirs-1", "look")]
    assert [e.reason for e in events if isinstance(e, ChoiceFinished)] == [FinishReason.TOOL_CALLS]


@pytest.mark.parametrize(
    "call",
    [
        {"index": 0, "function": {"arguments": "{}"}},  # no name
        {"index": -1, "function": {"name": "look"}},
        {"index": 10**9, "function": {"name": "look"}},
        {"index": 0, "function": {"name": 7}},
        {"index": 0, "id": 7, "function": {"name": "look"}},
        {"index": 0, "function": {"name": "look", "arguments": {"n": 1}}},
        "look",
    ],
)
async def test_calls_that_are_none_are_the_backends_fault(call: object) -> None:
    choice = {"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}
    data = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    fault = await fault_of(answering(STREAM_HEAD + data + chunk(reason="stop")), asked())
    assert fault.kind is FaultKind.BROKEN


# ------------------------------------------------------------------------------------ de-identification


async def test_nothing_of_a_person_leaves_in_tools_and_calls_and_it_comes_back() -> None:
    """In an argument, a result, a description, an enum, and as a number; escaped or not."""
    form = json.dumps({"type": "object", "properties": {"who": {"enum": [PERSON, "nobody"]}}})
    escaped = json.dumps({"who": "Margaret Whitcombe", "phone": 13912345678}).replace("Marg", "\\u004darg")
    talk = (
        ChatMessage("user", f"Call {PERSON}."),
        ChatMessage("assistant", "", (ToolCall("call_1", "look", escaped),)),
        ChatMessage("tool", f"{PERSON} has {PHONE}.", (), "call_1"),
    )
    tools = Tools((Tool("look", f"Asks {PERSON}.", form),))
    sampling = SamplingParams(grammar=Grammar(GrammarKind.JSON_SCHEMA, form))
    async with upstream(calling((0, '{"who": "[PERS'), (0, 'ON_1]"}'))) as up:
        departure = Deidentified(Policy(), Telemetry())
        backend = OpenAIBackend(Address("up", up.url, "m", 4096), departure)
        events = await collect(backend, Call("req-1", "acme", talk, sampling, tools=tools))
        await backend.close()
    sent = json.dumps(up.seen[0].body, ensure_ascii=False)
    for value in (PERSON, "Whitcombe", PHONE, "13912345678"):
        assert value not in sent
    arguments = json.loads(up.seen[0].body["messages"][1]["tool_calls"][0]["function"]["arguments"])
    assert arguments["phone"].startswith("[PHONE_")
    assert json.loads(arguments_of(events)[0]) == {"who": PERSON}


async def test_what_json_writes_with_escapes_does_not_leave_either() -> None:
    term, lines = 'the "Blue" plan', f"Ask\n{PERSON}\nof it."
    talk = (
        ChatMessage("user", "Go on."),
        ChatMessage(
            "assistant", "", (ToolCall("c", "look", json.dumps({"a": [term, {lines: "\ue0007"}], "b": 1})),)
        ),
        ChatMessage("tool", "Done.", (), "c"),
    )
    async with upstream(saying("x")) as up:
        backend = OpenAIBackend(Address("up", up.url, "m", 4096), Deidentified(Policy(terms=(term,)), Telemetry()))
        await collect(backend, replace(CALL, messages=talk))
        await backend.close()
    sent = json.loads(up.seen[0].body["messages"][1]["tool_calls"][0]["function"]["arguments"])
    assert sent == {"a": ["[TERM_1]", {"Ask\n[PERSON_1]\nof it.": "\ue0007"}], "b": 1}


async def test_what_comes_back_into_json_is_escaped() -> None:
    term = 'the "Blue" plan'
    async with upstream(calling((0, '{"what": "[TERM_1]"}'))) as up:
        departure = Deidentified(Policy(terms=(term,)), Telemetry())
        backend = OpenAIBackend(Address("up", up.url, "m", 4096), departure)
        events = await collect(backend, replace(asked(), messages=(ChatMessage("user", f"Tell of {term}."),)))
        await backend.close()
    assert up.seen[0].body["messages"][0]["content"] == "Tell of [TERM_1]."
    assert json.loads(arguments_of(events)[0]) == {"what": term}


def test_json_is_mended_or_kept_here() -> None:
    assert json.loads(mended('{"a": [PHONE_1], "b": "[PHONE_1]", "c": [EMAIL]}')) == {
        "a": "[PHONE_1]",
        "b": "[PHONE_1]",
        "c": "[EMAIL]",
    }
    assert json.loads(mended('{"a": [1, true, null], "b\\"": []}')) == {"a": [1, True, None], 'b"': []}
    with pytest.raises(Forbidden):
        mended('{"a": 12[PHONE_1]}')


# --------------------------------------------------------------------------------- through the service


async def test_a_backends_calls_go_through_the_service() -> None:
    async with routed(calling((0, '{"n": 1}'))) as (bench, up):
        wanted = replace(request("Look.", model="big"), tools=Tools((LOOK,)))
        events = [event async for event in bench.service.run(wanted)]
        assert arguments_of(events) == {0: '{"n": 1}'}  # type: ignore[arg-type]
        assert [e.reason for e in events if isinstance(e, ChoiceFinished)] == [FinishReason.TOOL_CALLS]
        assert up.seen[0].body["tools"][0]["function"]["name"] == "look"
        assert len(up.seen[0].body["messages"]) == 1, "tools are the backend's to tell its model"
        up.script = saying("I would rather not.")
        must = replace(wanted, request_id="req-2", tools=Tools((LOOK,), ToolMode.REQUIRED))
        told = report_of([event async for event in bench.service.run(must)])
        assert [each["code"] for each in told["degradations"]] == ["tool_not_called"]
