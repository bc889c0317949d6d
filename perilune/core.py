"""Plain data that every layer speaks: requests, plans, tokens, citations, events, the answer's report.

Knows the words of the system. Imports nothing of ours and no torch, so that every layer may import it.
Counts end in `_tokens`, durations in `_s`, sizes in `_bytes`. Clocks are passed in, never read here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Literal

BLOCK_TOKENS = 32
"""Tokens in one physical KV block: the unit of allocation, hashing and tier moves."""

DEFAULT_TENANT = "local"
"""The tenant of every caller on loopback while no keys exist."""


class ServiceClass(IntEnum):
    """Scheduling class (spec E2). Lower runs first."""

    P0_INTERACTIVE = 0
    P1_DOCUMENT = 1
    P2_BATCH = 2


class KVPolicy(StrEnum):
    """How a sequence's KV is kept (spec R4). KV of the two is never exchanged."""

    FULL = "full"  # every token at full precision
    TIERED = "tiered"  # recent tokens at full precision, older ones INT8 in RAM and on disk


class ContextPolicy(StrEnum):
    """What a caller allows the planner to do with the offered context (spec C3)."""

    AUTO = "auto"
    FULL = "full"
    REFINED = "refined"


class PlanKind(StrEnum):
    """The ways of answering a request (spec C2)."""

    WARM = "warm"  # the KV of the whole context is in some tier
    RESUME = "resume"  # a cached prefix, prefill the rest
    FULL = "full"  # prefill everything
    REFINED = "refined"  # retrieved passages within a token budget
    FALLBACK = "fallback"  # another model or backend
    LATER = "later"  # queue, batch or refuse
    CACHED = "cached"  # an answer that was given before


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"  # of a choice whose answer is calls; engines know it not
    CANCELLED = "cancelled"
    ERROR = "error"
    EXPIRED = "expired"  # its time to live ended before its first token


# ---------------------------------------------------------------------------------------------- requests


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


# --------------------------------------------------------------------------------------------- documents


class FileStatus(StrEnum):
    UPLOADED = "uploaded"
    PARSING = "parsing"
    PREFILLING = "prefilling"  # parsed and searchable; KV is being computed
    PROCESSED = "processed"
    ERROR = "error"


DOCUMENT_PURPOSES = frozenset({"user_data", "assistants", "file-extract", "vision", "image", "web_search"})
"""Purposes of files that are read, indexed and prefilled. Other files, like those of batches, are only kept."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """An uploaded file. `tokens` is known once it is parsed; `pages_total` once the parser has opened it."""

    file_id: str
    tenant: str
    filename: str
    purpose: str
    size_bytes: int
    sha256: str
    created_at: float  # seconds since the epoch
    status: FileStatus
    pages_total: int | None = None
    pages_parsed: int = 0
    tokens: int | None = None
    language: str | None = None  # "en", "zh", …; None while unknown
    error: str | None = None
    local_only: bool = False  # its text never leaves this machine
    expires_at: float | None = None  # it is gone from then on; None: it stays

    @property
    def is_document(self) -> bool:
        """It is read: it has text, an index and KV."""
        return self.purpose in DOCUMENT_PURPOSES


@dataclass(frozen=True, slots=True)
class Page:
    """One page of extracted text. `start` and `end` are character offsets in the document's whole text."""

    number: int  # counts from 1
    text: str
    start: int
    end: int
    anchor: str = ""  # where it is, for people, where the number says little: "slide 4", "src/a.py, lines 3-40"


@dataclass(frozen=True, slots=True)
class PageView:
    """A page as it is shown: of which file, of how many pages that are read so far, and whether it can be drawn."""

    page: Page
    filename: str
    pages: int
    drawable: bool


@dataclass(frozen=True, slots=True)
class Passage:
    """A retrieved piece: characters `start`:`end` of the document's whole text, all on `page`."""

    file_id: str
    page: int
    start: int
    end: int
    text: str
    score: float
    anchor: str = ""  # see `Page.anchor`; narrowed to the passage's own lines where it names lines


@dataclass(frozen=True, slots=True)
class Citation:
    """Where an answer's context came from (spec M9)."""

    file_id: str
    filename: str
    page: int
    start: int
    end: int
    quote: str
    anchor: str = ""  # see `Passage.anchor`


# ---------------------------------------------------------------------------------------------- sessions


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """One thing said in a session: `turn` counts from 1, a question and its answer are two. `at` is seconds since
    the epoch."""

    session_id: str
    turn: int
    speaker: str
    text: str
    at: float | None
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class Times:
    """A range of event times, both ends included, in seconds since the epoch; None is open."""

    since_s: float | None = None
    until_s: float | None = None


ANY_TIME = Times()


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found: `hits`, best first.

    `kind` is lookup, order, count or whole. Where it isn't a lookup, `evidence` is the set that the question needs,
    in the order in which things happened. `confidence` (0 to 1) is the chance that the best hits hold what was
    asked, None where it isn't known; `doubtful` that it is too low to answer from. `missing` says what the search
    did without."""

    hits: tuple[SessionTurn | Passage, ...] = ()
    kind: str = "lookup"
    evidence: tuple[SessionTurn | Passage, ...] = ()
    confidence: float | None = None
    doubtful: bool = False
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A kept conversation: how many turns, when the first and the last were said (a fork: when it was made), what
    it is called (None where nothing was said), and the turn of another session that it goes on from."""

    session_id: str
    turns: int
    first_at: float
    last_at: float
    title: str | None = None
    parent_id: str | None = None
    parent_turn: int | None = None
    local_only: bool = False


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer that a session keeps: which request it was to, who answered, and how it came about, as JSON values:
    `finish_reason`, `total_s`, `files` (ids), `usage` and `perilune`, the report (None where that isn't known)."""

    request_id: str
    model: str
    details: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A place in stored text: a turn of a session; or of a document a page, or characters `start`:`end` of its
    whole text."""

    source_id: str
    turn: int | None = None
    page: int | None = None
    start: int | None = None
    end: int | None = None


@dataclass(frozen=True, slots=True)
class Feedback:
    """Where a user found what a search had not. `at` is seconds since the epoch."""

    feedback_id: str
    question: str
    source_id: str
    at: float


AttributeValue = str | float | bool
"""What may be noted of a file in a vector store."""


@dataclass(frozen=True, slots=True)
class AttributeComparison:
    """One attribute against a value, as OpenAI's filters have it; `in` and `nin` take a tuple."""

    key: str
    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
    value: AttributeValue | tuple[AttributeValue, ...]


@dataclass(frozen=True, slots=True)
class AttributeCombination:
    """Filters of which all must hold, or one."""

    type: Literal["and", "or"]
    filters: tuple[AttributeFilter, ...]


AttributeFilter = AttributeComparison | AttributeCombination


@dataclass(frozen=True, slots=True)
class FileSearch:
    """Vector stores that a request searches for its question: files by attribute, at most so many passages, of at
    least this score."""

    store_ids: tuple[str, ...]
    wanted: AttributeFilter | None = None
    max_results: int = 20
    min_score: float = 0.0


@dataclass(frozen=True, slots=True)
class StoreHit:
    """A passage that a search of vector stores found. `score` is from 0 to 1; the place is that of a `Passage`."""

    file_id: str
    filename: str
    attributes: Mapping[str, AttributeValue]
    score: float
    page: int
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class TurnCitation:
    """An earlier turn that is part of the answer's context; see `SessionTurn`."""

    session_id: str
    turn: int
    speaker: str
    at: float | None
    quote: str


@dataclass(frozen=True, slots=True)
class ProfileFact:
    """What a user said about themselves, or wrote into their profile. Times are seconds since the epoch.

    `since` is when it became true, `until` when something else did (None: it is true now), `written_at` when it was
    said. `session_id` and `turn` say where, `start` and `end` are the sentence's characters in that turn; None for
    what was written by hand."""

    key: str
    value: str
    since: float
    written_at: float
    until: float | None = None
    session_id: str | None = None
    turn: int | None = None
    start: int | None = None
    end: int | None = None


@dataclass(frozen=True, slots=True)
class SummarySentence:
    """A sentence of a summary, as its source has it unless `corrected`.

    Of a session, `number` is the turn and `start`, `end` are characters in it; of a file, `number` is the page
    and they are characters of the whole text."""

    source_id: str
    number: int
    start: int
    end: int
    text: str
    speaker: str | None = None
    corrected: bool = False


# ------------------------------------------------------------------------------------ engine work and events


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One token stream for the engine.

    `salt` seeds the block hashes (tenant isolation and KV provenance); equal salts share KV.
    `shared_tokens` is how many leading prompt tokens may enter the shared and disk cache as whole blocks;
    `persist_owner` names who owns them on disk (a file id), None keeps them in RAM only; `persist_tokens` limits
    what goes to disk to that many leading tokens (a document, not the talk about it), None: all shared ones.
    A spec with `prefill_only` samples nothing and finishes when its prompt is computed (ingest).
    `kv_policy` decides how KV is kept, and belongs to what `salt` was made of; `preset` names how tiered KV is read
    while decoding.
    `tenant` is whom its service is charged to. Its first token is due `deadline_s` after it is submitted (None: its
    class's); without one after `ttl_s` it ends as EXPIRED (None: it waits for ever).
    """

    seq_id: str
    token_ids: Sequence[int]
    salt: bytes
    sampling: SamplingParams
    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    service_class: ServiceClass = ServiceClass.P0_INTERACTIVE
    shared_tokens: int = 0
    persist_owner: str | None = None
    persist_tokens: int | None = None
    prefill_only: bool = False
    kv_policy: KVPolicy = KVPolicy.FULL
    preset: str = "general"
    tenant: str = DEFAULT_TENANT
    deadline_s: float | None = None
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """Prefill advanced. `cached_*` say how many of `computed_tokens` were not computed but found."""

    seq_id: str
    computed_tokens: int
    total_tokens: int
    cached_ram_tokens: int
    cached_disk_tokens: int


@dataclass(frozen=True, slots=True)
class EngineToken:
    """A generated token. The stop token that ends a sequence is sent too, right before EngineFinished(STOP).

    `exact_share`: of its context, what decode attended exactly when it was last measured; 1 for full KV."""

    seq_id: str
    token_id: int
    logprob: TokenLogprob | None = None
    exact_share: float = 1.0


@dataclass(frozen=True, slots=True)
class EngineFinished:
    """The last event of a sequence. `error` is a message safe to show, set when `reason` is ERROR; `invalid`: what
    was asked is at fault, not the engine."""

    seq_id: str
    reason: FinishReason
    error: str | None = None
    invalid: bool = False


EngineEvent = EngineProgress | EngineToken | EngineFinished


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Leading tokens of a prompt whose KV exists, by the tier that holds them."""

    ram: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.ram + self.disk


@dataclass(frozen=True, slots=True)
class EngineStats:
    running: int
    waiting: int
    queued_prefill_tokens: int  # uncomputed prompt tokens of running and waiting sequences ahead of a P0
    free_blocks: int
    total_blocks: int
    queued_document_tokens: int = 0  # and those of P1, ahead of another one

    def queued_tokens(self, service_class: ServiceClass) -> int:
        """What is ahead of a new request of a class. For P2, who waits for everybody, what is known of it."""
        first = service_class is ServiceClass.P0_INTERACTIVE
        return self.queued_prefill_tokens + (0 if first else self.queued_document_tokens)


# ------------------------------------------------------------------------------- plans, reports, service events


@dataclass(frozen=True, slots=True)
class Degradation:
    """Something the answer is not, and why. `code` is stable, `reason` is for people."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """How one request is answered. `context_tokens` is what the prompt may hold; `fidelity` is in [0, 1].
    `bound_ttft_s` is the TTFT that holds in the share of cases that its class asks for (C2)."""

    kind: PlanKind
    deadline_s: float
    predicted_ttft_s: float
    fidelity: float
    context_tokens: int
    uncached_tokens: int
    degradations: tuple[Degradation, ...] = ()
    bound_ttft_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenReport:
    """Where the offered context went (spec C3). `exact + estimated + summarised + dropped = offered`."""

    offered: int = 0
    exact: int = 0
    estimated: int = 0
    summarised: int = 0
    dropped: int = 0
    cached: CachedTokens = field(default_factory=CachedTokens)


@dataclass(frozen=True, slots=True)
class Usage:
    """`reasoning_tokens` are part of `completion_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One backend that was asked. `outcome` is `answered`, `left` (nobody waited any more) or its fault's kind."""

    backend: str
    model: str
    outcome: str
    seconds: float


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What of the user's profile and of the session's summary stood in the prompt."""

    facts: tuple[ProfileFact, ...] = ()
    sentences: tuple[SummarySentence, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheHit:
    """An answer that was not made anew. `kind` is exact, semantic or faq; `question` is the one that it was given
    to, `age_s` seconds ago."""

    kind: str
    age_s: float
    question: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence of an answer, `start` to `end` of its characters, and whether the source that comes nearest says
    it: supported, unclear, unsupported, or unchecked."""

    start: int
    end: int
    verdict: str
    citation: Citation | TurnCitation | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The `perilune` object beside the standard fields; its JSON schema is docs/perilune-object.schema.json."""

    plan: PlanKind
    deadline_s: float
    predicted_ttft_s: float
    measured_ttft_s: float | None
    tokens: TokenReport
    model: str
    backend: str
    citations: tuple[Citation | TurnCitation, ...] = ()
    degradations: tuple[Degradation, ...] = ()
    attempts: tuple[Attempt, ...] = ()  # empty where the question went to the local engine and nowhere else
    cost: float | None = None  # by the configured prices; None for the local engine
    memory: MemoryUse = MemoryUse()
    confidence: float | None = None
    taken_out: Mapping[str, int] = field(default_factory=dict)  # personal identifiers that didn't leave, by kind
    answer_cache: CacheHit | None = None  # None: made for this request
    claims: tuple[Claim, ...] | None = None  # None: not asked for


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request was let in; the first event, where its key's rates are limited."""

    rates: RateState


@dataclass(frozen=True, slots=True)
class StageStarted:
    """One of: searching (the web), retrieving, composing, queued, prefilling, answering."""

    stage: str


@dataclass(frozen=True, slots=True)
class FileSearchStarted:
    """The request's vector stores are searched for these."""

    queries: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FileSearched:
    """What was found, best first."""

    hits: tuple[StoreHit, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan was chosen; sent before any work that takes time."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    processed_tokens: int
    total_tokens: int
    cached_tokens: int
    eta_s: float


@dataclass(frozen=True, slots=True)
class CitationAdded:
    citation: Citation | TurnCitation


@dataclass(frozen=True, slots=True)
class DecodedLogprob:
    """A token's log probability with its text, as the dialects report it."""

    token: str
    raw: bytes
    logprob: float
    top: tuple[tuple[str, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    choice: int
    text: str
    logprobs: tuple[DecodedLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """What a model thinks aloud before it answers."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A choice's call number `index`: first with its id and name, then with pieces of its arguments (JSON text)."""

    choice: int
    index: int
    arguments: str = ""
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """`stop` is the caller's stop string that ended the text, if one did."""

    choice: int
    reason: FinishReason
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Completed:
    """The last event of a request that ran."""

    usage: Usage
    report: Report


Event = (
    Admitted
    | StageStarted
    | FileSearchStarted
    | FileSearched
    | Planned
    | PrefillProgress
    | CitationAdded
    | TextDelta
    | ReasoningDelta
    | ToolCallDelta
    | ChoiceFinished
    | Completed
)
