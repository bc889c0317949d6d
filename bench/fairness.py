"""One tenant floods the others with document work, in virtual time. All its figures are SIMULATED.

    python -m bench.fairness [--quick] [--json FILE] [--rounds SEEDS]

Machine, lengths and bursts are those of `bench.simulate`. Ten quiet tenants send 40 % of its 1.0 x; an eleventh
adds so many document requests that 40 % or 90 % of all document requests are its own. `quiet_lost_*` are the points
of P1 in time that the quiet ones lose against running alone (`fcfs_lost_*`: under FCFS); `jain_*` is Jain's index
of what each tenant was served over its max-min fair share of it; `gap_over_bound_*` the greatest difference of
service counters between two tenants with work, over the bound of VTC, 2·max(w_in·L_in, w_out·M).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

from bench.loads import P1_S, Lengths, Mix, flooded, lengths, load
from bench.machine import describe
from bench.report import Bar, Result, finish, parse_options
from bench.simulate import DRAIN_S, MACHINE, NOMINAL, SECONDS, SEEDS
from perilune.core import BLOCK_TOKENS, ServiceClass
from perilune.engine.compare import POLICIES, jain
from perilune.engine.deadlines import DeadlinePolicy
from perilune.engine.fairness import INPUT_WEIGHT, OUTPUT_WEIGHT
from perilune.engine.observe import LoadObservation, StepObservation
from perilune.engine.simulator import Outcome, Simulation
from perilune.engine.traces import TraceRequest

QUIET_LOAD = 0.4
FLOODS = (0.4, 0.9)
OURS = "deadline-refuse"
P1 = ServiceClass.P1_DOCUMENT
BOUND = 2 * max(INPUT_WEIGHT * MACHINE.window_tokens, OUTPUT_WEIGHT * MACHINE.blocks * BLOCK_TOKENS)

BARS = {
    **{f"quiet_lost_{round(100 * f)}": Bar(at_most=1.0, unit="points") for f in FLOODS},
    **{f"jain_{round(100 * f)}": Bar(at_least=0.95, unit="") for f in FLOODS},
    **{f"gap_over_bound_{round(100 * f)}": Bar(at_most=1.0, unit="") for f in FLOODS},
}


@dataclass(slots=True)
class GapWatch:
    """The greatest spread of P1's service counters over all steps."""

    policy: DeadlinePolicy | None = None
    most: float = field(default=0.0)

    def step(self, observation: StepObservation) -> None:
        if self.policy is not None:
            self.most = max(self.most, self.policy.service.spread(P1))

    def load(self, observation: LoadObservation) -> None:
        """Nothing is loaded."""


def play(name: str, requests: Sequence[TraceRequest], seconds: float) -> tuple[list[Outcome], float]:
    """Outcomes, and the greatest gap of service."""
    policy, watch = POLICIES[name](), GapWatch()
    if isinstance(policy, DeadlinePolicy):
        watch.policy = policy
    outcomes = Simulation(MACHINE, policy, observer=watch).run(requests, seconds + DRAIN_S)
    return outcomes, watch.most


def quiet_in_time(outcomes: Sequence[Outcome]) -> float:
    theirs = [o for o in outcomes if o.request.service_class is P1 and o.request.tenant != "flood"]
    return 100 * sum(o.within(P1_S) for o in theirs) / max(1, len(theirs))


def fairness(outcomes: Sequence[Outcome]) -> float:
    """Jain's index of P1's service over its max-min fair share."""
    served: defaultdict[str, float] = defaultdict(float)
    asked: defaultdict[str, float] = defaultdict(float)
    for outcome in outcomes:
        if outcome.request.service_class is P1:
            tenant, request = outcome.request.tenant, outcome.request
            asked[tenant] += INPUT_WEIGHT * request.prompt_tokens + OUTPUT_WEIGHT * request.new_tokens
            if outcome.done:
                served[tenant] += INPUT_WEIGHT * request.prompt_tokens + OUTPUT_WEIGHT * request.new_tokens
    fair = max_min(asked, sum(served.values()))
    return jain([served[tenant] / fair[tenant] for tenant in asked])


def max_min(asked: Mapping[str, float], total: float) -> dict[str, float]:
    """Everybody's fair share of `total`: nobody more than was asked for, the rest equal."""
    fair, left = {}, total
    waiting = sorted(asked, key=lambda tenant: asked[tenant])
    for place, tenant in enumerate(waiting):
        fair[tenant] = min(asked[tenant], left / (len(waiting) - place))
        left -= fair[tenant]
    return fair


def measure(seeds: Sequence[int], seconds: float, drawn: Lengths, result: Result) -> None:
    quiet = {seed: load(QUIET_LOAD * NOMINAL, seconds, seed, Mix(), drawn) for seed in seeds}
    alone = {
        (name, seed): quiet_in_time(play(name, quiet[seed], seconds)[0])
        for name in (OURS, "fcfs")
        for seed in seeds
    }
    for share in FLOODS:
        found = defaultdict(list)
        for seed in seeds:
            mixed = flooded(quiet[seed], share, seconds, seed, drawn)
            for name, key in ((OURS, "quiet_lost"), ("fcfs", "fcfs_lost")):
                outcomes, gap = play(name, mixed, seconds)
                found[key].append(alone[name, seed] - quiet_in_time(outcomes))
                if name == OURS:
                    found["jain"].append(fairness(outcomes))
                    found["gap_over_bound"].append(gap / BOUND)
        for key, values in found.items():
            value = max(values) if key == "gap_over_bound" else mean(values)
            result.figures[f"{key}_{round(100 * share)}"] = round(value, 4)
            result.spread[f"{key}_{round(100 * share)}"] = (round(min(values), 4), round(max(values), 4))


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options("A tenant that floods, simulated.", argv, rounds=3)
    seeds = SEEDS[:1] if options.quick else SEEDS[: options.rounds]
    result = Result(
        "fairness", {}, {**describe(), "simulated": MACHINE.name, "foreign_share": 0.0}, [], quick=options.quick
    )
    result.notes.append(f"SIMULATED: {MACHINE.name}, seeds {seeds}")
    measure(seeds, SECONDS, lengths(), result)
    finish(result, BARS, options)


if __name__ == "__main__":
    main()
