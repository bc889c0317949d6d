"""Runs the choices of one request on a backend and turns engine events into service events.

Knows sequences, decoding and time; doesn't know documents or plans. With n choices the first runs alone until its
first token: the others then find the prompt's KV instead of computing it again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field, replace

from perilune.core import (
    CachedTokens,
    ChoiceFinished,
    EngineFinished,
    EngineProgress,
    EngineToken,
    Event,
    FinishReason,
    PrefillProgress,
    ReasoningDelta,
    Request,
    SequenceSpec,
    StageStarted,
    TextDelta,
    Usage,
)
from perilune.errors import InternalError, InvalidRequest, Overloaded
from perilune.service.backends.local import LocalBackend, Session
from perilune.service.output import ChoiceDecoder
from perilune.service.ports import Tokenizer
from perilune.service.predictor import Predictor
from perilune.service.thinking import ThinkingStyle, splitter_of


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured. `ttft_s` runs from arrival to the first text of the answer; None if there was none.
    `exact_share`: of the prompt, what decode attended exactly, not through summaries; the least of all choices."""

    ttft_s: float | None
    cached: CachedTokens
    usage: Usage
    exact_share: float = 1.0


@dataclass(slots=True)
class _Choice:
    index: int
    decoder: ChoiceDecoder
    tokens: int = 0
    thought_tokens: int = 0
    finished: bool = False
    exact_share: float = 1.0


@dataclass(slots=True)
class _State:
    choices: dict[str, _Choice] = field(default_factory=dict)
    cached: CachedTokens = field(default_factory=CachedTokens)
    prefilling: bool = False
    answering: bool = False
    ttft_s: float | None = None


class Generation:
    """One request's sequences. `spec` is the first choice's; `outcome` is complete when `events` has ended.

    `permit` is called right before each submit and raises what forbids it; `style` is how the model thinks.
    """

    def __init__(
        self,
        backend: LocalBackend,
        tokenizer: Tokenizer,
        predictor: Predictor,
        clock: Callable[[], float],
        request: Request,
        spec: SequenceSpec,
        timeout_s: float,
        permit: Callable[[], None],
        style: ThinkingStyle | None = None,
    ) -> None:
        self._style = style
        self._backend = backend
        self._tokenizer = tokenizer
        self._predictor = predictor
        self._clock = clock
        self._request = request
        self._spec = spec
        self._timeout_s = timeout_s
        self._permit = permit
        self._state = _State()

    @property
    def outcome(self) -> Outcome:
        state = self._state
        usage = Usage(
            prompt_tokens=len(self._spec.token_ids),
            completion_tokens=sum(choice.tokens for choice in state.choices.values()),
            cached_tokens=state.cached.total,
            reasoning_tokens=sum(choice.thought_tokens for choice in state.choices.values()),
        )
        exact = min((choice.exact_share for choice in state.choices.values()), default=1.0)
        return Outcome(state.ttft_s, state.cached, usage, exact)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Raises `Overloaded` when the engine refuses or time runs out, `InternalError` when the engine fails."""
        yield StageStarted("queued")
        with self._backend.session() as session:
            began_s = self._clock()
            expected_s, uncached = self._expected()
            self._submit(session, 0)
            while session.running:
                event = await self._next(session)
                for item in self._translate(session, event):
                    if isinstance(item, TextDelta | ReasoningDelta) and item.text and self._state.ttft_s is None:
                        self._state.ttft_s = self._clock() - self._request.arrival_s
                        measured_s = self._clock() - began_s
                        self._predictor.observe_ttft(expected_s, measured_s, uncached)
                    yield item
                if all(choice.finished for choice in self._state.choices.values()):
                    break

    def _expected(self) -> tuple[float, int]:
        """(TTFT from now on, uncached tokens) of exactly this prompt, as late as possible: what the predictor is
        judged by."""
        spec = self._spec
        cached = self._backend.cached(spec.token_ids, spec.salt)
        queued = self._backend.stats().queued_tokens(spec.service_class)
        uncached = max(0, len(spec.token_ids) - cached.total)
        ttft = self._predictor.rates.ttft_s(uncached, cached.total, cached.disk, queued)
        return ttft, uncached

    async def _next(self, session: Session) -> EngineProgress | EngineToken | EngineFinished:
        left = self._request.arrival_s + self._timeout_s - self._clock()
        try:
            return await session.next(max(0.0, left))
        except TimeoutError:
            raise Overloaded(
                f"The answer was not finished within {self._timeout_s:g} s.",
                hint="Ask for fewer tokens, or raise model_serving.timeout.",
            ) from None

    def _submit(self, session: Session, index: int) -> None:
        sampling = self._spec.sampling
        if index and sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + index)
        seq_id = f"{self._request.request_id}-{index}"
        self._permit()
        splitter = splitter_of(self._style, self._request)
        decoder = ChoiceDecoder(self._tokenizer, sampling.stop, sampling.logprobs is not None, splitter)
        self._state.choices[seq_id] = _Choice(index, decoder)
        session.submit(replace(self._spec, seq_id=seq_id, sampling=sampling))

    def _submit_rest(self, session: Session) -> None:
        for index in range(len(self._state.choices), self._request.n):
            self._submit(session, index)

    def _translate(self, session: Session, event: EngineProgress | EngineToken | EngineFinished) -> Iterator[Event]:
        choice = self._state.choices[event.seq_id]
        if choice.finished:
            return
        if isinstance(event, EngineProgress):
            yield from self._progress(choice, event)
        elif isinstance(event, EngineToken):
            yield from self._token(session, choice, event)
        else:
            yield from self._finished(session, choice, event)

    def _progress(self, choice: _Choice, event: EngineProgress) -> Iterator[Event]:
        if choice.index:
            return
        state = self._state
        state.cached = CachedTokens(event.cached_ram_tokens, event.cached_disk_tokens)
        if not state.prefilling:
            state.prefilling = True
            yield StageStarted("prefilling")
        left = max(0, event.total_tokens - event.computed_tokens)
        yield PrefillProgress(
            processed_tokens=event.computed_tokens,
            total_tokens=event.total_tokens,
            cached_tokens=state.cached.total,
            eta_s=self._predictor.rates.prefill_s(left, event.computed_tokens),
        )

    def _token(self, session: Session, choice: _Choice, event: EngineToken) -> Iterator[Event]:
        if not self._state.answering:
            self._state.answering = True
            self._submit_rest(session)
            yield StageStarted("answering")
        choice.tokens += 1
        choice.exact_share = event.exact_share
        if event.token_id in self._spec.stop_token_ids:
            return  # the end marker is counted, but it is not text
        choice.thought_tokens += choice.decoder.thinking
        text, logprobs = choice.decoder.push(event.token_id, event.logprob)
        if thought := choice.decoder.thought():
            yield ReasoningDelta(choice.index, thought)
        if text or logprobs:
            yield TextDelta(choice.index, text, logprobs)
        if choice.decoder.stopped:
            session.cancel(event.seq_id)
            choice.finished = True
            yield ChoiceFinished(choice.index, FinishReason.STOP, choice.decoder.stop)

    def _finished(self, session: Session, choice: _Choice, event: EngineFinished) -> Iterator[Event]:
        if event.invalid:
            raise InvalidRequest(event.error or "The request can't be answered.")
        if event.reason is FinishReason.ERROR:
            raise InternalError(event.error or "The engine failed.", hint="Try again; the server's log says more.")
        if event.reason is FinishReason.EXPIRED:
            raise Overloaded(
                "The answer can't begin before its deadline, so nothing was computed for it.",
                hint="Allow more time, send less, or try again when fewer requests are waiting.",
            )
        if event.reason is FinishReason.CANCELLED:
            raise Overloaded("The engine is shutting down.", hint="Try again in a few seconds.")
        if not self._state.answering:
            self._state.answering = True
            self._submit_rest(session)
        text, logprobs = choice.decoder.flush()
        if thought := choice.decoder.thought():
            yield ReasoningDelta(choice.index, thought)
        if text or logprobs:
            yield TextDelta(choice.index, text, logprobs)
        choice.finished = True
        reason = FinishReason.STOP if choice.decoder.stopped else event.reason
        yield ChoiceFinished(choice.index, reason, choice.decoder.stop)
