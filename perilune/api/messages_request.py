"""Anthropic's Messages on the wire: the request, and its way into `core.Request` (spec S1).

Knows Anthropic's fields; doesn't know models or files. What happens with a field that isn't honoured is written in
fields.py; images and server tools are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from perilune.api.errors import Unsupported
from perilune.api.fields import WireThinking, check_fields, ignored_fields
from perilune.api.limits import parse_json_object
from perilune.api.messages_sources import Sources
from perilune.api.schema import MAX_FILES, MAX_PARTS, ChatCall, check_count, effort_of, wrong_field
from perilune.api.tools import MAX_CALLS, MAX_TOOLS, Name
from perilune.api.wire import Wire
from perilune.config import Settings
from perilune.core import (
    FilePart,
    Grammar,
    GrammarKind,
    Message,
    Request,
    SamplingParams,
    TextPart,
    Tool,
    ToolCall,
    ToolMode,
    Tools,
)
from perilune.errors import InvalidRequest
from perilune.service.ports import Caller

MAX_TOKENS = 10_000_000
MAX_STOPS = 16


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class WireSource(Wire):
    type: str = Field(max_length=64)
    data: str | None = None
    file_id: str | None = Field(None, max_length=128)
    content: Blocks | None = None


class WireEnabled(Wire):
    enabled: bool | None = None


class WireBlock(Wire):
    """Any block of a message; which fields count depends on `type`."""

    type: str = Field(max_length=64)
    text: str | None = None
    source: WireSource | Annotated[str, Field(max_length=4096)] | None = None
    title: str | None = Field(None, max_length=1024)
    context: str | None = None
    citations: WireEnabled | list[dict[str, Any]] | None = None
    id: str | None = Field(None, max_length=256)
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = Field(None, max_length=256)
    is_error: bool | None = None
    content: Blocks | None = None


Blocks = Annotated[
    list[WireBlock],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[WireBlock]),
    Field(max_length=MAX_PARTS),
]


class WireMessage(Wire):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class WireTool(Wire):
    type: str | None = Field(None, max_length=64)
    name: Name
    description: str | None = Field(None, max_length=65_536)
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class WireToolChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class WireFormat(Wire):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class WireOutput(Wire):
    format: WireFormat | None = None


class WireMessages(Wire):
    """The body of POST /v1/messages."""

    model: str = Field(min_length=1, max_length=256)
    messages: list[WireMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    system: Blocks | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=1024)]] | None = Field(
        None, max_length=MAX_STOPS
    )
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1)
    stream: bool | None = None
    thinking: WireThinking | None = None
    tools: list[WireTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: WireToolChoice | None = None
    output_config: WireOutput | None = None


@dataclass(frozen=True, slots=True)
class MessagesCall(ChatCall):
    """`sources` are what the answer may cite of the request."""

    sources: Sources = field(default_factory=Sources)


def parse_messages(
    body: bytes, *, request_id: str, caller: Caller, arrival_s: float, settings: Settings
) -> ChatCall:
    """See `dialect.Parse`."""
    raw = parse_json_object(body)
    wire = _validated(raw, settings)
    if wire.max_tokens is None:
        raise InvalidRequest("max_tokens is missing.", hint="Say how long the answer may be.", param="max_tokens")
    sources = Sources()
    request = _request(wire, request_id, caller, arrival_s, settings, sources)
    ignored = ignored_fields(raw, WireMessages.model_fields, "messages")
    return MessagesCall(request, bool(wire.stream), True, False, ignored=ignored, sources=sources)


def parse_count_call(
    body: bytes, *, request_id: str, caller: Caller, arrival_s: float, settings: Settings
) -> ChatCall:
    """The body of POST /v1/messages/count_tokens: as a message, but without `max_tokens`. See `dialect.Parse`."""
    wire = _validated(parse_json_object(body), settings)
    request = _request(wire, request_id, caller, arrival_s, settings, Sources())
    return ChatCall(request, False, False, False)


def _validated(raw: Mapping[str, Any], settings: Settings) -> WireMessages:
    check_fields("messages", raw)
    check_count(raw, settings.server.max_messages)
    try:
        return WireMessages.model_validate(raw)
    except ValidationError as error:
        raise wrong_field(error) from None


def _request(
    wire: WireMessages, request_id: str, caller: Caller, arrival_s: float, settings: Settings, sources: Sources
) -> Request:
    messages = tuple(_messages(wire, sources))
    prefix = ""
    if messages and messages[-1].role == "assistant" and not messages[-1].tool_calls:
        prefix, messages = messages[-1].text, messages[:-1]  # the answer begins with it
    request = Request(
        request_id=request_id,
        tenant=caller.tenant,
        model=wire.model,
        messages=messages,
        arrival_s=arrival_s,
        sampling=SamplingParams(
            temperature=settings.model.temperature if wire.temperature is None else float(wire.temperature),
            top_p=1.0 if wire.top_p is None else max(float(wire.top_p), 1e-6),
            top_k=wire.top_k or 0,
            max_tokens=wire.max_tokens,
            stop=tuple(wire.stop_sequences or ()),
            grammar=_grammar(wire.output_config),
        ),
        deadline_s=caller.deadline_s,
        tools=_tools(wire),
        whole=not wire.stream,
        key_id=caller.key_id,
        limits=caller.limits,
        effort=effort_of(wire.thinking),
        prefix=prefix,
    )
    if len(request.file_ids) > MAX_FILES:
        raise InvalidRequest(f"A request may name at most {MAX_FILES} files.", param="messages")
    return request


def _grammar(output: WireOutput | None) -> Grammar | None:
    if output is None or output.format is None:
        return None
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(output.format.schema_), "output_config.format.schema")


def _tools(wire: WireMessages) -> Tools:
    offered = []
    for index, tool in enumerate(wire.tools or ()):
        if tool.type not in (None, "custom") or tool.input_schema is None:
            raise Unsupported(
                f"tools[{index}] is no tool with an input_schema.",
                hint="This server runs no tools.",
                param=f"tools[{index}]",
            )
        schema = json.dumps({"type": "object", **tool.input_schema}, ensure_ascii=False)
        offered.append(Tool(tool.name, tool.description or "", schema, bool(tool.strict)))
    if len({tool.name for tool in offered}) < len(offered):
        raise InvalidRequest("Two tools have the same name.", hint="Rename one.", param="tools")
    choice = wire.tool_choice or WireToolChoice(type="auto")
    several = not choice.disable_parallel_tool_use
    modes = {"auto": ToolMode.AUTO, "none": ToolMode.NONE, "any": ToolMode.REQUIRED, "tool": ToolMode.REQUIRED}
    if choice.type in ("any", "tool") and not offered:
        raise InvalidRequest(
            "tool_choice wants a call, but there are no tools.", hint="Send tools.", param="tool_choice"
        )
    if choice.type == "tool" and choice.name not in {tool.name for tool in offered}:
        raise InvalidRequest(
            "tool_choice names no tool of the request.", hint="Offer it.", param="tool_choice.name"
        )
    return Tools(tuple(offered), modes[choice.type], choice.name if choice.type == "tool" else None, several)


# --------------------------------------------------------------------------------------------------- messages


def _messages(wire: WireMessages, sources: Sources) -> Iterator[Message]:
    if wire.system:
        yield Message("system", tuple(TextPart(_text(block, "system")) for block in wire.system))
    for index, message in enumerate(wire.messages):
        yield from _message(message, f"messages[{index}].content", sources)


def _message(wire: WireMessage, param: str, sources: Sources) -> Iterator[Message]:
    """One message, but for results of tools: each of them is a message of its own, before the rest."""
    parts: list[TextPart | FilePart] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(wire.content):
        place = f"{param}[{index}]"
        match block.type:
            case "text":
                parts.append(TextPart(_text(block, place)))
            case "document":
                parts.append(_document(block, place, sources))
            case "search_result":
                parts.append(_search_result(block, place, sources))
            case "tool_use" if wire.role == "assistant":
                calls.append(_call(block, place))
            case "tool_result" if wire.role == "user":
                yield _result(block, place, sources)
            case "thinking" | "redacted_thinking":
                pass  # what was thought before isn't said again
            case _:
                raise Unsupported(
                    f"{place} is of a type this server can't read here.",
                    hint="It takes text, document, search_result, tool_use, tool_result; files by POST /v1/files.",
                    param=f"{place}.type",
                )
    if len(calls) > MAX_CALLS:
        raise InvalidRequest(f"A message may hold at most {MAX_CALLS} calls.", param=param)
    if parts or calls:
        yield Message(wire.role, tuple(parts), tuple(calls))


def _text(block: WireBlock, param: str) -> str:
    if block.type != "text" or block.text is None:
        raise InvalidRequest(f"{param} has no text.", hint="Send a block of type text.", param=f"{param}.text")
    return block.text


def _document(block: WireBlock, param: str, sources: Sources) -> TextPart | FilePart:
    source, cited = block.source, _cited(block)
    title = f"Document {block.title!r}:\n" if block.title else "Document:\n"
    if isinstance(source, WireSource) and source.type == "file" and source.file_id:
        sources.add_file(source.file_id)
        return FilePart(source.file_id)
    if isinstance(source, WireSource) and source.type == "text" and source.data is not None:
        sources.add_text(source.data, block.title, cited)
        return TextPart(f"{title}{source.data}\n\n")
    if isinstance(source, WireSource) and source.type == "content" and source.content:
        texts = _texts(source.content, f"{param}.source.content")
        sources.add_blocks(texts, block.title, cited)
        return TextPart(title + "\n".join(texts) + "\n\n")
    raise Unsupported(
        f"{param} has a source this server can't read; it takes file, text and content.",
        hint="Upload the document with POST /v1/files and name its file_id.",
        param=f"{param}.source",
    )


def _search_result(block: WireBlock, param: str, sources: Sources) -> TextPart:
    if not isinstance(block.source, str) or block.title is None or not block.content:
        raise InvalidRequest(f"{param} has no source, title or content.", param=param)
    texts = _texts(block.content, f"{param}.content")
    sources.add_search_result(texts, block.source, block.title, _cited(block))
    return TextPart(f"Search result {block.title!r} ({block.source}):\n" + "\n".join(texts) + "\n\n")


def _texts(blocks: Sequence[WireBlock], param: str) -> list[str]:
    return [_text(block, f"{param}[{at}]") for at, block in enumerate(blocks)]


def _cited(block: WireBlock) -> bool:
    return isinstance(block.citations, WireEnabled) and bool(block.citations.enabled)


def _call(block: WireBlock, param: str) -> ToolCall:
    if block.id is None or block.name is None:
        raise InvalidRequest(
            f"{param} has no id or no name.", hint="Send the block as it was answered.", param=param
        )
    return ToolCall(block.id, block.name, json.dumps(block.input or {}, ensure_ascii=False))


def _result(block: WireBlock, param: str, sources: Sources) -> Message:
    if block.tool_use_id is None:
        raise InvalidRequest(f"{param} names no tool_use_id.", param=f"{param}.tool_use_id")
    texts = []
    for at, item in enumerate(block.content or ()):
        place = f"{param}.content[{at}]"
        found = item.type == "search_result"
        texts.append(_search_result(item, place, sources).text if found else _text(item, place))
    said = "".join(texts)
    text = f"Error: {said}" if block.is_error else said
    return Message("tool", (TextPart(text),), tool_call_id=block.tool_use_id)
