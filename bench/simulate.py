"""Scheduling policies under overload, in virtual time. All its figures are SIMULATED.

    python -m bench.simulate [--quick] [--json FILE] [--rounds SEEDS]

The engine's own scheduler, policies, block pool and chunk controller run against a formula for the steps of an 8B
model on one 80 GB GPU (`engine.step_cost.A100_8B`; not fitted, there is none here). Lengths are those of public
traces: P0 of Azure's conversations, P1 and P2 of Mooncake's from 8K tokens on; 80/12/8 %, bursts of twice the rate
for 30 s in two minutes, ten tenants. 1.0 x is `NOMINAL`: the highest rate at which the tuned honest baseline,
static priority with a KV reserve, keeps P0 and P1 at 95 % (mean of the seeds; found with `--tune`, which tries its
reserve and the rate). Loads are 1.2 x and 1.6 x of it for 400 s and as long again to end. First tokens count: P0
within 3 s, P1 within 30 s. Figures without a name are our policy's, as it refuses what can't be in time any more
(`deadline-refuse`); `honest` is the baseline, `honest_ttl` the same with requests expiring at their deadline. A
full run takes about 15 minutes.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from bench.loads import DEADLINE_S, Lengths, Mix, lengths, load
from bench.machine import describe
from bench.report import Bar, Options, Result, finish, parse_options
from perilune.engine.compare import MACHINES, POLICIES, Interval, figures, interval, summarise
from perilune.engine.scheduling import SchedulingPolicy, StaticPriority
from perilune.engine.simulator import Simulation
from perilune.engine.traces import TraceRequest

NOMINAL = 0.94
"""Requests a second at 1.0 x."""
RESERVE = 0.2
"""The baseline's, tuned."""
SEEDS = (11, 12, 13, 14, 15, 16, 17, 18, 19, 20)
OTHERS_SEEDS = 5
"""Of them, for the policies that are shown beside."""
MACHINE = MACHINES["a100-8b"]
SECONDS, DRAIN_S = 400.0, 400.0
OURS = "deadline-refuse"

_SHARE = ""
BARS = {
    "p0_within_3s_1_2x": Bar(at_least=0.99, unit=_SHARE),
    "p1_within_30s_1_2x": Bar(at_least=0.50, unit=_SHARE),
    "p2_done_1_2x": Bar(at_least=1.0, unit=_SHARE),
    "shed_1_2x": Bar(at_most=0.02, unit=_SHARE),
    "missed_tokens_1_2x": Bar(at_most=0.05, unit=_SHARE),
    "p0_within_3s_1_6x": Bar(at_least=0.98, unit=_SHARE),
    "p1_within_30s_1_6x": Bar(at_least=0.35, unit=_SHARE),
    "p2_done_1_6x": Bar(at_least=0.95, unit=_SHARE),
    "shed_1_6x": Bar(at_most=0.05, unit=_SHARE),
    "missed_tokens_1_6x": Bar(at_most=0.05, unit=_SHARE),
    "p1_over_honest_low_1_2x": Bar(at_least=0.0, unit=_SHARE),
    "p1_over_honest_low_1_6x": Bar(at_least=0.0, unit=_SHARE),
}
_KEYS = {
    "p0_in_time": "p0_within_3s",
    "p1_in_time": "p1_within_30s",
    "p2_done": "p2_done",
    "shed": "shed",
    "missed_tokens": "missed_tokens",
    "missed_untold_tokens": "missed_untold_tokens",
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a policy is put through. `misjudged`: by how much predicted work is off, as a factor either way;
    `slower`: what a step takes at the end, of what it took at the beginning."""

    name: str
    factor: float
    mix: Mix = field(default_factory=Mix)
    misjudged: float = 1.0
    slower: float = 1.0


def honest() -> SchedulingPolicy:
    return StaticPriority(RESERVE)


def play(
    scenario: Scenario, policy: SchedulingPolicy, seed: int, drawn: Lengths, seconds: float, *, ttl: bool = False
) -> dict[str, float]:
    """One run. `ttl`: requests expire at their deadline."""
    requests: Sequence[TraceRequest] = load(NOMINAL * scenario.factor, seconds, seed, scenario.mix, drawn)
    if ttl:
        requests = [replace(r, ttl_s=DEADLINE_S[r.service_class]) for r in requests]
    chance, spread = random.Random(seed), math.log(scenario.misjudged)

    def drift(now_s: float, step_s: float) -> float:
        return step_s * (
            1 + (scenario.slower - 1) * min(1.0, max(0.0, now_s / seconds))
        )  # warm-up is long before 0

    run = Simulation(
        MACHINE, policy, drift, judge=lambda work_s: work_s * math.exp(chance.uniform(-spread, spread))
    )
    return figures(run.run(requests, seconds + DRAIN_S))


def compare(
    scenario: Scenario, seeds: Sequence[int], drawn: Lengths, seconds: float, names: Mapping[str, bool]
) -> dict[str, list[dict[str, float]]]:
    """Figures of every seed by policy; `names` says of each whether its requests expire at their deadline."""
    runs: dict[str, list[dict[str, float]]] = {}
    for name, ttl in names.items():
        make = honest if name.startswith("honest") else POLICIES[name]
        runs[name] = [play(scenario, make(), seed, drawn, seconds, ttl=ttl) for seed in seeds]
        print(row(scenario.name, name, summarise(runs[name])), file=sys.stderr, flush=True)
    return runs


def row(scenario: str, name: str, found: Mapping[str, Interval]) -> str:
    shown = "  ".join(f"{label} {found[key]}" for key, label in _KEYS.items())
    return f"{scenario:14} {name:16} {shown}"


def enter(result: Result, suffix: str, runs: Mapping[str, list[dict[str, float]]]) -> None:
    """Ours and the baseline's as figures, the paired difference of P1 with its interval, all of it as runs."""
    ours, baseline = runs[OURS], runs["honest"]
    for key, name in _KEYS.items():
        found = interval([run[key] for run in ours])
        result.figures[f"{name}_{suffix}"] = round(found.mean, 4)
        result.spread[f"{name}_{suffix}"] = (round(found.low, 4), round(found.high, 4))
    for name in ("honest", "honest_ttl"):
        if name in runs:
            key = f"p1_{name}_{suffix}"
            result.figures[key] = round(interval([run["p1_in_time"] for run in runs[name]]).mean, 4)
    gain = interval([a["p1_in_time"] - b["p1_in_time"] for a, b in zip(ours, baseline, strict=True)])
    result.figures[f"p1_over_honest_{suffix}"] = round(gain.mean, 4)
    result.figures[f"p1_over_honest_low_{suffix}"] = round(gain.low, 4)
    for name, each in runs.items():
        result.runs += [
            {"load": suffix, "policy": name, **{k: round(v, 4) for k, v in run.items()}} for run in each
        ]


FULL = (
    Scenario("p0_heavy", 4.0, Mix(p0=0.96, p1=0.03)),
    Scenario("misjudged_x2", 1.2, misjudged=2.0),
    Scenario("drift", 1.2, slower=1.5),
)


def main(argv: Sequence[str] | None = None) -> None:
    if argv is None and "--tune" in sys.argv:
        tune(lengths())
        return
    options = parse_options("Scheduling policies under overload, simulated.", argv, rounds=len(SEEDS))
    finish(measure(options, lengths()), BARS, options)


def measure(options: Options, drawn: Lengths) -> Result:
    result = Result(
        "simulate", {}, {**describe(), "simulated": MACHINE.name, "foreign_share": 0.0}, [], quick=options.quick
    )
    result.notes.append(
        f"SIMULATED: {MACHINE.name}, 1.0 x = {NOMINAL} requests/s, reserve {RESERVE}, seeds {SEEDS}"
    )
    seeds = SEEDS[:2] if options.quick else SEEDS[: options.rounds]
    names = {"honest": False, OURS: False}
    others = {} if options.quick else {"honest_ttl": True, "fcfs": False, "edf": False, "deadline": False}
    for factor, suffix in ((1.2, "1_2x"), (1.6, "1_6x")):
        scenario = Scenario(suffix, factor)
        runs = compare(scenario, seeds, drawn, SECONDS, names)
        runs |= compare(scenario, seeds[:OTHERS_SEEDS], drawn, SECONDS, others)
        enter(result, suffix, runs)
    for scenario in () if options.quick else FULL:
        enter(result, scenario.name, compare(scenario, seeds[:3], drawn, SECONDS, {"honest": False, OURS: False}))
    return result


def tune(drawn: Lengths, rates: Sequence[float] = (0.9, 0.95, 1.0, 1.05)) -> None:
    """The baseline's P0 and P1 by reserve at 1.0 x, and with the chosen one at rates around it."""
    runs: list[tuple[str, float, Callable[[], SchedulingPolicy]]] = [
        (f"reserve {share}", 1.0, partial(StaticPriority, share)) for share in (0.0, 0.1, 0.2, 0.3, 0.4)
    ]
    runs += [(f"x {factor}", factor, honest) for factor in rates]
    for name, factor, make in runs:
        found = summarise([play(Scenario(name, factor), make(), seed, drawn, SECONDS) for seed in SEEDS])
        print(row("tune", name, found), flush=True)


if __name__ == "__main__":
    main()
