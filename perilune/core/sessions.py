"""Sessions and memory: turns, search, profile, feedback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perilune.core.documents import Passage


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
    `finish_reason`, `total_s`, `files` (ids), `usage` and `perilune`, the report (None where that isn't known);
    where it thought before, `reasoning`, the text of that."""

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
