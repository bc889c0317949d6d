"""What perilune adds to a request that a backend answers: everything on, one core, open loop.

    python -m bench.gateway [--quick] [--json FILE] [--requests N]

An engine that computes nothing (`bench.mock_engine`: 20 ms to the first token, 16 chunks) is asked directly and
through `perilune serve` with a key, its limits, metrics and the ledger on. The server has one core, engine and
client the other one. Added is what the gateway's percentile has more than the direct one's of the same load.
A body of 500 KB is a conversation (Python's reference in turns) that comes again with a new question, as chats do;
`body500k_new`, reported beside it, is one whose whole text is new each time (one in two seconds).
`--requests N` sends so many instead, and fits the server's own memory over them (`make soak`: 100,000).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import corpus
from bench.cancel import percentile
from bench.driver import ROOT, say
from bench.machine import Calibration, CpuClock
from bench.open_loop import OpenLoop, Timing
from bench.report import Bar, Options, Result, finish, summarise
from bench.server import HOST, PeriluneServer
from bench.slope import Slope, slope

MODEL = "mock"
Figures = dict[str, float | bool | None]
BARS = {
    "added_p50_ms_100rps": Bar(at_most=5, unit="ms"),
    "added_p99_ms_100rps": Bar(at_most=15, unit="ms"),
    "ttft_added_p50_ms_50sps": Bar(at_most=4, unit="ms"),
    "ttft_added_p99_ms_50sps": Bar(at_most=12, unit="ms"),
    "body500k_added_p50_ms": Bar(at_most=8, unit="ms"),
}
_ROUND_REQUESTS = 2000
_AT_ONCE = 16  # requests of the memory's rounds
_WARM_SHARE = 0.4
_LARGE = 10_000


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of load. `body_bytes` is the question's size."""

    name: str
    per_s: float
    stream: bool
    body_bytes: int = 200
    new: bool = False  # every request has another text; else the history is the same and the last question new

    def bodies(self) -> Callable[[int], bytes]:
        """The body of each request, by its number."""
        if self.new:
            return lambda number: self._body(number + 1, f"{number}")
        head, _, tail = self._body(0, _NUMBER).rpartition(_NUMBER.encode())
        return lambda number: b"%b%08d%b" % (head, number, tail)

    def _body(self, start: int, question: str) -> bytes:
        text = corpus.text()
        text = (text[997 * start :] + text)[: self.body_bytes]
        messages = [
            {"role": "assistant" if at // _TURN_CHARS % 2 else "user", "content": text[at : at + _TURN_CHARS]}
            for at in range(0, len(text), _TURN_CHARS)
        ]
        messages.append({"role": "user", "content": f"Question {question}: what does this mean?"})
        return json.dumps({"model": MODEL, "messages": messages, "stream": self.stream, "max_tokens": 64}).encode()

    @property
    def mark(self) -> bytes:
        return b"word0" if self.stream else b"\r\n\r\n"


LOADS = (
    Load("100rps", 100, stream=False),
    Load("50sps", 50, stream=True),
    Load("body500k", 20, stream=False, body_bytes=500_000),
    Load("body500k_new", 0.5, stream=False, body_bytes=500_000, new=True),
)
_TURN_CHARS = 20_000
_NUMBER = "NUMBER"


@contextmanager
def pinned(cores: set[int]) -> Iterator[None]:
    """What is started inside runs on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def mock_engine() -> Iterator[int]:
    """Its port."""
    command = [sys.executable, "-m", "bench.mock_engine"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


@contextmanager
def gateway(home: Path, engine_port: int) -> Iterator[tuple[PeriluneServer, str]]:
    """A server with everything on, and a key that has every limit."""
    backend = {
        "name": "mock",
        "url": f"http://{HOST}:{engine_port}/v1",
        "model": MODEL,
        "context_tokens": 1_000_000,
    }
    backend |= {"prompt_cost": 1.0, "completion_cost": 2.0, "max_concurrency": 512}
    server = PeriluneServer(
        home,
        backends=json.dumps([backend]),
        kv_cache__ram="64M",
        kv_cache__disk_quota=0,
        runtime__threads=1,
        memory__embedder="off",
        server__max_queue=512,
    )
    limits = ("--rpm", "1000000", "--tpm", "2000000000", "--tpd", "1000000000000", "--concurrency", "1000")
    create = [
        *PeriluneServer.COMMAND,
        "keys",
        "create",
        "--role",
        "admin",
        *limits,
        "--budget",
        "1000000000",
        "--json",
    ]
    home.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(
        create, env={**os.environ, "PERILUNE_HOME": str(home)}, cwd=ROOT, capture_output=True, text=True, check=True
    )
    server.start()
    try:
        yield server, json.loads(made.stdout)["key"]
    finally:
        server.stop()


def measure(port: int, key: str, load: Load, seconds: float, warm_s: float) -> list[Timing]:
    """Timings of one load, after a short warm-up. Raises where an answer isn't 200."""
    loop = OpenLoop(port, load.bodies(), {"authorization": f"Bearer {key}"}, load.mark)
    asyncio.run(loop.run(load.per_s, warm_s))
    timings = asyncio.run(loop.run(load.per_s, seconds))
    wrong = [timing.status for timing in timings if timing.status != 200]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(timings)} requests failed, the first with {wrong[0]}")
    return timings


@dataclass(frozen=True, slots=True)
class Side:
    """The engine and the server before it, each on a core."""

    engine_port: int
    server: PeriluneServer
    key: str


@contextmanager
def sides() -> Iterator[Side]:
    cores = sorted(os.sched_getaffinity(0))
    server_core, other_core = {cores[0]}, {cores[-1]}
    with tempfile.TemporaryDirectory(prefix="perilune-bench-") as folder, pinned(other_core), mock_engine() as port:
        with pinned(server_core):
            started = gateway(Path(folder) / "home", port)
            server, key = started.__enter__()
        try:
            yield Side(port, server, key)
        finally:
            started.__exit__(None, None, None)


def run(side: Side, seconds: float, warm_s: float) -> tuple[Figures, list[dict[str, object]]]:
    """Figures and runs of every load. Wholly new text is compared with what the engine alone took for as much."""
    figures: Figures = {}
    runs: list[dict[str, object]] = []
    direct: list[Timing] = []
    for load in LOADS:
        if not load.new:
            direct = measure(side.engine_port, side.key, load, seconds, warm_s)
            runs.append(_run(load, "direct", direct))
        through = measure(side.server.port, side.key, load, seconds, warm_s)
        runs.append(_run(load, "gateway", through))
        figures |= _added(load, direct, through)
    return figures, runs


def soak(side: Side, requests: int) -> tuple[Figures, list[dict[str, object]]]:
    """Figures and runs of the memory."""
    found, samples = memory_slope(side.server, side.key, requests)
    figures: Figures = {
        "memory_bytes_per_request": round(found.estimate, 1),
        "memory_slope_low": round(found.low, 1),
        "memory_slope_high": round(found.high, 1),
        "memory_slope_includes_zero": found.includes_zero,
    }
    return figures, [{"requests": requests, "resident_bytes": samples}]


def _values(load: Load, timings: Sequence[Timing]) -> list[float]:
    return [1000 * (timing.first_s if load.stream else timing.total_s) for timing in timings]


def _run(load: Load, side: str, timings: Sequence[Timing]) -> dict[str, object]:
    values = _values(load, timings)
    told = {f"p{round(100 * share)}_ms": round(percentile(values, share), 2) for share in (0.5, 0.95, 0.99)}
    say(f"{load.name} {side}: {told}")
    return {"load": load.name, "side": side, "requests": len(values), **told}


def _added(load: Load, direct: Sequence[Timing], through: Sequence[Timing]) -> Figures:
    def added(share: float) -> float:
        alone, both = (percentile(_values(load, timings), share) for timings in (direct, through))
        return round(both - alone, 2)

    if load.body_bytes > _LARGE:
        return {f"{load.name}_added_p50_ms": added(0.5), f"{load.name}_added_p99_ms": added(0.99)}
    prefix = "ttft_added" if load.stream else "added"
    return {f"{prefix}_p50_ms_{load.name}": added(0.5), f"{prefix}_p99_ms_{load.name}": added(0.99)}


def memory_slope(server: PeriluneServer, key: str, requests: int) -> tuple[Slope, list[int]]:
    """Bytes of the server's own memory for each request, streamed and whole in turn, after the warm-up."""
    loops = [
        OpenLoop(server.port, load.bodies(), {"authorization": f"Bearer {key}"}, load.mark) for load in LOADS[:2]
    ]
    rounds = max(12, requests // _ROUND_REQUESTS)
    each = requests // rounds
    after: list[int] = []
    samples: list[int] = []
    for number in range(rounds):
        timings = asyncio.run(loops[number % 2].run_closed(each, _AT_ONCE))
        if wrong := [timing.status for timing in timings if timing.status != 200]:
            raise RuntimeError(f"{len(wrong)} requests failed, the first with {wrong[0]}")
        time.sleep(0.2)
        after.append((number + 1) * each)
        samples.append(own_bytes(server.pid))
        say(f"{after[-1]} requests: {samples[-1] / 1e6:.1f} MB")
    warm = int(len(samples) * _WARM_SHARE)
    return slope(after[warm:], samples[warm:]), samples


def own_bytes(pid: int) -> int:
    """Resident memory that is the process's own (not of files that the system could drop)."""
    found = re.search(r"^RssAnon:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What perilune adds to a request that a backend answers.")
    parser.add_argument("--quick", action="store_true", help="short turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument(
        "--requests", type=int, default=0, help="send so many instead, and fit the memory over them"
    )
    given = parser.parse_args(argv)
    with sides() as side:
        before = CpuClock.now([os.getpid()])
        if given.requests:
            figures, runs = soak(side, given.requests)
        else:
            figures, runs = run(side, *((3.0, 1.0) if given.quick else (15.0, 2.0)))
        foreign = CpuClock.now([os.getpid()]).foreign_share(before)
    machine = summarise(Calibration(0.0, 0.0), foreign)
    result = Result("gateway", figures, machine, runs, quick=given.quick)
    finish(result, BARS, Options(given.quick, given.json, 1, False, ()))


if __name__ == "__main__":
    main()
