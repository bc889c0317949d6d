"""Prefill speed at 2K and 8K tokens against llama.cpp, vLLM CPU and transformers, on the same weights.

    python -m bench.prefill [--quick] [--json FILE]

Every round gives every engine the same fresh text; the seconds run from the prompt to its first greedy token.
A full run takes about 13 minutes on two cores (llama.cpp alone needs a minute for each 8K prompt).
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
    live_engines,
    prefill_turn,
    tape,
)

ENGINES = (OURS, "llamacpp", "vllm", "transformers")
BARS = {
    "vs_llamacpp_2k": Bar(at_least=3.0),
    "vs_llamacpp_8k": Bar(at_least=3.0),
    "vs_vllm_2k": Bar(at_least=1.3),
    "vs_vllm_8k": Bar(at_least=1.3),
    "vs_transformers_2k": Bar(at_least=1.0),
    "vs_transformers_8k": Bar(at_least=1.0),
}


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options("Prefill tokens per second against the peers.", argv, engines=ENGINES)
    started_s = time.perf_counter()
    machine = Machine(THREADS)
    try:
        with loaded(live_engines(options), THREADS, MAX_CONTEXT_TOKENS) as workers:
            readings = _measure(workers, options, machine, started_s)
        recorded = add_recorded(readings, options, ["prefill_2k", "prefill_8k"], "gemm_gflops", machine)
    finally:
        machine.close()
    result = begin("prefill", readings, machine.calibration, options, recorded=recorded)
    for key in BARS:
        _, peer, size = key.split("_")
        compare(result, key, ratios(readings, peer, f"prefill_{size}"))
    finish(result, BARS, options)


def _measure(workers: dict[str, Worker], options: Options, machine: Machine, started_s: float) -> list[Reading]:
    text = tape()
    for worker in workers.values():
        worker.call("prefill", 400, token_ids=text.take(SIZES["512"]))  # threads, code paths, allocator
    plan = {"2k": 2, "8k": 1} if options.quick else {"2k": options.rounds, "8k": options.rounds}
    readings: list[Reading] = []
    for size, rounds in plan.items():
        if options.quick and readings and _too_long(readings, size, started_s):
            continue
        prompts = [text.take(SIZES[size]) for _ in range(rounds)]
        readings += interleave(workers, rounds, f"prefill_{size}", prefill_turn(prompts), machine)
    return readings


def _too_long(readings: Sequence[Reading], size: str, started_s: float) -> bool:
    """Whether a prompt of this size would break the promise of --quick on a slow or busy machine."""
    expected_s = 1.5 * SIZES[size] / readings[-1].rate
    return time.perf_counter() - started_s + expected_s > QUICK_BUDGET_S


if __name__ == "__main__":
    main()
