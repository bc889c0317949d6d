"""Whole decode steps at long contexts: tiered KV with hybrid attention, against our own bf16 dense and llama.cpp.

    python -m bench.long_decode [--quick] [--json FILE] [--rounds N] [--engines a,b]

The default model with its own weights, one sequence, greedy, at 8K, 32K, 64K and 128K tokens of context: far past
the 8K it was trained for, so speed is all that this says. Nothing was prefilled: our KV is random (`synthetic_kv`,
heads select as many units as its `BUDGETS`), llama.cpp's (q8_0) repeats the rows of a short prompt. So llama.cpp is
measured at 128K itself, not extrapolated. Our step is the runtime's under the default attention policy, without the
engine loop; llama.cpp's is `llama_decode`. A full run takes about six minutes on two cores and 8 GB.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

from bench import peers
from bench.driver import Machine, Reading, Worker, interleave, say
from bench.report import (
    Bar,
    Options,
    Result,
    compare,
    finish,
    foreign_share,
    parse_options,
    rates,
    ratios,
    runs,
    summarise,
)
from bench.speed import QUICK_BUDGET_S, THREADS, decode_turn

TIERED, DENSE, LLAMACPP = "perilune_long", "perilune_dense", "llamacpp_long"
ENGINES = (TIERED, DENSE, LLAMACPP)
SIZES = {"8k": 8192, "32k": 32_768, "64k": 65_536, "128k": 131_072}
BARS = {
    "vs_own_dense_32k": Bar(at_least=2.5),
    "vs_own_dense_128k": Bar(at_least=6),
    "vs_llamacpp_8k": Bar(at_least=1.5),
    "vs_llamacpp_32k": Bar(at_least=5),
    "vs_llamacpp_128k": Bar(at_least=10),
    "itl_64k_over_8k": Bar(at_most=1.3),
}
_PEERS = {"own_dense": DENSE, "llamacpp": LLAMACPP}
_NEW_TOKENS = {TIERED: 17, DENSE: 9, LLAMACPP: 5}
"""Steps of a turn, and one more; llama.cpp's take up to a second each."""

_LOAD_TIMEOUT_S = 600


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options("Decode steps at long contexts.", argv, engines=ENGINES)
    started_s = time.perf_counter()
    machine = Machine(THREADS)
    try:
        readings = _measure(options, machine, started_s)
    finally:
        machine.close()
    share = foreign_share(readings)
    result = Result("long_decode", {}, summarise(machine.calibration, share), runs(readings), quick=options.quick)
    for key in BARS:
        compare(result, key, _ratios(readings, key))
    for size in SIZES:
        for engine in ENGINES:
            found = rates(readings, engine, size)
            if found:
                result.figures[f"{engine}_{size}_ms"] = round(1000 / median(found.values()), 2)
    result.notes.append("KV is made up: speed only")
    finish(result, BARS, options)


def _ratios(readings: Sequence[Reading], key: str) -> list[float]:
    if key == "itl_64k_over_8k":
        short, long = rates(readings, TIERED, "8k"), rates(readings, TIERED, "64k")
        return [short[number] / long[number] for number in sorted(short.keys() & long.keys())]
    peer, _, size = key.removeprefix("vs_").rpartition("_")
    return ratios(readings, _PEERS[peer], size, ours=TIERED)


def _measure(options: Options, machine: Machine, started_s: float) -> list[Reading]:
    """Every size in turn. --quick ends with 32K, and begins nothing that would not end in time."""
    sizes = {size: count for size, count in SIZES.items() if not options.quick or count <= SIZES["32k"]}
    readings: list[Reading] = []
    with ExitStack() as stack:
        workers = {engine: _start(engine, stack, max(sizes.values())) for engine in options.engines}
        for size, count in sizes.items():
            if options.quick and time.perf_counter() - started_s > QUICK_BUDGET_S:
                break
            say(f"filling {size}")
            turn = partial(_turn, tokens=count)
            for worker in workers.values():
                turn(worker, 0)
            rounds = 2 if options.quick else options.rounds
            readings += interleave(workers, rounds, size, turn, machine)
    return readings


def _start(engine: str, stack: ExitStack, max_tokens: int) -> Worker:
    """A worker with the default model, in the environment that the engine needs."""
    python, environment = Path(sys.executable), dict[str, str]()
    if engine == LLAMACPP:
        peer = peers.PEERS["llamacpp"]
        python, environment = peers.ensure(peer), peer.environment
    worker = Worker(engine, python, environment)
    stack.callback(worker.close)
    model = str(peers.model_gguf())
    reply = worker.call("load", _LOAD_TIMEOUT_S, model=model, threads=THREADS, max_context_tokens=max_tokens)
    say(f"{engine} loaded in {reply['seconds']:.1f} s")
    return worker


def _turn(worker: Worker, number: int, tokens: int) -> tuple[int, float]:
    return decode_turn([1] * tokens, _NEW_TOKENS[worker.engine])(worker, number)


if __name__ == "__main__":
    main()
