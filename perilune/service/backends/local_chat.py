"""The engine of this process as a `Backend`: plain messages in, text out.

Knows the composer and the engine's streams. It is where a chat ends that no other backend could answer, and what
other backends are held against in tests; questions to the local model itself go through `answer.Answer`, which
plans and reuses KV over documents.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from perilune.core import (
    ChoiceFinished,
    KVPolicy,
    Message,
    Request,
    SequenceSpec,
    TextDelta,
    TextPart,
)
from perilune.errors import ContextTooLong, InvalidRequest, PeriluneError
from perilune.service.backends.local import LocalBackend
from perilune.service.backends.protocol import BackendDone, BackendEvent, BackendFault, Call, FaultKind
from perilune.service.compose import Composer
from perilune.service.generate import Generation
from perilune.service.model import ServedModel
from perilune.service.ports import Tokenizer
from perilune.service.predictor import Predictor

LOCAL = "local"
"""Its name in configuration and reports."""


class LocalChat:
    """Implements `Backend`. `timeout_s` bounds a whole answer."""

    def __init__(
        self,
        model: ServedModel,
        backend: LocalBackend,
        composer: Composer,
        tokenizer: Tokenizer,
        predictor: Predictor,
        salt_of: Callable[[str], bytes],
        kv_of: Callable[[str], KVPolicy],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._backend = backend
        self._composer = composer
        self._tokenizer = tokenizer
        self._predictor = predictor
        self._salt_of = salt_of
        self._kv_of = kv_of
        self._timeout_s = timeout_s
        self._clock = clock

    @property
    def name(self) -> str:
        return LOCAL

    @property
    def model_id(self) -> str:
        return self._model.model_id

    @property
    def window_tokens(self) -> int:
        return self._model.window_tokens

    async def chat(self, call: Call) -> AsyncGenerator[BackendEvent, None]:
        """See `Backend.chat`. What a call continues is put behind the prompt token by token."""
        try:
            spec = await asyncio.to_thread(self._spec, call)
            async with aclosing(self._generated(call, spec)) as events:
                async for event in events:
                    yield event
        except PeriluneError as error:
            raise self._fault(error) from error

    async def probe(self) -> None:
        if not self._backend.alive:
            raise BackendFault(FaultKind.UNREACHABLE, self.name, "has stopped.")

    async def close(self) -> None:
        """The engine isn't this one's to close."""

    async def _generated(self, call: Call, spec: SequenceSpec) -> AsyncGenerator[BackendEvent, None]:
        request = Request(
            request_id=call.request_id,
            tenant=call.tenant,
            model=self.model_id,
            messages=(),
            arrival_s=self._clock(),
            sampling=call.sampling,
            n=call.n,
            service_class=call.service_class,
        )
        generation = Generation(
            self._backend,
            self._tokenizer,
            self._predictor,
            self._clock,
            request,
            spec,
            self._timeout_s,
            lambda: None,
        )
        async with aclosing(generation.events()) as events:
            async for event in events:
                if isinstance(event, (TextDelta, ChoiceFinished)):
                    yield event
        yield BackendDone(generation.outcome.usage)

    def _spec(self, call: Call) -> SequenceSpec:
        said = call.messages[:-1] if call.continues else call.messages
        messages = [Message(message.role, (TextPart(message.text),)) for message in said]
        prompt = self._composer.compose([], self._composer.conversation(messages), "")
        ids = array("i", prompt.token_ids)
        if call.continues:
            ids.extend(self._tokenizer.encode(call.messages[-1].text))
        left = self.window_tokens - len(ids)
        if left < 1:
            raise ContextTooLong(f"The prompt needs {len(ids):,} tokens; the window is {self.window_tokens:,}.")
        return SequenceSpec(
            seq_id=f"{call.request_id}-0",
            token_ids=ids,
            salt=self._salt_of(call.tenant),
            sampling=call.sampling,
            max_new_tokens=min(call.sampling.max_tokens or left, left),
            stop_token_ids=frozenset() if call.sampling.ignore_eos else self._tokenizer.stop_ids,
            service_class=call.service_class,
            shared_tokens=len(prompt),
            kv_policy=self._kv_of(call.tenant),
            tenant=call.tenant,
        )

    def _fault(self, error: PeriluneError) -> BackendFault:
        kind = FaultKind.OVERLOADED
        if isinstance(error, ContextTooLong):
            kind = FaultKind.TOO_LONG
        elif isinstance(error, InvalidRequest):
            kind = FaultKind.REFUSED
        return BackendFault(kind, self.name, f"said: {error}")
