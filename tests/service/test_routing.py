"""Routing: order of choice, health, failover before the first text, resuming or an honest end after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.core import Attempt, ChoiceFinished, FinishReason, ReasoningDelta, SamplingParams, TextDelta, Usage
from perilune.errors import InvalidRequest, Overloaded, PeriluneError
from perilune.service.backends.health import Health, HealthRules, estimated_tokens
from perilune.service.backends.protocol import (
    BackendDone,
    BackendEvent,
    BackendFault,
    Call,
    ChatMessage,
    FaultKind,
)
from perilune.service.routing import AnswerBroken, Prices, Router, Target, Trace
from perilune.telemetry import Telemetry

Act = BackendEvent | FaultKind | float
THOUGHT = ReasoningDelta(0, "hm")


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Scripted:
    """Plays a list of events, faults and pauses; remembers its calls."""

    name: str
    acts: list[Act] = field(default_factory=lambda: answer("hello ", "world"))
    model_id: str = "m"
    window_tokens: int = 4096
    calls: list[Call] = field(default_factory=list)
    closed: int = 0

    async def chat(self, call: Call) -> AsyncGenerator[BackendEvent, None]:
        self.calls.append(call)
        try:
            for act in self.acts:
                if isinstance(act, FaultKind):
                    raise BackendFault(act, self.name, "failed.", 7.0 if act is FaultKind.LIMITED else None)
                if isinstance(act, float):
                    await asyncio.sleep(act)
                else:
                    yield act
        finally:
            self.closed += 1

    async def probe(self) -> None: ...
    async def close(self) -> None: ...


def answer(*words: str) -> list[Act]:
    said: list[Act] = [TextDelta(0, word) for word in words]
    return [*said, ChoiceFinished(0, FinishReason.STOP), BackendDone(Usage(10, len(words), 0))]


def target(
    name: str, acts: list[Act] | None = None, clock: Callable[[], float] | None = None, **options: Any
) -> Target:
    backend = Scripted(name) if acts is None else Scripted(name, acts)
    backend.window_tokens = options.pop("window", 4096)
    return Target(backend, "m", Health(HealthRules(), backend.window_tokens, clock or Clock()), **options)


CALL = Call("req-1", "acme", (ChatMessage("user", "Hello?"),), deadline_s=5.0)


async def run(
    targets: list[Target], call: Call = CALL, whole: bool = False
) -> tuple[list[BackendEvent], Trace, PeriluneError | None]:
    router, trace, got = Router(targets, asyncio.get_running_loop().time, Telemetry()), Trace(), []
    try:
        async for event in router.run(targets, call, 3.0, trace, whole):
            got.append(event)  # noqa: PERF401 (what came before an error is wanted)
    except PeriluneError as error:
        return got, trace, error
    finally:
        assert all(t.health.in_flight == 0 for t in targets)
        assert all(t.backend.closed == len(t.backend.calls) for t in targets)  # type: ignore[attr-defined]
    return got, trace, None


def text(events: list[BackendEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def outcomes(trace: Trace) -> list[str]:
    return [attempt.outcome for attempt in trace.attempts]


# ------------------------------------------------------------------------------------------- running


@pytest.mark.parametrize(
    "fault", [kind for kind in FaultKind if kind is not FaultKind.REFUSED], ids=lambda kind: kind.value
)
@pytest.mark.parametrize("first", [[], [THOUGHT]], ids=["at once", "after a sign of life"])
async def test_before_the_first_text_every_fault_is_survived(fault: FaultKind, first: list[Act]) -> None:
    got, trace, error = await run([target("a", [*first, fault]), target("b")])
    assert error is None
    assert text(got) == "hello world"
    assert outcomes(trace) == [fault.value, "answered"]
    assert trace.target is not None
    assert trace.target.name == "b"


async def test_a_request_that_is_refused_is_not_asked_again() -> None:
    second = target("b")
    _, trace, error = await run([target("a", [FaultKind.REFUSED]), second])
    assert isinstance(error, InvalidRequest)
    assert outcomes(trace) == ["refused"]
    assert not second.backend.calls  # type: ignore[attr-defined]


async def test_a_hang_costs_half_the_time_to_the_deadline_and_not_the_answer() -> None:
    call = Call("r", "t", CALL.messages, deadline_s=1.2)
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    got, trace, error = await run([target("a", [60.0]), target("b")], call)
    assert error is None
    assert text(got) == "hello world"
    assert outcomes(trace) == ["timed_out", "answered"]
    assert 0.5 <= loop.time() - start_s < 5


async def test_the_last_one_is_waited_for() -> None:
    call = Call("r", "t", CALL.messages, deadline_s=0.01)
    got, _, error = await run([target("a", [0.8, *answer("late")])], call)
    assert error is None
    assert text(got) == "late"


async def test_when_nobody_answers_the_last_fault_is_shown_and_all_are_told() -> None:
    _, trace, error = await run([target("a", [FaultKind.UNREACHABLE]), target("b", [FaultKind.LIMITED])])
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 7.0
    assert outcomes(trace) == ["unreachable", "limited"]


HALF: list[Act] = [TextDelta(0, "hello "), FaultKind.UNREACHABLE]


async def test_after_the_first_text_it_goes_on_where_it_broke_off() -> None:
    other = target("b", answer("world"), continues=True)
    call = Call("r", "t", CALL.messages, SamplingParams(max_tokens=9))
    got, trace, error = await run([target("a", HALF), other], call)
    assert error is None
    assert text(got) == "hello world"
    asked = other.backend.calls[0]  # type: ignore[attr-defined]
    assert asked.continues
    assert asked.messages[-1] == ChatMessage("assistant", "hello ")
    assert asked.sampling.max_tokens == 8
    assert trace.resumed_from == "a"


@pytest.mark.parametrize(
    ("call", "continues"),
    [
        (CALL, False),
        (Call("r", "t", CALL.messages, n=2), True),
        (Call("r", "t", CALL.messages, SamplingParams(stop=("x",))), True),
        (Call("r", "t", CALL.messages, SamplingParams(logprobs=1)), True),
    ],
)
async def test_where_it_can_not_go_on_the_end_is_honest(call: Call, continues: bool) -> None:
    got, trace, error = await run([target("a", HALF), target("b", continues=continues)], call)
    assert isinstance(error, AnswerBroken)
    assert text(got) == "hello "  # never begun anew
    assert outcomes(trace) == ["unreachable"]


async def test_an_answer_nobody_has_seen_is_begun_anew() -> None:
    got, trace, error = await run([target("a", HALF), target("b")], whole=True)
    assert error is None
    assert text(got) == "hello world"
    assert outcomes(trace) == ["unreachable", "answered"]


async def test_a_stream_that_just_ends_is_a_fault() -> None:
    got, trace, _ = await run([target("a", [THOUGHT]), target("b")])
    assert text(got) == "hello world"
    assert outcomes(trace) == ["broken", "answered"]


async def test_leaving_closes_the_backend_and_is_no_fault() -> None:
    slow = target("a", [TextDelta(0, "x"), 60.0])
    router, trace = Router([slow], Clock(), Telemetry()), Trace()
    events = router.run([slow], CALL, 3.0, trace, False)
    assert isinstance(await anext(events), TextDelta)
    await events.aclose()
    assert slow.backend.closed == 1  # type: ignore[attr-defined]
    assert trace.attempts == [Attempt("a", "m", "left", 0.0)]
    assert slow.health.available
    assert slow.health.in_flight == 0


async def test_cost_is_of_the_tokens_the_backend_counted() -> None:
    _, trace, _ = await run([target("a", prices=Prices(2.0, 10.0))])
    assert trace.cost == pytest.approx((10 * 2 + 2 * 10) / 1e6)
    assert Prices(2.0, 10.0, 0.5).of(Usage(10, 2, 4)) == pytest.approx((6 * 2 + 4 * 0.5 + 20) / 1e6)


# ------------------------------------------------------------------------------------------ choosing


def order(targets: list[Target], call: Call = CALL, estimate: float = 100.0) -> list[str]:
    return [t.name for t in Router(targets, Clock(), Telemetry()).order(targets, call, estimate, 256)]


def test_the_cheapest_that_is_in_time_comes_first() -> None:
    cheap, dear = target("cheap", prices=Prices(1.0)), target("dear", prices=Prices(5.0))
    assert order([dear, cheap]) == ["cheap", "dear"]
    for _ in range(30):
        cheap.health.answered(9.0, 100)  # late for a deadline of 5 s
    assert order([dear, cheap]) == ["dear", "cheap"]


def test_much_slower_ones_come_last() -> None:
    fast, slow = target("fast"), target("slow")
    for _ in range(30):
        slow.health.answered(4.0, 100)
        fast.health.answered(0.1, 100)
    assert order([slow, fast]) == ["fast", "slow"]


def test_the_same_beginning_goes_to_the_same_backend_and_others_spread() -> None:
    targets = [target(f"b{number}") for number in range(4)]

    def first(number: int, tail: str) -> str:
        messages = (ChatMessage("system", f"Manual {number}. " * 200), ChatMessage("user", tail))
        return order(targets, Call("r", "t", messages, deadline_s=5.0))[0]

    chosen = [first(number, "one") for number in range(60)]
    assert chosen == [first(number, "another question") for number in range(60)]
    assert all(chosen.count(f"b{number}") > 4 for number in range(4))


def test_affinity_gives_way_to_load() -> None:
    targets = [target(f"b{number}") for number in range(3)]
    favourite = next(t for t in targets if t.name == order(targets)[0])
    favourite.health.in_flight = 6
    assert order(targets)[0] != favourite.name


def test_full_small_and_cooling_ones_are_not_asked() -> None:
    clock = Clock()
    full = target("full", most_calls=1)
    full.health.in_flight = 1
    limited = target("limited", clock=clock)
    limited.health.failed(BackendFault(FaultKind.LIMITED, "limited", "x", 9.0))
    assert order([full, limited, target("small", window=90), target("good")]) == ["good"]


def test_ejected_ones_are_the_last_resort() -> None:
    clock = Clock()
    out = target("out", clock=clock)
    out.health.failed(BackendFault(FaultKind.UNREACHABLE, "out", "x"))
    assert order([out, target("good")]) == ["good"]
    assert order([out]) == ["out"]


# -------------------------------------------------------------------------------------------- health


def fault(kind: FaultKind, wait_s: float | None = None) -> BackendFault:
    return BackendFault(kind, "b", "x", wait_s)


def test_ejection_doubles_and_a_good_answer_ends_it() -> None:
    clock = Clock()
    health = Health(HealthRules(eject_after=3, eject_s=2.0, most_s=10.0), 4096, clock)
    assert [health.failed(fault(FaultKind.BROKEN)) for _ in range(3)] == [False, False, True]
    waits = []
    for _ in range(4):
        waits.append(health.back_in_s)
        clock.now_s += health.back_in_s
        assert health.available
        assert health.failed(fault(FaultKind.BROKEN))  # on trial: one more is enough
    assert waits == [2.0, 4.0, 8.0, 10.0]
    clock.now_s += 10
    health.succeeded()
    assert not health.failed(fault(FaultKind.BROKEN))


def test_a_probe_brings_back_who_was_away_and_not_who_answered_nonsense() -> None:
    for kind, back in ((FaultKind.UNREACHABLE, True), (FaultKind.TIMED_OUT, True), (FaultKind.BROKEN, False)):
        health = Health(HealthRules(eject_after=1), 4096, Clock())
        assert health.failed(fault(kind))
        health.probed()
        assert health.available is back


def test_retry_after_is_kept_and_no_probe_shortens_it() -> None:
    clock = Clock()
    health = Health(HealthRules(), 4096, clock)
    assert health.failed(fault(FaultKind.LIMITED, 30.0))
    health.probed()
    assert health.back_in_s == 30.0
    assert health.cooling
    clock.now_s += 30
    assert health.available


def test_a_clock_that_jumps_back_keeps_nobody_out_for_long() -> None:
    """The router's clock is monotonic; were it not, a backend would come back after its time at the latest."""
    clock = Clock()
    health = Health(HealthRules(eject_s=2.0), 4096, clock)
    health.failed(fault(FaultKind.UNREACHABLE))
    health.probed()
    clock.now_s -= 3600
    assert health.back_in_s <= 3600


def test_a_window_that_was_a_lie_is_learnt() -> None:
    health = Health(HealthRules(), 100_000, Clock())
    health.too_long(9000)
    assert health.window_tokens == 8999


def test_tokens_are_learnt_from_usage() -> None:
    health = Health(HealthRules(), 4096, Clock())
    for _ in range(40):
        health.counted(1000.0, 1500)
    assert health.tokens(1000.0) == pytest.approx(1500, rel=0.01)
    assert health.estimate(health.tokens(1000.0)) == pytest.approx(1000, rel=0.01)


@given(st.text(max_size=2000))
def test_estimates_are_finite_and_grow(words: str) -> None:
    assert 0 <= estimated_tokens(words) <= estimated_tokens(words + "mehr") <= 2 * len(words) + 3


@given(
    st.lists(
        st.lists(st.sampled_from([*FaultKind, THOUGHT, TextDelta(0, "x")]), max_size=4), min_size=1, max_size=4
    ),
    st.booleans(),
)
def test_whatever_backends_do_a_call_ends_and_text_is_never_begun_anew(
    scripts: list[list[Act]], whole: bool
) -> None:
    """And nothing before the first text is lost while one of them is well."""

    async def check() -> None:
        targets = [target(f"b{i}", list(acts)) for i, acts in enumerate(scripts)] + [target("good")]
        got, trace, error = await run(targets, Call("r", "t", CALL.messages), whole)
        done = [event for event in got if isinstance(event, BackendDone)]
        assert len(done) == (error is None)
        if error is None:
            assert text(got) == "hello world"
        else:
            refused = outcomes(trace)[-1] == "refused"
            assert isinstance(error, AnswerBroken) or refused
            assert refused or (text(got) and not whole)

    asyncio.run(check())
