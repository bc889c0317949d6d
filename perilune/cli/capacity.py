"""`perilune capacity`: what one replica holds of a trace's load, and how many replicas a load needs (spec O5).

Knows the simulator, and how to search for a rate; nothing here was measured, and everything it prints says so. A
replica *holds* a rate where the asked share of P0, and of P1, has its first token within the class's seconds. A
rate below the load is a random share of it, as a balancer that knows no prefixes would give to one of several
replicas; a higher one is the load with its arrivals pressed together. Each seed plays another part of the trace.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from math import ceil, log, log1p
from pathlib import Path
from statistics import mean

from perilune.cli import simulate
from perilune.cli.console import StatusLine, print_json, say
from perilune.core import ServiceClass
from perilune.engine.compare import interval, policy_named
from perilune.engine.simulator import Machine, Outcome, Simulation
from perilune.engine.traces import TraceRequest, read_trace
from perilune.errors import InvalidRequest, PeriluneError

LEAST_REQUESTS = 200
"""In a run, however slow the rate: of fewer, one late answer would decide."""

STEP, ENOUGH = 1.5, 1.12
"""A search goes up or down by the one until a rate holds and the next doesn't, and halves that ratio until it is at
most the other: 12 %, about what the seeds differ by."""

LEAST_SHARE = 0.01
"""Of the rate that lone requests allow: slower ones aren't tried."""

MOST_PER_S = 1e6
"""Of a load: a trace that comes faster has all its requests at once."""

LONE_GAP_S = 3600.0
SHORT_TOKENS, SHORT_SHARE = 4096, 0.95
FAST_S = 0.05
SHORT = (
    f"at least {SHORT_SHARE:.0%} of the trace's contexts are shorter than {SHORT_TOKENS:,} tokens: long-context "
    "serving isn't what it needs. A server for short prompts does it with less."
)
FAST = f"first tokens within {FAST_S * 1000:.0f} ms: serving that plans for long contexts isn't made for that."


class NotHeld(PeriluneError):
    """No rate is held, however many replicas there are."""

    code = "not_held"


@dataclass(frozen=True, slots=True)
class Options:
    """`load` in requests a second; None: the trace's own. `minutes` are simulated ones of a run, `time_limit_s`
    real seconds for everything."""

    load: float | None
    attainment: float
    machine: str
    policy: str
    seeds: int
    minutes: float
    p0_s: float
    p1_s: float
    time_limit_s: float
    as_json: bool

    @property
    def limits_s(self) -> dict[ServiceClass, float]:
        return {ServiceClass.P0_INTERACTIVE: self.p0_s, ServiceClass.P1_DOCUMENT: self.p1_s}


@dataclass(frozen=True, slots=True)
class Found:
    """Of one seed, in requests a second: the highest rate that held, and the lowest that didn't (None: time was up
    before one was found)."""

    seed: int
    held: float
    missed: float | None
    runs: int

    @property
    def narrow(self) -> bool:
        return self.missed is not None and self.missed <= self.held * ENOUGH


class _OutOfTime(Exception):
    """A run was given up."""


class _TooManyMissed(Exception):
    """The rest of a run can't change what it tells."""


def run(traces: Sequence[Path], options: Options) -> None:
    """Raises `InvalidRequest` for what isn't known, and where the time limit is too short to find anything;
    `NotHeld` where no number of replicas would do."""
    machine = simulate.machine_named(options.machine)
    policy_named(options.policy)  # before anything takes time
    requests = sorted((r for path in traces for r in read_trace(path)), key=lambda r: r.arrival_s)
    if not any(r.service_class in options.limits_s for r in requests):
        raise InvalidRequest(
            "All requests of the trace are batch work (P2), which may wait: any replica holds it.",
            hint="Give a trace with P0 or P1.",
        )
    load = own_rate(requests) if options.load is None else options.load
    status, found, begin = StatusLine(quiet=options.as_json), list[Found](), time.monotonic()
    try:
        for seed in range(options.seeds):
            until = begin + options.time_limit_s * (seed + 1) / options.seeds
            search = Search(machine, options, requests, load, seed, until, status)
            found.append(search.run(found[-1].held if found else None))
    finally:
        status.clear()
    _show(machine, options, found, load, advice(requests, options))


def own_rate(requests: Sequence[TraceRequest]) -> float:
    """Requests a second. Raises `InvalidRequest` where a trace has no length in time."""
    if len(requests) > MOST_PER_S * requests[-1].arrival_s:
        raise InvalidRequest(
            "All requests of the trace arrive at once, so it has no rate.",
            hint="Name the load: --requests-per-second 2.",
        )
    return len(requests) / requests[-1].arrival_s


def advice(requests: Sequence[TraceRequest], options: Options) -> list[str]:
    """When not to use this: sentences, none where nothing speaks against it."""
    short = sum(r.prompt_tokens + r.new_tokens < SHORT_TOKENS for r in requests)
    told = [SHORT] if short >= SHORT_SHARE * len(requests) else []
    return told + ([FAST] if options.p0_s <= FAST_S else [])


@dataclass(slots=True)
class Search:
    """For the highest rate that one replica holds, of one seed. `until` is on the monotonic clock."""

    machine: Machine
    options: Options
    requests: Sequence[TraceRequest]
    load: float
    seed: int
    until: float
    status: StatusLine
    runs: int = 0

    def run(self, guess: float | None) -> Found:
        """From `guess` on, or from half of what lone requests' times allow. Raises as `capacity.run` does."""
        held = missed = None
        try:
            lone = self._alone()
            rate = lone if guess is None else guess
            while missed is None or held is None or missed > held * ENOUGH:
                if self.holds(rate):
                    held = rate
                else:
                    missed = rate
                if held is None:
                    rate /= STEP
                else:
                    rate = held * STEP if missed is None else (held * missed) ** 0.5
                if rate < lone * LEAST_SHARE:
                    raise self._not_held(f"at {rate:.2g} requests/s")
        except _OutOfTime:
            if held is None:
                raise InvalidRequest(
                    f"No rate was found that holds within {self.options.time_limit_s:g} s.",
                    hint="Raise --time-limit, or simulate fewer --minutes.",
                ) from None
        return Found(self.seed, held, missed, self.runs)

    def holds(self, rate: float) -> bool:
        """Whether both classes are kept at this rate."""
        self._tell(f"{rate:.3g} requests/s")
        self.runs += 1
        try:
            self._play(part(self.requests, self.options, self.seed, self.load, rate))
        except _TooManyMissed:
            return False
        return True

    def _alone(self) -> float:
        """Each request by itself: half of the rate at which their prompts would fill the time. Raises `NotHeld`
        where not even these are in time."""
        self._tell("one request at a time")
        played = part(self.requests, self.options, self.seed, self.load, self.load)[:LEAST_REQUESTS]
        try:
            outcomes = self._play(
                [replace(r, arrival_s=n * LONE_GAP_S, new_tokens=1) for n, r in enumerate(played)]
            )
        except _TooManyMissed:
            raise self._not_held("when nobody else is served") from None
        return 0.5 / max(1e-6, mean(o.ttft_s for o in outcomes if o.ttft_s is not None))

    def _tell(self, what: str) -> None:
        self.status.update("simulating", f"seed {self.seed + 1} of {self.options.seeds}, {what}")

    def _not_held(self, when: str) -> NotHeld:
        return NotHeld(
            f"No number of replicas holds {self.options.attainment:.0%} (simulated): too many requests of this "
            f"trace are late on {self.machine.name} even {when}.",
            hint="Allow more time (--p0, --p1), ask for less (--attainment), or name another --machine.",
        )

    def _play(self, played: Sequence[TraceRequest]) -> list[Outcome]:
        """Raises `_TooManyMissed` and `_OutOfTime`."""
        watch = _Watch(self.options, played, self.until)
        simulation = Simulation(
            self.machine, policy_named(self.options.policy), plan=watch.plan, first_token=watch.first_token
        )
        # Whoever has no first token by then is late; how long answers go on doesn't matter.
        end_s = played[-1].arrival_s + max(self.options.limits_s.values())
        outcomes = simulation.run(played, end_s)
        watch.judge(outcomes)
        return outcomes


@dataclass(slots=True)
class _Watch:
    """Ends a run by an exception, on an arrival, once its result is known or time is up."""

    options: Options
    played: Sequence[TraceRequest]
    until: float
    late: dict[ServiceClass, int] = field(init=False)
    allowed: dict[ServiceClass, float] = field(init=False)

    def __post_init__(self) -> None:
        may = 1 - self.options.attainment + 1e-9
        self.late = dict.fromkeys(self.options.limits_s, 0)
        self.allowed = {c: may * sum(r.service_class is c for r in self.played) for c in self.options.limits_s}

    def plan(self, request: TraceRequest) -> TraceRequest:
        if time.monotonic() > self.until:
            raise _OutOfTime
        if any(self.late[c] > self.allowed[c] for c in self.late):
            raise _TooManyMissed
        return request

    def first_token(self, outcome: Outcome) -> None:
        limit_s = self.options.limits_s.get(outcome.request.service_class)
        if limit_s is not None and not outcome.within(limit_s):
            self.late[outcome.request.service_class] += 1

    def judge(self, outcomes: Sequence[Outcome]) -> None:
        for service_class, seconds in self.options.limits_s.items():
            of_class = [o for o in outcomes if o.request.service_class is service_class]
            if sum(not o.within(seconds) for o in of_class) > self.allowed[service_class]:
                raise _TooManyMissed


def part(
    requests: Sequence[TraceRequest], options: Options, seed: int, load: float, rate: float
) -> list[TraceRequest]:
    """What one replica gets at `rate` of a trace that comes at `load`, both in requests a second: `options.minutes`
    of it from a random moment on, at least `LEAST_REQUESTS`. A trace that is too short is played again and again,
    each time with prefixes of its own."""
    number = max(LEAST_REQUESTS, round(rate * options.minutes * 60))
    drawn = simulate.excerpt(requests, _whole(options, requests[-1].arrival_s), seed)
    kept = list(islice(_endless(drawn, rate / load, random.Random(seed)), number))
    stretch = number / rate / max(1e-9, kept[-1].arrival_s)
    return [replace(r, arrival_s=r.arrival_s * stretch) for r in kept]


def _endless(drawn: Sequence[TraceRequest], share: float, chance: random.Random) -> Iterator[TraceRequest]:
    """A random share of a part that comes again and again, a mean gap behind its end. What isn't taken is skipped
    in one step: of a very high load next to nothing is."""
    span_s = (drawn[-1].arrival_s or 1.0) * (1 + 1 / len(drawn))
    ids = 1 + max((number for r in drawn for number in r.hash_ids), default=0)
    at = -1
    while True:
        at += 1 if share >= 1 else 1 + int(log(1.0 - chance.random()) / log1p(-share))
        turn, place = divmod(at, len(drawn))
        r = drawn[place]
        names = tuple(turn * ids + number for number in r.hash_ids)
        yield replace(r, arrival_s=r.arrival_s + turn * span_s, hash_ids=names)


def _whole(options: Options, span_s: float) -> simulate.Options:
    """What `simulate.excerpt` wants to be told for all of a trace."""
    return simulate.Options(
        machine=options.machine,
        policies=[options.policy],
        seeds=options.seeds,
        minutes=span_s / 60 + 1,
        scale=1.0,
        p0_s=options.p0_s,
        p1_s=options.p1_s,
        batch_share=0.0,
        tenants=1,
        as_json=True,
    )


def _show(machine: Machine, options: Options, found: Sequence[Found], load: float, told: Sequence[str]) -> None:
    rates = interval([each.held for each in found])
    needed = [ceil(load / each.held) for each in found]
    narrow = all(each.narrow for each in found)
    if options.as_json:
        print_json(
            {
                "simulated": True,
                "machine": machine.name,
                "policy": options.policy,
                "attainment": options.attainment,
                "p0_s": options.p0_s,
                "p1_s": options.p1_s,
                "requests_per_second": asdict(rates),
                "seeds": [asdict(each) for each in found],
                "load_requests_per_second": load,
                "replicas": max(needed),
                "replicas_by_seed": needed,
                "narrow": narrow,
                "advice": list(told),
            }
        )
        return
    say(f"SIMULATED on {machine.name}: {len(found)} seeds, mean with a 95 % interval; nothing here was measured.")
    say(
        f"A rate is held where {options.attainment:.0%} of P0 start within {options.p0_s:g} s, and of P1 within "
        f"{options.p1_s:g} s."
    )
    seeds = ", ".join(f"{each.held:.3g}" for each in found)
    print(
        f"One replica holds {rates.mean:.3g} requests/s ±{rates.high - rates.mean:.2g} (simulated; seeds: {seeds})."
    )
    whose = ", the trace's own rate," if options.load is None else ""
    print(f"{load:.3g} requests/s{whose} need {_replicas(needed)} (simulated).")
    if not narrow:
        say("note: time was up before every rate was narrowed down; they may be higher. --time-limit gives more.")
    for sentence in told:
        say(f"advice: {sentence}")


def _replicas(needed: Sequence[int]) -> str:
    most, least = max(needed), min(needed)
    spread = "" if most == least else f", {least} in the easiest part of the trace"
    return f"{most} replica{'s' if most > 1 else ''}{spread}"
