"""`perilune simulate`: scheduling policies side by side on a trace, in virtual time. Always says that it is
simulated."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from perilune.cli.console import StatusLine, print_json, say, table
from perilune.core import ServiceClass
from perilune.engine.compare import MACHINES, figures, policy_named, summarise
from perilune.engine.policy import EngineLimits
from perilune.engine.simulator import Machine, Simulation
from perilune.engine.step_cost import LinearCost
from perilune.engine.traces import TraceRequest, read_trace
from perilune.errors import InvalidRequest

COLUMNS = {
    "p0_in_time": "P0 in time",
    "p1_in_time": "P1 in time",
    "p2_done": "P2 done",
    "shed": "shed",
    "missed_tokens": "tokens of misses",
    "p0_ttft_p50_s": "P0 TTFT p50 s",
    "p0_ttft_p99_s": "p99 s",
    "p1_ttft_p50_s": "P1 TTFT p50 s",
    "p1_ttft_p99_s": "p99 s",
}


@dataclass(frozen=True, slots=True)
class Options:
    """`minutes` of the trace are played per seed, another part each; `scale` times as fast. `batch_share` of
    requests become P2 where the trace names no classes; `tenants` share them where it names none."""

    machine: str
    policies: Sequence[str]
    seeds: int
    minutes: float
    scale: float
    p0_s: float
    p1_s: float
    batch_share: float
    tenants: int
    as_json: bool


def run(traces: Sequence[Path], options: Options) -> None:
    """Raises `InvalidRequest` for traces, machines or policies that aren't known."""
    machine = machine_named(options.machine)
    requests = sorted((r for path in traces for r in read_trace(path)), key=lambda r: r.arrival_s)
    for name in options.policies:
        policy_named(name)  # before anything takes time
    status, found = StatusLine(quiet=options.as_json), {}
    for name in options.policies:
        runs = []
        for seed in range(options.seeds):
            status.update("simulating", f"{name}, seed {seed + 1} of {options.seeds}")
            played = excerpt(requests, options, seed)
            outcomes = Simulation(machine, policy_named(name)).run(played)
            runs.append(figures(outcomes, options.p0_s, options.p1_s))
        found[name] = summarise(runs)
    status.clear()
    if options.as_json:
        rows = {name: {key: asdict(value) for key, value in row.items()} for name, row in found.items()}
        print_json({"simulated": True, "machine": machine.name, "seeds": options.seeds, "policies": rows})
        return
    say(
        f"SIMULATED on {machine.name}: {options.seeds} seeds, means with 95 % intervals; nothing here was measured."
    )
    table(
        ["policy (simulated)", *COLUMNS.values()], [[n, *(row[key] for key in COLUMNS)] for n, row in found.items()]
    )


def excerpt(requests: Sequence[TraceRequest], options: Options, seed: int) -> list[TraceRequest]:
    """Some minutes of a trace from a random moment on, its end followed by its beginning, with what it leaves open
    filled in."""
    chance = random.Random(seed)
    span_s = requests[-1].arrival_s + 1e-9
    length_s = min(options.minutes * 60 * options.scale, span_s)
    begin_s = chance.uniform(0, span_s)
    picked = [(r, (r.arrival_s - begin_s) % span_s) for r in requests]
    picked = sorted(((r, at) for r, at in picked if at < length_s), key=lambda pair: pair[1])
    if not picked:
        raise InvalidRequest("The excerpt has no requests.", hint="Raise --minutes.")
    named = {r.service_class for r in requests} - {ServiceClass.P0_INTERACTIVE, ServiceClass.P1_DOCUMENT}
    made = []
    for request, at in picked:
        batch = not named and chance.random() < options.batch_share
        kind = ServiceClass.P2_BATCH if batch else request.service_class
        tenant = request.tenant if options.tenants < 2 else f"tenant-{chance.randrange(options.tenants)}"
        limits = {ServiceClass.P0_INTERACTIVE: options.p0_s, ServiceClass.P1_DOCUMENT: options.p1_s}
        due = limits.get(kind) if request.deadline_s is None else request.deadline_s
        made.append(
            replace(request, arrival_s=at / options.scale, service_class=kind, tenant=tenant, deadline_s=due)
        )
    return made


def machine_named(name: str) -> Machine:
    """A known one, or one that `python -m bench.simulator` fitted and wrote to a file."""
    if name in MACHINES:
        return MACHINES[name]
    hint = f"Use one of {', '.join(MACHINES)}, or a file of fitted constants (docs/scheduling.md)."
    try:
        kept = json.loads(Path(name).read_text(encoding="utf-8"))
        cost, limits = LinearCost(**kept["cost"]), EngineLimits(**kept["limits"])
        return Machine(kept["name"], cost, int(kept["blocks"]), int(kept["window_tokens"]), limits)
    except OSError:
        raise InvalidRequest(f"There is no machine {name!r} to simulate.", hint=hint) from None
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{name} holds no fitted machine: {error}.", hint=hint) from None
