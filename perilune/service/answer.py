"""The life of one request: gather, plan, retrieve, compose, run, report.

Knows the service's parts and one request; doesn't know dialects or keys. Everything happens inside the async
generator `Answer.events`, so closing it stops the work in whatever phase it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from perilune.core import (
    CachedTokens,
    ChoiceFinished,
    Citation,
    CitationAdded,
    Completed,
    ContextPolicy,
    Degradation,
    Event,
    FileRecord,
    FinishReason,
    KVPolicy,
    MemoryUse,
    Plan,
    PlanKind,
    Planned,
    Report,
    Request,
    SearchResult,
    SequenceSpec,
    ServiceClass,
    SessionTurn,
    StageStarted,
    TextDelta,
    TokenReport,
    TurnCitation,
    Usage,
)
from perilune.errors import PeriluneError
from perilune.memory.session_ids import profile_owner, session_owner, tenant_owner
from perilune.service import background, languages, presets
from perilune.service.abstain import Abstain, asks_back, disclosed, not_said, sentence
from perilune.service.compose import Conversation, Prompt
from perilune.service.documents import joint_owner
from perilune.service.generate import Generation, Outcome
from perilune.service.material import Material, MaterialReader
from perilune.service.parts import ANSWER_RESERVE_TOKENS, WHOLE_CITATIONS, Parts
from perilune.service.passages import citation, joined
from perilune.service.peak import BUDGET_SHARE, cut_by_peak
from perilune.service.planner import Facts, choose, too_long
from perilune.service.recall import (
    CANDIDATES,
    SPARE_TOKENS,
    in_view,
    recall_budget,
    turn_citation,
    with_turns,
)
from perilune.service.refine import Refined, Refiner
from perilune.service.sessions import Visit
from perilune.service.telling import Telling
from perilune.service.thinking import NO_THOUGHT, citations_last

QUANTILE = {
    ServiceClass.P0_INTERACTIVE: 0.99,
    ServiceClass.P1_DOCUMENT: 0.90,
    ServiceClass.P2_BATCH: 0.90,
}
"""In which share of cases a plan has to be in time."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """A prompt with what is said about it in the report."""

    prompt: Prompt
    offered: int
    exact: int
    degradations: tuple[Degradation, ...] = ()


class BetterElsewhere(Exception):
    """Nothing was done yet but to plan, and a backend is expected to answer sooner."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.kind)
        self.plan = plan


class Answer:
    """One request being answered. `elsewhere` says of a plan that a backend would answer it sooner."""

    def __init__(
        self, parts: Parts, request: Request, elsewhere: Callable[[Plan], bool] = lambda plan: False
    ) -> None:
        self._parts = parts
        self._request = request
        self._elsewhere = elsewhere
        self._deadline_s = parts.limits.deadline_s(request)
        self._citations: list[Citation | TurnCitation] = []
        self._late: list[Degradation] = []  # what went wrong after the prompt was made
        self._visit: Visit | None = None
        self._recalled: list[SessionTurn] = []
        self._background = background.Background()
        self._found: SearchResult | None = None  # of the search whose hits the model reads; turns before passages

    async def events(self) -> AsyncGenerator[Event, None]:
        """Every event of the answer, the first before any slow work. Errors are raised; `BetterElsewhere` before
        anything was computed."""
        request, sessions = self._request, self._parts.sessions
        if request.session_id is not None:
            self._visit = sessions.visit(request.tenant, request.session_id, request.local_only)
        telling = Telling(
            sessions, None if request.prewarm else self._visit, request, _last_question(request), self._parts.clock
        )
        made = self._answered() if self._parts.thinking is None else citations_last(self._answered())
        async with aclosing(made) as events:
            with telling:
                async for event in events:
                    telling.see(event)
                    yield event

    async def _answered(self) -> AsyncGenerator[Event, None]:
        """Gather, plan, compose, run."""
        parts, request = self._parts, self._request
        conversation = await asyncio.to_thread(
            parts.composer.conversation, request.messages, request.effort, request.prefix
        )
        # Without documents: the template's objections and a sure excess come out before anything is streamed.
        bare = await asyncio.to_thread(parts.composer.compose, [], conversation, "")
        records = [await parts.documents.get(request.tenant, file_id) for file_id in request.file_ids]
        reader = MaterialReader(parts.documents, parts.composer, parts.library, parts.clock)

        async def refuse(known: Sequence[FileRecord]) -> None:
            await self._refuse_surely_too_long(bare, known, conversation, reader)

        await refuse(records)
        yield StageStarted("retrieving" if records or request.recall else "composing")
        wait = reader.patience(request.context_policy, self._deadline_s)
        records = await reader.readable(records, request.arrival_s, wait, parts.limits.timeout_s, refuse)
        if request.recall:
            conversation = await self._recall(records, conversation, bare, reader)
            bare = await asyncio.to_thread(parts.composer.compose, [], conversation, "")
        material = await asyncio.to_thread(reader.read, records, bare, conversation, self._room())
        facts = await asyncio.to_thread(self._facts, material, bare, conversation)
        facts, cut = self._cut(facts)
        plan = choose(facts)
        if plan.predicted_ttft_s > self._deadline_s and self._elsewhere(plan):
            raise BetterElsewhere(plan)
        if plan.kind is PlanKind.REFINED and request.context_policy is ContextPolicy.AUTO and facts.fits:
            parts.documents.warm(records)  # only its KV was missing: the next question shall have it
        yield Planned(plan)
        for item in self._add([turn_citation(turn) for turn in self._recalled]):
            yield item

        if plan.kind is PlanKind.REFINED:
            refiner = Refiner(parts.composer, parts.library, request.tenant)
            refined = await asyncio.to_thread(refiner.refine, records, conversation, plan.context_tokens)
            if records:
                yield StageStarted("composing")
            for item in self._cite(refined):
                yield item
            self._found = refined.found or self._found
            ready = _Ready(refined.prompt, material.offered, refined.exact, refined.degradations)
            # Passages may differ for every question, so they don't go to disk; owned they are all the same, so that
            # deleting the file drops them.
            spec = self._spec(
                refined.prompt, self._owner(records), 0, self._preset(records, conversation, True, bool(cut))
            )
        else:
            assert material.prompt is not None  # the planner chooses a whole plan only where one was composed
            ready = _Ready(material.prompt, len(material.prompt), len(material.prompt))
            preset = self._preset(records, conversation, False, bool(cut))
            spec = self._spec(material.prompt, self._owner(records), material.prompt.context_tokens, preset)
        degradations = (
            *request.notes,
            *plan.degradations,
            *ready.degradations,
            *material.degradations,
            *self._reduced(),
            *self._language(conversation),
            *parts.model.past_its_length(len(ready.prompt)),
            *self._unthought(),
            *(cut if plan.kind is PlanKind.REFINED or spec.kv_policy is KVPolicy.TIERED else ()),
        )
        if self._is_doubtful(plan, records, conversation):
            degradations = (*degradations, disclosed(self._found, "documents" if records else "earlier turns"))
        degradations = tuple(dict.fromkeys(degradations))
        async with aclosing(self._spoken(plan, spec, ready, degradations, records, conversation)) as events:
            async for event in events:
                yield event

    # ----------------------------------------------------------------------------------- abstention

    async def _spoken(
        self,
        plan: Plan,
        spec: SequenceSpec,
        ready: _Ready,
        degradations: tuple[Degradation, ...],
        records: list[FileRecord],
        conversation: Conversation,
    ) -> AsyncGenerator[Event, None]:
        """What the model says, behind or instead of what is said where the documents don't contain it."""
        parts, request = self._parts, self._request
        doubt = self._doubt(records, conversation) if self._is_doubtful(plan, records, conversation) else ""
        for choice in range(request.n if doubt else 0):
            yield TextDelta(choice, doubt)
        if doubt and parts.abstain is Abstain.REFUSE:
            for choice in range(request.n):
                yield ChoiceFinished(choice, FinishReason.STOP)
            outcome = Outcome(parts.clock() - request.arrival_s, CachedTokens(), Usage(0, 0, 0))
            yield self._completed(plan, replace(ready, exact=0), degradations, outcome)
            return
        async with aclosing(self._run(plan, spec, ready, degradations, records, conversation)) as events:
            async for event in events:
                yield event

    def _is_doubtful(self, plan: Plan, records: Sequence[FileRecord], conversation: Conversation) -> bool:
        """Whether the sources don't contain what was asked, as far as the search can tell. Not where all of them
        was read.

        Turns are an addition: who asks for a poem isn't told that no turn holds one. So of a request without
        documents this is said only where it asks back, where the model doesn't read the whole conversation anyway,
        and where nothing stands in the prompt that no turn holds: facts that were written by hand."""
        if self._found is None or not self._found.doubtful or self._parts.abstain is Abstain.OFF:
            return False
        if records:
            return plan.kind is PlanKind.REFINED
        if conversation.has_history and plan.kind is not PlanKind.REFINED:
            return False
        by_hand = any(fact.session_id is None for fact in self._background.facts)
        return bool(self._request.recall) and not by_hand and asks_back(conversation.question)

    def _doubt(self, records: Sequence[FileRecord], conversation: Conversation) -> str:
        """What the answer begins with then; nothing where it has a given form or may be a call."""
        parts, request = self._parts, self._request
        if request.sampling.grammar or request.tools.offered:
            return ""
        end = "" if parts.abstain is Abstain.REFUSE else "\n\n"
        language = parts.detect_language(conversation.question)
        said = sentence(language, records) if records else not_said(language, len(request.recall))
        return said + end

    # ------------------------------------------------------------------------------------- recall

    async def _recall(
        self, records: Sequence[FileRecord], conversation: Conversation, bare: Prompt, reader: MaterialReader
    ) -> Conversation:
        """The conversation with what is known of the user and the session so far, and with the earlier turns
        that help with its question, as far as the window has room."""
        parts, request = self._parts, self._request
        self._found, found = await parts.sessions.recall(
            request.tenant, request.recall, request.session_id, conversation.query, CANDIDATES
        )
        room = self._room()
        whole = room + 1 if conversation.omitted_turns else len(bare) + await reader.least_tokens(records)
        least = await asyncio.to_thread(reader.least_prompt, conversation, bare)
        if request.session_id in request.recall:
            spare = room - (whole if whole <= room else least) - SPARE_TOKENS
            conversation = await self._with_background(conversation, request.session_id, room, spare)
        taken = len(conversation.background_ids)
        budget = recall_budget(room, whole + taken, least + taken)
        if not found or budget <= 0:
            return conversation
        return await asyncio.to_thread(self._with_turns, conversation, found, budget)

    async def _with_background(self, said: Conversation, session_id: str, room: int, spare: int) -> Conversation:
        parts, request = self._parts, self._request
        facts, brief = await parts.sessions.background(request.tenant, session_id, request.profile)

        def compose() -> Conversation:
            known = in_view(said, room)
            made = background.compose(facts, brief, known, room, spare, parts.composer.count)
            self._background = made
            return replace(said, background_ids=tuple(parts.composer.text_piece(made.text)) if made.text else ())

        return await asyncio.to_thread(compose) if facts or brief else said

    def _reduced(self) -> list[Degradation]:
        """What the search for earlier turns did without."""
        faults = self._parts.library.search_faults() if self._request.recall else []
        return [Degradation("search_reduced", " ".join(faults))] if faults else []

    def _with_turns(self, conversation: Conversation, found: list[SessionTurn], budget: int) -> Conversation:
        sessions = self._request.recall
        with_session = sessions != (self._request.session_id,)
        known = in_view(conversation, self._room() - budget)
        held = {each.text for each in self._background.sentences if not each.corrected}  # cited, not repeated
        conversation, self._recalled = with_turns(
            self._parts.composer, conversation, found, known, budget, sessions, with_session, held
        )
        return conversation

    # ------------------------------------------------------------------------------------- planning

    def _room(self) -> int:
        """Prompt tokens that leave the window room for an answer."""
        return self._parts.model.window_tokens - self._answer_reserve()

    def _answer_reserve(self) -> int:
        wanted = self._request.sampling.max_tokens or ANSWER_RESERVE_TOKENS
        return min(wanted, ANSWER_RESERVE_TOKENS, self._parts.model.window_tokens // 4)

    async def _refuse_surely_too_long(
        self, bare: Prompt, records: Sequence[FileRecord], conversation: Conversation, reader: MaterialReader
    ) -> None:
        """Pinned `full`, or nothing that could be left out: the 400 comes before the stream begins, or as soon as
        enough is read of a document that is still being parsed."""
        refinable = bool(records) or conversation.has_history
        if refinable and self._request.context_policy is not ContextPolicy.FULL:
            return
        least = len(bare) + conversation.omitted_tokens + await reader.least_tokens(records)
        if least > self._room():
            raise too_long(least, self._sure_facts(least, refinable))

    def _sure_facts(self, prompt: int, refinable: bool) -> Facts:
        return Facts(
            policy=self._request.context_policy,
            deadline_s=self._deadline_s,
            elapsed_s=0.0,
            window=self._parts.model.window_tokens,
            answer=self._answer_reserve(),
            prompt=prompt,
            stable=0,
            required=0,
            cached=CachedTokens(),
            complete=True,
            refinable=refinable,
            searched=False,
            queued=0,
            rates=self._parts.predictor.rates,
            reserve_s=self._parts.limits.reserve_s,
            quantile=QUANTILE[self._request.service_class],
        )

    def _facts(self, material: Material, bare: Prompt, conversation: Conversation) -> Facts:
        parts, request = self._parts, self._request
        prompt = material.prompt
        salt = parts.salt_of(request.tenant)
        cached = parts.backend.cached(prompt.token_ids, salt) if prompt is not None else CachedTokens()
        documents = bool(material.records)
        return replace(
            self._sure_facts(material.offered, documents or conversation.has_history),
            elapsed_s=max(0.0, parts.clock() - request.arrival_s),
            stable=_stable(prompt, conversation),
            required=material.required,
            cached=cached,
            complete=material.complete,
            searched=documents,
            queued=parts.backend.stats().queued_tokens(request.service_class),
        )

    def _cut(self, facts: Facts) -> tuple[Facts, list[Degradation]]:
        """The facts, with less for the context at the server's peak; and what is said of it."""
        queued_s = facts.queued * facts.rates.prefill_s_per_token
        if not self._parts.peak.cuts(self._request.service_class, queued_s):
            return facts, []
        return replace(facts, budget_share=BUDGET_SHARE), [cut_by_peak(queued_s)]

    # -------------------------------------------------------------------------------------- running

    def _owner(self, records: list[FileRecord]) -> str:
        """Whose deletion takes the prompt's KV along; the tenant's where it was made of nothing that is kept."""
        owners = [*(record.file_id for record in records), *self._remembered()]
        if not owners:
            return tenant_owner(self._request.tenant)
        owner = joint_owner(owners)
        self._parts.documents.remember_joint(owner)
        return owner

    def _remembered(self) -> list[str]:
        """The owners of what memory gave: the session's, those of recalled ones, the profile's and of its
        sessions."""
        tenant, facts = self._request.tenant, self._background.facts
        sessions = [self._request.session_id, *(turn.session_id for turn in self._recalled)]
        sessions += [fact.session_id for fact in facts]
        owners = dict.fromkeys(session_owner(tenant, each) for each in sessions if each is not None)
        return [*owners, *([profile_owner(tenant)] if facts else [])]

    def _preset(self, records: list[FileRecord], conversation: Conversation, refined: bool, cut: bool) -> str:
        """How decoding reads tiered KV: as asked, with little at the server's peak, as configured, or as fits the
        documents."""
        if cut and not self._request.attention_preset:
            return presets.PEAK
        asked = self._request.attention_preset or self._parts.preset
        if asked != presets.AUTO:
            return asked
        turns = len(self._request.messages)
        return presets.choose([record.filename for record in records], refined=refined, turns=turns)

    def _spec(self, prompt: Prompt, owner: str, persist: int, preset: str) -> SequenceSpec:
        """The first choice. Whole prompts are shared in RAM; on disk go the first `persist` tokens."""
        request, parts = self._request, self._parts
        sampling = request.sampling
        left = parts.model.window_tokens - len(prompt)
        return SequenceSpec(
            seq_id=f"{request.request_id}-0",
            token_ids=prompt.token_ids,
            salt=parts.salt_of(request.tenant),
            sampling=sampling,
            max_new_tokens=min(sampling.max_tokens or left, left),
            stop_token_ids=frozenset() if sampling.ignore_eos else parts.tokenizer.stop_ids,
            service_class=request.service_class,
            shared_tokens=len(prompt),
            persist_owner=owner,
            persist_tokens=persist,
            kv_policy=parts.kv_of(request.tenant),
            preset=preset,
            prefill_only=request.prewarm,
            tenant=request.tenant,
            deadline_s=max(0.0, self._deadline_s - (parts.clock() - request.arrival_s)),
        )

    async def _run(
        self,
        plan: Plan,
        spec: SequenceSpec,
        ready: _Ready,
        degradations: tuple[Degradation, ...],
        records: list[FileRecord],
        conversation: Conversation,
    ) -> AsyncGenerator[Event, None]:
        parts, request = self._parts, self._request
        generation = Generation(
            parts.backend,
            parts.tokenizer,
            parts.predictor,
            parts.clock,
            request,
            spec,
            parts.limits.timeout_s,
            self._require,
            parts.thinking,
        )
        quotes: asyncio.Task[list[Citation]] | None = None
        if records and plan.kind is not PlanKind.REFINED:
            quotes = asyncio.create_task(asyncio.to_thread(self._quotes, records, conversation))
        try:
            async with aclosing(generation.events()) as events:
                async for event in events:
                    yield event
                    if quotes and quotes.done():
                        found, quotes = quotes, None
                        for item in self._add(await self._quoted(found)):
                            yield item
            if quotes:
                for item in self._add(await self._quoted(quotes)):
                    yield item
        finally:
            if quotes:
                quotes.cancel()
        yield self._completed(plan, ready, (*degradations, *self._late), generation.outcome)

    def _require(self) -> None:
        """Raises `NotFound` where what the prompt was made of is deleted by now."""
        self._parts.documents.require(self._request.file_ids)
        self._parts.sessions.require(self._visit, self._remembered())

    def _completed(
        self, plan: Plan, ready: _Ready, degradations: tuple[Degradation, ...], outcome: Outcome
    ) -> Completed:
        request, parts = self._request, self._parts
        if outcome.ttft_s is not None:
            service_class, kind = request.service_class.name.lower(), plan.kind.value
            met = "met" if outcome.ttft_s <= self._deadline_s else "missed"
            parts.telemetry.observe("ttft_seconds", outcome.ttft_s, plan=kind, service_class=service_class)
            parts.telemetry.count("deadline", outcome=met, plan=kind, service_class=service_class)
        read = min(ready.exact, ready.offered)
        exact = round(read * outcome.exact_share)
        report = Report(
            plan=plan.kind,
            deadline_s=self._deadline_s,
            predicted_ttft_s=plan.predicted_ttft_s,
            measured_ttft_s=outcome.ttft_s,
            tokens=TokenReport(
                offered=ready.offered,
                exact=exact,
                estimated=read - exact,
                dropped=ready.offered - read,
                cached=outcome.cached,
            ),
            model=parts.model.model_id,
            backend=parts.model.backend,
            citations=tuple(self._citations),
            degradations=degradations,
            memory=MemoryUse(self._background.facts, self._background.sentences),
            confidence=self._found.confidence if self._found else None,
        )
        return Completed(outcome.usage, report)

    # ------------------------------------------------------------------------------ citations, language

    def _cite(self, refined: Refined) -> list[CitationAdded]:
        return self._add(list(refined.citations))

    def _add(self, citations: Sequence[Citation | TurnCitation]) -> list[CitationAdded]:
        self._citations += citations
        return [CitationAdded(item) for item in citations]

    def _quotes(self, records: list[FileRecord], conversation: Conversation) -> list[Citation]:
        """Where the answer is likely to be found, for an answer that read everything."""
        names = {record.file_id: record.filename for record in records}
        found = self._parts.library.search(self._request.tenant, list(names), conversation.query, WHOLE_CITATIONS)
        return [citation(passage, names) for passage in joined(found, list(names))]

    async def _quoted(self, quotes: asyncio.Task[list[Citation]]) -> list[Citation]:
        """The quotes. The answer doesn't need them, so that a file deleted meanwhile or a damaged index costs them
        alone."""
        try:
            return await quotes
        except PeriluneError as error:
            self._late.append(Degradation("no_citations", f"The passages to quote were not found: {error.message}"))
            return []

    def _unthought(self) -> tuple[Degradation, ...]:
        """Where the model can't do with its thoughts what was asked."""
        style, effort = self._parts.thinking, self._request.effort
        if effort is None:
            return ()
        wanted = effort not in NO_THOUGHT
        if wanted and style is None:
            return (
                Degradation(
                    "no_reasoning", "The model doesn't think before it answers: the effort changes nothing."
                ),
            )
        if not wanted and style is not None and not style.optional:
            return (Degradation("reasons_anyway", "The model always thinks before it answers."),)
        return ()

    def _language(self, conversation: Conversation) -> tuple[Degradation, ...]:
        model = self._parts.model
        spoken = self._parts.detect_language(conversation.question)
        if not model.languages or spoken is None or spoken in model.languages:
            return ()
        return (languages.not_spoken(spoken, model.model_id, model.languages),)


def _last_question(request: Request) -> str:
    """The caller's newest message, without what else it sent or memory found."""
    return next((message.text for message in reversed(request.messages) if message.role == "user"), "")


def _stable(prompt: Prompt | None, conversation: Conversation) -> int:
    """Tokens that must be cached for a plan to be called warm: all but the question, and but the few tokens of
    instructions where a document is asked its first question."""
    if prompt is None:
        return 0
    first = not conversation.has_history and prompt.context_tokens
    return prompt.context_tokens if first else prompt.stable_tokens
