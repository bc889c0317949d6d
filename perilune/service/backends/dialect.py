"""OpenAI's chat dialect from the client's side: a call as a request body, a chunk as events.

Knows field names and distrusts every value; doesn't know HTTP. `Malformed` is raised for what isn't the dialect.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from perilune.core import (
    ChoiceFinished,
    DecodedLogprob,
    FinishReason,
    ReasoningDelta,
    SamplingParams,
    TextDelta,
    Tool,
    ToolCallDelta,
    ToolMode,
    Tools,
    Usage,
)
from perilune.service.backends.departure import Departed
from perilune.service.backends.protocol import BackendEvent, Call, ChatMessage

MAX_CALLS = 128
"""Of one choice."""

_MOST_TOKENS = 1 << 40
_FORM_NAME = "answer"
_TOO_LONG = "maximum context length"
_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "eos": FinishReason.STOP,
    "content_filter": FinishReason.STOP,
    "tool_calls": FinishReason.TOOL_CALLS,
}


class Malformed(Exception):
    """A chunk that isn't the dialect."""


class UpstreamError(Exception):
    """The stream carries an error object instead of a chunk. `code` is its code or type, lower case."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


def body_of(call: Call, departed: Departed, model: str) -> bytes:
    """The request body. Text comes from `departed` only; the call gives numbers and flags."""
    said = departed.said
    payload: dict[str, Any] = {
        "model": model,
        "messages": [_message(message) for message in said.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        **_sampling(call.sampling),
    }
    if said.stops:
        payload["stop"] = list(said.stops)
    if said.tools:
        payload |= _tools(said.tools, call.tools)
    if said.form is not None:
        schema = {"name": _FORM_NAME, "schema": orjson.loads(said.form), "strict": True}
        payload["response_format"] = {"type": "json_schema", "json_schema": schema}
    if call.n > 1:
        payload["n"] = call.n
    if call.continues:
        payload |= {"continue_final_message": True, "add_generation_prompt": False}
    return orjson.dumps(payload)


def _message(message: ChatMessage) -> dict[str, Any]:
    told: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.tool_calls:
        told["content"] = message.text or None
        told["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        told["tool_call_id"] = message.tool_call_id
    return told


def _tools(offered: Sequence[Tool], wanted: Tools) -> dict[str, Any]:
    """Only the tools that may be called are told: few servers know a choice of some of them."""
    told: dict[str, Any] = {"tools": [_tool(each) for each in offered]}
    if wanted.mode is not ToolMode.AUTO:
        named = {"type": "function", "function": {"name": wanted.name}}
        told["tool_choice"] = wanted.mode.value if wanted.name is None else named
    if not wanted.parallel:
        told["parallel_tool_calls"] = False
    return told


def _tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": orjson.loads(tool.parameters)}
    return {"type": "function", "function": function | ({"strict": True} if tool.strict else {})}


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    """What differs from the usual: a server needn't know the fields of others."""
    fields: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    usual = SamplingParams()
    for name in ("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos"):
        if getattr(sampling, name) != getattr(usual, name):
            fields[name] = getattr(sampling, name)
    if sampling.max_tokens is not None:
        fields["max_tokens"] = sampling.max_tokens
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.logprobs is not None:
        fields["logprobs"] = True
        if sampling.logprobs:
            fields["top_logprobs"] = sampling.logprobs
    return fields


@dataclass(slots=True)
class ChunkReader:
    """The chunks of one stream. `usage` is None until the server told it; `pieces` counts deltas with text or parts
    of calls; `calls` are those that began, each a choice and its number in it; `thinking` are the choices that have
    thought, for whoever reads on to take them out once they speak."""

    choices: int
    usage: Usage | None = None
    pieces: int = 0
    finished: set[int] = field(default_factory=set)
    calls: set[tuple[int, int]] = field(default_factory=set)
    thinking: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether every choice has said how it ended."""
        return len(self.finished) == self.choices

    def read(self, data: bytes) -> Iterator[BackendEvent]:
        """The events of one chunk. Raises `Malformed` and `UpstreamError`."""
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise Malformed from None
        if not isinstance(chunk, dict):
            raise Malformed
        if chunk.get("error"):
            raise UpstreamError(error_code(chunk))
        if usage := chunk.get("usage"):
            self.usage = usage_of(usage)
        choices = chunk.get("choices") or []
        if not isinstance(choices, list):
            raise Malformed
        for choice in choices:
            yield from self._choice(choice)

    def _choice(self, choice: Any) -> Iterator[BackendEvent]:
        if not isinstance(choice, dict):
            raise Malformed
        index, delta = choice.get("index", 0), choice.get("delta") or {}
        if not isinstance(index, int) or not 0 <= index < self.choices or not isinstance(delta, dict):
            raise Malformed
        if index in self.finished:
            return
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text = delta.get("content") or ""
        if not isinstance(text, str) or not isinstance(thought, str):
            raise Malformed
        if thought:
            self.thinking.add(index)
            yield ReasoningDelta(index, thought)
        if text:
            self.pieces += 1
            yield TextDelta(index, text, _logprobs(choice.get("logprobs")))
        for call in _list(delta.get("tool_calls")):
            yield self._call(index, call)
        if reason := choice.get("finish_reason"):
            if reason not in _REASONS:
                raise Malformed
            self.finished.add(index)
            yield ChoiceFinished(index, _REASONS[reason])

    def _call(self, choice: int, value: Any) -> ToolCallDelta:
        """A piece of a call. The first has its name; one without an id gets one."""
        if not isinstance(value, dict) or not isinstance(function := value.get("function") or {}, dict):
            raise Malformed
        number, name, arguments = value.get("index", 0), function.get("name"), function.get("arguments") or ""
        if not isinstance(number, int) or not 0 <= number < MAX_CALLS or not isinstance(arguments, str):
            raise Malformed
        self.pieces += 1
        if (choice, number) in self.calls:
            return ToolCallDelta(choice, number, arguments)
        call_id = value.get("id") or f"call_{secrets.token_hex(12)}"
        if not isinstance(name, str) or not name or not isinstance(call_id, str):
            raise Malformed
        self.calls.add((choice, number))
        return ToolCallDelta(choice, number, arguments, call_id, name)


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise Malformed
    return value


def usage_of(value: Any) -> Usage:
    """Token counts. Raises `Malformed` for anything that can't be one."""
    if not isinstance(value, dict):
        raise Malformed
    details = value.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    if cached is None:
        cached = value.get("prompt_cache_hit_tokens", value.get("cached_tokens"))  # DeepSeek's and Moonshot's names
    more = value.get("completion_tokens_details") or {}
    thought = more.get("reasoning_tokens") if isinstance(more, dict) else None
    told = (value.get("prompt_tokens"), value.get("completion_tokens"), cached or 0, thought or 0)
    return Usage(*map(_count, told))


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < _MOST_TOKENS:
        raise Malformed
    return value


def _logprobs(value: Any) -> tuple[DecodedLogprob, ...]:
    if value is None:
        return ()
    content = value.get("content") if isinstance(value, dict) else None
    if content is None:
        return ()
    if not isinstance(content, list):
        raise Malformed
    return tuple(DecodedLogprob(*_token(item), _alternatives(item.get("top_logprobs"))) for item in content)


def _alternatives(value: Any) -> tuple[tuple[str, bytes, float], ...]:
    if value is not None and not isinstance(value, list):
        raise Malformed
    return tuple(_token(item) for item in value or ())


def _token(item: Any) -> tuple[str, bytes, float]:
    if not isinstance(item, dict):
        raise Malformed
    token, raw, logprob = item.get("token"), item.get("bytes"), item.get("logprob")
    if not isinstance(token, str) or not isinstance(logprob, (int, float)) or math.isnan(logprob):
        raise Malformed
    try:
        return token, bytes(raw) if isinstance(raw, list) else token.encode(), float(logprob)
    except (ValueError, TypeError):
        raise Malformed from None


def error_code(body: Any) -> str:
    """The code, else the type, of an error body of any server; empty where it has none. Its message is never given
    on, as that can quote prompts and keys; vLLM's only there says that a prompt is too long."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return ""
    message = error.get("message")
    if isinstance(message, str) and _TOO_LONG in message:
        return "context_length_exceeded"
    for name in ("code", "type"):
        value = error.get(name)
        if isinstance(value, str) and len(value) <= 64 and value.replace("_", "").replace("-", "").isalnum():
            return value.lower()
    return ""
