"""What the speed benches share: sizes, the turns, and the choice between live and recorded peers."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bench import peers
from bench.corpus import TokenTape
from bench.driver import OURS, Machine, Reading, Turn, Worker
from bench.machine import Calibration
from bench.report import Options, Scale, recorded_readings

SIZES = {"512": 512, "2k": 2048, "8k": 7680}
"""Prompt tokens by the name that figures use. "8K" leaves room for an answer in an 8,192-token window."""

MAX_CONTEXT_TOKENS = 8192
THREADS = min(2, len(os.sched_getaffinity(0)))
TURN_TIMEOUT_S = 400.0
QUICK_BUDGET_S = 36.0
"""From which second on a --quick run begins nothing more, so that it ends within 45 s with what it has."""


def tape() -> TokenTape:
    return TokenTape.load(peers.model_safetensors() / "tokenizer.json")


def live_engines(options: Options) -> list[str]:
    """With --quick only ours runs; peers come from the recorded readings."""
    if not options.quick:
        return list(options.engines)
    return [engine for engine in options.engines if engine == OURS]


def add_recorded(
    readings: list[Reading], options: Options, whats: Sequence[str], scale: Scale, machine: Machine
) -> bool:
    """With --quick, append the recorded peers' readings, scaled to this machine. True if any was used."""
    if not options.quick:
        return False
    mine = [reading for reading in readings if reading.what in whats]
    found = [
        reading
        for peer in options.engines
        if peer != OURS
        for reading in recorded_peer(peer, mine, scale, machine.calibration)
    ]
    readings += found
    return bool(found)


def recorded_peer(peer: str, readings: Sequence[Reading], scale: Scale, now: Calibration) -> list[Reading]:
    """A peer's recorded readings for whatever ours were read of, one for each round, scaled to this machine."""
    rounds = {r.what: 1 + max(o.round for o in readings if o.what == r.what) for r in readings}
    return [
        reading for what, count in rounds.items() for reading in recorded_readings(peer, what, scale, now, count)
    ]


def prefill_turn(prompts: Sequence[list[int]]) -> Turn[Worker]:
    """Round n computes `prompts[n]`, the same for every engine and never seen before."""

    def turn(worker: Worker, number: int) -> tuple[int, float]:
        reply = worker.call("prefill", TURN_TIMEOUT_S, token_ids=prompts[number])
        return len(prompts[number]), reply["seconds"]

    return turn


def decode_turn(prompt: list[int], new_tokens: int) -> Turn[Worker]:
    """Every round continues the same prompt, whose KV the engine keeps; only the steps after the first count."""

    def turn(worker: Worker, number: int) -> tuple[int, float]:
        reply = worker.call("decode", TURN_TIMEOUT_S, token_ids=prompt, new_tokens=new_tokens)
        return len(reply["seconds"]), sum(reply["seconds"])

    return turn
