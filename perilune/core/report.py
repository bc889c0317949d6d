"""Plans and the report of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from perilune.core.documents import Citation
from perilune.core.requests import Degradation
from perilune.core.sequences import CachedTokens
from perilune.core.sessions import ProfileFact, SummarySentence, TurnCitation
from perilune.core.words import PlanKind


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
