"""The service: what `api` and `cli` call. Admits requests, answers them, owns documents and keys.

Knows the parts that `build` made; everything about one request lives in `answer.py`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from perilune.core import Event, Request, SamplingParams, SequenceSpec
from perilune.errors import Overloaded
from perilune.runtime.sampler import check_sampling
from perilune.service.admission import Admission
from perilune.service.answer import Answer, Parts
from perilune.service.documents import DocumentService
from perilune.service.ports import Caller, KVView, ModelCard
from perilune.service.sessions import SessionService
from perilune.service.tools.stream import ToolStream, prepared

CALIBRATION_TOKENS = 384
WARM_UP_TOKENS = 33


class Service:
    """Implements `ports.ServiceApi`. `authenticate` maps a key to a caller and may block (it runs in a thread)."""

    def __init__(
        self,
        parts: Parts,
        admission: Admission,
        authenticate: Callable[[str | None], Caller],
        kv: KVView,
    ) -> None:
        self._parts = parts
        self._kv = kv
        self._admission = admission
        self._authenticate = authenticate
        self._ready = False

    @property
    def documents(self) -> DocumentService:
        return self._parts.documents

    @property
    def conversations(self) -> SessionService:
        return self._parts.sessions

    @property
    def kv(self) -> KVView:
        return self._kv

    async def start(self, warm_up: bool) -> None:
        """Warm the engine, then take up unfinished ingests."""
        if warm_up:
            await self.warm_up()
        await self._parts.documents.start()
        self._ready = True

    async def close(self) -> None:
        """Stop ingests and keep the measured rates. Running answers end with their consumers."""
        self._ready = False
        await self._parts.documents.close()
        await self._parts.sessions.close()
        self._parts.predictor.save()

    async def run(self, request: Request) -> AsyncGenerator[Event, None]:
        """Answer a request; see `ports.ServiceApi.run`."""
        parts = self._parts
        parts.model.require(request.model)
        check_sampling(request.sampling, parts.model.vocab_size)
        if not self._ready:
            raise Overloaded("The server is starting or stopping.", hint="Try again in a few seconds.")
        stream = None
        if request.tools.offered or any(message.role == "tool" for message in request.messages):
            request = prepared(request, parts.tool_format)
            stream = ToolStream(parts.tool_format, request.n)
        if request.sampling.grammar is not None:
            await asyncio.to_thread(parts.grammars.constrain, request.sampling.grammar)
        parts.telemetry.count("requests", service_class=request.service_class.name.lower())
        with self._admission.enter(request.n):
            async with aclosing(Answer(parts, request).events()) as events:
                async for event in events:
                    for item in stream.translate(event) if stream is not None else (event,):
                        yield item

    async def authenticate(self, key: str | None) -> Caller:
        return await asyncio.to_thread(self._authenticate, key)

    async def models(self) -> list[ModelCard]:
        return [self._parts.model.card()]

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
