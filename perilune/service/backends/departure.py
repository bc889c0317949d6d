"""The one place where text leaves for a remote backend (spec M12).

`OpenAIBackend` builds its bodies from a `Departed` and from nothing else, and only a `Departure` makes those; a
test holds that no other module of the service has an HTTP client. Knows text; doesn't know sockets or dialects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from perilune.core import Tool
from perilune.errors import Forbidden
from perilune.service.backends.protocol import ChatMessage

_MARK = "\ue000"
"""Before the number of a string that stands elsewhere."""

_IN_JSON = re.compile(r'"(?:[^"\\]|\\.)*"|\[[A-Z][A-Z_]*(?:[0-9]+[a-z]*)?\]')
"""A string, or a placeholder outside of one."""


@dataclass(frozen=True, slots=True)
class Said:
    """All of a request's text: messages with the calls in them, stop strings, the tools that are offered, and the
    JSON Schema that the answer must follow. Names and ids of tools are names of programs, not text."""

    messages: tuple[ChatMessage, ...]
    stops: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    form: str | None = None

    def texts(self) -> list[str]:
        """Every text, in the order that `rewritten` takes: what stays while a conversation grows comes first."""
        said: list[str] = []
        for tool in self.tools:
            said += [tool.description, *parted(tool.parameters)]
        said += [*self.stops, *(() if self.form is None else parted(self.form))]
        for message in self.messages:
            said.append(message.text)
            for call in message.tool_calls:
                said += parted(call.arguments)
        return said

    def rewritten(self, texts: Sequence[str]) -> Said:
        """The same with other texts. Raises `Forbidden` where one that is JSON can't be made JSON again."""
        given = iter(texts)

        def json_of(before: str) -> str:
            return joined([next(given) for _ in parted(before)])

        tools = [replace(tool, description=next(given), parameters=json_of(tool.parameters)) for tool in self.tools]
        stops = tuple(next(given) for _ in self.stops)
        form = None if self.form is None else json_of(self.form)
        messages = []
        for message in self.messages:
            text = next(given)
            calls = tuple(replace(call, arguments=json_of(call.arguments)) for call in message.tool_calls)
            messages.append(replace(message, text=text, tool_calls=calls))
        return Said(tuple(messages), stops, tuple(tools), form)


def parted(text: str) -> list[str]:
    """JSON without escapes that would hide what it says: the whole, in which strings that can't be written without
    them have marks in their place, and then those strings."""
    apart: list[str] = []

    def marked(value: str) -> str:
        if json.dumps(value, ensure_ascii=False)[1:-1] == value and not value.startswith(_MARK):
            return value
        apart.append(value)
        return f"{_MARK}{len(apart) - 1}"

    whole = json.dumps(_with_strings(json.loads(text), marked), ensure_ascii=False)
    return [whole, *apart]


def joined(parts: Sequence[str]) -> str:
    """What `parted` gave, as one JSON again. Raises `Forbidden`, as `mended`."""

    def back(value: str) -> str:
        return parts[1 + int(value[1:])] if value.startswith(_MARK) else value

    return json.dumps(_with_strings(json.loads(mended(parts[0])), back), ensure_ascii=False)


def _with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every string of it, keys too, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_with_strings(each, change) for each in value]
    if isinstance(value, dict):
        return {change(name): _with_strings(each, change) for name, each in value.items()}
    return value


def mended(text: str) -> str:
    """JSON in which a number may have been replaced by a placeholder: that becomes a string. Raises `Forbidden` for
    what is no JSON then."""
    whole = _IN_JSON.sub(lambda found: found[0] if found[0][0] == '"' else f'"{found[0]}"', text)
    try:
        json.loads(whole)
    except ValueError:
        raise Forbidden(
            "A tool or form of the request holds personal identifiers that can't be taken out of it.",
            hint="Take them out, or use a model that runs here.",
            param="tools",
        ) from None
    return whole


@dataclass(frozen=True, slots=True)
class Leaving:
    """What is to leave, of which request, and where to."""

    tenant: str
    backend: str
    request_id: str
    said: Said


@dataclass(frozen=True, slots=True)
class Thought:
    """What is thought before a choice."""

    choice: int


Stream = int | tuple[int, int] | Thought
"""A choice, a choice and the number of a call in it (both count from 0), or what was thought before a choice."""


class Reverser(Protocol):
    """Undoes in the answer what was done to the question. One for each answer. Texts of calls are JSON."""

    def push(self, stream: Stream, text: str) -> str:
        """The text to show now. It may hold some back until the next piece tells what it is."""
        ...

    def flush(self, stream: Stream) -> str:
        """What was held back, once the stream is finished."""
        ...


@dataclass(frozen=True, slots=True)
class Departed:
    """What does leave. `altered`: it isn't what was written, so that tokens' log probabilities aren't shown.
    `taken_out` counts the personal identifiers that don't leave, by kind."""

    said: Said
    reverser: Reverser
    altered: bool = False
    taken_out: Mapping[str, int] = field(default_factory=dict)


class Departure(Protocol):
    """Decides what leaves."""

    async def leave(self, leaving: Leaving) -> Departed:
        """What may leave of it. Raises `errors.Forbidden` where nothing may."""
        ...


class Unchanged:
    """A reverser that has nothing to undo."""

    def push(self, stream: Stream, text: str) -> str:
        return text

    def flush(self, stream: Stream) -> str:
        return ""


class AsWritten:
    """The departure that lets everything leave as it is."""

    async def leave(self, leaving: Leaving) -> Departed:
        return Departed(leaving.said, Unchanged())
