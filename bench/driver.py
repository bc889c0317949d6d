"""Runs several engines in one run, in turn, one computing at a time, and keeps every reading.

The engines that have no turn are stopped (SIGSTOP): loaded but idle ones still poll, and each look takes a core
from the engine being timed.

Knows workers, rounds and readings. Knows nothing of figures (`bench.report`) or of what an engine is inside.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

from bench import peers
from bench.machine import Calibration, CpuClock

ROOT = Path(__file__).resolve().parent.parent
OURS = "perilune"
REST_S = 0.3
"""Idle time before a turn, for the machine to come to rest."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One engine's turn in one round. `rate` is tokens per second; `foreign_share` is others' use of the cores."""

    round: int
    engine: str
    what: str
    tokens: int
    seconds: float
    foreign_share: float
    recorded: bool = False

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class WorkerError(RuntimeError):
    """An engine failed or did not answer in time; the message names it."""


class Worker:
    """An engine's process. Not thread-safe; one request at a time."""

    def __init__(self, engine: str, python: Path, environment: Mapping[str, str]) -> None:
        self.engine = engine
        self._process = subprocess.Popen(
            [str(python), "-m", "bench.worker", engine],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=_log(engine).open("wb"),
            start_new_session=True,  # a process group of its own, to be stopped with all its children
            text=True,
            encoding="utf-8",
            bufsize=1,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, operation: str, timeout_s: float, **fields: object) -> dict[str, Any]:
        """Send one request and wait for its reply. Raises `WorkerError`."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"op": operation, **fields}) + "\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        except BrokenPipeError:
            raise WorkerError(f"{self.engine} ended; see {_log(self.engine)}") from None
        if not ready:
            raise WorkerError(f"{self.engine} did not answer {operation} within {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"{self.engine} ended at {operation}; see {_log(self.engine)}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(f"{self.engine} failed at {operation}: {reply['error']}; see {_log(self.engine)}")
        return reply

    def pause(self) -> None:
        """Stop the engine's processes where they are."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, which: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, which)

    def close(self) -> None:
        """End the process; never raises."""
        assert self._process.stdin
        try:
            self._process.stdin.close()
            self._process.wait(timeout=10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


def _log(engine: str) -> Path:
    folder = peers.home() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{engine}.log"


def start_worker(engine: str) -> Worker:
    """A worker in the right environment; installs a peer that is missing."""
    peer = peers.PEERS.get(engine)
    if peer is None:
        return Worker(engine, Path(sys.executable), {})
    return Worker(engine, peers.ensure(peer), peer.environment)


def model_for(engine: str) -> Path:
    """The same weights in the form an engine reads."""
    return peers.model_safetensors() if engine in {"vllm", "transformers"} else peers.model_gguf()


@contextmanager
def loaded(engines: list[str], threads: int, max_context_tokens: int) -> Iterator[dict[str, Worker]]:
    """Workers with their models loaded, one after the other; all are ended on the way out."""
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for engine in engines:
            worker = start_worker(engine)
            stack.callback(worker.close)
            reply = worker.call(
                "load",
                600,
                model=str(model_for(engine)),
                threads=threads,
                max_context_tokens=max_context_tokens,
            )
            say(f"{engine} loaded in {reply['seconds']:.1f} s")
            workers[engine] = worker
        yield workers


class Machine:
    """Calibrates in a process of its own, so that the driver stays light."""

    def __init__(self, threads: int) -> None:
        self._worker = start_worker("machine")
        self._threads = threads
        self.readings: list[Calibration] = []

    def calibrate(self) -> Calibration:
        reading = Calibration(**self._worker.call("calibrate", 120, threads=self._threads))
        self.readings.append(reading)
        return reading

    @property
    def calibration(self) -> Calibration:
        """The median of this run's readings."""
        return Calibration(
            gemm_gflops=median(reading.gemm_gflops for reading in self.readings),
            read_gb_s=median(reading.read_gb_s for reading in self.readings),
        )

    def close(self) -> None:
        self._worker.close()


class Contender(Protocol):
    """An engine in processes of its own that can be stopped where they are: a worker, or a server."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


C = TypeVar("C", bound=Contender)
Turn = Callable[[C, int], tuple[int, float]]
"""Runs one engine's turn in a round and returns (tokens, seconds)."""


def interleave(
    workers: Mapping[str, C], rounds: int, what: str, turn: Turn[C], machine: Machine | None = None
) -> list[Reading]:
    """A B C A B C …: every engine once a round, alone, after a calibration of the machine."""
    own = [os.getpid()]  # with all its children; those that are stopped use no CPU
    readings: list[Reading] = []
    for number in range(rounds):
        if machine is not None:
            with _paused(workers.values()):
                machine.calibrate()
        for engine, worker in workers.items():
            with _paused(other for other in workers.values() if other is not worker):
                time.sleep(REST_S)
                before = CpuClock.now(own)
                tokens, seconds = turn(worker, number)
            foreign = CpuClock.now(own).foreign_share(before)
            readings.append(Reading(number, engine, what, tokens, seconds, round(foreign, 3)))
            say(f"{what} round {number + 1}: {engine} {readings[-1].rate:.1f} tokens/s (others {foreign:.0%})")
    return readings


@contextmanager
def _paused(workers: Iterable[Contender]) -> Iterator[None]:
    stopped = list(workers)
    for worker in stopped:
        worker.pause()
    try:
        yield
    finally:
        for worker in stopped:
            worker.resume()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
