"""A shadow decides nothing and is compared; arms of an experiment act in turns, and requests keep theirs."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.build.engine import scheduling_policy
from perilune.config import SchedulerSettings
from perilune.core import FinishReason, ServiceClass
from perilune.engine.compare import MACHINES, POLICIES
from perilune.engine.deadlines import DeadlinePolicy
from perilune.engine.scheduling import FirstComeFirstServed, SchedulingPolicy, StaticPriority
from perilune.engine.sequence import EngineSequence
from perilune.engine.simulator import Outcome, Simulation
from perilune.engine.traces import TraceRequest
from perilune.engine.trial import Trial
from perilune.errors import ConfigError
from perilune.telemetry import Telemetry
from tests.engine.harness import Bench, spec, text
from tests.engine.test_scheduling import sequence

P0, P1, P2 = ServiceClass.P0_INTERACTIVE, ServiceClass.P1_DOCUMENT, ServiceClass.P2_BATCH
MACHINE = MACHINES["a100-8b"]


class Sink:
    def __init__(self) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.seen: list[tuple[str, float, dict[str, str]]] = []

    def count(self, name: str, value: float, labels: dict[str, str]) -> None:
        self.counts[name, *labels.values()] += int(value)

    def observe(self, name: str, value: float, labels: dict[str, str]) -> None:
        self.seen.append((name, value, labels))

    def gauge(self, name: str, value: float, labels: dict[str, str]) -> None: ...


def trial(*names: str, slot_s: float | None = None, now: list[float] | None = None) -> tuple[Trial, Sink]:
    sink = Sink()
    at = now if now is not None else [0.0]
    arms = {name: POLICIES[name]() for name in names}
    return Trial(arms, Telemetry(sink), lambda: at[0], slot_s), sink


def load(seed: int) -> list[TraceRequest]:
    made = []
    for number in range(40):
        kind = (P0, P0, P1, P2)[(number * 7 + seed) % 4]
        tokens = 500 if kind is P0 else 40_000
        due_s = {P0: 3.0, P1: 30.0}.get(kind)
        made.append(TraceRequest(0.15 * number, tokens + seed, 20, kind, f"t{number % 3}", due_s))
    return made


def told(outcomes: list[Outcome]) -> list[tuple[float | None, float | None, FinishReason | None]]:
    return [(outcome.ttft_s, outcome.end_s, outcome.reason) for outcome in outcomes]


@pytest.mark.parametrize("shadow", sorted(set(POLICIES) - {"deadline-refuse"}))
@settings(deadline=None, max_examples=4)
@given(seed=st.integers(0, 50))
def test_a_shadow_changes_nothing(shadow: str, seed: int) -> None:
    """Every first token and end is what it is without the shadow."""
    alone = Simulation(MACHINE, DeadlinePolicy()).run(load(seed))
    both, _ = trial("deadline", shadow)
    assert told(Simulation(MACHINE, both).run(load(seed))) == told(alone)


def test_a_shadow_that_refuses_refuses_nothing() -> None:
    alone = Simulation(MACHINE, FirstComeFirstServed()).run(load(3))
    both, sink = trial("fcfs", "deadline-refuse")
    assert told(Simulation(MACHINE, both).run(load(3))) == told(alone)
    assert sink.counts["scheduler_shadow_left_out", "shadow", "deadline-refuse"] > 0


def test_who_would_come_first_is_compared() -> None:
    both, sink = trial("fcfs", "static")
    batch, chat = sequence(1, P2), sequence(2, P0)
    for each in (batch, chat):
        both.queued(each)
    assert both.ordered([chat, batch], 0.0) == [batch, chat]
    assert both.ordered([chat, batch], 0.05) == [batch, chat]  # too soon to ask again
    assert sink.counts["scheduler_shadow", "static", "other"] == 1
    both.left(batch)
    assert both.ordered([chat, sequence_too(both)], 0.2)[0] is chat
    assert sink.counts["scheduler_shadow", "static", "same"] == 1


def sequence_too(policy: SchedulingPolicy) -> EngineSequence:
    made = sequence(3, P1)
    policy.queued(made)
    return made


def test_arms_act_in_turns_and_requests_keep_theirs() -> None:
    now = [0.0]
    both, sink = trial("fcfs", "static", slot_s=10.0, now=now)
    acted = []
    for slot in range(40):
        now[0] = slot * 10.0 + 5.0
        acted.append(both.acting)
    assert all(set(acted[at : at + 2]) == {"fcfs", "static"} for at in range(0, 40, 2))
    assert acted != ["fcfs", "static"] * 20
    now[0] = 5.0
    chat = sequence(1, P0, arrival_s=4.0, deadline_s=3.0)
    arm = both.acting
    both.queued(chat)
    while both.acting == arm:
        now[0] += 1.0
    chat.tokens.append(7)
    both.served(chat, 64, 1)
    both.served(chat, 0, 1)
    both.left(chat)
    assert [(name, labels["arm"]) for name, _, labels in sink.seen] == [("scheduler_arm_ttft_seconds", arm)]
    assert sink.counts == {("scheduler_arm_requests", "late", arm, "p0_interactive"): 1}


def test_one_that_leaves_without_a_token_is_counted() -> None:
    both, sink = trial("deadline", "fcfs")
    chat = sequence(1, P0)
    both.queued(chat)
    both.left(chat)
    assert sink.counts["scheduler_arm_requests", "none", "deadline", "p0_interactive"] == 1


@pytest.mark.parametrize("slot_s", [None, 0.001])
def test_an_engine_runs_on_it(slot_s: float | None) -> None:
    """With prompts larger than a quota, and preemption among classes."""
    arms: dict[str, SchedulingPolicy] = {"deadline": DeadlinePolicy(), "static": StaticPriority()}
    bench = Bench(num_blocks=20, policy=Trial(arms, Telemetry(), time.monotonic, slot_s))
    listener = bench.answer(spec("big", text(1, 19 * 32), new=2, service_class=P1))
    assert listener.reason is FinishReason.LENGTH


def test_what_the_settings_make() -> None:
    def made(**settings: object) -> SchedulingPolicy:
        return scheduling_policy(SchedulerSettings.model_validate(settings), Telemetry())

    assert isinstance(made(), DeadlinePolicy)
    assert isinstance(made(shadow='["deadline"]'), DeadlinePolicy)
    shadowed, taking_turns = made(shadow='["static", "fcfs"]'), made(experiment=["deadline", "static"])
    assert isinstance(shadowed, Trial)
    assert isinstance(taking_turns, Trial)
    assert shadowed.acting == "deadline"
    assert taking_turns.acting in ("deadline", "static")
    with pytest.raises(ConfigError, match="can't both be set"):
        made(shadow=["static"], experiment=["static", "fcfs"])
    with pytest.raises(ValueError, match="shadow"):
        made(shadow=["lifo"])
