"""Answers to prompts that come as they are, without messages or a chat template: OpenAI's Completions.

Knows the local engine and one prompt; doesn't know documents, sessions or backends. Nothing is left out: a prompt
that doesn't fit is refused."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from perilune.core import (
    ChoiceFinished,
    Completed,
    DecodedLogprob,
    Event,
    Plan,
    PlanKind,
    Planned,
    Report,
    Request,
    SequenceSpec,
    StageStarted,
    TextDelta,
    TokenReport,
)
from perilune.errors import ContextTooLong, InvalidRequest
from perilune.memory.session_ids import tenant_owner
from perilune.service.generate import Generation
from perilune.service.parts import Parts

DEFAULT_TOKENS = 16
"""Of an answer whose length isn't asked for, as the dialect has it."""


@dataclass(slots=True)
class _Candidate:
    """One of several answers of which the best are wanted."""

    pieces: list[TextDelta] = field(default_factory=list)
    finish: ChoiceFinished | None = None

    @property
    def logprobs(self) -> list[DecodedLogprob]:
        return [each for piece in self.pieces for each in piece.logprobs]

    @property
    def worth(self) -> float:
        """The mean log probability of its tokens."""
        values = [each.logprob for each in self.logprobs]
        return sum(values) / len(values) if values else -math.inf


class RawAnswer:
    """One prompt being answered."""

    def __init__(self, parts: Parts, request: Request) -> None:
        assert request.raw is not None
        self._parts = parts
        self._request = request
        self._raw = request.raw

    async def events(self) -> AsyncGenerator[Event, None]:
        """Raises `InvalidRequest` for ids that are no tokens, `ContextTooLong`, and as `Generation.events`."""
        parts, request = self._parts, self._request
        yield StageStarted("composing")
        ids = await asyncio.to_thread(self._ids)
        window = parts.model.window_tokens
        if len(ids) + (request.sampling.max_tokens != 0) > window:
            raise ContextTooLong(
                f"The prompt has {len(ids):,} tokens, and the model's window is {window:,}.",
                hint="Send less.",
                param="prompt",
            )
        plan = self._plan(ids)
        yield Planned(plan)
        spec = self._spec(ids)
        asked = replace(request, n=max(request.n, self._raw.best_of), sampling=spec.sampling)
        generation = Generation(
            parts.backend,
            parts.tokenizer,
            parts.predictor,
            parts.clock,
            asked,
            spec,
            parts.limits.timeout_s,
            lambda: None,
        )
        if self._raw.echo:
            text = parts.tokenizer.decode(list(ids)) if self._raw.text is None else self._raw.text
            for choice in range(request.n):
                yield TextDelta(choice, text)
        async with aclosing(generation.events()) as events:
            if asked.n == request.n:
                async for event in events:
                    yield event
            else:
                async for event in self._best(events, asked.n):
                    yield event
        outcome = generation.outcome
        tokens = TokenReport(offered=len(ids), exact=len(ids), cached=outcome.cached)
        measured, deadline_s = outcome.ttft_s, plan.deadline_s
        report = Report(
            plan.kind,
            deadline_s,
            plan.predicted_ttft_s,
            measured,
            tokens,
            parts.model.model_id,
            parts.model.backend,
        )
        yield Completed(outcome.usage, report)

    async def _best(self, events: AsyncGenerator[Event, None], count: int) -> AsyncGenerator[Event, None]:
        """The best of `count` answers, once all are there."""
        candidates = [_Candidate() for _ in range(count)]
        async for event in events:
            if isinstance(event, TextDelta):
                candidates[event.choice].pieces.append(event)
            elif isinstance(event, ChoiceFinished):
                candidates[event.choice].finish = event
            else:
                yield event
        best = sorted(candidates, key=lambda each: -each.worth)[: self._request.n]
        for index, candidate in enumerate(best):
            for event in self._told(index, candidate):
                yield event

    def _told(self, index: int, candidate: _Candidate) -> Iterator[Event]:
        wanted = self._request.sampling.logprobs is not None
        for piece in candidate.pieces:
            yield replace(piece, choice=index, logprobs=piece.logprobs if wanted else ())
        if candidate.finish is not None:
            yield replace(candidate.finish, choice=index)

    def _ids(self) -> Sequence[int]:
        tokenizer, raw = self._parts.tokenizer, self._raw
        if raw.text is None:
            size = self._parts.model.vocab_size
            if any(not 0 <= token < size for token in raw.token_ids):
                raise InvalidRequest(
                    f"The prompt holds a number that is no token of the model; it has {size:,}.", param="prompt"
                )
            return raw.token_ids
        ids = tokenizer.encode_template(raw.text)  # the caller writes the whole prompt, its markers too
        bos = tokenizer.bos_ids
        return ids if tuple(ids[: len(bos)]) == tuple(bos) else [*bos, *ids]

    def _plan(self, ids: Sequence[int]) -> Plan:
        parts, request = self._parts, self._request
        cached = parts.backend.cached(ids, parts.salt_of(request.tenant))
        queued = parts.backend.stats().queued_tokens(request.service_class)
        uncached = max(0, len(ids) - cached.total)
        ttft_s = parts.predictor.rates.ttft_s(uncached, cached.total, cached.disk, queued)
        kind = PlanKind.RESUME if cached.total else PlanKind.FULL
        return Plan(kind, parts.limits.deadline_s(request), ttft_s, 1.0, len(ids), uncached, bound_ttft_s=ttft_s)

    def _spec(self, ids: Sequence[int]) -> SequenceSpec:
        parts, request = self._parts, self._request
        sampling = request.sampling
        if self._raw.best_of > request.n and sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)  # what the best are told by
        wanted = DEFAULT_TOKENS if sampling.max_tokens is None else sampling.max_tokens
        return SequenceSpec(
            seq_id=f"{request.request_id}-0",
            token_ids=ids,
            salt=parts.salt_of(request.tenant),
            sampling=sampling,
            max_new_tokens=min(wanted, parts.model.window_tokens - len(ids)),
            stop_token_ids=frozenset() if sampling.ignore_eos else parts.tokenizer.stop_ids,
            service_class=request.service_class,
            shared_tokens=len(ids),
            persist_owner=tenant_owner(request.tenant),
            persist_tokens=0,
            kv_policy=parts.kv_of(request.tenant),
            tenant=request.tenant,
            deadline_s=max(0.0, parts.limits.deadline_s(request) - (parts.clock() - request.arrival_s)),
        )
