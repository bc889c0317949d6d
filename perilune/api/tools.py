"""Tools on the wire: what a request offers and wants called, and calls that were made earlier (spec S1).

Knows OpenAI's shapes; doesn't know how models write calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from perilune.core import Tool, ToolCall, ToolMode, Tools
from perilune.errors import InvalidRequest

MAX_TOOLS = 128
MAX_CALLS = 128
MAX_ARGUMENTS_CHARS = 1 << 20
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class WireFunction(_Wire):
    name: Name
    description: str | None = Field(None, max_length=65_536)
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class WireTool(_Wire):
    type: Literal["function"]
    function: WireFunction


class WireNamed(_Wire):
    name: Name


class WireToolChoice(_Wire):
    type: Literal["function"]
    function: WireNamed


class WireAllowedTool(_Wire):
    type: Literal["function"]
    function: WireNamed


class WireAllowed(_Wire):
    mode: Literal["auto", "required"]
    tools: list[WireAllowedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class WireAllowedChoice(_Wire):
    """Some of the tools: clients send all of them each time, because prompts that begin alike are cached."""

    type: Literal["allowed_tools"]
    allowed_tools: WireAllowed


class WireCalled(_Wire):
    name: Name
    arguments: str = Field(max_length=MAX_ARGUMENTS_CHARS)


class WireCall(_Wire):
    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: WireCalled


Choice = Literal["none", "auto", "required"] | WireToolChoice | WireAllowedChoice
Offered = Annotated[list[WireTool], Field(max_length=MAX_TOOLS)]


def tools_of(offered: Sequence[WireTool] | None, choice: Choice | None, parallel: bool | None) -> Tools:
    """Raises `InvalidRequest` for tools of one name, parameters that are no object's, or a choice among none."""
    tools = tuple(_tool(tool.function, f"tools[{index}].function") for index, tool in enumerate(offered or ()))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidRequest(
                f"Two tools are called {name!r}.", hint="Rename one.", param=f"tools[{index}].function.name"
            )
    if not tools and choice not in (None, "none", "auto"):
        raise InvalidRequest(
            "tool_choice wants a call, but there are no tools.", hint="Send tools.", param="tool_choice"
        )
    several = parallel is not False
    if isinstance(choice, WireToolChoice):
        _check_offered((choice.function.name,), names)
        return Tools(tools, ToolMode.REQUIRED, choice.function.name, several)
    if isinstance(choice, WireAllowedChoice):
        allowed = tuple(tool.function.name for tool in choice.allowed_tools.tools)
        _check_offered(allowed, names)
        return Tools(tools, ToolMode(choice.allowed_tools.mode), None, several, allowed)
    return Tools(tools, ToolMode(choice or "auto"), None, several)


def _check_offered(wanted: Sequence[str], names: Sequence[str]) -> None:
    for name in wanted:
        if name not in names:
            raise InvalidRequest(
                f"tool_choice names {name!r}, which isn't among the tools.", hint="Offer it.", param="tool_choice"
            )


def _tool(wire: WireFunction, param: str) -> Tool:
    parameters = wire.parameters or {"type": "object", "properties": {}}
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f"{param}.parameters is no schema of an object.",
            hint='Use {"type": "object", …}.',
            param=f"{param}.parameters",
        )
    schema = {"type": "object", **parameters}
    return Tool(wire.name, wire.description or "", json.dumps(schema, ensure_ascii=False), bool(wire.strict))


def calls_of(wire: Sequence[WireCall], param: str) -> tuple[ToolCall, ...]:
    """Raises `InvalidRequest` for arguments that are no JSON object: a model can't have written them."""
    calls = []
    for index, call in enumerate(wire):
        arguments = call.function.arguments or "{}"
        try:
            valid = isinstance(orjson.loads(arguments), dict)
        except orjson.JSONDecodeError:
            valid = False
        if not valid:
            raise InvalidRequest(
                "The arguments of a call are no JSON object.",
                hint="Send back the call as it was answered.",
                param=f"{param}[{index}].function.arguments",
            )
        calls.append(ToolCall(call.id, call.function.name, arguments))
    return tuple(calls)


def call_dict(call: ToolCall) -> Mapping[str, Any]:
    """A whole call, as answers show it."""
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
