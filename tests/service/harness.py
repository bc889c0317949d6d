"""A whole service over the fakes; after every test nothing may be left in the engine or in admission."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from perilune.core import (
    ContextPolicy,
    Event,
    FilePart,
    FileStatus,
    Grammar,
    KeyLimits,
    Message,
    Request,
    SamplingParams,
    ServiceClass,
    TextDelta,
    TextPart,
)
from perilune.errors import InvalidRequest
from perilune.memory.vector_stores import VectorStores
from perilune.service.admission import Admission
from perilune.service.archive import Archive
from perilune.service.backends.local import LocalBackend
from perilune.service.backends.searxng import SearXNG
from perilune.service.caches.answers import AnswerCaches, CachePolicy, Vectors
from perilune.service.caches.faq import CuratedAnswers
from perilune.service.compose import Composer
from perilune.service.documents import DocumentService
from perilune.service.ledger import Ledger, UsageRows
from perilune.service.model import ServedModel
from perilune.service.parts import Limits, Parts
from perilune.service.peak import Peak
from perilune.service.pool import Backends
from perilune.service.ports import Caller, SessionStore
from perilune.service.predictor import Predictor
from perilune.service.rates import Rates
from perilune.service.ratings import RatingService
from perilune.service.routed import Routes
from perilune.service.routing import Router, Target
from perilune.service.service import Service
from perilune.service.sessions import SessionService
from perilune.service.tools.formats import Hermes
from perilune.service.uploads import UploadService
from perilune.service.vector_stores import VectorStoreService
from perilune.service.web_search import WebSearch
from perilune.telemetry import Telemetry
from tests.service.fakes import (
    CharTokenizer,
    FakeEngine,
    MemoryLibrary,
    NoBatches,
    NoKV,
    NoUsage,
    Template,
    upload_bytes,
)

_ids = itertools.count()
VOCABULARY = 0x110000  # every character is a token


@dataclass
class Bench:
    """A service with everything in reach."""

    engine: FakeEngine = field(default_factory=FakeEngine)
    library: MemoryLibrary = field(default_factory=MemoryLibrary)
    tokenizer: CharTokenizer = field(default_factory=CharTokenizer)
    template: Any = field(default_factory=Template)
    window: int = 8192
    capacity: int = 100_000
    max_upload_bytes: int = 1_000_000
    rates: Rates = field(
        default_factory=lambda: Rates(5e-6, 0.0, 1e-6, decode_s=0.001, overhead_s=0.005, error=0.1)
    )
    limit: int = 8
    timeout_s: float = 30.0
    kept: SessionStore | None = None
    stores: VectorStores | None = None
    language: Callable[[str], str | None] = lambda text: "en"
    targets: list[Target] = field(default_factory=list)
    fallbacks: tuple[tuple[str, ...], ...] = ()
    probe_s: float = 10.0
    usage: UsageRows = field(default_factory=NoUsage)
    limits: KeyLimits = field(default_factory=KeyLimits)
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time
    cache: CachePolicy = field(default_factory=CachePolicy)
    curated: CuratedAnswers | None = None
    vectors: Vectors | None = None
    web: SearXNG | None = None
    service: Service = field(init=False)
    admission: Admission = field(init=False)
    peak_queue_s: float = 10.0
    peak_classes: tuple[ServiceClass, ...] = ()
    documents: DocumentService = field(init=False)
    predictor: Predictor = field(init=False)

    async def start(self) -> None:
        telemetry = Telemetry()
        self.predictor = Predictor(None, telemetry, 1024, self.rates)
        self.engine.observer = self.predictor
        backend = LocalBackend(self.engine)
        composer = Composer(self.tokenizer, self.template, self.window)
        self.documents = DocumentService(
            self.library,
            composer,
            backend,
            lambda tenant: tenant.encode().ljust(32, b"-"),
            self.engine.owners,
            self.window,
            self.capacity,
            self.max_upload_bytes,
            telemetry,
            forget_answers=lambda part: caches.forget(part),
        )
        caches = AnswerCaches(self.cache, self.documents, self.curated, self.vectors, self.clock, telemetry)
        self.admission = Admission(self.limit, telemetry)
        sessions = SessionService(self.kept, self.documents.forget_kv, telemetry)
        parts = Parts(
            model=ServedModel(
                "fake-1", self.window, "Apache-2.0", 0, VOCABULARY, frozenset({"fake"}), frozenset({"en"})
            ),
            tokenizer=self.tokenizer,
            composer=composer,
            grammars=NoGrammars(),
            tool_format=Hermes(),
            library=self.library,
            documents=self.documents,
            sessions=sessions,
            backend=backend,
            predictor=self.predictor,
            salt_of=lambda tenant: tenant.encode().ljust(32, b"-"),
            detect_language=lambda text: self.language(text),
            limits=Limits(5.0, 30.0, 1.0, self.timeout_s),
            web=WebSearch(self.web, self.documents, sessions),
            peak=Peak(self.peak_queue_s, self.peak_classes, telemetry),
            clock=time.monotonic,
            telemetry=telemetry,
        )
        routes = Routes(Router(self.targets, time.monotonic, telemetry), self.fallbacks)
        ledger = Ledger(self.usage, self.limits, routes.price, self.clock, self.now, telemetry)
        backends = Backends(routes, self.probe_s, time.monotonic, telemetry)
        self.service = Service(
            parts,
            self.admission,
            lambda key: Caller("local", "admin"),
            NoKV(),
            backends,
            ledger,
            Archive(None),
            RatingService(None, parts.sessions, telemetry),
            VectorStoreService(self.stores, self.library),
            caches,
            UploadService(None, self.documents, self.max_upload_bytes),
            NoBatches(),
        )
        await self.service.start(warm_up=False)

    async def upload(self, text: str, name: str = "doc.txt", tenant: str = "local", wait: bool = True) -> str:
        record = await self.documents.upload(tenant, name, "assistants", upload_bytes(text))
        if wait:
            await self.documents.settled()
            assert (await self.documents.get(tenant, record.file_id)).status in (
                FileStatus.PROCESSED,
                FileStatus.ERROR,
            )
        return record.file_id

    async def ask(self, question: str, **options: Any) -> list[Event]:
        return [event async for event in self.service.run(request(question, **options))]


class NoGrammars:
    """The fake engine follows no forms."""

    def constrain(self, grammar: Grammar) -> object:
        raise InvalidRequest("No forms here.", hint="Leave it out.", param=grammar.param)


def request(
    question: str,
    *,
    files: tuple[str, ...] = (),
    history: tuple[tuple[str, str], ...] = (),
    tenant: str = "local",
    model: str = "fake-1",
    n: int = 1,
    deadline_s: float | None = None,
    policy: ContextPolicy = ContextPolicy.AUTO,
    session: str | None = None,
    recall: tuple[str, ...] | None = None,
    profile: bool = True,
    **sampling: Any,
) -> Request:
    messages = [Message(role, (TextPart(text),)) for role, text in history]
    parts: tuple[TextPart | FilePart, ...] = (*map(FilePart, files), TextPart(question))
    messages.append(Message("user", parts))
    return Request(
        request_id=f"req-{next(_ids)}",
        tenant=tenant,
        model=model,
        messages=tuple(messages),
        arrival_s=time.monotonic(),
        sampling=SamplingParams(**sampling),
        n=n,
        deadline_s=deadline_s,
        context_policy=policy,
        session_id=session,
        recall=recall if recall is not None else (session,) if session else (),
        profile=profile,
    )


def text_of(events: list[Event], choice: int = 0) -> str:
    return "".join(e.text for e in events if isinstance(e, TextDelta) and e.choice == choice)


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Bench]:
    bench = Bench(**options)
    await bench.start()
    try:
        yield bench
        await asyncio.to_thread(bench.engine.assert_clean)
        assert bench.admission.inside == 0, "a place in the service was not given back"
    finally:
        await bench.service.close()
        bench.engine.close()
