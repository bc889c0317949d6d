"""What the service tells while it answers, in order."""

from __future__ import annotations

from dataclasses import dataclass

from perilune.core.documents import Citation, StoreHit
from perilune.core.report import Plan, Report, Usage
from perilune.core.requests import RateState
from perilune.core.sessions import TurnCitation
from perilune.core.words import FinishReason


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
