"""How well the planner predicts and chooses, in virtual time. All its figures are SIMULATED.

    python -m bench.planner [--quick] [--json FILE] [--rounds SEEDS]

The server's planner and predictor run beside the simulated engine: the predictor learns from its steps and first
tokens, the planner chooses, for every document question, between reading all of it and the best passages
(`refined`), with the queue as it is on arrival. The machine is one like those that Perilune is made for (a small
model on two cores, 700 prompt tokens a second), whose steps take up to a quarter longer or shorter at random and
half as long again in the middle third of the run.

`coverage_p90` is the share of first tokens that came within the predicted p90. `regret` is what the plans are worth
less than the best in hindsight, as a share: a plan is worth its fidelity if its first token came in time and
nothing otherwise; the plan that was not chosen is taken to come as early or late, as a ratio to its prediction, as
the other did.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from bench.machine import describe
from bench.report import Bar, Result, finish, parse_options
from perilune.core import CachedTokens, ContextPolicy, Plan, PlanKind, ServiceClass
from perilune.engine.deadlines import DeadlinePolicy
from perilune.engine.policy import EngineLimits
from perilune.engine.simulator import Machine, Outcome, Simulation
from perilune.engine.step_cost import LinearCost
from perilune.engine.traces import TraceRequest
from perilune.service.planner import Facts, choose
from perilune.service.predictor import Predictor
from perilune.service.rates import Rates
from perilune.telemetry import Telemetry

SEEDS = (21, 22, 23, 24, 25)
MACHINE = Machine(
    "two cores, 135M", LinearCost(0.004, 1.4e-3, 1e-7, 0.006, 2e-7), 4096, 32_768, EngineLimits(queue=1000)
)
SECONDS, QUICK_SECONDS = 3600.0, 900.0
REQUESTS_PER_S = 0.22
BARS = {
    "coverage_p90": Bar(at_least=0.85, unit=""),
    "coverage_p90_most": Bar(at_most=0.95, unit=""),
    "regret": Bar(at_most=0.05, unit=""),
}
_REQUIRED, _ANSWER, _RESERVE_S, _KNOWN = 120, 256, 1.0, 60
_TEXT_TOKENS = 512  # of hash blocks
_DEADLINE_S = 5.0


@dataclass(slots=True)
class Asked:
    """One question: its facts on arrival, the plan, its prediction without what the queue did."""

    facts: Facts
    plan: Plan
    predicted_s: float
    p90: float


class Planned:
    """Chooses a plan when a request arrives, and tells the predictor when its first token came."""

    def __init__(self) -> None:
        self.predictor = Predictor(None, Telemetry(), 1024, Rates())
        self.asked: dict[int, Asked] = {}
        self._simulation: Simulation | None = None

    def attach(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def plan(self, request: TraceRequest) -> TraceRequest:
        assert self._simulation is not None
        stepper, rates = self._simulation.stepper, self.predictor.rates
        cached = stepper.lookup(request.block_names())
        facts = Facts(
            policy=ContextPolicy.AUTO,
            deadline_s=_DEADLINE_S,
            elapsed_s=self._simulation.runtime.now - request.arrival_s,
            window=MACHINE.window_tokens,
            answer=_ANSWER,
            prompt=request.prompt_tokens,
            stable=request.prompt_tokens - 32,
            required=_REQUIRED,
            cached=cached,
            complete=True,
            refinable=request.prompt_tokens > 1000,
            searched=True,
            queued=stepper.stats().queued_tokens(request.service_class),
            rates=rates,
            reserve_s=_RESERVE_S,
            quantile=0.99,
        )
        plan = choose(facts)
        refined = plan.kind is PlanKind.REFINED
        uncached = plan.context_tokens if refined else plan.uncached_tokens
        found = 0 if refined else cached.total
        predicted_s = rates.ttft_s(uncached, found, 0, facts.queued)
        planned = replace(
            request,
            prompt_tokens=plan.context_tokens,
            hash_ids=() if refined else request.hash_ids,
            deadline_s=_DEADLINE_S - facts.elapsed_s,
        )
        self.asked[id(planned)] = Asked(facts, plan, predicted_s, rates.p90)
        return planned

    def first_token(self, outcome: Outcome) -> None:
        asked = self.asked[id(outcome.planned)]
        assert outcome.ttft_s is not None
        measured_s = outcome.ttft_s - asked.facts.elapsed_s
        self.predictor.observe_ttft(asked.predicted_s, measured_s, asked.plan.uncached_tokens)


def questions(seconds: float, seed: int) -> list[TraceRequest]:
    """Chats, and questions about forty documents, some of them asked again."""
    chance, now_s, made = random.Random(seed), 0.0, []
    sizes = [round(1024 * math.exp(chance.uniform(0.0, 3.2))) for _ in range(40)]
    while now_s < seconds:
        now_s += chance.expovariate(REQUESTS_PER_S)
        if chance.random() < 0.5:
            made.append(TraceRequest(now_s, chance.randrange(60, 700), chance.randrange(10, 120)))
            continue
        document = chance.randrange(len(sizes))
        hashes = tuple(1000 * document + place for place in range(sizes[document] // _TEXT_TOKENS))
        made.append(TraceRequest(now_s, sizes[document] + 60, chance.randrange(20, 200), hash_ids=hashes))
    return made


def play(seconds: float, seed: int) -> tuple[float, float]:
    """Coverage and regret."""
    chance, planned = random.Random(seed + 1), Planned()

    def disturb(now_s: float, step_s: float) -> float:
        slow = 1.5 if seconds / 3 <= now_s < 2 * seconds / 3 else 1.0
        return step_s * slow * chance.uniform(0.75, 1.25)

    simulation = Simulation(
        MACHINE,
        DeadlinePolicy(),
        disturb,
        observer=planned.predictor,
        plan=planned.plan,
        first_token=planned.first_token,
    )
    planned.attach(simulation)
    outcomes = simulation.run(questions(seconds, seed))
    answered = [o for o in outcomes if o.ttft_s is not None][_KNOWN:]
    pairs = [(planned.asked[id(o.planned)], o) for o in answered]
    held = [_measured_s(asked, o) <= asked.p90 * asked.predicted_s for asked, o in pairs]
    won = [_worth(asked, o) for asked, o in pairs]
    best = sum(max(pair) for pair in won)
    return sum(held) / len(held), (best - sum(chosen for chosen, _ in won)) / best


def _measured_s(asked: Asked, outcome: Outcome) -> float:
    return (outcome.ttft_s or 0.0) - asked.facts.elapsed_s


def _worth(asked: Asked, outcome: Outcome) -> tuple[float, float]:
    """Of the plan that was chosen, and of the other way."""
    facts, ratio = asked.facts, _measured_s(asked, outcome) / asked.predicted_s
    chosen = asked.plan.fidelity if outcome.within(_DEADLINE_S) else 0.0
    if not facts.refinable:
        return chosen, chosen
    if asked.plan.kind is PlanKind.REFINED:
        uncached, found, fidelity = facts.prompt - facts.cached.total, facts.cached, 1.0
        if not facts.fits:
            return chosen, chosen
    else:
        other = choose(replace(facts, policy=ContextPolicy.REFINED))
        uncached, found, fidelity = other.context_tokens, CachedTokens(), other.fidelity
    expected_s = facts.rates.ttft_s(uncached, found.total, 0, facts.queued) * ratio
    return chosen, fidelity if facts.elapsed_s + expected_s <= _DEADLINE_S else 0.0


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options("Predictions and plans, simulated.", argv, rounds=len(SEEDS))
    seeds = SEEDS[:2] if options.quick else SEEDS[: options.rounds]
    result = Result(
        "planner", {}, {**describe(), "simulated": MACHINE.name, "foreign_share": 0.0}, [], quick=options.quick
    )
    found = [play(QUICK_SECONDS if options.quick else SECONDS, seed) for seed in seeds]
    coverage, regret = [pair[0] for pair in found], [pair[1] for pair in found]
    result.figures["coverage_p90"] = result.figures["coverage_p90_most"] = round(mean(coverage), 4)
    result.figures["regret"] = round(mean(regret), 4)
    result.spread["coverage_p90"] = (round(min(coverage), 4), round(max(coverage), 4))
    result.spread["regret"] = (round(min(regret), 4), round(max(regret), 4))
    result.notes.append(f"SIMULATED: {MACHINE.name}, seeds {seeds}, {ServiceClass.P0_INTERACTIVE.name} only")
    finish(result, BARS, options)


if __name__ == "__main__":
    main()
