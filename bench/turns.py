"""A million turns in small writes: whether memory stays flat, and how soon a turn is found.

    python -m bench.turns [--turns N] [--write N] [--minutes M] [--json FILE]

Memory as the service uses it (SQLite that syncs, LanceDB with its upkeep in a process of its own, what
`memory/resident.py` holds until there is too much), without an embedder: by words only. `--write` turns go into
each write, 100 sessions take turns. After every 2 % of the turns the heap's free pages are given back and the
process's own bytes are read; a search goes in between. `slope_bytes_per_turn` is told with its 95 % interval, from
the place on where the copy in memory has been let go. `visible_p95_ms`: from the call that stores a turn to the end
of the first search that finds it, one a slice.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bench.driver import say
from bench.gateway import own_bytes
from bench.machine import CpuClock, describe
from bench.report import Bar, Result, finish, parse_options
from bench.slope import MIN_SAMPLES, slope
from perilune.cli.heap import limit_arenas, trim
from perilune.memory.indexer import Indexer
from perilune.memory.memory import INDEX_FOLDER, Memory, Turn
from perilune.memory.resident import Resident
from perilune.memory.scope import Scope
from perilune.memory.store import Store
from perilune.memory.vectors import upkeep
from perilune.memory.vectors.lance import LanceIndex

BARS = {
    "visible_p95_ms": Bar(at_most=50.0, unit="ms"),
    "slope_bytes_per_turn": Bar(at_most=8.0, unit="bytes"),
}
TURNS = 1_000_000
SLICES = 50
SESSIONS = 100
COPY = 50_000
"""Entries that the copy in memory may hold here, so that it is let go early: what it takes is known."""

_VOCABULARY = 5_000
_FIND_S = 10.0
_TENANT = "bench"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--write", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=240.0)
    given, rest = parser.parse_known_args(argv)
    options = parse_options("A million turns. Also: --turns N, --write N, --minutes M.", rest)
    limit_arenas()
    clock = CpuClock.now([os.getpid()])
    result = Result("turns", {}, describe(), [], quick=options.quick)
    turns = given.turns // 50 if options.quick else given.turns
    with tempfile.TemporaryDirectory() as home:
        said, held, visible = _write(Path(home), turns, given.write, 60 * given.minutes)
    result.figures["visible_p95_ms"] = round(float(np.quantile(visible, 0.95)), 1)
    result.notes.append(f"{said[-1]:,} turns, {given.write} a write; visible p50 {np.median(visible):.1f} ms")
    told = [f"{count:,}: {own >> 20}" for count, own in zip(said, held, strict=True)]
    result.notes.append("own MiB after turns: " + ", ".join(told))
    settled = [at for at, count in enumerate(said) if count > COPY]
    if len(settled) >= MIN_SAMPLES:
        found = slope([said[at] for at in settled], [held[at] for at in settled])
        result.figures["slope_bytes_per_turn"] = round(found.estimate, 2)
        result.spread["slope_bytes_per_turn"] = (round(found.low, 2), round(found.high, 2))
    result.machine["foreign_share"] = round(CpuClock.now([os.getpid()]).foreign_share(clock), 3)
    finish(result, BARS, options)


def _write(home: Path, turns: int, each: int, limit_s: float) -> tuple[list[int], list[int], list[float]]:
    """(turns stored, own bytes then, milliseconds until one was found), once a slice."""
    store = Store(home)
    index = LanceIndex(home / INDEX_FOLDER, "none", 1)
    indexer = Indexer(store, index, None, partial(upkeep.run, home / INDEX_FOLDER, "none", 1))
    memory = Memory(store, index, None, indexer=indexer, resident=Resident(store, most=COPY))
    memory.start()
    rng = np.random.default_rng(0)
    words = np.array([f"word{number:x}" for number in range(_VOCABULARY)])
    said: list[int] = []
    held: list[int] = []
    visible: list[float] = []
    end_s, written = time.monotonic() + limit_s, 0
    try:
        while written < turns and time.monotonic() < end_s:
            until = written + turns // SLICES
            while written < until:
                texts = [" ".join(words[rng.zipf(1.3, 8) % _VOCABULARY].tolist()) for _ in range(each)]
                session = f"s{(written // each) % SESSIONS}"
                memory.add_turns(_TENANT, session, [Turn("user", text, float(written)) for text in texts])
                written += each
            visible.append(_found(memory, written))
            written += 1
            trim()
            said.append(written)
            held.append(own_bytes(os.getpid()))
            say(f"{written:,} turns, {held[-1] >> 20} MiB, found after {visible[-1]:.1f} ms")
    finally:
        memory.close()
        store.close()
    return said, held, visible


def _found(memory: Memory, number: int) -> float:
    """Milliseconds from storing a turn to finding it."""
    begun_s = time.perf_counter()
    memory.add_turns(_TENANT, "asked", [Turn("user", f"The berth is marker{number}.", float(number))])
    while time.perf_counter() - begun_s < _FIND_S:
        hits = memory.search(f"marker{number}", Scope(_TENANT), 1).hits
        if hits and f"marker{number}." in hits[0].text:
            return 1000 * (time.perf_counter() - begun_s)
    raise RuntimeError(f"turn {number} was not found within {_FIND_S:.0f} s")


if __name__ == "__main__":
    main()
