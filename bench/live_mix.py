"""Chats, documents and batches together on the real server over HTTP: our policy against order of arrival.

    python -m bench.live_mix [--quick] [--json FILE]

One server a policy, the same engine and settings (`scheduler.policy`), one after the other, the same requests at
the same times: `mix(SEED)`, a function of a seed that was committed before either policy was run, at a pace that
asks `WORK` times what this machine was just measured to prefill: how late requests are is a matter of that share,
and machines differ, also from themselves an hour ago. P0 is in time when its first token comes within 5 s of when
it was due to be sent, P1 within 30 s. The simulator plays the same requests with the machine that `bench.simulator
--record` fitted, where there is one (`simulated_*`), to see whether it orders the policies as the server does.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.driver import say
from bench.machine import CpuClock, describe
from bench.report import RECORDED, Bar, Result, finish, parse_options
from bench.server import HOST, PeriluneServer
from perilune.cli.replay import Replayed, Target, replay, summary
from perilune.cli.simulate import machine_named
from perilune.core import ServiceClass
from perilune.engine.compare import figures as simulated_figures
from perilune.engine.compare import policy_named
from perilune.engine.simulator import Simulation
from perilune.engine.traces import TraceRequest

SEED = 20261130
SECONDS, QUICK_SECONDS = 40.0, 12.0
P0_S, P1_S = 5.0, 30.0
POLICIES = ("fcfs", "deadline")
CHATS_PER_S, DOCUMENTS_PER_S, BATCHES_PER_S = 0.8, 0.2, 0.15
BARS = {"p0_attainment": Bar(at_least=0.95, unit=""), "fcfs_p0_attainment": Bar(at_most=0.60, unit="")}
WORK = 1.3
"""Prompt tokens asked for, over what the machine prefills: more than it has, so that somebody must wait."""

PROBES, PROBE_TOKENS = 4, 4000
_DRAIN_S = 8.0


def mix(seed: int, seconds: float) -> list[TraceRequest]:
    """Poisson arrivals of three kinds: chats of about 250 tokens (P0), documents of 3,000 to 7,000 (P1), batch
    lines of 1,500 to 5,000 (P2)."""
    chance = random.Random(seed)
    made: list[TraceRequest] = []
    for kind, rate, due_s in (
        (ServiceClass.P0_INTERACTIVE, CHATS_PER_S, P0_S),
        (ServiceClass.P1_DOCUMENT, DOCUMENTS_PER_S, P1_S),
        (ServiceClass.P2_BATCH, BATCHES_PER_S, None),
    ):
        now_s = 0.0
        while (now_s := now_s + chance.expovariate(rate)) < seconds:
            made.append(TraceRequest(now_s, *_lengths(kind, chance), kind, deadline_s=due_s))
    return sorted(made, key=lambda request: request.arrival_s)


def _lengths(kind: ServiceClass, chance: random.Random) -> tuple[int, int]:
    """Tokens of prompt and answer."""
    if kind is ServiceClass.P0_INTERACTIVE:
        return min(800, max(30, round(math.exp(chance.gauss(math.log(250), 0.6))))), chance.randint(12, 40)
    if kind is ServiceClass.P1_DOCUMENT:
        return chance.randint(3000, 7000), chance.randint(24, 64)
    return chance.randint(1500, 5000), chance.randint(32, 96)


def paced(seed: int, seconds: float, prefill_tokens_per_s: float) -> list[TraceRequest]:
    """`seconds` of the mix, so fast that `WORK` of the machine is asked for."""
    long = mix(seed, 10 * SECONDS)
    asked = sum(request.prompt_tokens for request in long) / (10 * SECONDS)
    pace = WORK * prefill_tokens_per_s / asked
    return [replace(each, arrival_s=each.arrival_s / pace) for each in mix(seed, seconds * pace)]


def prefill_rate() -> float:
    """Prompt tokens a second of a server that has documents to read, and nothing else."""
    asked = [TraceRequest(0.0, PROBE_TOKENS, 1, ServiceClass.P1_DOCUMENT, deadline_s=60.0)] * PROBES
    found = live("fcfs", asked, drain_s=60.0)
    if any(each.status != 200 or each.total_s is None for each in found):
        raise RuntimeError(f"The server didn't answer the probes: {[each.status for each in found]}.")
    return PROBES * PROBE_TOKENS / max(each.total_s or 0.0 for each in found)


def live(policy: str, requests: Sequence[TraceRequest], drain_s: float = _DRAIN_S) -> list[Replayed]:
    """The requests on a fresh server; what runs `drain_s` after the last one came is given up."""
    with tempfile.TemporaryDirectory(prefix="perilune-bench-") as folder:
        server = PeriluneServer(
            Path(folder) / "home", scheduler__policy=policy, memory__embedder="off", server__max_queue=1000
        )
        server.start()
        try:
            target = Target(f"http://{HOST}:{server.port}/v1", server.model_id(), drain_s=drain_s)
            warm = [TraceRequest(0.0, 200, 4, deadline_s=60.0)]
            asyncio.run(replay(target, warm, 1))
            return asyncio.run(replay(target, requests, 1))
        finally:
            server.stop()


def simulated(policy: str, requests: Sequence[TraceRequest]) -> float | None:
    """P0 in time where the simulator plays it; None without a fitted machine."""
    fitted = RECORDED / "simulated_machine.json"
    if not fitted.exists():
        return None
    outcomes = Simulation(machine_named(str(fitted)), policy_named(policy)).run(requests)
    return simulated_figures(outcomes, P0_S, P1_S)["p0_in_time"]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options("Mixed load on the real server, by policy.", argv, rounds=1)
    rate = prefill_rate()
    requests = paced(SEED, QUICK_SECONDS if options.quick else SECONDS, rate)
    result = Result("live_mix", {}, describe(), [], quick=options.quick)
    before = CpuClock.now([os.getpid()])
    for policy in POLICIES:
        rows = summary(live(policy, requests))
        say(f"{policy}: {json.dumps(rows)}")
        prefix = "" if policy == "deadline" else f"{policy}_"
        result.figures |= {
            f"{prefix}p0_attainment": _share(rows["P0"]["in_time"]),
            f"{prefix}p1_attainment": _share(rows["P1"]["in_time"]),
            f"{prefix}p0_ttft_p50_s": _share(rows["P0"]["ttft_p50_s"]),
            f"{prefix}p0_ttft_p95_s": _share(rows["P0"]["ttft_p95_s"]),
        }
        result.figures[f"simulated_{prefix}p0_attainment"] = simulated(policy, requests)
        result.runs.append({"policy": policy, "classes": rows})
    result.machine["foreign_share"] = round(CpuClock.now([os.getpid()]).foreign_share(before), 3)
    result.notes.append(
        f"{len(requests)} requests, seed {SEED}; {rate:.0f} prompt tokens/s measured, {WORK} times that asked"
    )
    finish(result, BARS, options)


def _share(value: float | int | None) -> float | None:
    return None if value is None else round(float(value), 4)


if __name__ == "__main__":
    main()
