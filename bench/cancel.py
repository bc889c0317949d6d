"""How soon the engine stops after a client has gone, in every phase: queued, loading, prefill (alone and beside
another prompt), decode.

    python -m bench.cancel [--quick] [--json FILE]

Against the real server over HTTP. A client drops its connection at a random moment of a phase. Where it was alone,
the server's CPU clock shows from outside when its two cores fall idle (prefill, decode, loading KV from disk).
Where others are served on (queued, shared), the engine's own timestamp tells when it ended the sequence: from then
on nothing is computed for it and its blocks are free (tests/engine/test_leaving.py holds it to that). The metrics
are read once, after a pause, since polling them would take the engine's cores. `p99_ms` is over all samples; 130
without --quick, 26 for each phase.
"""

from __future__ import annotations

import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.corpus import text
from bench.driver import Machine, say
from bench.machine import CpuClock
from bench.report import Bar, Options, Result, finish, parse_options, summarise
from bench.server import PeriluneServer, ServerError, Stream
from bench.speed import THREADS

PHASES = ("queued", "loading", "prefill", "shared", "decode")
BARS = {"p99_ms": Bar(at_most=50.0, unit="ms")} | {
    f"{phase}_p99_ms": Bar(at_most=50.0, unit="ms") for phase in PHASES
}
_WATCH_S = 0.4
"""How long a server is watched after it seems to have stopped; later work would count against it."""
_WINDOW_S = 0.005
_BUSY_SHARE = 0.5
"""Share of one core over `_WINDOW_S` from which the server counts as still working. At work it takes two cores."""
_GIVE_UP_S = 5.0
_SETTLE_S = 0.1
"""From a drop until the metrics are read: twice the bar. A sequence that has not left by then is waited for."""
_LEFT_METRIC = "perilune_engine_last_cancel_timestamp_seconds"
_QUEUE_METRIC = "vllm:num_requests_waiting"
_BATCH_METRIC = "vllm:num_requests_running"
_BATCH = 2
"""Sequences that may run at once."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Characters of the prompts, and a KV pool that holds one of the two documents with its question but not both,
    so that each question loads from disk. A client of `prefill` leaves within `prefill_s`."""

    document_chars: int
    prefill_chars: int
    prefill_s: float
    kv_ram: str


FULL = Sizes(document_chars=12_000, prefill_chars=14_000, prefill_s=1.0, kv_ram="96M")
QUICK = Sizes(document_chars=4_000, prefill_chars=5_000, prefill_s=0.4, kv_ram="32M")


@dataclass(frozen=True, slots=True)
class CpuWatch:
    """The CPU time of another process, to the nanosecond."""

    pid: int

    def cpu_s(self) -> float:
        return time.clock_gettime((~self.pid << 3) | 2)  # CLOCK_PROCESS_CPUTIME_ID of that process

    def stopped_after_s(self, since_s: float) -> float:
        """Seconds from `since_s` until the last moment at which the process was busy.

        Raises `ServerError` when it has not stopped within `_GIVE_UP_S`.
        """
        samples = [(time.perf_counter(), self.cpu_s())]
        last_busy_s = since_s
        start = 0
        while samples[-1][0] - last_busy_s < _WATCH_S:
            time.sleep(0.001)
            samples.append((time.perf_counter(), self.cpu_s()))
            while samples[-1][0] - samples[start + 1][0] >= _WINDOW_S:
                start += 1
            wall_s, cpu_s = (now - then for now, then in zip(samples[-1], samples[start], strict=True))
            if wall_s >= _WINDOW_S and cpu_s >= _BUSY_SHARE * wall_s:
                last_busy_s = samples[-1][0]
            if samples[-1][0] - since_s > _GIVE_UP_S:
                raise ServerError(f"the server still computes {_GIVE_UP_S:g} s after the disconnect")
        return max(0.0, last_busy_s - since_s)


class Scenes:
    """Each method plays one disconnect and returns how many seconds the engine went on."""

    def __init__(self, server: PeriluneServer, sizes: Sizes, chance: random.Random) -> None:
        self._server = server
        self._sizes = sizes
        self._chance = chance
        self._watch = CpuWatch(server.pid)
        self._text = text()
        self._cursor = 0
        self._documents: list[str] = []
        self._turn = 0

    def prepare(self) -> None:
        """Ingest the two documents that `loading` asks in turn, and check that they come from disk."""
        for number in range(2):
            data = self._fresh(self._sizes.document_chars).encode()
            self._documents.append(self._server.upload(f"reference-{number}.txt", data))
            self._server.wait_until(self._documents[-1], {"processed"})
        for file_id in self._documents * 2:
            answer = self._server.ask("What is this about?", file_id, max_tokens=2, context_policy="full")
        if not answer.report["tokens"]["cached"]["disk"]:
            raise ServerError(f"the document did not come from disk: {answer.report['tokens']}")

    def queued(self) -> float:
        """The batch is full; one more request waits and leaves."""
        running = []
        try:
            for number in range(_BATCH):
                running.append(self._open(f"Count to {number + 1} thousand.", max_tokens=4000, ignore_eos=True))
                _until_content(running[-1])
            waiting = self._open("And you?", max_tokens=8)
            self._until_metric(_QUEUE_METRIC, 1)
            time.sleep(self._chance.uniform(0.0, 0.05))
            return self._leave(waiting)
        finally:
            for stream in running:
                stream.drop()
            self._watch.stopped_after_s(time.perf_counter())

    def loading(self) -> float:
        """The document's KV is on disk; the client leaves while it is being read."""
        self._turn += 1
        stream = self._open(
            "What is said first?",
            self._documents[self._turn % 2],
            max_tokens=64,
            ignore_eos=True,
            context_policy="full",
        )
        return self._drop(stream, self._chance.uniform(0.005, 0.08))

    def prefill(self) -> float:
        stream = self._open(self._fresh(self._sizes.prefill_chars), max_tokens=8, context_policy="full")
        _until_stage(stream, "prefilling")
        return self._drop(stream, self._chance.uniform(0.0, self._sizes.prefill_s))

    def shared(self) -> float:
        """Two prompts are being computed; the client of the one whose turn it is leaves, the other stays."""
        size = self._sizes.prefill_chars // 10  # of ten parts eight: the KV of both fits beside each other
        first, second = (
            self._open(self._fresh(parts * size), max_tokens=64, ignore_eos=True, context_policy="full")
            for parts in (3, 5)  # the shorter one ranks first, so it is its turn
        )
        try:
            _until_stage(second, "prefilling")
            self._until_metric(_BATCH_METRIC, 2)
            time.sleep(self._chance.uniform(0.0, self._sizes.prefill_s / 10))
            return self._leave(first)
        finally:
            second.drop()
            self._watch.stopped_after_s(time.perf_counter())

    def decode(self) -> float:
        stream = self._open("Tell me a long story.", max_tokens=2000, ignore_eos=True)
        _until_content(stream)
        return self._drop(stream, self._chance.uniform(0.0, 0.3))

    def _open(self, question: str, file_id: str | None = None, **body: object) -> Stream:
        return self._server.open_stream(
            question, file_id, stream_options={"include_progress": True}, deadline=600, **body
        )

    def _drop(self, stream: Stream, delay_s: float) -> float:
        time.sleep(delay_s)
        dropped_s = time.perf_counter()
        stream.drop()
        return self._watch.stopped_after_s(dropped_s)

    def _leave(self, stream: Stream) -> float:
        """Drop a connection while others are served; seconds until the engine had ended its sequence."""
        dropped_s = time.time()
        stream.drop()
        end_s = time.perf_counter() + _GIVE_UP_S
        while time.perf_counter() < end_s:
            time.sleep(_SETTLE_S)
            left_s = self._metric(_LEFT_METRIC)
            if left_s is not None and left_s >= dropped_s:
                return left_s - dropped_s
        raise ServerError(f"the engine did not let the request go within {_GIVE_UP_S:g} s")

    def _fresh(self, characters: int) -> str:
        self._cursor += 1  # begins elsewhere each time, so that no prompt finds another one's KV
        start = (self._cursor * characters) % (len(self._text) - characters) + self._cursor
        return self._text[start : start + characters]

    def _until_metric(self, name: str, wanted: int) -> None:
        end_s = time.perf_counter() + _GIVE_UP_S
        while time.perf_counter() < end_s:
            if self._metric(name) == wanted:
                return
            time.sleep(0.01)
        raise ServerError(f"{name} did not reach {wanted} within {_GIVE_UP_S:g} s")

    def _metric(self, name: str) -> float | None:
        _, page = self._server.request("GET", "/metrics")
        values = [line for line in page.decode().splitlines() if line.startswith((name + "{", name + " "))]
        return float(values[0].rpartition(" ")[2]) if values else None


def _until_stage(stream: Stream, stage: str) -> None:
    for event in stream.events():
        if event.get("perilune", {}).get("stage") == stage:
            return
    raise ServerError(f"the stream ended before the stage {stage!r}")


def _until_content(stream: Stream) -> None:
    for event in stream.events():
        if any(choice["delta"].get("content") for choice in event.get("choices", [])):
            return
    raise ServerError("the stream ended before any content")


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of all do not exceed (nearest rank)."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options("Milliseconds from a disconnect until the engine stops.", argv, rounds=26)
    machine = Machine(THREADS)
    try:
        machine.calibrate()
        before = CpuClock.now([os.getpid()])
        with tempfile.TemporaryDirectory(prefix="perilune-bench-") as folder:
            samples = _samples(Path(folder), options)
        foreign = CpuClock.now([os.getpid()]).foreign_share(before)
    finally:
        machine.close()
    stops_ms = {phase: [1000 * s for p, s in samples if p == phase] for phase in PHASES}
    every = [value for values in stops_ms.values() for value in values]
    figures: dict[str, float | bool | None] = {"p99_ms": round(percentile(every, 0.99), 1)}
    for phase, values in stops_ms.items():
        figures[f"{phase}_p50_ms"] = round(percentile(values, 0.5), 1)
        figures[f"{phase}_p99_ms"] = round(percentile(values, 0.99), 1)
    figures["samples"] = len(every)
    runs: list[dict[str, object]] = [{"phase": phase, "ms": round(1000 * s, 2)} for phase, s in samples]
    result = Result("cancel", figures, summarise(machine.calibration, foreign), runs, quick=options.quick)
    finish(result, BARS, options)


def _samples(folder: Path, options: Options) -> list[tuple[str, float]]:
    """(phase, seconds), the phases in turn."""
    rounds, sizes = (4, QUICK) if options.quick else (options.rounds, FULL)
    server = PeriluneServer(folder / "home", kv_cache__ram=sizes.kv_ram, runtime__max_batch_size=_BATCH)
    samples: list[tuple[str, float]] = []
    try:
        server.start()
        scenes = Scenes(server, sizes, random.Random(1))
        scenes.prepare()
        play: dict[str, Callable[[], float]] = {phase: getattr(scenes, phase) for phase in PHASES}
        for number in range(rounds):
            for phase, scene in play.items():
                samples.append((phase, scene()))
                say(f"round {number + 1}: {phase} stopped after {1000 * samples[-1][1]:.1f} ms")
    finally:
        server.stop()
    return samples


if __name__ == "__main__":
    main()
