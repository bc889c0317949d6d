"""Whole decode steps at long contexts: tiered KV with hybrid attention, against our own bf16 dense and llama.cpp.

    python -m bench.long_decode [--quick] [--json FILE] [--rounds N] [--engines a,b]

The default model with its own weights, stored alike (Q4_1) for all three, one sequence, greedy, at 4K to 128K
tokens of context: far past the 8K it was trained for, so speed is all that this says. Nothing was prefilled: our KV
is random (`synthetic_kv`), and its heads select as many units as on real text (`bench.selection`); llama.cpp's
(q8_0) repeats the rows of a short prompt. Everything lies in RAM, COLD too. Our step is the runtime's under the
default attention policy, without the engine loop; llama.cpp's is `llama_decode`.

llama.cpp at 128K is extrapolated by its slope between 8K and 32K. It is measured, too (`llamacpp_long_128k_ms`);
where that is the less, it stands. `itl_64k_over_8k` takes its two turns one after the other. With --quick llama.cpp
is recorded. A full run takes about eight minutes on two cores and 9 GB.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from bench import peers
from bench.driver import Machine, Reading, Worker, interleave, say
from bench.report import Bar, Options, begin, compare, finish, parse_options, rates, ratios
from bench.speed import QUICK_BUDGET_S, THREADS, decode_turn, recorded_peer
from bench.synthetic_kv import Selection

TIERED, DENSE, LLAMACPP = "perilune_long", "perilune_dense", "llamacpp_long"
ENGINES = (TIERED, DENSE, LLAMACPP)
SIZES = {"4k": 4096, "8k": 8192, "16k": 16_384, "32k": 32_768, "64k": 65_536, "128k": 131_072}
BARS = {
    "vs_own_dense_32k": Bar(at_least=2.5),
    "vs_own_dense_128k": Bar(at_least=6),
    "vs_llamacpp_4k": Bar(at_least=1),
    "vs_llamacpp_8k": Bar(at_least=1.5),
    "vs_llamacpp_16k": Bar(at_least=1),
    "vs_llamacpp_32k": Bar(at_least=5),
    "vs_llamacpp_64k": Bar(at_least=1),
    "vs_llamacpp_128k": Bar(at_least=10),
    "itl_64k_over_8k": Bar(at_most=1.3),
}
_PEERS = {"own_dense": DENSE, "llamacpp": LLAMACPP}
_DENSE_SIZES = ("32k", "128k")
_NEW_TOKENS = {TIERED: 33, DENSE: 9, LLAMACPP: 5}
"""Steps of a turn, and one more; llama.cpp's take up to a second each."""
_ITL = {"itl_8k": SIZES["8k"], "itl_64k": SIZES["64k"]}
_QUICK_ROUNDS, _QUICK_GAUGE = 2, "4k"
"""--quick calibrates the machine at one size only: a reading takes a second."""
_LOAD_TIMEOUT_S = 600


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options("Decode steps at long contexts.", argv, engines=ENGINES)
    started_s = time.perf_counter()
    machine = Machine(THREADS)
    try:
        readings = _measure(options, machine, started_s)
    finally:
        machine.close()
    if recorded := options.quick and LLAMACPP in options.engines:
        readings += recorded_peer(LLAMACPP, readings, "read_gb_s", machine.calibration)
    result = begin("long_decode", readings, machine.calibration, options, recorded=recorded)
    for key in BARS:
        compare(result, key, figure(readings, key))
    for size in SIZES:
        for engine in ENGINES:
            if found := rates(readings, engine, size):
                result.figures[f"{engine}_{size}_ms"] = round(1000 / median(found.values()), 2)
    result.notes += ["KV is made up: speed only", Selection.load().note, *_note_128k(readings)]
    finish(result, BARS, options)


# ------------------------------------------------------------------------------------------------- figures


def figure(readings: Sequence[Reading], key: str) -> list[float]:
    """A figure in every round in which it was measured."""
    if key == "itl_64k_over_8k":
        short, long = rates(readings, TIERED, "itl_8k"), rates(readings, TIERED, "itl_64k")
        return [short[number] / long[number] for number in sorted(short.keys() & long.keys())]
    peer, _, size = key.removeprefix("vs_").rpartition("_")
    found = ratios(readings, _PEERS[peer], size, ours=TIERED)
    if key != "vs_llamacpp_128k":
        return found
    mine, slope_s = rates(readings, TIERED, size), extrapolated_s(readings)
    by_slope = [mine[number] * slope_s[number] for number in sorted(mine.keys() & slope_s.keys())]
    return min([found, by_slope], key=median) if found and by_slope else by_slope


def extrapolated_s(readings: Sequence[Reading]) -> Mapping[int, float]:
    """Seconds of llama.cpp's step at 128K by round: a straight line through its steps at 8K and 32K."""
    short, long = rates(readings, LLAMACPP, "8k"), rates(readings, LLAMACPP, "32k")
    reach = (SIZES["128k"] - SIZES["8k"]) / (SIZES["32k"] - SIZES["8k"])
    return {
        number: 1 / short[number] + reach * (1 / long[number] - 1 / short[number])
        for number in sorted(short.keys() & long.keys())
    }


def _note_128k(readings: Sequence[Reading]) -> list[str]:
    slope_s, measured = extrapolated_s(readings), rates(readings, LLAMACPP, "128k")
    if not slope_s:
        return []
    note = f"llama.cpp at 128K: {1000 * median(slope_s.values()):.0f} ms extrapolated from 8K and 32K"
    return [note + (f", {1000 / median(measured.values()):.0f} ms measured" if measured else "")]


# ------------------------------------------------------------------------------------------------ the run


def _measure(options: Options, machine: Machine, started_s: float) -> list[Reading]:
    """Every size in turn, then ours at 8K and 64K together. --quick begins nothing that would not end in time."""
    rounds = _QUICK_ROUNDS if options.quick else options.rounds
    readings: list[Reading] = []
    with ExitStack() as stack:
        live = [engine for engine in options.engines if not (options.quick and engine == LLAMACPP)]
        workers = {engine: _start(engine, stack) for engine in live}
        for size, tokens in SIZES.items():
            if options.quick and time.perf_counter() - started_s > QUICK_BUDGET_S:
                return readings
            say(f"filling {size}")
            present = {name: w for name, w in workers.items() if name != DENSE or size in _DENSE_SIZES}
            turn = partial(_turn, tokens=tokens)
            for worker in present.values():
                turn(worker, 0)
            gauge = machine if not options.quick or size == _QUICK_GAUGE else None
            readings += interleave(present, rounds, size, turn, gauge)
        if TIERED in workers:
            readings += _itl({TIERED: workers[TIERED]}, rounds)
    return readings


def _itl(workers: Mapping[str, Worker], rounds: int) -> list[Reading]:
    readings: list[Reading] = []
    for number in range(rounds):
        for what, tokens in _ITL.items():
            turn = partial(_turn, tokens=tokens)
            readings += [replace(reading, round=number) for reading in interleave(workers, 1, what, turn)]
    return readings


def _start(engine: str, stack: ExitStack) -> Worker:
    """A worker with the default model, in the environment that the engine needs."""
    python, environment = Path(sys.executable), dict[str, str]()
    if engine == LLAMACPP:
        peer = peers.PEERS["llamacpp"]
        python, environment = peers.ensure(peer), peer.environment
    worker = Worker(engine, python, environment)
    stack.callback(worker.close)
    model, most = str(peers.model_gguf()), max(SIZES.values())
    reply = worker.call("load", _LOAD_TIMEOUT_S, model=model, threads=THREADS, max_context_tokens=most)
    say(f"{engine} loaded in {reply['seconds']:.1f} s")
    return worker


def _turn(worker: Worker, number: int, tokens: int) -> tuple[int, float]:
    return decode_turn([1] * tokens, _NEW_TOKENS[worker.engine])(worker, number)


if __name__ == "__main__":
    main()
