"""The wire form of a chat request, and its way into `core.Request` (spec S1, X4).

Knows OpenAI's fields and ours; doesn't know models or files. Every field is strictly typed. What happens with a
field that isn't honoured is written in fields.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError

from perilune.api.errors import Unsupported
from perilune.api.fields import Effort, WireCacheOptions, WireThinking, check_fields, ignored_fields, prewarmed
from perilune.api.forms import WireResponseFormat, WireStructured, grammar_of
from perilune.api.limits import parse_json_object
from perilune.api.tools import MAX_CALLS, Choice, Offered, WireCall, calls_of, tools_of
from perilune.api.wire import Wire
from perilune.config import Settings
from perilune.core import (
    ContextPolicy,
    FilePart,
    Message,
    Request,
    SamplingParams,
    ServiceClass,
    TextPart,
)
from perilune.errors import Forbidden, InvalidRequest
from perilune.memory.session_ids import SESSION_ID_FORM, is_session_id
from perilune.service.ports import Caller

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_FILES = 64
MAX_SESSIONS = 64
MAX_PARTS = 2048
MAX_OUTPUT_TOKENS = 10_000_000
MAX_DEADLINE_S = 86_400.0
_INT64 = 2**63 - 1
_TOKEN_ID = 2**31 - 1
_SMALLEST_TOP_P = 1e-6
_FORM = re.compile(r"[A-Z]|[a-z-]+\[|(str|int|float|bool|dict|none)$")
Number = TypeVar("Number", int, float)

_UNSUPPORTED_IN_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "function_call": (None,),
    "audio": (None,),
}

_TIERS: Mapping[str, ServiceClass] = {
    "auto": ServiceClass.P0_INTERACTIVE,
    "default": ServiceClass.P0_INTERACTIVE,
    "priority": ServiceClass.P0_INTERACTIVE,
    "fast": ServiceClass.P0_INTERACTIVE,
    "scale": ServiceClass.P0_INTERACTIVE,
    "flex": ServiceClass.P1_DOCUMENT,
    "batch": ServiceClass.P2_BATCH,
}
TIER_OF_CLASS: Mapping[ServiceClass, str] = {
    ServiceClass.P0_INTERACTIVE: "default",
    ServiceClass.P1_DOCUMENT: "flex",
    ServiceClass.P2_BATCH: "batch",
}
"""What a response reports as the tier that was used."""


ModelName = Annotated[str, Field(min_length=1, max_length=256)]


def as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class WireFile(Wire):
    file_id: str | None = Field(None, max_length=128)


class WirePart(Wire):
    type: str = Field(max_length=64)
    text: str | None = None
    file: WireFile | None = None
    file_id: str | None = Field(None, max_length=128)


Parts = Annotated[
    list[WirePart],
    BeforeValidator(_as_parts, json_schema_input_type=str | list[WirePart]),
    Field(min_length=1, max_length=MAX_PARTS),
]


class WireMessage(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Parts | None = None
    tool_calls: Annotated[list[WireCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    name: str | None = Field(None, max_length=256)
    partial: bool | None = None
    prefix: bool | None = None


class WireTemplateKwargs(Wire):
    """vLLM's and SGLang's way to tell Qwen's template whether to think; other keys are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    enable_thinking: bool | None = None


def effort_of(thinking: WireThinking | None, kwargs: WireTemplateKwargs | None = None) -> str | None:
    """What other dialects and servers say about thoughts, as an effort."""
    if thinking is not None:
        return {"disabled": "none", "enabled": "medium", "adaptive": None}[thinking.type]
    if kwargs is not None and kwargs.enable_thinking is not None:
        return "medium" if kwargs.enable_thinking else "none"
    return None


class WireStreamOptions(Wire):
    include_usage: bool | None = None
    include_progress: bool | None = None
    include_obfuscation: bool | None = None
    resumable: bool | None = None


class WireWebSearch(Wire):
    """OpenAI's `web_search_options`: how much of the web a question may read."""

    search_context_size: Literal["low", "medium", "high"] = "medium"
    user_location: None = None


WEB_RESULTS = {"low": 3, "medium": 5, "high": 10}

Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]


def _session_id(value: str) -> str:
    if not is_session_id(value):
        raise ValueError(f"A session id {SESSION_ID_FORM}")
    return value


SessionId = Annotated[str, AfterValidator(_session_id)]


class WireChat(Wire):
    """The body of POST /v1/chat/completions."""

    model: ModelName
    messages: list[WireMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=MAX_OUTPUT_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_OUTPUT_TOKENS)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Annotated[Stops | None, BeforeValidator(as_list, json_schema_input_type=str | Stops | None)] = None
    seed: int | None = Field(None, ge=-_INT64 - 1, le=_INT64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_TOKEN_ID)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    ignore_eos: bool | None = None
    response_format: WireResponseFormat | None = None
    structured_outputs: WireStructured | None = None
    tools: Offered | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: WireStreamOptions | None = None
    return_progress: bool | None = None
    deadline: float | None = Field(None, gt=0, le=MAX_DEADLINE_S)
    deadline_s: float | None = Field(None, gt=0, le=MAX_DEADLINE_S)
    context_policy: Literal["auto", "full", "refined"] | None = None
    attention_preset: Literal["auto", "general", "support", "contract", "paper", "rag"] | None = None
    service_tier: str | None = Field(None, max_length=64)
    reasoning_effort: Effort | None = None
    thinking: WireThinking | None = None
    chat_template_kwargs: WireTemplateKwargs | None = None
    web_search_options: WireWebSearch | None = None
    prompt_cache_options: WireCacheOptions | None = None
    session: SessionId | None = None
    local_only: bool | None = None
    session_scope: (
        Literal["session", "none"] | Annotated[list[SessionId], Field(max_length=MAX_SESSIONS)] | None
    ) = None
    profile: bool | None = None
    verify_claims: bool | None = None


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A chat request and how its answer is to be delivered. `ignored` are the names of fields that nobody reads."""

    request: Request
    stream: bool
    include_usage: bool
    include_progress: bool
    resumable: bool = False
    obfuscate: bool = False
    ignored: tuple[str, ...] = ()


def parse_chat(body: bytes, *, request_id: str, caller: Caller, arrival_s: float, settings: Settings) -> ChatCall:
    """Untrusted bytes -> a request. Raises `InvalidRequest` naming the field; nothing else, whatever the bytes."""
    raw = parse_json_object(body)
    check_fields("chat", raw)
    check_count(raw, settings.server.max_messages)
    _refuse_in_messages(raw)
    try:
        wire = WireChat.model_validate(raw)
    except ValidationError as error:
        raise wrong_field(error) from None
    options = wire.stream_options or WireStreamOptions()
    if wire.stream_options is not None and not wire.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
    prefix = _prefix_of(wire.messages)
    request = Request(
        request_id=request_id,
        tenant=caller.tenant,
        model=wire.model,
        messages=_messages(wire.messages[:-1] if prefix else wire.messages),
        arrival_s=arrival_s,
        sampling=_sampling(wire, settings.model.temperature),
        n=wire.n or 1,
        deadline_s=_same(wire.deadline_s, wire.deadline, "deadline_s", "deadline") or caller.deadline_s,
        context_policy=ContextPolicy(wire.context_policy or "auto"),
        service_class=service_class(wire.service_tier),
        attention_preset=wire.attention_preset,
        session_id=wire.session,
        recall=_recall(wire),
        local_only=bool(wire.local_only),
        tools=tools_of(wire.tools, wire.tool_choice, wire.parallel_tool_calls),
        whole=not wire.stream,
        key_id=caller.key_id,
        limits=caller.limits,
        profile=settings.memory.profile and wire.profile is not False,
        effort=wire.reasoning_effort or effort_of(wire.thinking, wire.chat_template_kwargs),
        verify=bool(wire.verify_claims),
        prefix=prefix,
        web_results=WEB_RESULTS[wire.web_search_options.search_context_size] if wire.web_search_options else 0,
    )
    request = prewarmed(request, wire.prompt_cache_options, settings.model_serving.timeout)
    if request.session_id is not None and caller.role == "read-only":
        raise Forbidden(
            "A key with the role read-only can't add to a session.",
            hint="Leave out session, and name what to read in session_scope.",
        )
    if len(request.file_ids) > MAX_FILES:
        raise InvalidRequest(f"A request may name at most {MAX_FILES} files.", param="messages")
    return ChatCall(
        request,
        bool(wire.stream),
        bool(options.include_usage),
        bool(options.include_progress or wire.return_progress),
        bool(options.resumable),
        bool(options.include_obfuscation),
        ignored_fields(raw, WireChat.model_fields, "chat"),
    )


def wrong_field(error: ValidationError) -> InvalidRequest:
    """The first fault as an error that names the field as `messages[0].role`. The value is not repeated.

    Of a field with several forms pydantic tells what is wrong by each: the one that reached deepest is meant."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    forms = [each for each in found if each["loc"][:1] == found[0]["loc"][:1]]
    first = max(forms, key=lambda each: len(each["loc"]))
    # Between names and indices stand pydantic's names of the forms: `list[…]`, `str`, a model's class.
    parts = [part for part in first["loc"] if isinstance(part, int) or not _FORM.match(part)]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
    return InvalidRequest(
        f"Wrong value for {param}: {first['msg'].lower()}.", hint="docs/api.md lists every field.", param=param
    )


def check_count(raw: Mapping[str, Any], max_messages: int) -> None:
    """Bounds the messages before each of them is validated."""
    messages = raw.get("messages")
    if isinstance(messages, list) and len(messages) > max_messages:
        raise InvalidRequest(
            f"{len(messages):,} messages are more than this server's limit of {max_messages:,}.",
            hint="Send fewer, or raise server.max_messages.",
            param="messages",
        )


def _refuse_in_messages(raw: Mapping[str, Any]) -> None:
    """Unsupported parts, before each message is validated."""
    messages = raw.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        if message.get("role") == "function":
            raise _unsupported(f"messages[{index}].role")
        for field, neutral in _UNSUPPORTED_IN_MESSAGE.items():
            if field in message and message[field] not in neutral:
                raise _unsupported(f"messages[{index}].{field}")


def _unsupported(param: str) -> Unsupported:
    return Unsupported(f"{param} isn't supported by this server yet.", hint="Leave it out.", param=param)


def _recall(wire: WireChat) -> tuple[str, ...]:
    """The sessions whose old turns may enter the prompt: the request's own unless others, or none, are named."""
    own = () if wire.session is None else (wire.session,)
    if wire.session_scope is None or wire.session_scope == "none":
        return own if wire.session_scope is None else ()
    if wire.session_scope == "session":
        if not own:
            raise InvalidRequest("session_scope is `session`, but session names none.", param="session_scope")
        return own
    return tuple(dict.fromkeys(wire.session_scope))


def _messages(wire: Sequence[WireMessage]) -> tuple[Message, ...]:
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(wire))


def _prefix_of(wire: Sequence[WireMessage]) -> str:
    """How the answer begins: a last message of the assistant that is `partial`, as Moonshot has it (DeepSeek:
    `prefix`), with its name before it. Raises `InvalidRequest` where it can't be gone on from."""
    for index, message in enumerate(wire):
        if not (message.partial or message.prefix):
            continue
        if index < len(wire) - 1 or message.role != "assistant" or message.tool_calls:
            raise InvalidRequest(
                "Only the last message can be partial, and only an assistant's without calls.",
                param=f"messages[{index}].partial",
            )
        said = _message(message, f"messages[{index}]") if message.content else None
        text = said.text if said is not None else ""
        return f"{message.name}: {text}" if message.name else text
    return ""


def _message(wire: WireMessage, param: str) -> Message:
    calls = calls_of(wire.tool_calls or (), f"{param}.tool_calls")
    if calls and wire.role != "assistant":
        raise InvalidRequest("Only an assistant makes calls.", param=f"{param}.tool_calls")
    if wire.content is None and not calls:
        raise InvalidRequest(f"{param} has no content.", hint="Send a text.", param=f"{param}.content")
    if wire.role == "tool" and wire.tool_call_id is None:
        raise InvalidRequest(
            f"{param} doesn't say which call it answers.", hint="Send tool_call_id.", param=f"{param}.tool_call_id"
        )
    return Message(
        role="system" if wire.role == "developer" else wire.role,
        parts=tuple(_part(part, f"{param}.content[{at}]") for at, part in enumerate(wire.content or ())),
        tool_calls=calls,
        tool_call_id=wire.tool_call_id,
    )


def _part(part: WirePart, param: str) -> TextPart | FilePart:
    if part.type in ("text", "input_text"):
        if part.text is None:
            raise InvalidRequest(f"{param} has no text.", param=f"{param}.text")
        return TextPart(part.text)
    if part.type == "file":
        file_id = part.file.file_id if part.file is not None else None
    elif part.type == "input_file":
        file_id = part.file_id
    else:
        raise Unsupported(
            f"{param} is of a type this server can't read; it takes text, file and input_file.",
            hint="Upload documents with POST /v1/files and name them by id.",
            param=f"{param}.type",
        )
    if not file_id:
        raise InvalidRequest(
            f"{param} names no file_id.",
            hint="Upload the file with POST /v1/files first; inline file data isn't accepted.",
            param=f"{param}.file.file_id" if part.type == "file" else f"{param}.file_id",
        )
    return FilePart(file_id)


def _sampling(wire: WireChat, temperature: float) -> SamplingParams:
    if wire.top_logprobs is not None and not wire.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return SamplingParams(
        temperature=temperature if wire.temperature is None else float(wire.temperature),
        # 0 means "only the most likely token", which the smallest share selects.
        top_p=1.0 if wire.top_p is None else max(float(wire.top_p), _SMALLEST_TOP_P),
        top_k=max(wire.top_k or 0, 0),  # -1 is vLLM's spelling of off
        min_p=float(wire.min_p or 0.0),
        presence_penalty=float(wire.presence_penalty or 0.0),
        frequency_penalty=float(wire.frequency_penalty or 0.0),
        repetition_penalty=1.0 if wire.repetition_penalty is None else float(wire.repetition_penalty),
        seed=wire.seed,
        logit_bias=logit_bias_of(wire.logit_bias or {}),
        logprobs=(wire.top_logprobs or 0) if wire.logprobs else None,
        max_tokens=_same(wire.max_completion_tokens, wire.max_tokens, "max_completion_tokens", "max_tokens"),
        stop=tuple(wire.stop or ()),
        ignore_eos=bool(wire.ignore_eos),
        grammar=grammar_of(wire.response_format, wire.structured_outputs),
    )


def logit_bias_of(wire: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, bias in wire.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10) or int(key) > _TOKEN_ID:
            raise InvalidRequest("logit_bias has a key that is no token id.", param="logit_bias")
        pairs.append((int(key), float(bias)))
    return tuple(pairs)


def _same(first: Number | None, second: Number | None, one: str, other: str) -> Number | None:
    """The value of a field with two names."""
    if first is not None and second is not None and first != second:
        raise InvalidRequest(f"{one} and {other} disagree.", hint="Send one of them.", param=other)
    return second if first is None else first


def service_class(tier: str | None) -> ServiceClass:
    try:
        return _TIERS[tier or "auto"]
    except KeyError:
        raise InvalidRequest(
            "Wrong value for service_tier.", hint=f"Use one of {', '.join(_TIERS)}.", param="service_tier"
        ) from None
