"""The simulator against the real engine: constants fitted on one part of a run, its error on another part.

    python -m bench.simulator [--quick] [--json FILE] [--record]

The real scheduler, runtime and model (SmolLM2-135M, as `bench.prefill` runs it) serve two kinds of load in turn, so
that a slow minute of the machine hits both, in real time and open loop: lengths of Azure's conversations, prompts
up to 1,500 tokens and answers up to 60. Every step of the first is recorded and the constants of
`engine.step_cost.LinearCost` are fitted to them; the second is held out. The simulator then plays the second load,
with what the fit left unexplained of the first as noise. `*_error` are relative errors of quantiles of time to
first token and of whole requests. `--record` keeps the fitted machine in `recorded/simulated_machine.json`, which
`perilune simulate --machine` takes.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from bench import peers
from bench.driver import say
from bench.loads import lengths
from bench.machine import CpuClock, describe
from bench.report import RECORDED, Bar, Result, finish, parse_options
from bench.speed import THREADS
from perilune.core import EngineEvent, EngineFinished, EngineToken, SamplingParams, SequenceSpec
from perilune.engine.deadlines import DeadlinePolicy
from perilune.engine.observe import NullObserver
from perilune.engine.policy import EngineLimits
from perilune.engine.sequence import EngineSequence
from perilune.engine.simulator import Machine, Outcome, Simulation
from perilune.engine.step_cost import LinearCost, StepShape, fit, shape_of
from perilune.engine.stepper import Stepper
from perilune.engine.traces import TraceRequest
from perilune.runtime.loader import load_model
from perilune.runtime.mri import CancelFlag, ModelRuntime, StepPlan, StepResult
from perilune.telemetry import Telemetry

BARS = {
    f"{what}_{at}_error": Bar(at_most=most, unit="")
    for what in ("ttft", "total")
    for at, most in (("p50", 0.10), ("p99", 0.20))
}
ROUNDS, QUICK_ROUNDS = 8, 2
SECONDS = 9.0  # of arrivals, each load and round
REQUESTS_PER_S = 1.0
LIMITS = EngineLimits(queue=1000)
_MOST_PROMPT, _MOST_NEW = 1500, 60
_KV_BYTES = 512 * 1024**2


@dataclass(slots=True)
class Recorded:
    """A runtime whose steps are timed."""

    runtime: ModelRuntime
    steps: list[tuple[StepShape, float]]

    def __getattr__(self, name: str) -> object:
        return getattr(self.runtime, name)

    def forward_step(self, plan: StepPlan, cancelled: CancelFlag) -> StepResult:
        begun_s = time.perf_counter()
        result = self.runtime.forward_step(plan, cancelled)
        self.steps.append((shape_of(plan), time.perf_counter() - begun_s))
        return result


def load(seconds: float, seed: int) -> list[TraceRequest]:
    chance, now_s, made = random.Random(seed), 0.0, []
    short = [r for r in lengths().short if r.prompt_tokens <= _MOST_PROMPT]
    while (now_s := now_s + chance.expovariate(REQUESTS_PER_S)) < seconds:
        like = chance.choice(short)
        made.append(replace(like, arrival_s=now_s, new_tokens=min(like.new_tokens, _MOST_NEW)))
    return made


def play(runtime: Recorded, requests: Sequence[TraceRequest]) -> list[Outcome]:
    """Serve requests with the real engine, in real time."""
    outcomes, flag, begun_s = [Outcome(r, r) for r in requests], CancelFlag(), time.monotonic()
    chance = random.Random(5)

    def event(outcome: Outcome, told: EngineEvent) -> None:
        now_s = time.monotonic() - begun_s
        if isinstance(told, EngineToken) and outcome.ttft_s is None:
            outcome.ttft_s = now_s - outcome.request.arrival_s
        elif isinstance(told, EngineFinished):
            outcome.end_s, outcome.reason = now_s, told.reason

    with ThreadPoolExecutor(1) as worker:
        stepper = Stepper(
            cast(ModelRuntime, runtime),
            None,
            LIMITS,
            loader=worker,
            saver=worker,
            post=lambda call: call(),
            ended=lambda sequence: None,
            clock=time.monotonic,
            telemetry=Telemetry(),
            observer=NullObserver(),
            policy=DeadlinePolicy(),
        )
        coming = list(enumerate(outcomes))
        while coming or stepper.sequences:
            while coming and coming[0][1].request.arrival_s <= time.monotonic() - begun_s:
                number, outcome = coming.pop(0)
                request = outcome.request
                ids = [chance.randrange(100, 40_000) for _ in range(request.prompt_tokens)]
                spec = SequenceSpec(f"r{number}", ids, b"", SamplingParams(ignore_eos=True), request.new_tokens)
                at_s = begun_s + request.arrival_s
                stepper.add(EngineSequence(spec, partial(event, outcome), [], number, at_s))
            plan = stepper.plan(flag)
            if plan is not None:
                stepper.execute(plan, flag)
            elif coming:
                time.sleep(max(0.0, coming[0][1].request.arrival_s - (time.monotonic() - begun_s)))
    return outcomes


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def errors(real: Sequence[Outcome], simulated: Sequence[Outcome]) -> dict[str, float]:
    """Relative errors of quantiles."""
    found = {}
    for what, of in (("ttft", _ttft_s), ("total", _total_s)):
        for name, share in (("p50", 0.50), ("p99", 0.99)):
            truth = quantile([of(o) for o in real], share)
            found[f"{what}_{name}_error"] = abs(quantile([of(o) for o in simulated], share) - truth) / truth
            found[f"{what}_{name}_s"] = truth
    return found


def _ttft_s(outcome: Outcome) -> float:
    assert outcome.ttft_s is not None
    return outcome.ttft_s


def _total_s(outcome: Outcome) -> float:
    assert outcome.end_s is not None
    return outcome.end_s - outcome.request.arrival_s


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options("The simulator's error against the real engine.", argv)
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    before = CpuClock.now([os.getpid()])
    model = load_model(Path(peers.model_gguf()), threads=THREADS, kv_bytes=_KV_BYTES)
    steps: list[tuple[StepShape, float]] = []
    real: list[Outcome] = []
    try:
        recorded = Recorded(model.runtime, [])
        play(recorded, load(3.0, 1))  # warms up
        for number in range(rounds):
            recorded.steps.clear()
            play(recorded, load(SECONDS, 2 + 2 * number))
            steps += recorded.steps
            real += play(recorded, load(SECONDS, 3 + 2 * number))
        cost, ratios = fitted(steps)
        say(f"fitted on {len(steps)} steps: {cost}")
        machine = Machine("fitted", cost, model.runtime.num_blocks, model.runtime.max_context_tokens, LIMITS)
    finally:
        model.close()
    foreign = CpuClock.now([os.getpid()]).foreign_share(before)
    simulated = [o for number in range(rounds) for o in simulate(machine, load(SECONDS, 3 + 2 * number), ratios)]
    result = Result("simulator", {}, {**describe(), "foreign_share": round(foreign, 3)}, [], quick=options.quick)
    result.figures |= {key: round(value, 4) for key, value in errors(real, simulated).items()}
    result.runs.append({"machine": asdict(machine), "steps": len(steps), "requests": len(real)})
    if options.record:
        kept = {**asdict(machine), "date": result.date, "fitted_on": describe()}
        path = RECORDED / "simulated_machine.json"
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    finish(result, BARS, options)


def simulate(machine: Machine, requests: Sequence[TraceRequest], ratios: Sequence[float]) -> list[Outcome]:
    """With steps as uneven as those that were measured."""
    chance = random.Random(4)
    return Simulation(machine, DeadlinePolicy(), lambda now_s, step_s: step_s * chance.choice(ratios)).run(requests)


def fitted(steps: Sequence[tuple[StepShape, float]]) -> tuple[LinearCost, list[float]]:
    """Constants, and what steps took over what they say."""
    cost = fit(steps)
    return cost, [seconds / cost.seconds(shape) for shape, seconds in steps]


if __name__ == "__main__":
    main()
