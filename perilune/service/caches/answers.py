"""Answers that were given, for the same question again: exact, or alike and verified. One shelf a tenant.

Knows requests, reports and what an answer was made of; not how answers are made. Off by default. A tenant finds
only what it asked itself. What an answer was made of is part of its key (every document by its content, everything
said before, sampling, policy): a changed document is a different question, and deleting one drops what was made of
it. Kept in memory, never on disk. Used from the event loop; vectors are made in a thread.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from perilune.core import (
    CacheHit,
    ChoiceFinished,
    CitationAdded,
    Completed,
    Event,
    FileRecord,
    FileStatus,
    FinishReason,
    Plan,
    PlanKind,
    Planned,
    Report,
    Request,
    StageStarted,
    TextDelta,
    TokenReport,
    Usage,
)
from perilune.errors import NotFound, PeriluneError
from perilune.service.caches.faq import CuratedAnswers
from perilune.service.caches.verify import same_question
from perilune.telemetry import Telemetry

_LASTING = frozenset({"language", "effective_length", "over_window", "usage_unknown"})
"""Degradations that the same question would meet again; an answer with another one may be better next time."""

_LONGEST_QUESTION_CHARS = 2_000
"""A longer question is looked for exactly, not by likeness."""

Vectors = Callable[[str, str], Sequence[float]]
"""(tenant, question) -> its meaning."""
"""A question's vector of length 1. May block; raises `PeriluneError` where there is none."""


class Documents(Protocol):
    """Of `DocumentService`, what answers depend on."""

    async def get(self, tenant: str, file_id: str) -> FileRecord: ...

    def require(self, file_ids: Iterable[str]) -> None:
        """Raises `NotFound` for a file whose deletion has begun."""
        ...


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """`ttl_s` from when an answer was given; `tenant_bytes` of text a tenant may keep; `likeness` is the least
    cosine of two questions that are compared further."""

    exact: bool = False
    semantic: bool = False
    ttl_s: float = 3600.0
    tenant_bytes: int = 16 * 1024**2
    likeness: float = 0.92


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that may be answered from a shelf. `scope` is everything but the question."""

    tenant: str
    scope: bytes
    question: str
    vector: Sequence[float] | None = None

    @property
    def key(self) -> bytes:
        return hashlib.sha256(self.scope + self.question.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer with what it was made of."""

    ask: Ask
    text: str
    usage: Usage
    report: Report
    kept_at: float
    made_of: frozenset[str]

    @property
    def size_bytes(self) -> int:
        return 4 * (len(self.text) + len(self.ask.question) + len(self.ask.vector or ())) + 2048


@dataclass(slots=True)
class _Shelf:
    entries: OrderedDict[bytes, Kept] = field(default_factory=OrderedDict)
    size_bytes: int = 0

    def drop(self, key: bytes) -> None:
        self.size_bytes -= self.entries.pop(key).size_bytes


class AnswerCaches:
    """Looks answers up, and keeps them; does nothing without a policy that is on and without curated answers."""

    def __init__(
        self,
        policy: CachePolicy,
        documents: Documents,
        curated: CuratedAnswers | None,
        vectors: Vectors | None,
        clock: Callable[[], float],
        telemetry: Telemetry,
    ) -> None:
        self._policy = policy
        self._documents = documents
        self._curated = curated
        self._vectors = vectors
        self._clock = clock
        self._telemetry = telemetry
        self._shelves: dict[str, _Shelf] = {}

    def forget(self, part: str) -> None:
        """Drop every answer that was made of a document."""
        for shelf in self._shelves.values():
            for key in [key for key, kept in shelf.entries.items() if part in kept.made_of]:
                shelf.drop(key)

    def kept(self, tenant: str) -> int:
        """Answers on a tenant's shelf."""
        shelf = self._shelves.get(tenant)
        return len(shelf.entries) if shelf is not None else 0

    async def ask(self, request: Request, model: str, settings: str) -> Ask | None:
        """The request as a key; None where its answer isn't one that could be given twice: sampled, with choices,
        tools or log probabilities, or part of a session. Raises `NotFound` for documents that aren't there."""
        sampling = request.sampling
        on = self._policy.exact or self._policy.semantic or self._curated is not None
        personal = request.session_id is not None or request.recall
        special = request.tools.offered or sampling.grammar is not None or sampling.logprobs is not None
        special = special or request.effort is not None or bool(request.prefix)
        if not on or personal or special or sampling.temperature or request.n != 1:
            return None
        if not request.messages or request.messages[-1].role != "user":
            return None
        records = [await self._documents.get(request.tenant, file_id) for file_id in request.file_ids]
        if any(record.status is not FileStatus.PROCESSED for record in records):
            return None
        said = [(message.role, message.text, message.file_ids) for message in request.messages[:-1]]
        files = [(record.file_id, record.sha256, record.filename) for record in records]
        whole = (
            request.tenant,
            model,
            settings,
            request.context_policy,
            request.attention_preset,
            sampling,
            said,
            files,
        )
        return Ask(
            request.tenant,
            hashlib.sha256(repr(whole).encode("utf-8", "surrogatepass")).digest(),
            request.messages[-1].text,
        )

    async def find(self, ask: Ask, request: Request) -> tuple[Ask, Kept | None, CacheHit | None]:
        """(the ask, with its vector if one was made; the answer; how it was found)."""
        bare = len(request.messages) == 1 and not request.file_ids
        if bare and self._curated is not None and (text := self._curated.find(ask.question)) is not None:
            self._telemetry.count("answer_cache", outcome="faq")
            return ask, _curated(ask, text), CacheHit("faq", 0.0, ask.question)
        shelf = self._shelves.get(ask.tenant, _Shelf())
        self._expire(shelf)
        if self._policy.exact and (kept := shelf.entries.get(ask.key)) is not None:
            shelf.entries.move_to_end(ask.key)
            return ask, kept, self._hit("exact", kept)
        if self._policy.semantic and self._vectors is not None and len(ask.question) <= _LONGEST_QUESTION_CHARS:
            ask = replace(ask, vector=await self._vector(ask.tenant, ask.question))
            if (kept := self._alike(shelf, ask)) is not None:
                return ask, kept, self._hit("semantic", kept)
        self._telemetry.count("answer_cache", outcome="miss")
        return ask, None, None

    def keep(self, ask: Ask, request: Request, text: str, completed: Completed) -> None:
        """Keep a whole answer, unless the next attempt may be better or the tenant has no room for it. Raises
        `NotFound` where a document that it was made of is deleted by now."""
        report = completed.report
        if not (self._policy.exact or self._policy.semantic):
            return
        if not text.strip() or any(item.code not in _LASTING for item in report.degradations):
            return
        self._documents.require(request.file_ids)
        made_of = frozenset(request.file_ids)
        kept = Kept(ask, text, completed.usage, report, self._clock(), made_of)
        if kept.size_bytes > self._policy.tenant_bytes // 4:
            return
        shelf = self._shelves.setdefault(ask.tenant, _Shelf())
        if ask.key in shelf.entries:
            shelf.drop(ask.key)
        shelf.entries[ask.key] = kept
        shelf.size_bytes += kept.size_bytes
        while shelf.size_bytes > self._policy.tenant_bytes:
            shelf.drop(next(iter(shelf.entries)))

    def _hit(self, kind: str, kept: Kept) -> CacheHit:
        self._telemetry.count("answer_cache", outcome=kind)
        return CacheHit(kind, self._clock() - kept.kept_at, kept.ask.question)

    def _alike(self, shelf: _Shelf, ask: Ask) -> Kept | None:
        """The likest kept question of the same scope that is verified to be the same one."""
        if ask.vector is None:
            return None
        near = [
            (sum(a * b for a, b in zip(ask.vector, kept.ask.vector, strict=True)), number)
            for number, kept in enumerate(shelf.entries.values())
            if kept.ask.scope == ask.scope
            and kept.ask.vector is not None
            and len(kept.ask.vector) == len(ask.vector)
        ]
        entries = list(shelf.entries.values())
        for likeness, number in sorted(near, reverse=True):
            if likeness < self._policy.likeness:
                break
            if same_question(ask.question, entries[number].ask.question):
                return entries[number]
        return None

    async def _vector(self, tenant: str, question: str) -> Sequence[float] | None:
        assert self._vectors is not None
        try:
            return await asyncio.to_thread(self._vectors, tenant, question)
        except PeriluneError:
            self._telemetry.count("answer_cache", outcome="no_vector")
            return None

    def _expire(self, shelf: _Shelf) -> None:
        oldest = self._clock() - self._policy.ttl_s
        for key in [key for key, kept in shelf.entries.items() if kept.kept_at <= oldest]:
            shelf.drop(key)


def _curated(ask: Ask, text: str) -> Kept:
    report = Report(
        plan=PlanKind.CACHED,
        deadline_s=1.0,
        predicted_ttft_s=0.0,
        measured_ttft_s=None,
        tokens=TokenReport(),
        model="faq",
        backend="faq",
    )
    return Kept(ask, text, Usage(0, 0, 0), report, 0.0, frozenset())


async def served(kept: Kept, hit: CacheHit, deadline_s: float, elapsed_s: float) -> AsyncGenerator[Event, None]:
    """A kept answer as the events of an answer."""
    yield StageStarted("answering")
    yield Planned(Plan(PlanKind.CACHED, deadline_s, 0.0, 1.0, 0, 0))
    for citation in kept.report.citations:
        yield CitationAdded(citation)
    yield TextDelta(0, kept.text)
    yield ChoiceFinished(0, FinishReason.STOP)
    usage = replace(kept.usage, cached_tokens=kept.usage.prompt_tokens)
    report = replace(
        kept.report,
        plan=PlanKind.CACHED,
        deadline_s=deadline_s,
        predicted_ttft_s=0.0,
        measured_ttft_s=elapsed_s,
        attempts=(),
        cost=None,
        answer_cache=hit,
    )
    yield Completed(usage, report)


async def keeping(
    events: AsyncIterator[Event], keep: Callable[[str, Completed], None]
) -> AsyncGenerator[Event, None]:
    """The events as they are; a whole answer, not one cut by its length, is kept before its last event."""
    said: list[str] = []
    whole = False
    async for event in events:
        if isinstance(event, TextDelta):
            said.append(event.text)
        elif isinstance(event, ChoiceFinished):
            whole = event.reason is FinishReason.STOP
        elif isinstance(event, Completed) and whole:
            with suppress(NotFound):  # deleted meanwhile: the answer is given, and not kept
                keep("".join(said), event)
        yield event
