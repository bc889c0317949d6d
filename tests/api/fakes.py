"""A service that plays a written script of events, with delays, and remembers what was asked and how it ended.

Stands in for `service.Service` where the API's own behaviour is tested: phases that last, errors at chosen points,
cancellation measured to the millisecond. The real service runs in tests/e2e.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from perilune.config import Settings
from perilune.core import (
    Balance,
    CachedTokens,
    ChoiceFinished,
    Citation,
    CitationAdded,
    Completed,
    DecodedLogprob,
    Event,
    FileRecord,
    FileStatus,
    FinishReason,
    Page,
    PageView,
    Plan,
    PlanKind,
    Planned,
    PrefillProgress,
    Report,
    Request,
    StageStarted,
    TextDelta,
    TokenReport,
    Usage,
)
from perilune.engine.attention_debug import LayerFigures, StepFigures, TopK, summarise
from perilune.engine.health import EngineHealth
from perilune.engine.kv_tally import KVTally
from perilune.engine.pressure import KVUse
from perilune.errors import ModelNotFound, NotFound, TooLarge, Unauthenticated, UnsupportedDocument
from perilune.memory.ratings import Ratings
from perilune.runtime.kv.spec import TierSpec
from perilune.service.archive import Archive
from perilune.service.kv_health import as_json
from perilune.service.ports import Caller, LineAnswers, ModelCard
from perilune.service.ratings import RatingService
from perilune.service.sessions import SessionService
from perilune.service.vector_stores import VectorStoreService
from perilune.telemetry import Telemetry

MODEL = "fake-model"
WORDS = ("The ", "answer ", "is ", "42", ".")
CITATION = Citation("file-1", "moon.pdf", 3, 10, 20, "the far side")
PLAN = Plan(PlanKind.FULL, 5.0, 0.25, 1.0, 96, 64, bound_ttft_s=0.31)


@dataclass(frozen=True)
class Pause:
    """Silence of so many seconds, or for ever."""

    seconds: float


@dataclass(frozen=True)
class Fail:
    error: Exception


Step = Event | Pause | Fail


def report(text_s: float | None = 0.1) -> Report:
    tokens = TokenReport(offered=96, exact=96, cached=CachedTokens(ram=32))
    return Report(PlanKind.FULL, 5.0, 0.25, text_s, tokens, MODEL, "local", (CITATION,))


def opening() -> list[Step]:
    return [
        StageStarted("composing"),
        Planned(PLAN),
        CitationAdded(CITATION),
        StageStarted("prefilling"),
        PrefillProgress(32, 96, 32, 0.2),
        PrefillProgress(96, 96, 32, 0.0),
        StageStarted("answering"),
    ]


def answer(request: Request) -> list[Step]:
    """What the fake says when no script is set: every choice says the words, with logprobs if they are wanted."""
    steps = opening()
    for choice in range(request.n):
        for word in WORDS:
            steps.append(TextDelta(choice, word, _logprobs(request, word)))
        steps.append(ChoiceFinished(choice, FinishReason.STOP))
    usage = Usage(96, len(WORDS) * request.n, 32)
    return [*steps, Completed(usage, report())]


def _logprobs(request: Request, word: str) -> tuple[DecodedLogprob, ...]:
    wanted = request.sampling.logprobs
    if wanted is None:
        return ()
    top = tuple((f"{word}{i}", f"{word}{i}".encode(), -1.0 - i) for i in range(wanted))
    return (DecodedLogprob(word, word.encode(), float("-inf") if word == "." else -0.5, top),)


class CountedBytes(io.BytesIO):
    """Remembers the longest part that was read at once."""

    longest = 0

    def read(self, size: int | None = -1, /) -> bytes:
        part = super().read(size)
        self.longest = max(self.longest, len(part))
        return part


class FakeDocuments:
    """Files in a dictionary; ingest is instant."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[FileRecord, bytes]] = {}
        self.opened: list[CountedBytes] = []

    async def upload(
        self,
        tenant: str,
        filename: str,
        purpose: str,
        data: BinaryIO,
        local_only: bool = False,
        *,
        lasts_s: float | None = None,
        file_id: str | None = None,
    ) -> FileRecord:
        content = await asyncio.to_thread(data.read)
        if not content:
            raise UnsupportedDocument("The file is empty.", hint="Upload one with content.")
        if len(content) > 10 * 1024**2:
            raise TooLarge("The file is too large.")
        record = FileRecord(
            file_id=file_id or f"file-{len(self.files) + 1}",
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            size_bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            created_at=1000.0 + len(self.files),
            status=FileStatus.PARSING,
            pages_total=12,
            pages_parsed=3,
            expires_at=None if lasts_s is None else 1000.0 + lasts_s,
            local_only=local_only,
        )
        self.files[record.file_id] = (record, content)
        return record

    def finish(self, file_id: str) -> None:
        record, content = self.files[file_id]
        done = replace(record, status=FileStatus.PROCESSED, pages_parsed=12, tokens=99, language="en")
        self.files[file_id] = (done, content)

    def _find(self, tenant: str, file_id: str) -> tuple[FileRecord, bytes]:
        found = self.files.get(file_id)
        if found is None or found[0].tenant != tenant:
            raise NotFound("There is no such file.", param="file_id")
        return found

    async def get(self, tenant: str, file_id: str) -> FileRecord:
        return self._find(tenant, file_id)[0]

    async def list(self, tenant: str) -> list[FileRecord]:
        return [record for record, _ in self.files.values() if record.tenant == tenant]

    async def delete(self, tenant: str, file_id: str) -> None:
        self._find(tenant, file_id)
        del self.files[file_id]

    async def content(self, tenant: str, file_id: str) -> BinaryIO:
        self.opened.append(CountedBytes(self._find(tenant, file_id)[1]))
        return self.opened[-1]

    async def text(self, tenant: str, file_id: str) -> str:
        return self._find(tenant, file_id)[1].decode("utf-8", errors="replace")

    async def page(self, tenant: str, file_id: str, number: int) -> PageView:
        record, content = self._find(tenant, file_id)
        if number > 2:
            raise NotFound("There is no such page.", param="page")
        text = content.decode("utf-8", errors="replace")
        half = len(text) // 2
        start, end = (0, half) if number == 1 else (half, len(text))
        return PageView(Page(number, text[start:end], start, end), record.filename, 2, number == 1)

    async def page_image(self, tenant: str, file_id: str, number: int, width: int) -> bytes:
        if not (await self.page(tenant, file_id, number)).drawable:
            raise NotFound("It has no picture.", param="page")
        return b"\x89PNG\r\n\x1a\n" + str(width).encode()


class FakeKV:
    """The real view of an engine whose local window is too large."""

    def __init__(self) -> None:
        self.on = False
        times = {"local_attn_ms": 0.7, "sparse_attn_ms": 0.1, "summary_attn_ms": 0.05, "kv_cache_ms": 0.05}
        layer = LayerFigures(**times, other_ms=0.1, sparse_attn_hit_rate=0.9, topk_dynamics=TopK(48, 0.1))
        self.steps = [StepFigures(number, 2, 9000, 2.0, 0.05, 0.0, (layer, layer)) for number in range(1, 11)]

    def view(self, steps: int = 0) -> dict[str, Any]:
        use = KVUse(3 << 20, 5 << 20, 7 << 20, 1 << 20, warm_compression=0.71, limit_bytes=1 << 30)
        tally = KVTally(hit_tokens=300, rehydrated_tokens=100, computed_tokens=400, cold_steps_hit=3)
        tiers = TierSpec(90, 1 << 20, 23 << 20, 12, 8, 4)
        health = EngineHealth(use, tally, tiers, debug_on=self.on, attention=summarise(self.steps))
        return as_json(health, Settings(), self.steps[-steps:] if steps else [])

    def debug(self, on: bool) -> None:
        self.on = on


class NoBatches:
    """Of a server that runs none."""

    def serve(self, answers: LineAnswers) -> None:
        self.answers = answers


class NoBackends:
    def view(self) -> list[dict[str, Any]]:
        return [{"name": "local"}]


def no_sessions() -> SessionService:
    """Of a process that keeps none."""

    async def no_kv(owner: str) -> None:
        raise AssertionError("there is no session whose KV could be dropped")

    return SessionService(None, no_kv, Telemetry())


@dataclass
class FakeService:
    """Implements `ports.ServiceApi`. `script` replaces the usual answer; `keys` turns authentication on."""

    script: Sequence[Step] | None = None
    keys: dict[str, Caller] = field(default_factory=dict)
    is_ready: bool = True
    documents: FakeDocuments = field(default_factory=FakeDocuments)
    kv: FakeKV = field(default_factory=FakeKV)
    backends: NoBackends = field(default_factory=NoBackends)
    responses: Archive = field(default_factory=lambda: Archive(None))
    uploads: Any = None
    batches: Any = field(default_factory=NoBatches)
    conversations: SessionService = field(default_factory=no_sessions)
    ratings: Ratings | None = None
    vector_stores: VectorStoreService = field(default_factory=lambda: VectorStoreService(None, None))
    requests: list[Request] = field(default_factory=list)
    tokens: int = 0  # of every prompt; 0: its words
    open: int = 0
    closed_at: list[float] = field(default_factory=list)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a pause begins: the phase a test wants to interrupt."""

    @property
    def feedback(self) -> RatingService:
        return RatingService(self.ratings, self.conversations, Telemetry())

    async def run(self, request: Request) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        self.open += 1
        try:
            if request.model != MODEL:
                raise ModelNotFound(f"There is no model {request.model}.", param="model")
            for step in answer(request) if self.script is None else self.script:
                if isinstance(step, Pause):
                    self.reached.set()
                    await asyncio.sleep(step.seconds)
                elif isinstance(step, Fail):
                    raise step.error
                else:
                    yield step
        finally:
            self.open -= 1
            self.closed_at.append(time.monotonic())

    def machine(self) -> dict[str, Any]:
        check = {"name": "disk", "state": "warning", "detail": "little", "fix": "perilune kv rm --all"}
        return {
            "object": "machine",
            "version": "1.0",
            "model": {
                "id": MODEL,
                "parameters": 135,
                "window_tokens": 8192,
                "languages": ["en"],
                "licence": None,
                "bytes": 98,
                "runtime": "torch",
            },
            "cores": 2,
            "memory": dict.fromkeys(("total_bytes", "free_bytes", "model_bytes", "kv_bytes", "kv_tokens"), 1),
            "fit": "ok",
            "rates": {
                "measured": True,
                "prefill_tokens_per_s": 900.0,
                "decode_tokens_per_s": 40.0,
                "tokens_within_deadline": 4000,
            },
            "kernels": {"path": "portable", "native": False},
            "warnings": ["Disk: little"],
            "checks": [check],
        }

    async def forget_everything(self, tenant: str) -> None:
        self.documents.files.clear()
        await self.conversations.forget_tenant(tenant)

    async def count_tokens(self, request: Request) -> int:
        return self.tokens or sum(len(message.text.split()) for message in request.messages)

    async def balance(self, caller: Caller) -> Balance:
        return Balance(20.0, 1.5) if caller.key_id else Balance(None, 0.0)

    async def estimate(self, request: Request) -> Plan:
        if request.model != MODEL:
            raise ModelNotFound("No such model.", hint="Ask /v1/models.")
        return PLAN

    async def authenticate(self, key: str | None) -> Caller:
        if not self.keys:
            return Caller("local", "admin")
        if key is None or key not in self.keys:
            raise Unauthenticated("The key is unknown.", hint="Send a valid key.")
        return self.keys[key]

    async def models(self) -> list[ModelCard]:
        return [ModelCard(MODEL, 1_700_000_000, 8192, "Apache-2.0")]

    async def ready(self) -> bool:
        return self.is_ready
