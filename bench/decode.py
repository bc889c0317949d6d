"""Decode speed at 512 and 8K tokens of context against llama.cpp and vLLM CPU, on the same weights.

    python -m bench.decode [--quick] [--json FILE]

Greedy, one sequence. The context is prefilled once per engine; each round decodes from its end again, engine by
engine, and the first token (prefill's) doesn't count. A full run takes about five minutes on two cores.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.driver import OURS, Machine, Reading, Worker, interleave, loaded
from bench.report import Bar, Options, begin, compare, finish, parse_options, ratios
from bench.speed import (
    MAX_CONTEXT_TOKENS,
    QUICK_BUDGET_S,
    SIZES,
    THREADS,
    add_recorded,
    decode_turn,
    live_engines,
    tape,
)

ENGINES = (OURS, "llamacpp", "vllm")
BARS = {
    "vs_llamacpp_512": Bar(at_least=0.8),
    "vs_llamacpp_8k": Bar(at_least=1.1),
    "vs_vllm_512": Bar(at_least=1.5),
    "vs_vllm_8k": Bar(at_least=1.5),
}
_NEW_TOKENS = 65  # 64 steps count
_QUICK_NEW_TOKENS = 33
_LONGER = 20
"""How many times longer the first turn at 8K takes than at 512, and the rounds after it."""


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options("Decode tokens per second against the peers.", argv, rounds=7, engines=ENGINES)
    started_s = time.perf_counter()
    machine = Machine(THREADS)
    try:
        with loaded(live_engines(options), THREADS, MAX_CONTEXT_TOKENS) as workers:
            readings = _measure(workers, options, machine, started_s)
        recorded = add_recorded(readings, options, ["decode_512", "decode_8k"], "read_gb_s", machine)
    finally:
        machine.close()
    result = begin("decode", readings, machine.calibration, options, recorded=recorded)
    for key in BARS:
        _, peer, size = key.split("_")
        compare(result, key, ratios(readings, peer, f"decode_{size}"))
    finish(result, BARS, options)


def _measure(workers: dict[str, Worker], options: Options, machine: Machine, started_s: float) -> list[Reading]:
    text = tape()
    new_tokens = _QUICK_NEW_TOKENS if options.quick else _NEW_TOKENS
    rounds = 3 if options.quick else options.rounds
    readings: list[Reading] = []
    spent_s = 0.0
    for size in ("512", "8k"):
        if options.quick and time.perf_counter() - started_s + _LONGER * spent_s > QUICK_BUDGET_S:
            continue  # a slow or busy machine: the figure stays empty
        begun_s = time.perf_counter()
        turn = decode_turn(text.take(SIZES[size]), new_tokens)
        for worker in workers.values():
            turn(worker, 0)  # prefills the context
        spent_s = time.perf_counter() - begun_s
        readings += interleave(workers, rounds, f"decode_{size}", turn, machine)
    return readings


if __name__ == "__main__":
    main()
