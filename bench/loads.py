"""Simulated loads: arrivals with bursts, lengths drawn from public traces, classes and tenants by shares.

Knows the trace files of the data folder (`PERILUNE_BENCH_DATA`, else `shared/data` beside the project). Every load
is a function of its seed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perilune.core import ServiceClass
from perilune.engine.traces import DOCUMENT_TOKENS, TraceRequest, read_trace
from perilune.errors import InvalidRequest

DATA_VARIABLE = "PERILUNE_BENCH_DATA"
P0_S, P1_S = 3.0, 30.0
DEADLINE_S = {ServiceClass.P0_INTERACTIVE: P0_S, ServiceClass.P1_DOCUMENT: P1_S, ServiceClass.P2_BATCH: None}

_CYCLE_S, _BURST_S = 120.0, 30.0


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of P0 and P1 (the rest is P2), tenants with equal shares, and how much denser arrivals come in the 30
    s of every two minutes that are a burst (the mean rate stays)."""

    p0: float = 0.80
    p1: float = 0.12
    tenants: int = 10
    burst: float = 2.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Requests whose lengths are drawn: P0 from the short ones, P1 and P2 from the long ones."""

    short: Sequence[TraceRequest]
    long: Sequence[TraceRequest]


def data_folder() -> Path:
    given = os.environ.get(DATA_VARIABLE)
    return Path(given) if given else Path(__file__).resolve().parents[2] / "shared" / "data"


def lengths() -> Lengths:
    """Azure's conversations, and Mooncake's of 8K tokens and more. Raises `InvalidRequest` without the files."""
    folder = data_folder()
    try:
        short = read_trace(folder / "azure_llm_2023_conv.csv")
        long = read_trace(folder / "mooncake_conversation_trace.jsonl")
    except InvalidRequest as error:
        raise InvalidRequest(error.message, hint=f"Set {DATA_VARIABLE} to the folder with the traces.") from None
    return Lengths(short, [request for request in long if request.prompt_tokens >= DOCUMENT_TOKENS])


def load(rate: float, seconds: float, seed: int, mix: Mix, drawn: Lengths) -> list[TraceRequest]:
    """`rate` requests a second for so long: a Poisson process whose rate has bursts."""
    chance, now_s = random.Random(seed), 0.0
    made: list[TraceRequest] = []
    calm = (_CYCLE_S - mix.burst * _BURST_S) / (_CYCLE_S - _BURST_S)
    while True:
        now_s += chance.expovariate(rate * (mix.burst if now_s % _CYCLE_S < _BURST_S else calm))
        if now_s > seconds:
            return made
        made.append(_request(now_s, chance, mix, drawn))


def _request(now_s: float, chance: random.Random, mix: Mix, drawn: Lengths) -> TraceRequest:
    place = chance.random()
    number = 0 if place < mix.p0 else 1 if place < mix.p0 + mix.p1 else 2
    service_class = ServiceClass(number)
    like = chance.choice(drawn.short if number == 0 else drawn.long)
    tenant = f"tenant-{chance.randrange(mix.tenants)}"
    return TraceRequest(
        now_s, like.prompt_tokens, like.new_tokens, service_class, tenant, DEADLINE_S[service_class]
    )


def flooded(
    quiet: Sequence[TraceRequest], share: float, seconds: float, seed: int, drawn: Lengths
) -> list[TraceRequest]:
    """With one tenant more, whose document requests are `share` of all document requests, in order of arrival."""
    chance = random.Random(seed + 1_000_000)
    count = sum(r.service_class is ServiceClass.P1_DOCUMENT for r in quiet)
    more = round(count * share / (1 - share))
    p1 = ServiceClass.P1_DOCUMENT
    flood = []
    for _ in range(more):
        like = chance.choice(drawn.long)
        flood.append(
            TraceRequest(chance.uniform(0, seconds), like.prompt_tokens, like.new_tokens, p1, "flood", P1_S)
        )
    return sorted([*quiet, *flood], key=lambda r: r.arrival_s)
