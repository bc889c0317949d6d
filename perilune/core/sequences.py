"""The engine's work: what it is given, and what it tells while it works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perilune.core.requests import SamplingParams
from perilune.core.words import DEFAULT_TENANT, FinishReason, KVPolicy, ServiceClass


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
