"""OpenAI's Responses on the wire: the request, and its way into `core.Request` (spec S1).

Knows the dialect's fields; items are responses_items.py's, and it doesn't know what is kept. What happens with a
field that isn't honoured is written in fields.py. An answer's instructions aren't carried over to the next, as the
dialect has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError

from perilune.api.errors import Unsupported
from perilune.api.fields import Effort, WireCacheOptions, check_fields, ignored_fields, prewarmed
from perilune.api.file_search import RESULTS, TOOL, file_search_of
from perilune.api.forms import WireResponseFormat, WireSchema, grammar_of
from perilune.api.limits import parse_json_object
from perilune.api.responses_items import Item, WireItem, as_items, kept, messages_of, read_items
from perilune.api.schema import (
    MAX_DEADLINE_S,
    MAX_FILES,
    MAX_OUTPUT_TOKENS,
    ChatCall,
    check_count,
    service_class,
    wrong_field,
)
from perilune.api.tools import (
    MAX_TOOLS,
    Name,
    WireAllowedChoice,
    WireFunction,
    WireNamed,
    WireTool,
    WireToolChoice,
    tools_of,
)
from perilune.api.wire import Wire
from perilune.config import Settings
from perilune.core import ContextPolicy, Grammar, Message, Request, SamplingParams, Tools
from perilune.errors import InvalidRequest
from perilune.service.ports import Caller

Body = TypeVar("Body", bound=Wire)
ShortName = Annotated[str, Field(max_length=64)]
ShortValue = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[ShortName, ShortValue], Field(max_length=16)]
ConversationId = Annotated[str, Field(min_length=1, max_length=64)]
LOGPROBS = "message.output_text.logprobs"
Include = Literal[
    "message.output_text.logprobs",
    "file_search_call.results",
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""As the dialect has them; what there is none of here can't be included."""


class WireFunctionTool(Wire):
    type: str = Field(max_length=64)
    name: Name | None = None
    description: str | None = Field(None, max_length=65_536)
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class WireNamedChoice(Wire):
    type: Literal["function"]
    name: Name


class WireSearchChoice(Wire):
    type: Literal["file_search"]


class WireAllowedNames(Wire):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[WireNamedChoice | WireSearchChoice] = Field(min_length=1, max_length=MAX_TOOLS)


class WireTextFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=256)
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class WireText(Wire):
    format: WireTextFormat | None = None
    verbosity: str | None = None


class WireReasoning(Wire):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class WireConversation(Wire):
    id: ConversationId


class WireCompaction(Wire):
    type: Literal["compaction"]
    compact_threshold: int | None = Field(None, ge=1, le=MAX_OUTPUT_TOKENS)


class WireStreamOptions(Wire):
    include_obfuscation: bool | None = None


class WireResponse(Wire):
    """The body of POST /v1/responses."""

    model: str = Field(min_length=1, max_length=256)
    input: Annotated[
        list[WireItem], BeforeValidator(as_items, json_schema_input_type=str | list[WireItem]), Field(min_length=1)
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_OUTPUT_TOKENS)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool | None = None
    stream_options: WireStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = Field(None, min_length=1, max_length=64)
    conversation: ConversationId | WireConversation | None = None
    context_management: list[WireCompaction] | None = Field(None, max_length=1)
    include: list[Include] | None = Field(None, max_length=16)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    reasoning: WireReasoning | None = None
    prompt_cache_options: WireCacheOptions | None = None
    tools: list[WireFunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: (
        Literal["none", "auto", "required"] | WireNamedChoice | WireAllowedNames | WireSearchChoice | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: WireText | None = None
    service_tier: str | None = Field(None, max_length=64)
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    deadline_s: float | None = Field(None, gt=0, le=MAX_DEADLINE_S)
    context_policy: Literal["auto", "full", "refined"] | None = None


@dataclass(frozen=True, slots=True)
class ResponseCall(ChatCall):
    """`items` are the request's own input, as it came, `echo` is what the answer repeats of the request.
    `compaction`: when the prompt is compacted first; `before` is what came before `items`, `compacted` what was
    made of it."""

    items: tuple[dict[str, Any], ...] = ()
    store: bool = True
    background: bool = False
    conversation_id: str | None = None
    compaction: WireCompaction | None = None
    include_logprobs: bool = False
    include_results: bool = False
    before: tuple[Item, ...] = ()
    compacted: tuple[dict[str, Any], ...] = ()
    echo: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class GoesOnFrom:
    """What a request goes on from, before the rest of it is read."""

    previous_id: str | None = None
    conversation_id: str | None = None


def goes_on_from(body: bytes) -> GoesOnFrom:
    """Raises `InvalidRequest` for a body that names both; wrong types are found when the rest is read."""
    raw = parse_json_object(body)
    previous, talk = raw.get("previous_response_id"), raw.get("conversation")
    if isinstance(talk, dict):
        talk = talk.get("id")
    if previous is not None and talk is not None:
        raise InvalidRequest(
            "previous_response_id and conversation can't be sent together.", hint="Send one.", param="conversation"
        )
    return GoesOnFrom(_short(previous), _short(talk))


def _short(value: object) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= 64 else None


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
    check_fields("responses", raw)
    items = as_items(raw.get("input"))
    check_count({"messages": [*before, *items] if isinstance(items, list) else items}, settings.server.max_messages)
    wire = validated(WireResponse, raw)
    own = [kept(item) for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    messages = tuple(messages_of([*read_items(before), *wire.input], wire.instructions))
    request = _request(raw, wire, messages, request_id, caller, arrival_s, settings)
    store = wire.store is not False and caller.role != "read-only"
    if wire.background and not store:
        raise InvalidRequest(
            "background needs the answer to be kept.", hint="Don't send store: false.", param="store"
        )
    talk = wire.conversation.id if isinstance(wire.conversation, WireConversation) else wire.conversation
    return ResponseCall(
        request,
        bool(wire.stream),
        False,
        False,
        obfuscate=bool(wire.stream_options and wire.stream_options.include_obfuscation),
        ignored=ignored_fields(raw, WireResponse.model_fields, "responses"),
        items=tuple(own),
        store=store,
        background=bool(wire.background),
        conversation_id=talk,
        compaction=wire.context_management[0] if wire.context_management else None,
        include_logprobs=LOGPROBS in (wire.include or ()),
        include_results=RESULTS in (wire.include or ()),
        before=tuple(before),
        echo=_echo(raw, wire, store, talk, request),
    )


def validated(shape: type[Body], raw: Mapping[str, Any]) -> Body:
    try:
        return shape.model_validate(raw)
    except ValidationError as error:
        raise wrong_field(error) from None


def _request(
    raw: Mapping[str, Any],
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
            logprobs=(wire.top_logprobs or 0) if LOGPROBS in (wire.include or ()) else None,
        ),
        # Nobody waits for an answer in the background: nothing is left out to be in time.
        deadline_s=wire.deadline_s or (settings.model_serving.timeout if wire.background else caller.deadline_s),
        context_policy=_policy(wire),
        service_class=service_class(wire.service_tier),
        tools=_tools(wire),
        file_search=file_search_of(raw.get("tools") or [], wire.tool_choice),
        whole=not wire.stream and not wire.background,
        key_id=caller.key_id,
        limits=caller.limits,
        effort=wire.reasoning.effort if wire.reasoning is not None else None,
    )
    request = prewarmed(request, wire.prompt_cache_options, settings.model_serving.timeout)
    if len(request.file_ids) > MAX_FILES:
        raise InvalidRequest(f"A request may name at most {MAX_FILES} files.", param="input")
    return request


def _policy(wire: WireResponse) -> ContextPolicy:
    """`truncation` in our words: `disabled` leaves nothing out, `auto` leaves out what doesn't fit or takes too
    long. Unlike OpenAI's, the default is `auto`, and the answer says so."""
    meant = {"disabled": "full", "auto": "auto", None: None}[wire.truncation]
    if meant is not None and wire.context_policy not in (None, meant):
        raise InvalidRequest("truncation and context_policy disagree.", hint="Send one.", param="truncation")
    return ContextPolicy(wire.context_policy or meant or "auto")


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
        if tool.type == TOOL:
            continue
        if tool.type != "function" or tool.name is None:
            raise Unsupported(
                f"tools[{index}] is no function with a name, and file_search is the one tool that runs here.",
                hint="Offer functions and file_search.",
                param=f"tools[{index}].type",
            )
        function = WireFunction(
            name=tool.name, description=tool.description, parameters=tool.parameters, strict=bool(tool.strict)
        )
        offered.append(WireTool(type="function", function=function))
    choice = wire.tool_choice
    searches = len(offered) < len(wire.tools or ())
    if isinstance(choice, WireSearchChoice) or (choice == "required" and not offered and searches):
        return tools_of(offered, "none" if offered else None, wire.parallel_tool_calls)  # it is searched anyway
    if isinstance(choice, WireNamedChoice):
        named = WireToolChoice(type="function", function=WireNamed(name=choice.name))
        return tools_of(offered, named, wire.parallel_tool_calls)
    if isinstance(choice, WireAllowedNames):
        functions = [tool for tool in choice.tools if isinstance(tool, WireNamedChoice)]
        if not functions:
            return tools_of(offered, "none" if offered else None, wire.parallel_tool_calls)
        names = [{"type": "function", "function": {"name": tool.name}} for tool in functions]
        given = {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": names}}
        return tools_of(offered, WireAllowedChoice.model_validate(given), wire.parallel_tool_calls)
    return tools_of(offered, choice, wire.parallel_tool_calls)


def _echo(
    raw: Mapping[str, Any], wire: WireResponse, store: bool, talk: str | None, request: Request
) -> dict[str, Any]:
    """What an answer repeats of its request."""
    names = ("instructions", "max_output_tokens", "temperature", "top_p", "previous_response_id")
    return {name: getattr(wire, name) for name in names} | {
        "metadata": wire.metadata or {},
        "parallel_tool_calls": wire.parallel_tool_calls is not False,
        "store": store,
        "text": raw.get("text") or {"format": {"type": "text"}},
        "tool_choice": raw.get("tool_choice") or "auto",
        "tools": raw.get("tools") or [],
        "truncation": "disabled" if request.context_policy is ContextPolicy.FULL else "auto",
        "background": bool(wire.background),
        "conversation": {"id": talk} if talk is not None else None,
        "reasoning": {"effort": request.effort, "summary": None},
        "top_logprobs": wire.top_logprobs or 0,
    }
