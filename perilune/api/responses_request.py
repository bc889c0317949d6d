"""OpenAI's Responses on the wire: the request, and its way into `core.Request` (spec S1).

Knows the dialect's items; doesn't know what is kept. Hosted tools, background answers and conversation objects
aren't there yet and are refused; bookkeeping is ignored. An answer's instructions aren't carried over to the next,
as the dialect has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError

from perilune.api.errors import Unsupported
from perilune.api.forms import WireResponseFormat, WireSchema, grammar_of
from perilune.api.limits import parse_json_object
from perilune.api.schema import (
    MAX_DEADLINE_S,
    MAX_FILES,
    MAX_OUTPUT_TOKENS,
    MAX_PARTS,
    ChatCall,
    Wire,
    check_count,
    service_class,
    wrong_field,
)
from perilune.api.tools import (
    MAX_TOOLS,
    Name,
    WireCall,
    WireCalled,
    WireFunction,
    WireNamed,
    WireTool,
    WireToolChoice,
    calls_of,
    tools_of,
)
from perilune.config import Settings
from perilune.core import (
    ContextPolicy,
    FilePart,
    Grammar,
    Message,
    Request,
    SamplingParams,
    TextPart,
    ToolCall,
    Tools,
)
from perilune.errors import InvalidRequest
from perilune.service.ports import Caller

Item = Mapping[str, Any]
Body = TypeVar("Body", bound=Wire)

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "context_management": (None, []),
    "prompt": (None,),
    "image": (None,),
    "max_tool_calls": (None,),
}


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _as_parts(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class WirePart(Wire):
    type: str = Field(max_length=64)
    text: str | None = None
    file_id: str | None = Field(None, max_length=128)
    refusal: str | None = None


ShortName = Annotated[str, Field(max_length=64)]
ShortValue = Annotated[str, Field(max_length=512)]

Parts = Annotated[list[WirePart], BeforeValidator(_as_parts), Field(max_length=MAX_PARTS)]


class WireItem(Wire):
    """Any item; which fields count depends on `type`."""

    type: str = Field("message", max_length=64)
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | None = None
    call_id: str | None = Field(None, min_length=1, max_length=256)
    name: Name | None = None
    arguments: str | None = Field(None, max_length=1 << 20)
    output: Parts | None = None


_ITEM_FIELDS = frozenset({*WireItem.model_fields, "id", "status"})


class WireFunctionTool(Wire):
    type: str = Field(max_length=64)
    name: Name | None = None
    description: str | None = Field(None, max_length=65_536)
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class WireNamedChoice(Wire):
    type: Literal["function"]
    name: Name


class WireTextFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=256)
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class WireText(Wire):
    format: WireTextFormat | None = None


class WireStreamOptions(Wire):
    include_obfuscation: bool | None = None


class WireResponse(Wire):
    """The body of POST /v1/responses."""

    model: str = Field(min_length=1, max_length=256)
    input: Annotated[list[WireItem], BeforeValidator(_as_items), Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_OUTPUT_TOKENS)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool | None = None
    stream_options: WireStreamOptions | None = None
    store: bool | None = None
    previous_response_id: str | None = Field(None, min_length=1, max_length=64)
    tools: list[WireFunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | WireNamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: WireText | None = None
    service_tier: str | None = Field(None, max_length=64)
    metadata: dict[ShortName, ShortValue] | None = Field(None, max_length=16)
    truncation: Literal["auto", "disabled"] | None = None
    deadline_s: float | None = Field(None, gt=0, le=MAX_DEADLINE_S)
    context_policy: Literal["auto", "full", "refined"] | None = None


@dataclass(frozen=True, slots=True)
class ResponseCall(ChatCall):
    """`items` are the request's own input, as it came; `echo` is what the answer repeats of the request."""

    items: tuple[dict[str, Any], ...] = ()
    store: bool = True
    echo: Mapping[str, Any] | None = None


def previous_of(body: bytes) -> str | None:
    """The answer that a request goes on from, before the rest of it is read."""
    found = parse_json_object(body).get("previous_response_id")
    return found if isinstance(found, str) and 0 < len(found) <= 64 else None


def parse_response(
    body: bytes,
    *,
    request_id: str,
    caller: Caller,
    arrival_s: float,
    settings: Settings,
    before: Sequence[Item] = (),
) -> ResponseCall:
    """See `dialect.Parse`; `before` are the items of the answers that this one goes on from."""
    raw = parse_json_object(body)
    for field, neutral in UNSUPPORTED.items():
        if field in raw and raw[field] not in neutral:
            raise Unsupported(f"{field} isn't supported by this server yet.", hint="Leave it out.", param=field)
    items = _as_items(raw.get("input"))
    check_count({"messages": [*before, *items] if isinstance(items, list) else items}, settings.server.max_messages)
    wire = _validated(WireResponse, raw)
    earlier = _validated(_Items, {"input": list(before)}).input
    messages = tuple(_messages([*earlier, *wire.input], wire.instructions))
    request = _request(wire, messages, request_id, caller, arrival_s, settings)
    own = tuple(_kept(item) for item in items if isinstance(item, dict)) if isinstance(items, list) else ()
    store = wire.store is not False and caller.role != "read-only"
    return ResponseCall(
        request, bool(wire.stream), False, False, items=own, store=store, echo=_echo(raw, wire, store)
    )


def _kept(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item without the fields that nobody reads: else anything could be stored with it."""
    kept = {name: value for name, value in item.items() if name in _ITEM_FIELDS}
    for name in ("content", "output"):
        if isinstance(kept.get(name), list):
            parts = [{key: part[key] for key in part if key in WirePart.model_fields} for part in kept[name]]
            kept[name] = parts
    return kept


class _Items(Wire):
    input: list[WireItem]


def _validated(shape: type[Body], raw: Mapping[str, Any]) -> Body:
    try:
        return shape.model_validate(raw)
    except ValidationError as error:
        raise wrong_field(error) from None


def _request(
    wire: WireResponse,
    messages: tuple[Message, ...],
    request_id: str,
    caller: Caller,
    arrival_s: float,
    settings: Settings,
) -> Request:
    request = Request(
        request_id=request_id,
        tenant=caller.tenant,
        model=wire.model,
        messages=messages,
        arrival_s=arrival_s,
        sampling=SamplingParams(
            temperature=settings.model.temperature if wire.temperature is None else float(wire.temperature),
            top_p=1.0 if wire.top_p is None else max(float(wire.top_p), 1e-6),
            max_tokens=wire.max_output_tokens,
            grammar=_grammar(wire.text),
        ),
        deadline_s=wire.deadline_s or caller.deadline_s,
        context_policy=ContextPolicy(wire.context_policy or "auto"),
        service_class=service_class(wire.service_tier),
        tools=_tools(wire),
        whole=not wire.stream,
        key_id=caller.key_id,
    )
    if len(request.file_ids) > MAX_FILES:
        raise InvalidRequest(f"A request may name at most {MAX_FILES} files.", param="input")
    return request


def _grammar(text: WireText | None) -> Grammar | None:
    if text is None or text.format is None:
        return None
    form = text.format
    schema = None
    if form.type == "json_schema":
        schema = WireSchema.model_validate({"name": form.name or "answer", "schema": form.schema_})
    return grammar_of(WireResponseFormat(type=form.type, json_schema=schema), None)


def _tools(wire: WireResponse) -> Tools:
    offered = []
    for index, tool in enumerate(wire.tools or ()):
        if tool.type != "function" or tool.name is None:
            raise Unsupported(
                f"tools[{index}] is no function with a name; this server runs no tools yet.",
                hint="Offer functions.",
                param=f"tools[{index}].type",
            )
        function = WireFunction(
            name=tool.name, description=tool.description, parameters=tool.parameters, strict=bool(tool.strict)
        )
        offered.append(WireTool(type="function", function=function))
    choice = wire.tool_choice
    if isinstance(choice, WireNamedChoice):
        named = WireToolChoice(type="function", function=WireNamed(name=choice.name))
        return tools_of(offered, named, wire.parallel_tool_calls)
    return tools_of(offered, choice, wire.parallel_tool_calls)


def _echo(raw: Mapping[str, Any], wire: WireResponse, store: bool) -> dict[str, Any]:
    """What an answer repeats of its request."""
    names = ("instructions", "max_output_tokens", "temperature", "top_p", "previous_response_id")
    return {name: getattr(wire, name) for name in names} | {
        "metadata": wire.metadata or {},
        "parallel_tool_calls": wire.parallel_tool_calls is not False,
        "store": store,
        "text": raw.get("text") or {"format": {"type": "text"}},
        "tool_choice": raw.get("tool_choice") or "auto",
        "tools": raw.get("tools") or [],
        "truncation": wire.truncation or "disabled",
    }


# ------------------------------------------------------------------------------------------------------ items


def _messages(items: Sequence[WireItem], instructions: str | None) -> Iterator[Message]:
    """Calls in a row are one assistant message, with the text before them, as models' templates have it."""
    if instructions:
        yield Message("system", (TextPart(instructions),))
    said: tuple[TextPart | FilePart, ...] | None = None  # of an assistant, waiting for its calls
    calls: list[ToolCall] = []
    for index, item in enumerate(items):
        place = f"input[{index}]"
        if item.type == "function_call":
            calls += _call(item, place)
            continue
        if item.type == "reasoning":
            continue  # what was thought before isn't said again
        if said is not None or calls:
            yield Message("assistant", said or (), tuple(calls))
            said, calls = None, []
        message = _message(item, place)
        if message.role == "assistant":
            said = message.parts
        else:
            yield message
    if said is not None or calls:
        yield Message("assistant", said or (), tuple(calls))


def _message(item: WireItem, param: str) -> Message:
    if item.type == "function_call_output":
        if item.call_id is None or item.output is None:
            raise InvalidRequest(f"{param} has no call_id or no output.", param=param)
        return Message("tool", _parts(item.output, f"{param}.output"), tool_call_id=item.call_id)
    if item.type != "message" or item.role is None:
        raise Unsupported(
            f"{param} is of a type this server can't read.",
            hint="It takes message, function_call and function_call_output.",
            param=f"{param}.type",
        )
    if not item.content:
        raise InvalidRequest(f"{param} has no content.", hint="Send a text.", param=f"{param}.content")
    role = "system" if item.role == "developer" else item.role
    return Message(role, _parts(item.content, f"{param}.content"))


def _parts(wire: Sequence[WirePart], param: str) -> tuple[TextPart | FilePart, ...]:
    return tuple(_part(part, f"{param}[{index}]") for index, part in enumerate(wire))


def _part(part: WirePart, param: str) -> TextPart | FilePart:
    if part.type in ("input_text", "output_text", "text") and part.text is not None:
        return TextPart(part.text)
    if part.type == "refusal":
        return TextPart(part.refusal or "")
    if part.type == "input_file" and part.file_id:
        return FilePart(part.file_id)
    raise Unsupported(
        f"{param} is of a type this server can't read; it takes input_text, output_text and input_file by file_id.",
        hint="Upload documents with POST /v1/files and name them by id.",
        param=f"{param}.type",
    )


def _call(item: WireItem, param: str) -> tuple[ToolCall, ...]:
    if item.call_id is None or item.name is None:
        raise InvalidRequest(f"{param} has no call_id or no name.", hint="Send it as it was answered.", param=param)
    called = WireCalled(name=item.name, arguments=item.arguments or "{}")
    return calls_of([WireCall(id=item.call_id, function=called)], param)
