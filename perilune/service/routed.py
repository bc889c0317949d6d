"""The life of a request that a backend answers: gather text, plan, route, report.

The counterpart of answer.py for models that don't run on the local engine, and for local ones that can't answer in
time. Knows the service's parts, the router and one request; doesn't know HTTP. Closing `events` stops the work in
whatever phase it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from perilune.core import (
    CachedTokens,
    Citation,
    CitationAdded,
    Completed,
    ContextPolicy,
    Degradation,
    Event,
    FileRecord,
    GrammarKind,
    Plan,
    PlanKind,
    Planned,
    ReasoningDelta,
    Report,
    Request,
    SessionTurn,
    StageStarted,
    TextDelta,
    TokenReport,
    ToolCallDelta,
    ToolMode,
    TurnCitation,
    Usage,
)
from perilune.errors import ContextTooLong, InvalidRequest, Overloaded, PeriluneError
from perilune.service.backends.protocol import BackendDone, BackendEvent, Call
from perilune.service.material import READ, MaterialReader, coverage
from perilune.service.parts import ANSWER_RESERVE_TOKENS, WHOLE_CITATIONS, Parts
from perilune.service.planner import Facts, choose
from perilune.service.recall import CANDIDATES, turn_citation
from perilune.service.routing import Router, Target, Trace
from perilune.service.sessions import Visit
from perilune.service.telling import Telling
from perilune.service.text_prompt import TextComposer, TextPrompt, chosen_turns
from perilune.service.thinking import citations_last

_REPLANS = 2
"""Times that a backend may turn out to have a smaller window than it claims."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The router, and which models may stand in for which: the others of a list for its first, the best first."""

    router: Router
    fallbacks: Sequence[Sequence[str]] = ()

    def serves(self, model: str) -> bool:
        return bool(self.router.serving(model))

    def price(self, model: str, usage: Usage) -> float:
        """What a usage of a model may cost at most, before it is known who answers."""
        return max((target.prices.of(usage) for target in self.router.serving(model)), default=0.0)

    def stand_ins(self, request: Request) -> list[Target]:
        """Targets of the models that may answer instead; none where the caller pinned `full`, or asks for what only
        the local engine does."""
        if request.context_policy is ContextPolicy.FULL or only_local(request):
            return []
        models = dict.fromkeys(m for chain in self.fallbacks if chain[:1] == (request.model,) for m in chain[1:])
        found = [target for model in models for target in self.router.serving(model)]
        return [target for target in found if target.remote or not asks_more(request)]

    def soonest_s(self, request: Request, tokens: int) -> float | None:
        """When a stand-in would answer, from now; None without one that could be asked."""
        ready = [t for t in self.stand_ins(request) if t.health.available and not t.full]
        return min((t.health.ttft_s(tokens) for t in ready), default=None)


class RoutedAnswer:
    """One request being answered by a backend. `instead`: why it isn't the local engine that answers."""

    def __init__(self, parts: Parts, routes: Routes, request: Request, instead: Degradation | None = None) -> None:
        self._parts = parts
        self._routes = routes
        self._request = request
        self._instead = instead
        self._deadline_s = parts.limits.deadline_s(request)
        self._trace = Trace()
        self._visit: Visit | None = None
        self._recalled: list[SessionTurn] = []
        self._ttft_s: float | None = None
        self._speaking: set[int] = set()
        self._usage = Usage(0, 0, 0)
        self._counted = True
        self._called = False
        self._taken_out: Mapping[str, int] = {}

    async def events(self) -> AsyncGenerator[Event, None]:
        """Every event of the answer. Errors are raised."""
        request, sessions = self._request, self._parts.sessions
        if request.session_id is not None:
            self._visit = sessions.visit(request.tenant, request.session_id, request.local_only)
        telling = Telling(sessions, self._visit, request, _question(request), self._parts.clock)
        async with aclosing(citations_last(self._answered())) as events:
            with telling:
                async for event in events:
                    telling.see(event)
                    yield event

    async def _answered(self) -> AsyncGenerator[Event, None]:
        parts, request = self._parts, self._request
        await parts.sessions.require_may_leave(request)
        records = [await parts.documents.get(request.tenant, file_id) for file_id in request.file_ids]
        composer = TextComposer(request, records)
        yield StageStarted("retrieving" if records or request.recall else "composing")
        degradations: list[Degradation] = [] if self._instead is None else [self._instead]
        if records:
            records = await self._readable(records)
        kept = await parts.sessions.kept_here(request.tenant, request.recall)
        if kept:
            degradations.append(
                Degradation(
                    "local_only", f"{len(kept)} sessions stay on this machine: nothing of them was recalled."
                )
            )
            request = self._request = replace(
                request, recall=tuple(each for each in request.recall if each not in kept)
            )
        if request.recall:
            self._recalled = chosen_turns(await self._found(composer.question), request)
        if records or self._recalled:
            composer = TextComposer(request, records, self._recalled)
        texts = await self._texts(records)
        for _ in range(_REPLANS):
            try:
                async with aclosing(self._planned(composer, records, texts, degradations)) as events:
                    async for event in events:
                        yield event
                return
            except ContextTooLong:
                # A window that was smaller than claimed is known by now: plan again for what there is.
                if self._trace.pieces or not self._refinable(composer, records):
                    raise
        async with aclosing(self._planned(composer, records, texts, degradations)) as events:
            async for event in events:
                yield event

    async def _planned(
        self,
        composer: TextComposer,
        records: Sequence[FileRecord],
        texts: Sequence[str],
        degradations: list[Degradation],
    ) -> AsyncGenerator[Event, None]:
        """Plan with the targets as they are now, compose, run."""
        parts = self._parts
        whole = composer.whole(texts)
        targets = self._targets(whole)
        best = targets[0]
        plan = choose(self._facts(composer, records, whole, best, targets))
        prompt = whole
        if plan.kind is PlanKind.REFINED:
            budget = best.health.estimate(plan.context_tokens)
            prompt = await asyncio.to_thread(composer.refined, parts.library, budget)
            targets = self._targets(prompt)
        yield Planned(replace(plan, kind=self._kind(plan, targets[0])))
        citations: list[Citation | TurnCitation] = [*map(turn_citation, self._recalled), *prompt.citations]
        if records and not prompt.citations:
            citations += await asyncio.to_thread(composer.quotes, parts.library, WHOLE_CITATIONS)
        for citation in citations:
            yield CitationAdded(citation)
        self._require()
        await parts.sessions.require_may_leave(self._request)  # it may have been marked meanwhile
        async with aclosing(self._run(targets, prompt)) as events:
            async for event in events:
                yield event
        said = (
            *self._request.notes,
            *degradations,
            *plan.degradations,
            *prompt.degradations,
            *coverage(records),
            *self._late_degradations(),
        )
        yield self._completed(plan, whole, prompt, tuple(citations), tuple(dict.fromkeys(said)))

    async def _run(self, targets: Sequence[Target], prompt: TextPrompt) -> AsyncGenerator[Event, None]:
        request = self._request
        call = self._call(prompt)
        yield StageStarted("queued")
        running = self._routes.router.run(targets, call, prompt.estimate, self._trace, request.whole)
        async with aclosing(running) as events:
            while (event := await self._next(events)) is not None:
                if isinstance(event, BackendDone):
                    self._usage, self._counted = event.usage, event.counted
                    self._taken_out = event.taken_out
                    continue
                if isinstance(event, ReasoningDelta):
                    if event.choice not in self._speaking:  # what a second backend thinks in the middle is nobody's
                        yield event
                    continue
                self._called |= isinstance(event, ToolCallDelta)
                self._speaking.add(event.choice)
                if isinstance(event, TextDelta | ToolCallDelta) and self._ttft_s is None:
                    self._ttft_s = self._elapsed_s()
                    yield StageStarted("answering")
                yield event

    async def _next(self, events: AsyncIterator[BackendEvent]) -> BackendEvent | None:
        """The next event; None at the end. Raises `Overloaded` when the answer takes too long."""
        timeout_s = self._parts.limits.timeout_s
        try:
            async with asyncio.timeout(max(0.0, timeout_s - self._elapsed_s())):
                return await anext(events, None)
        except TimeoutError:
            raise Overloaded(
                f"The answer was not finished within {timeout_s:g} s.",
                hint="Ask for fewer tokens, or raise model_serving.timeout.",
            ) from None

    # ----------------------------------------------------------------------------------------- gathering

    async def _readable(self, records: list[FileRecord]) -> list[FileRecord]:
        parts, request = self._parts, self._request
        reader = MaterialReader(parts.documents, parts.composer, parts.library, parts.clock)

        async def progressed(known: Sequence[FileRecord]) -> None:
            """More is read; nothing can be refused for it here."""

        wait_s = reader.patience(request.context_policy, self._deadline_s)
        return await reader.readable(records, request.arrival_s, wait_s, parts.limits.timeout_s, progressed)

    async def _texts(self, records: Sequence[FileRecord]) -> list[str]:
        library, tenant = self._parts.library, self._request.tenant
        return [await asyncio.to_thread(library.text, tenant, record.file_id) for record in records]

    async def _found(self, question: str) -> list[SessionTurn]:
        request = self._request
        _, turns = await self._parts.sessions.recall(
            request.tenant, request.recall, request.session_id, question, CANDIDATES
        )
        return turns

    # ------------------------------------------------------------------------------------------ planning

    def _targets(self, prompt: TextPrompt) -> list[Target]:
        """Who may answer, the best first. Raises `Overloaded` where nobody can be asked."""
        router, request = self._routes.router, self._request
        own, others = router.serving(request.model), self._routes.stand_ins(request)
        call, estimate, answer = self._call(prompt), prompt.estimate, self._answer_tokens()
        groups = [own] if self._instead is None else []
        groups += [[t for t in others if t.serves == model] for model in dict.fromkeys(t.serves for t in others)]
        ordered = [router.order(group, call, estimate, answer) for group in groups]
        in_time = [group for group in ordered if group and self._in_time(group[0], estimate)]
        late = [group for group in ordered if group not in in_time]
        found = [target for group in (*in_time, *late) for target in group]
        if found:
            return found
        known = [*own, *others]
        windows = [t.health.window_tokens for t in known if t.health.tokens(estimate) >= t.health.window_tokens]
        if known and len(windows) == len(known):  # only too long for all of them: the planner says so, or refines
            return sorted(known, key=lambda t: (t.health.back_in_s, -t.health.window_tokens))
        raise router.refusal(request.model, known)

    def _in_time(self, target: Target, estimate: float) -> bool:
        return target.health.available and target.health.ttft_s(target.health.tokens(estimate)) <= self._left_s()

    def _facts(
        self,
        composer: TextComposer,
        records: Sequence[FileRecord],
        whole: TextPrompt,
        best: Target,
        targets: Sequence[Target],
    ) -> Facts:
        health = best.health
        return Facts(
            policy=self._request.context_policy,
            deadline_s=self._deadline_s,
            elapsed_s=self._elapsed_s(),
            window=max(target.health.window_tokens for target in targets),
            answer=self._answer_tokens(),
            prompt=health.tokens(whole.estimate),
            stable=0,
            required=health.tokens(composer.least()),
            cached=CachedTokens(),
            complete=all(record.status in READ for record in records),
            refinable=self._refinable(composer, records),
            searched=bool(records),
            queued=0,
            rates=health.rates,
            reserve_s=0.0,
        )

    @staticmethod
    def _refinable(composer: TextComposer, records: Sequence[FileRecord]) -> bool:
        return bool(records) or composer.has_history

    def _answer_tokens(self) -> int:
        return min(self._request.sampling.max_tokens or ANSWER_RESERVE_TOKENS, ANSWER_RESERVE_TOKENS)

    def _call(self, prompt: TextPrompt) -> Call:
        request = self._request
        return Call(
            request.request_id,
            request.tenant,
            prompt.messages,
            request.sampling,
            request.n,
            request.service_class,
            self._left_s(),
            tools=request.tools,
        )

    def _require(self) -> None:
        """Raises `NotFound` where what the prompt was made of is deleted by now."""
        self._parts.documents.require(self._request.file_ids)
        self._parts.sessions.require(self._visit)

    def _elapsed_s(self) -> float:
        return max(0.0, self._parts.clock() - self._request.arrival_s)

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - self._elapsed_s())

    # ----------------------------------------------------------------------------------------- reporting

    def _degraded(self, target: Target) -> tuple[Degradation, ...]:
        """What is said where another model answers than the one that was asked."""
        asked = self._request.model
        if target.serves == asked:
            return ()
        return (Degradation("fallback_model", f"{target.serves} answers instead of {asked}."),)

    def _kind(self, plan: Plan, target: Target) -> PlanKind:
        return plan.kind if target.serves == self._request.model else PlanKind.FALLBACK

    def _late_degradations(self) -> tuple[Degradation, ...]:
        trace = self._trace
        said: list[Degradation] = []
        if trace.target is not None:
            said += self._degraded(trace.target)
        failed = [a for a in trace.attempts if a.outcome not in ("answered", "left")]
        if failed:
            told = ", ".join(f"{attempt.backend} ({attempt.outcome.replace('_', ' ')})" for attempt in failed)
            said.append(Degradation("failover", f"Asked before: {told}."))
        if trace.resumed_from is not None:
            said.append(
                Degradation("resumed", f"{trace.resumed_from} broke off in its answer; another backend went on.")
            )
        if self._request.tools.mode is ToolMode.REQUIRED and not self._called:
            said.append(Degradation("tool_not_called", "The backend answered without the call that was asked for."))
        if not self._counted:
            said.append(Degradation("usage_unknown", "The backend counted no tokens; usage is an estimate."))
        return tuple(said)

    def _completed(
        self,
        plan: Plan,
        whole: TextPrompt,
        prompt: TextPrompt,
        citations: tuple[Citation | TurnCitation, ...],
        degradations: tuple[Degradation, ...],
    ) -> Completed:
        parts, request, trace = self._parts, self._request, self._trace
        target = trace.target
        assert target is not None
        kind = self._kind(plan, target)
        if self._ttft_s is not None:
            service_class = request.service_class.name.lower()
            met = "met" if self._ttft_s <= self._deadline_s else "missed"
            parts.telemetry.observe("ttft_seconds", self._ttft_s, plan=kind.value, service_class=service_class)
            parts.telemetry.count("deadline", outcome=met, plan=kind.value, service_class=service_class)
        usage = self._usage
        if not self._counted:
            usage = replace(usage, prompt_tokens=target.health.tokens(prompt.estimate))
        offered = max(target.health.tokens(whole.estimate), usage.prompt_tokens)
        exact = usage.prompt_tokens if prompt is not whole else offered
        report = Report(
            plan=kind,
            deadline_s=self._deadline_s,
            predicted_ttft_s=plan.predicted_ttft_s,
            measured_ttft_s=self._ttft_s,
            tokens=TokenReport(offered=offered, exact=min(exact, offered), dropped=max(0, offered - exact)),
            model=target.backend.model_id,
            backend=target.name,
            citations=citations,
            degradations=degradations,
            attempts=tuple(trace.attempts),
            cost=round(trace.cost, 9),
            taken_out=self._taken_out,
        )
        return Completed(usage, report)


def only_local(request: Request) -> bool:
    """Whether a request asks for what isn't passed on to backends: a form of the answer that is no JSON Schema, or
    the answer's beginning."""
    grammar = request.sampling.grammar
    return bool(request.prefix) or (grammar is not None and grammar.kind is not GrammarKind.JSON_SCHEMA)


def asks_more(request: Request) -> bool:
    """Whether it asks for what the engine of this process does in its own way only: tools, and forms of answers."""
    spoken = any(message.tool_calls or message.tool_call_id for message in request.messages)
    return bool(request.tools.offered) or request.sampling.grammar is not None or spoken


def require_known(request: Request) -> None:
    """Raises `InvalidRequest` for what isn't passed on to backends."""
    if only_local(request):
        raise InvalidRequest(
            f"{request.model} runs on a backend; partial, regex, choice and grammar aren't passed on to it.",
            hint="Leave them out, or use the local model.",
            param="messages" if request.prefix else "structured_outputs",
        )


def instead_of(error: PeriluneError) -> Degradation:
    """Why the local engine doesn't answer, as a report says it."""
    return Degradation("local_unavailable", f"The local engine didn't answer: {error.message}")


def too_late(plan: Plan) -> Degradation:
    return Degradation(
        "local_too_late",
        f"The local engine would have answered after {plan.predicted_ttft_s:.1f} s; the deadline is "
        f"{plan.deadline_s:g} s.",
    )


def _question(request: Request) -> str:
    return next((message.text for message in reversed(request.messages) if message.role == "user"), "")
