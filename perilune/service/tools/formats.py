"""How families of models are told of tools, write calls, and read results.

Knows text only. Two notations cover the families that we run. Hermes: Qwen 2.5 and 3 were trained on it, and models
without a notation of their own follow it, too, because their calls are held to it (grammar.py). Llama 3.1 and later
write a bare JSON object. What stands here is text of the prompt: the chat template around it stays the model's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from perilune.core import Tool, ToolCall


class ToolFormat(Protocol):
    """`marker` begins a call; `is_bare`: it is the call's own beginning, and only at an answer's start."""

    @property
    def marker(self) -> str: ...
    @property
    def is_bare(self) -> bool: ...
    @property
    def arguments_key(self) -> str: ...
    @property
    def result_role(self) -> str:
        """What the model's template calls the speaker of results."""
        ...

    @property
    def close(self) -> str:
        """What follows a call's JSON."""
        ...

    def begin(self, name: str) -> str:
        """A call up to its arguments."""
        ...

    def instructions(self, tools: Sequence[Tool]) -> str:
        """What the system message says of tools."""
        ...

    def call(self, call: ToolCall) -> str:
        """A call that was made earlier, as the model would have written it."""
        ...

    def result(self, text: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Hermes:
    """`<tool_call>` tags around JSON (NousResearch/Hermes-Function-Calling; Qwen 2.5's chat template)."""

    marker: str = "<tool_call>"
    is_bare: bool = False
    arguments_key: str = "arguments"
    close: str = "\n</tool_call>"
    result_role: str = "user"

    def begin(self, name: str) -> str:
        return f'{self.marker}\n{{"name": {json.dumps(name)}, "{self.arguments_key}": '

    def instructions(self, tools: Sequence[Tool]) -> str:
        signatures = "\n".join(json.dumps(signature(tool), ensure_ascii=False) for tool in tools)
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{signatures}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            "<tool_call></tool_call> XML tags:\n<tool_call>\n"
            '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )

    def call(self, call: ToolCall) -> str:
        return f"{self.begin(call.name)}{call.arguments}}}{self.close}"

    def result(self, text: str) -> str:
        return f"<tool_response>\n{text}\n</tool_response>"


@dataclass(frozen=True, slots=True)
class Llama3:
    """A bare JSON object, one call an answer (Llama 3.1's model card, "JSON based tool calling")."""

    marker: str = '{"name":'
    is_bare: bool = True
    arguments_key: str = "parameters"
    close: str = ""
    result_role: str = "tool"

    def begin(self, name: str) -> str:
        return f'{self.marker} {json.dumps(name)}, "{self.arguments_key}": '

    def instructions(self, tools: Sequence[Tool]) -> str:
        signatures = "\n\n".join(json.dumps(signature(tool), ensure_ascii=False, indent=4) for tool in tools)
        return (
            "You have access to the following functions. To call a function, please respond with JSON for a "
            'function call. Respond in the format {"name": function name, "parameters": dictionary of argument '
            f"name and its value}}. Do not use variables.\n\n{signatures}"
        )

    def call(self, call: ToolCall) -> str:
        return f"{self.begin(call.name)}{call.arguments}}}"

    def result(self, text: str) -> str:
        return text


def format_of(template_source: str) -> ToolFormat:
    """The notation that a model's chat template shows it was trained on; Hermes where it shows none."""
    return Llama3() if "ipython" in template_source and "<tool_call>" not in template_source else Hermes()


def signature(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates pass it to models."""
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    function["parameters"] = json.loads(tool.parameters)
    return {"type": "function", "function": function}
