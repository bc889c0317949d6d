"""A request with tools made one without, and its answer's events read back into calls.

Knows requests and events of the service; doesn't know models beyond their notation. `prepared` goes before the
answer, `ToolStream` behind it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace

from perilune.core import (
    ChoiceFinished,
    Event,
    FinishReason,
    Message,
    Request,
    TextDelta,
    TextPart,
    ToolCallDelta,
)
from perilune.errors import InvalidRequest
from perilune.service.tools.formats import ToolFormat
from perilune.service.tools.grammar import tools_grammar
from perilune.service.tools.parse import CallBegan, CallParser, CallWrote, Piece, Said


def prepared(request: Request, notation: ToolFormat) -> Request:
    """The request as the model reads it: tools in the system message, calls and results as text, calls held to
    their schemas.

    Raises `InvalidRequest` for a form beside tools that is no JSON schema, and for a result that answers no call.
    """
    messages = tuple(_told(request.messages, notation))
    grammar = tools_grammar(request.tools, notation, request.sampling.grammar)
    if grammar is not None:
        messages = _with_instructions(messages, notation.instructions(request.tools.offered))
        request = replace(request, sampling=replace(request.sampling, grammar=grammar))
    return replace(request, messages=messages)


def _told(messages: Sequence[Message], notation: ToolFormat) -> Iterator[Message]:
    """Calls and results as text; results in a row are one message, as the models' templates have it."""
    known: set[str] = set()
    results: list[str] = []
    for index, message in enumerate(messages):
        if message.role == "tool":
            if message.tool_call_id not in known:
                raise InvalidRequest(
                    "A tool message answers no call that was made before it.",
                    hint="Send the assistant message with its tool_calls first, and name one of their ids.",
                    param=f"messages[{index}].tool_call_id",
                )
            results.append(notation.result(message.text))
            continue
        if results:
            yield Message("tool", (TextPart("\n".join(results)),))
            results = []
        known.update(call.call_id for call in message.tool_calls)
        if message.tool_calls:
            calls = "\n".join(notation.call(call) for call in message.tool_calls)
            text = f"{message.text}\n{calls}" if message.text else calls
            yield Message(message.role, (TextPart(text),))
        else:
            yield message
    if results:
        yield Message("tool", (TextPart("\n".join(results)),))


def _with_instructions(messages: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    first = messages[0] if messages else None
    if first is not None and first.role in ("system", "developer"):
        return (replace(first, parts=(*first.parts, TextPart(f"\n\n{text}"))), *messages[1:])
    return (Message("system", (TextPart(text),)), *messages)


class ToolStream:
    """The events of one answer, with calls in place of their text."""

    def __init__(self, notation: ToolFormat, choices: int) -> None:
        self._parsers = [CallParser(notation) for _ in range(choices)]

    def translate(self, event: Event) -> Iterator[Event]:
        if isinstance(event, TextDelta):
            pieces = self._parsers[event.choice].push(event.text)
            yield from self._events(event.choice, pieces, event)
        elif isinstance(event, ChoiceFinished):
            parser = self._parsers[event.choice]
            yield from self._events(event.choice, parser.flush(), None)
            called = parser.whole and event.reason is FinishReason.STOP  # a stop string may cut a call, too
            yield replace(event, reason=FinishReason.TOOL_CALLS) if called else event
        else:
            yield event

    @staticmethod
    def _events(choice: int, pieces: Iterator[Piece], source: TextDelta | None) -> Iterator[Event]:
        """Log probabilities go with the first text that comes of their tokens."""
        logprobs = source.logprobs if source is not None else ()
        for piece in pieces:
            match piece:
                case Said(text):
                    yield TextDelta(choice, text, logprobs)
                    logprobs = ()
                case CallBegan(index, name):
                    yield ToolCallDelta(choice, index, call_id=f"call_{secrets.token_hex(12)}", name=name)
                case CallWrote(index, text):
                    yield ToolCallDelta(choice, index, arguments=text)
        if logprobs:
            yield TextDelta(choice, "", logprobs)
