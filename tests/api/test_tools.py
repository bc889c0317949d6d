"""Tools on the wire: what they mean, and which mistakes are told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from perilune.core import ToolCall, ToolMode
from tests.api.test_schema import GOOD, parse, refused

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}}
CALL: dict[str, Any] = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}


def test_offers_and_choices() -> None:
    assert parse(GOOD).request.tools.offered == ()
    tools = parse({**GOOD, "tools": [TOOL]}).request.tools
    assert tools.mode is ToolMode.AUTO
    assert tools.parallel
    assert json.loads(tools.offered[0].parameters) == {"type": "object", "properties": {"a": {}}}
    none = parse({**GOOD, "tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False}).request.tools
    assert (none.mode, none.parallel) == (ToolMode.NONE, False)
    named = parse({**GOOD, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}})
    assert (named.request.tools.mode, named.request.tools.name) == (ToolMode.REQUIRED, "f")
    names = [{"type": "function", "function": {"name": "f"}}]
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": names}}
    allowed = parse({**GOOD, "tools": [TOOL], "tool_choice": some}).request.tools
    assert (allowed.mode, allowed.name, allowed.allowed) == (ToolMode.REQUIRED, None, ("f",))


def test_calls_and_results() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "12"}
    messages = parse({**GOOD, "messages": [*GOOD["messages"], called, result]}).request.messages
    assert messages[-2].tool_calls == (ToolCall("call_1", "f", '{"a":1}'),)
    assert (messages[-1].role, messages[-1].tool_call_id, messages[-1].text) == ("tool", "call_1", "12")


def _call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{**CALL, "function": {**CALL["function"], **function}}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [_call(arguments="[1]")]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [_call(arguments="{")]}, "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_mistakes_are_told(body: dict[str, Any], param: str) -> None:
    found = refused({**GOOD, **body}).param
    assert found is not None
    assert found.startswith(param)
