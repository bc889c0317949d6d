"""Which backend answers a chat, and what happens when it doesn't (spec S4).

Knows targets, their health and cost, and one call; doesn't know documents, plans or dialects. Order of choice:
in time for the deadline, cheapest, not much slower than the fastest, not fuller than the others, and then by
rendezvous hashing of the prompt's beginning, so that equal beginnings meet the same prefix cache.

Before the first text any fault but the request's own is followed by the next target. After it the answer goes on
elsewhere where that can be done without a seam (one choice, no stop strings, a target that continues text), and
otherwise ends in a typed error: text that was shown is never silently begun anew.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from perilune.core import Attempt, TextDelta, ToolCallDelta, Usage
from perilune.errors import Overloaded, PeriluneError
from perilune.service.backends.health import Health
from perilune.service.backends.protocol import (
    Backend,
    BackendDone,
    BackendEvent,
    BackendFault,
    Call,
    ChatMessage,
    FaultKind,
)
from perilune.telemetry import Telemetry

AFFINITY_CHARS = 2048
"""Beginning of a message that decides which of equals is asked."""

_LONG_CHARS = 512

PATIENCE_SHARE = 0.5
"""Of the time to the deadline, what one target may take to its first text while others could still make it."""

_LEAST_PATIENCE_S = 0.5
_SLOW_FACTOR, _SLOW_S = 3.0, 0.25  # a target this much slower than the fastest is asked after it
_FULL_FACTOR = 1.25  # bounded load: no target takes more than this times the mean, and one
_MILLION = 1e6


class AnswerBroken(PeriluneError):
    """A backend failed in the middle of its answer, and nothing could go on from there."""

    status, code, type, exit_code = 502, "answer_broken", "server_error", 3


@dataclass(frozen=True, slots=True)
class Prices:
    """Cost of a million tokens, in whatever unit the configuration uses."""

    prompt: float = 0.0
    completion: float = 0.0
    cached: float | None = None  # None: as the prompt's

    def of(self, usage: Usage) -> float:
        cached = min(usage.cached_tokens, usage.prompt_tokens)
        cached_price = self.prompt if self.cached is None else self.cached
        fresh = usage.prompt_tokens - cached
        return (fresh * self.prompt + cached * cached_price + usage.completion_tokens * self.completion) / _MILLION


@dataclass(frozen=True, slots=True)
class Target:
    """A backend with what routing needs to know. `serves` is the model name callers use for it; `most_calls` at
    once; `continues`: it takes up an unfinished answer; `remote` is false for the engine of this process."""

    backend: Backend
    serves: str
    health: Health
    prices: Prices = Prices()
    most_calls: int = 64
    continues: bool = False
    remote: bool = True

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def full(self) -> bool:
        return self.health.in_flight >= self.most_calls


@dataclass(slots=True)
class Trace:
    """What one routed call did so far. `said` is the text of choice 0, `pieces` counts all that came."""

    attempts: list[Attempt] = field(default_factory=list)
    target: Target | None = None
    said: list[str] = field(default_factory=list)
    pieces: int = 0
    resumed_from: str | None = None
    called: bool = False
    """Whether a call of a tool has begun: nothing goes on in the middle of one."""

    cost: float = 0.0

    def saw(self, event: TextDelta | ToolCallDelta) -> None:
        """What the caller was shown."""
        self.pieces += 1
        if isinstance(event, ToolCallDelta):
            self.called = True
        elif event.choice == 0:
            self.said.append(event.text)


class Router:
    """Targets and the calls on them. Used from one event loop."""

    def __init__(self, targets: Sequence[Target], clock: Callable[[], float], telemetry: Telemetry) -> None:
        self.targets = tuple(targets)
        self._clock = clock
        self._telemetry = telemetry

    def serving(self, model: str) -> list[Target]:
        return [target for target in self.targets if target.serves == model]

    # ---------------------------------------------------------------------------------------- choosing

    def order(self, targets: Sequence[Target], call: Call, estimate: float, answer_tokens: int) -> list[Target]:
        """Targets worth asking, the best first; those that are ejected come last, as a last resort."""
        fits = [t for t in targets if t.health.tokens(estimate) < t.health.window_tokens and not t.full]
        usable = [t for t in fits if t.health.available]
        if not usable:
            ejected = [t for t in fits if not t.health.cooling]
            return sorted(ejected, key=lambda t: t.health.back_in_s)
        expected_s = {t.name: t.health.ttft_s(t.health.tokens(estimate)) for t in usable}
        fastest_s = min(expected_s.values())
        mean = sum(t.health.in_flight for t in usable) / len(usable)
        key = affinity_key(call)

        def rank(target: Target) -> tuple[bool, float, bool, bool, bytes]:
            ttft_s = expected_s[target.name]
            tokens = Usage(target.health.tokens(estimate), answer_tokens, 0)
            return (
                call.deadline_s is not None and ttft_s > call.deadline_s,
                round(target.prices.of(tokens), 9),
                ttft_s > _SLOW_FACTOR * fastest_s + _SLOW_S,
                target.health.in_flight > _FULL_FACTOR * mean + 1,
                hashlib.blake2b(key + target.name.encode(), digest_size=8).digest(),
            )

        return sorted(usable, key=rank)

    def refusal(self, model: str, targets: Sequence[Target]) -> PeriluneError:
        """Why nothing can be asked now."""
        waits = [target.health.back_in_s for target in targets if not target.health.available]
        wait_s = min(waits) if waits else 1.0
        return Overloaded(
            f"No backend can take a request for {model} now: all are full, out of service or out of quota.",
            hint=f"Try again in {max(1, round(wait_s))} s.",
            retry_after_s=max(1.0, wait_s),
        )

    # ----------------------------------------------------------------------------------------- running

    async def run(
        self, targets: Sequence[Target], call: Call, estimate: float, trace: Trace, whole: bool
    ) -> AsyncGenerator[BackendEvent, None]:
        """Ask one target after the other. `whole`: nobody sees text before the end, so that it may be begun anew.

        Raises the last fault's error, `AnswerBroken` after text was shown.
        """
        begun_s, last = self._clock(), None
        for index, target in enumerate(targets):
            asked = self._call_now(call, trace, begun_s)
            if trace.said and not target.continues:
                continue
            patience_s = None if index == len(targets) - 1 else _patience_s(asked)
            try:
                async with aclosing(self._attempt(target, asked, estimate, trace, patience_s, whole)) as events:
                    async for event in events:
                        yield event
                return
            except BackendFault as fault:
                last = fault
                if fault.kind is FaultKind.REFUSED:
                    raise fault.shown() from fault
                if trace.pieces and not whole and not _resumable(call, trace):
                    break
                if trace.said and not whole:
                    trace.resumed_from = target.name
        assert last is not None
        if trace.pieces and not whole:
            raise AnswerBroken(
                f"The backend {last.backend} {last.detail} What came of the answer is not complete.",
                hint="Send the request again.",
            ) from last
        raise last.shown() from last

    def _call_now(self, call: Call, trace: Trace, begun_s: float) -> Call:
        """The call as the next target gets it: with the time that is left, and behind what was said already."""
        left_s = None if call.deadline_s is None else call.deadline_s - (self._clock() - begun_s)
        call = replace(call, deadline_s=left_s)
        if not trace.said:
            return call
        sampling = call.sampling
        if sampling.max_tokens is not None:
            sampling = replace(sampling, max_tokens=max(1, sampling.max_tokens - trace.pieces))
        said = ChatMessage("assistant", "".join(trace.said))
        return replace(call, messages=(*call.messages, said), continues=True, sampling=sampling)

    async def _attempt(
        self, target: Target, call: Call, estimate: float, trace: Trace, patience_s: float | None, whole: bool
    ) -> AsyncGenerator[BackendEvent, None]:
        """One target's answer; its health learns from it. Events of a `whole` answer come at its end."""
        health, start_s = target.health, self._clock()
        trace.target = target
        health.in_flight += 1
        held: list[BackendEvent] = []
        outcome = "left"
        try:
            async with aclosing(_impatient(target, call, patience_s)) as events:
                async for event in events:
                    if isinstance(event, BackendDone):
                        outcome = "answered"
                        self._done(target, event, estimate, trace)
                        for item in held:
                            yield item
                        yield event
                        return
                    if isinstance(event, ToolCallDelta) or (isinstance(event, TextDelta) and event.text):
                        if not (held if whole else trace.pieces):
                            self._first(target, self._clock() - start_s, estimate)
                        if not whole:
                            trace.saw(event)
                    if whole:
                        held.append(event)
                    else:
                        yield event
            raise BackendFault(FaultKind.BROKEN, target.name, "ended without saying that it was done.")
        except BackendFault as fault:
            outcome = fault.kind.value
            self._failed(target, fault, estimate)
            raise
        finally:
            health.in_flight -= 1
            spent_s = self._clock() - start_s
            trace.attempts.append(Attempt(target.name, target.backend.model_id, outcome, spent_s))
            self._telemetry.count("backend_calls", backend=target.name, outcome=outcome)

    def _first(self, target: Target, ttft_s: float, estimate: float) -> None:
        target.health.answered(ttft_s, target.health.tokens(estimate))
        self._telemetry.observe("backend_ttft_seconds", ttft_s, backend=target.name)

    def _done(self, target: Target, event: BackendDone, estimate: float, trace: Trace) -> None:
        target.health.succeeded()
        if event.counted:
            target.health.counted(estimate, event.usage.prompt_tokens)
        cost = target.prices.of(event.usage)
        trace.cost += cost
        self._telemetry.count("backend_cost", cost, backend=target.name)

    def _failed(self, target: Target, fault: BackendFault, estimate: float) -> None:
        if fault.kind is FaultKind.TOO_LONG:
            target.health.too_long(target.health.tokens(estimate))
        elif target.health.failed(fault):
            self._telemetry.count("backend_ejections", backend=target.name, reason=fault.kind.value)


def affinity_key(call: Call) -> bytes:
    """What calls on the same material share: the tenant and a long system message (a document, instructions); with
    a short one also the first turn, so that a conversation stays where it began."""
    first = call.messages[0].text if call.messages else ""
    parts = [call.tenant, first[:AFFINITY_CHARS]]
    if len(first) < _LONG_CHARS and len(call.messages) > 1:
        parts.append(call.messages[1].text[:AFFINITY_CHARS])
    return "\0".join(parts).encode("utf-8", "surrogatepass")


def _patience_s(call: Call) -> float | None:
    if call.deadline_s is None:
        return None
    return max(_LEAST_PATIENCE_S, PATIENCE_SHARE * call.deadline_s)


def _resumable(call: Call, trace: Trace) -> bool:
    plain = not call.tools.offered and call.sampling.grammar is None and not trace.called
    return plain and call.n == 1 and not call.sampling.stop and call.sampling.logprobs is None and bool(trace.said)


async def _impatient(target: Target, call: Call, patience_s: float | None) -> AsyncGenerator[BackendEvent, None]:
    """The backend's events; the first may take `patience_s`. Raises `BackendFault`."""
    async with aclosing(target.backend.chat(call)) as events:
        try:
            async with asyncio.timeout(patience_s):
                first = await anext(events, None)
        except TimeoutError:
            raise BackendFault(FaultKind.TIMED_OUT, target.name, f"said nothing for {patience_s:.1f} s.") from None
        if first is not None:
            yield first
        async for event in events:
            yield event
