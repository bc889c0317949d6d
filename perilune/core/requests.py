"""What is asked: messages, tools, sampling, limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from perilune.core.documents import FileSearch
from perilune.core.words import ContextPolicy, ServiceClass


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that an answer must have, in a known notation. `param` is the request's field, for errors."""

    kind: GrammarKind
    source: str
    param: str = "response_format"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. `temperature` 0 is greedy. `logprobs` is the number of alternatives
    reported per token; None reports nothing, 0 reports only the chosen token's."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    max_tokens: int | None = None  # None: what the window and the configuration leave
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class FilePart:
    """An uploaded document, referenced by id."""

    file_id: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the caller can run. `parameters` is a JSON Schema of an object, as text; `strict`: calls
    follow every keyword of it, or the request is refused."""

    name: str
    description: str = ""
    parameters: str = '{"type": "object"}'
    strict: bool = False


class ToolMode(StrEnum):
    AUTO = "auto"  # calls or text, as the model likes
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Tools:
    """What is offered, and what of it must be called: `name` is the one tool that is wanted (mode REQUIRED).

    `allowed` are the names that may be called; None: all. The model is told of the others, too.
    """

    offered: tuple[Tool, ...] = ()
    mode: ToolMode = ToolMode.AUTO
    name: str | None = None
    parallel: bool = True
    allowed: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made. `arguments` is JSON text."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """`tool_calls` are an assistant's; `tool_call_id` is whose result a message of the role tool is."""

    role: str  # "system" | "user" | "assistant" | "tool"
    parts: tuple[TextPart | FilePart, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def file_ids(self) -> tuple[str, ...]:
        return tuple(part.file_id for part in self.parts if isinstance(part, FilePart))


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A prompt that comes as it is: `text`, whose markers become special tokens, or else `token_ids`. `echo` says
    it again before the answer; of `best_of` answers the likeliest are given."""

    text: str | None
    token_ids: tuple[int, ...] = ()
    echo: bool = False
    best_of: int = 1


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What an API key may use; None: no limit of its own. `tokens_per_day` by UTC day, `budget` by UTC month in the
    unit of the backends' prices, `stream_tokens_per_s` over all of its streams together."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    concurrency: int | None = None
    budget: float | None = None
    stream_tokens_per_s: float | None = None

    def over(self, defaults: KeyLimits) -> KeyLimits:
        """These, and `defaults` where they say nothing."""
        return KeyLimits(
            *(
                getattr(defaults, name) if getattr(self, name) is None else getattr(self, name)
                for name in self.__slots__
            )
        )


@dataclass(frozen=True, slots=True)
class Balance:
    """Of a UTC month, in the unit of the backends' prices. `budget` None: there is no limit."""

    budget: float | None
    spent: float


@dataclass(frozen=True, slots=True)
class RateState:
    """How much of a key's rates is left, right after a request was let in or refused; None: no such limit."""

    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests_s: float | None = None
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_tokens_s: float | None = None


@dataclass(frozen=True, slots=True)
class Degradation:
    """Something the answer is not, and why. `code` is stable, `reason` is for people."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Request:
    """One question, as the service runs it. `arrival_s` is the monotonic time of its last byte (spec C1)."""

    request_id: str
    tenant: str
    model: str
    messages: tuple[Message, ...]
    arrival_s: float
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    deadline_s: float | None = None  # None: the key's, else the class's
    context_policy: ContextPolicy = ContextPolicy.AUTO
    service_class: ServiceClass = ServiceClass.P0_INTERACTIVE
    attention_preset: str | None = None  # None: the configured one
    session_id: str | None = None  # the session that keeps the question and its answer
    recall: tuple[str, ...] = ()  # sessions whose old turns may enter the prompt
    local_only: bool = False  # nothing of it may leave this machine, and of its session from now on
    tools: Tools = field(default_factory=Tools)
    whole: bool = False  # nobody sees text before the answer's end
    key_id: str | None = None  # the API key that asks
    limits: KeyLimits | None = None  # the key's; None: the configured ones
    profile: bool = True  # facts about the user may be used, and learnt from the question
    raw: RawPrompt | None = None  # instead of messages
    prefix: str = ""  # how the answer begins; the model goes on from there
    prewarm: bool = False  # compute the prompt's KV and say nothing
    effort: str | None = None  # how much the model thinks first: none, minimal … max; None: as it likes
    verify: bool = False  # the answer's claims are compared with its sources
    file_search: FileSearch | None = None  # search these stores first; files that are found become documents of it
    web_results: int = 0  # how many results of a web search become a document of it
    notes: tuple[Degradation, ...] = ()  # what it did without before it was planned

    @property
    def file_ids(self) -> tuple[str, ...]:
        """Every referenced document once, in order of first mention."""
        return tuple(dict.fromkeys(i for message in self.messages for i in message.file_ids))
