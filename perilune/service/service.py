"""The service: what `api` and `cli` call. Admits requests, answers them, owns documents and keys.

Knows the parts that `build` made; everything about one request lives in `answer.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from perilune.core import (
    Admitted,
    Balance,
    CitationAdded,
    Completed,
    Event,
    Plan,
    Planned,
    Request,
    SamplingParams,
    SequenceSpec,
    StageStarted,
    TextDelta,
    Usage,
)
from perilune.errors import InternalError, InvalidRequest, KeptHere, ModelNotFound, NotFound, Overloaded
from perilune.memory.embed.protocol import Embedded, Role
from perilune.runtime.sampler import check_sampling
from perilune.service.admission import Admission
from perilune.service.answer import Answer, BetterElsewhere
from perilune.service.archive import Archive
from perilune.service.batch.service import BatchService
from perilune.service.caches.answers import AnswerCaches, keeping, served
from perilune.service.claims import verified
from perilune.service.documents import DocumentService
from perilune.service.ledger import Ledger, Reservation
from perilune.service.parts import Parts
from perilune.service.pool import Backends
from perilune.service.ports import Caller, Embedding, KVView, ModelCard
from perilune.service.ratings import RatingService
from perilune.service.raw import RawAnswer
from perilune.service.retention import Retention
from perilune.service.routed import RoutedAnswer, instead_of, require_known, too_late
from perilune.service.sessions import SessionService
from perilune.service.tools.stream import ToolStream, prepared
from perilune.service.uploads import UploadService
from perilune.service.vector_stores import VectorStoreService

CALIBRATION_TOKENS = 384
WARM_UP_TOKENS = 33
_ANY_VOCABULARY = 1 << 31  # a backend knows its own


class Service:
    """Implements `ports.ServiceApi`. `authenticate` maps a key to a caller and may block (it runs in a thread);
    `known` never does, and answers None where the other must be asked."""

    def __init__(
        self,
        parts: Parts,
        admission: Admission,
        authenticate: Callable[[str | None], Caller],
        kv: KVView,
        backends: Backends,
        ledger: Ledger,
        responses: Archive,
        feedback: RatingService,
        vector_stores: VectorStoreService,
        caches: AnswerCaches,
        uploads: UploadService,
        batches: BatchService,
        known: Callable[[str | None], Caller | None] = lambda key: None,
        retention: Retention | None = None,
        machine: Callable[[], dict[str, Any]] = dict,
        embedding: Embedding | None = None,
    ) -> None:
        self._embedding = embedding
        self._parts = parts
        self._known = known
        self._machine = machine
        self._ledger = ledger
        self._retention = retention
        self._backends = backends
        self._responses = responses
        self._feedback = feedback
        self._vector_stores = vector_stores
        self._caches = caches
        self._uploads = uploads
        self._batches = batches
        self._kv = kv
        self._admission = admission
        self._authenticate = authenticate
        self._ready = False

    @property
    def documents(self) -> DocumentService:
        return self._parts.documents

    @property
    def uploads(self) -> UploadService:
        return self._uploads

    @property
    def batches(self) -> BatchService:
        return self._batches

    @property
    def conversations(self) -> SessionService:
        return self._parts.sessions

    @property
    def responses(self) -> Archive:
        return self._responses

    @property
    def feedback(self) -> RatingService:
        return self._feedback

    @property
    def vector_stores(self) -> VectorStoreService:
        return self._vector_stores

    @property
    def kv(self) -> KVView:
        return self._kv

    @property
    def backends(self) -> Backends:
        return self._backends

    def machine(self) -> dict[str, Any]:
        return self._machine()

    async def start(self, warm_up: bool) -> None:
        """Warm the engine, then take up unfinished ingests."""
        self._backends.start()
        self._ledger.start()
        if warm_up:
            await self.warm_up()
        await self._parts.documents.start()
        if self._retention is not None:
            self._retention.start()
        self._ready = True
        self._batches.start()

    async def close(self) -> None:
        """Stop ingests and keep the measured rates. Running answers end with their consumers."""
        self._ready = False
        await self._batches.close()
        if self._retention is not None:
            await self._retention.close()
        await self._backends.close()
        await self._ledger.close()
        await self._parts.documents.close()
        await self._parts.sessions.close()
        self._parts.predictor.save()

    async def run(self, request: Request) -> AsyncGenerator[Event, None]:
        """Answer a request; see `ports.ServiceApi.run`."""
        parts, remote = self._parts, self._checked(request)
        stream = None
        with_tools = bool(request.tools.offered) or any(message.role == "tool" for message in request.messages)
        if with_tools and not remote:  # a backend has its own notation
            request = prepared(request, parts.tool_format)
            stream = ToolStream(parts.tool_format, request.n)
        parts.telemetry.count("requests", service_class=request.service_class.name.lower())
        async with self._ledger.reserve(request) as reserved:
            if request.sampling.grammar is not None and not remote:  # within the key's limits: one may take seconds
                await asyncio.to_thread(parts.grammars.constrain, request.sampling.grammar)
            with self._admission.enter(request.n):
                if reserved.state is not None:
                    yield Admitted(reserved.state)
                async with aclosing(self._read_first(request)) as read:
                    async for told in read:
                        if isinstance(told, Request):
                            request = told
                        else:
                            yield told
                events = self._made(request, remote, with_tools)
                if request.verify:
                    events = verified(events, request, parts.library)
                async with aclosing(_accounted(events, reserved)) as accounted:
                    async for event in accounted:
                        for item in stream.translate(event) if stream is not None else (event,):
                            yield item

    def _checked(self, request: Request) -> bool:
        """Whether a backend answers. Raises for what can't be asked, or not now."""
        parts, routes = self._parts, self._backends.routes
        remote = routes.serves(request.model) and not parts.model.means(request.model)
        if remote and (request.raw is not None or request.prewarm):
            raise InvalidRequest(
                f"{request.model} runs on a backend; raw prompts and prewarm are the local model's.",
                hint="Send messages, or use the local model.",
                param="model",
            )
        if remote:
            require_known(request)
        else:
            parts.model.require(request.model)
        parts.web.require(request)
        check_sampling(request.sampling, _ANY_VOCABULARY if remote else parts.model.vocab_size)
        if not self._ready:
            raise Overloaded("The server is starting or stopping.", hint="Try again in a few seconds.")
        return remote

    async def _read_first(self, request: Request) -> AsyncGenerator[Event | Request, None]:
        """What is told of searches before the answer; last comes the request with what was found."""
        if request.file_search is not None:
            async with aclosing(self._vector_stores.looked_up(request)) as found:
                async for told in found:
                    if isinstance(told, Request):
                        request = told
                    else:
                        yield told
        if request.web_results:
            yield StageStarted("searching")
            request = await self._parts.web.with_results(request)
        yield request

    def _made(self, request: Request, remote: bool, with_tools: bool) -> AsyncGenerator[Event, None]:
        """The answer, by whoever is to give it."""
        if request.raw is not None:
            return RawAnswer(self._parts, request).events()
        if request.prewarm:
            return Answer(self._parts, request).events()
        made = RoutedAnswer(self._parts, self._backends.routes, request).events() if remote else None
        made = made or self._local_first(request)
        return made if with_tools else self._again_or_anew(request, made, remote)

    async def _again_or_anew(
        self, request: Request, anew: AsyncGenerator[Event, None], remote: bool
    ) -> AsyncGenerator[Event, None]:
        """An answer that was given before, where the settings allow it; else `anew`, which may be kept."""
        parts, caches = self._parts, self._caches
        async with aclosing(anew):
            policy = f"{parts.kv_of(request.tenant)} {parts.preset}"
            ask = await caches.ask(request, request.model if remote else parts.model.model_id, policy)
            if ask is None:
                async for event in anew:
                    yield event
                return
            ask, kept, hit = await caches.find(ask, request)
            if kept is not None and hit is not None:
                parts.documents.require(request.file_ids)
                elapsed_s = max(0.0, parts.clock() - request.arrival_s)
                async for event in served(kept, hit, parts.limits.deadline_s(request), elapsed_s):
                    yield event
                return
            async for event in keeping(anew, partial(caches.keep, ask, request)):
                yield event

    async def embed(self, request: Request, role: Role, dimensions: int | None) -> Embedded:
        """See `ports.ServiceApi.embed`."""
        known = self._embedding.embedder_model if self._embedding is not None else None
        if self._embedding is None or known is None or request.model != known:
            hint = f"Ask {known}." if known else "Set memory.embedder, and restart the server."
            raise ModelNotFound(f"There is no embedder {request.model}.", hint=hint, param="model")
        texts = [message.text for message in request.messages]
        counted = replace(request, sampling=replace(request.sampling, max_tokens=1))
        async with self._ledger.reserve(counted) as reserved:
            found = await asyncio.to_thread(self._embedding.embed, request.tenant, texts, role)
            reserved.settle(Usage(found.tokens, 0, 0), 0.0)
        if dimensions not in (None, width := found.vectors.shape[1]):
            raise InvalidRequest(
                f"{found.model} gives {width} dimensions; vectors cut shorter would mean little.",
                hint=f"Leave out dimensions, or ask for {width}.",
                param="dimensions",
            )
        return found

    async def balance(self, caller: Caller) -> Balance:
        return await self._ledger.balance(caller.key_id, caller.limits)

    async def estimate(self, request: Request) -> Plan:
        """How a request would be answered here, and how soon; see `ports.ServiceApi.estimate`."""
        parts = self._parts
        parts.model.require(request.model)
        check_sampling(request.sampling, parts.model.vocab_size)
        if not self._ready:
            raise Overloaded("The server is starting or stopping.", hint="Try again in a few seconds.")
        if request.tools.offered or any(message.role == "tool" for message in request.messages):
            request = prepared(request, parts.tool_format)
        with self._admission.enter():
            async with aclosing(Answer(parts, request).events()) as events:
                async for event in events:
                    if isinstance(event, Planned):
                        return event.plan
        raise InternalError("The answer ended without a plan.")

    async def _local_first(self, request: Request) -> AsyncGenerator[Event, None]:
        """The local engine's answer; a backend's where that can't be had, or not in time, and one may stand in."""
        parts, routes = self._parts, self._backends.routes
        shown = False
        try:
            await parts.sessions.require_may_leave(request)
        except KeptHere:  # then nobody stands in
            async with aclosing(Answer(parts, request).events()) as events:
                async for event in events:
                    yield event
            return
        try:
            answer = Answer(parts, request, partial(self._sooner_elsewhere, request))
            async with aclosing(answer.events()) as events:
                async for event in events:
                    shown = shown or isinstance(event, (TextDelta, CitationAdded))
                    yield event
            return
        except BetterElsewhere as found:
            instead = too_late(found.plan)
        except (Overloaded, InternalError) as error:
            if shown or not routes.stand_ins(request):
                raise
            instead = instead_of(error)
        parts.telemetry.count("overflows", reason=instead.code)
        async with aclosing(RoutedAnswer(parts, routes, request, instead).events()) as events:
            async for event in events:
                yield event

    def _sooner_elsewhere(self, request: Request, plan: Plan) -> bool:
        soonest_s = self._backends.routes.soonest_s(request, plan.context_tokens)
        elapsed_s = self._parts.clock() - request.arrival_s
        return soonest_s is not None and elapsed_s + soonest_s < plan.predicted_ttft_s

    async def count_tokens(self, request: Request) -> int:
        parts = self._parts
        parts.model.require(request.model)
        if request.tools.offered or any(message.role == "tool" for message in request.messages):
            request = prepared(request, parts.tool_format)
        documents = [await parts.documents.get(request.tenant, file_id) for file_id in request.file_ids]
        tokens = await asyncio.to_thread(parts.composer.count_prompt, request.messages)
        return tokens + sum(record.tokens or 0 for record in documents)

    async def forget_everything(self, tenant: str) -> None:
        """See `ports.ServiceApi.forget_everything`."""
        documents = self._parts.documents
        await self._batches.forget_tenant(tenant)
        await self._uploads.forget_tenant(tenant)
        for record in await documents.list(tenant):
            with contextlib.suppress(NotFound):  # deleted meanwhile
                await documents.delete(tenant, record.file_id)
        await self._parts.sessions.forget_tenant(tenant)

    async def authenticate(self, key: str | None) -> Caller:
        known = self._known(key)
        return known if known is not None else await asyncio.to_thread(self._authenticate, key)

    async def models(self) -> list[ModelCard]:
        card, embedding = self._parts.model.card(), self._embedding
        embedders = []
        if embedding is not None and (name := embedding.embedder_model) is not None:
            embedders.append(ModelCard(name, card.created_at, embedding.embedder_window or 0, ""))
        return [card, *self._backends.cards(self._parts.model), *embedders]

    async def ready(self) -> bool:
        """Whether a question could be answered now: started, not closing, and the engine has not failed."""
        return self._ready and self._parts.backend.alive

    async def warm_up(self) -> None:
        """Run a short sequence, so that the first request isn't slower than the next (spec R15).

        Where the prefill rate was never measured it is long enough to measure it.
        """
        parts = self._parts
        size = WARM_UP_TOKENS if parts.predictor.measured else CALIBRATION_TOKENS
        words = parts.tokenizer.encode("The quick brown fox jumps over the lazy dog. ")
        ids = (words * (size // len(words) + 1))[: min(size, parts.model.window_tokens // 2)]
        spec = SequenceSpec(
            seq_id=f"warm-up-{secrets.token_hex(4)}",
            token_ids=ids,
            salt=secrets.token_bytes(32),
            sampling=SamplingParams(ignore_eos=True),
            max_new_tokens=3,
        )
        await parts.backend.finish(spec)


async def _accounted(events: AsyncGenerator[Event, None], reserved: Reservation) -> AsyncGenerator[Event, None]:
    """The events at the key's pace; what was used is settled. An answer that was left or broke off counts with the
    text that came."""
    pieces = 0
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, TextDelta):
                    pieces += 1
                    await reserved.pace()
                elif isinstance(event, Completed):
                    reserved.settle(event.usage, event.report.cost or 0.0)
                yield event
    finally:
        if pieces:
            reserved.settle_left(pieces)
