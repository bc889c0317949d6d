"""Thousands of small mixed requests to one server, and whether its memory at rest grows with them (spec R12).

    python -m bench.soak [--requests N] [--rounds N] [--minutes M] [--json FILE]

First files are uploaded, asked and deleted; then requests come in rounds. After each the server is let idle and
its own resident memory read. The first `WARM_SHARE` of the rounds warm up too. Over the rest, the
slope of memory over requests is told with its 95 % confidence interval. Knows the wire only.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.machine import describe
from bench.server import PeriluneServer, ServerError
from bench.slope import MIN_SAMPLES, Slope, slope

WARM_SHARE = 0.4
WORKERS = 8
WARM_FILES = 12  # of each worker; as many as 2,400 mixed requests hold
MAX_FILES = 12
REST_S = 1.6  # the server gives free memory back after a second's rest
GIVE_UP_S = 60.0
WORDS = ("rent", "city", "moon", "ledger", "harbour", "winter", "goose", "lamp", "river", "copper", "letter")
_IDLE = ("perilune_sequences_running", "perilune_sequences_waiting", "perilune_kv_cache_usage_ratio")


@dataclass(slots=True)
class Soak:
    """What one soak saw. `private_bytes` at rest after each round; `requests` counts every answered request."""

    rounds: int
    requests: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    after_requests: list[int] = field(default_factory=list)
    private_bytes: list[int] = field(default_factory=list)
    spent_s: float = 0.0

    @property
    def warm_rounds(self) -> int:
        return int(len(self.private_bytes) * WARM_SHARE)

    def slope(self) -> Slope:
        """Bytes for each request, after the warm-up."""
        return slope(self.after_requests[self.warm_rounds :], self.private_bytes[self.warm_rounds :])


class Load:
    """The mixed requests. Every one but a cancelled one is checked for the status it must have."""

    def __init__(self, server: PeriluneServer) -> None:
        self._server = server
        self._files: list[str] = []
        self._lock = threading.Lock()

    def warm_up(self) -> None:
        """Fill the caches of files and searches, which mixed requests would take thousands to fill."""
        self._work(lambda chance, _: [act(chance) for act in (self._upload, self._ask, self._delete) * WARM_FILES])

    def round(self, requests: int, seed: int) -> Counter[str]:
        """Send so many from `WORKERS` threads; returns how many of each kind. Raises what a worker raised."""
        done: Counter[str] = Counter()

        def send(chance: random.Random, worker: int) -> None:
            for _ in range(requests // WORKERS + (worker < requests % WORKERS)):
                kind = self._one(chance)
                with self._lock:
                    done[kind] += 1

        self._work(send, seed)
        return done

    def _work(self, work: Callable[[random.Random, int], object], seed: int = -1) -> None:
        """Do it in `WORKERS` threads, each with its own chance and number. Raises what one of them raised."""
        failures: list[Exception] = []

        def run(number: int) -> None:
            try:
                work(random.Random(f"{seed} {number}"), number)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _one(self, chance: random.Random) -> str:
        acts: dict[str, tuple[int, Callable[[random.Random], None]]] = {
            "chat": (72, self._chat),
            "error": (12, self._error),
            "cancel": (4, self._cancel),
            "ask": (4, self._ask),
            "upload": (4, self._upload),
            "delete": (4, self._delete),
        }
        kind = chance.choices(list(acts), [weight for weight, _ in acts.values()])[0]
        acts[kind][1](chance)
        return kind

    def _chat(self, chance: random.Random) -> None:
        self._send(200, _text(chance, chance.randint(1, 40)))

    def _error(self, chance: random.Random) -> None:
        status, body = chance.choice(
            (
                (400, {"max_tokens": -1}),
                (400, {"temperature": "hot"}),
                (404, {"model": "none"}),
                (400, {"messages": []}),
                (400, {"messages": [{"role": "user", "content": _text(chance, 30_000)}]}),
            )
        )
        self._send(status, "What?", **body)

    def _ask(self, chance: random.Random) -> None:
        with self._lock:
            file_id = chance.choice(self._files) if self._files else None
        if file_id is not None:  # another worker may delete it meanwhile
            parts = [{"type": "file", "file": {"file_id": file_id}}, {"type": "text", "text": _text(chance, 4)}]
            self._send((200, 404), parts)

    def _cancel(self, chance: random.Random) -> None:
        stream = self._server.open_stream(_text(chance, chance.choice((5, 200))), max_tokens=200, ignore_eos=True)
        try:
            time.sleep(chance.uniform(0, 0.3))
        finally:
            stream.drop()

    def _upload(self, chance: random.Random) -> None:
        with self._lock:
            full = len(self._files) >= MAX_FILES
        if not full:
            file_id = self._server.upload("notes.txt", _text(chance, chance.randint(20, 300)).encode())
            with self._lock:
                self._files.append(file_id)

    def _delete(self, chance: random.Random) -> None:
        with self._lock:
            file_id = self._files.pop(chance.randrange(len(self._files))) if self._files else None
        if file_id is not None:
            self._server.json("DELETE", f"/v1/files/{file_id}")

    def _send(self, expected: int | tuple[int, ...], content: object, **more: object) -> None:
        body = {
            "model": self._server.model_id(),
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 1,
            **more,
        }
        status, reply = self._server.request("POST", "/v1/chat/completions", json.dumps(body).encode())
        if status not in (expected if isinstance(expected, tuple) else (expected,)):
            raise ServerError(f"{status} instead of {expected}: {reply[:300]!r}")


def _text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words))


def until_idle(server: PeriluneServer) -> None:
    """Wait until nothing runs and no KV block is in use. Raises `ServerError` when something stays."""
    end_s = time.monotonic() + GIVE_UP_S
    while time.monotonic() < end_s:
        page = server.request("GET", "/metrics")[1].decode()
        values = dict(re.findall(r"^(perilune_\w+) (\S+)$", page, re.MULTILINE))
        if not any(float(values[name]) for name in _IDLE):
            time.sleep(REST_S)
            return
        time.sleep(0.05)
    raise ServerError("something runs on, or a KV block leaked")


def private_bytes(pid: int) -> int:
    """Resident memory that is the process's own: not the pages of files, which are read when they are first used
    and taken back when others need the memory (30 MB of lancedb's code come with the first search).

    Linux only. Raises `ServerError` when the process is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except FileNotFoundError:
        raise ServerError("the server died") from None
    found = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", status, re.MULTILINE)
    if not found:
        raise ServerError("the server died")
    return sum(map(int, found)) * 1024


def soak(
    server: PeriluneServer, requests: int, rounds: int, limit_s: float, tell: Callable[[str], None] = lambda _: None
) -> Soak:
    """Run it on a started server; ends early, after a whole round, once `limit_s` are over."""
    found, load = Soak(rounds), Load(server)
    load.warm_up()
    begun_s = time.monotonic()
    for number in range(rounds):
        done = load.round(requests // rounds, number)
        found.outcomes += done
        found.requests += sum(done.values())
        until_idle(server)
        found.after_requests.append(found.requests)
        found.private_bytes.append(private_bytes(server.pid))
        found.spent_s = time.monotonic() - begun_s
        tell(f"round {number + 1}: {found.requests:,} requests, {found.private_bytes[-1] / 2**20:.1f} MiB")
        if found.spent_s > limit_s:
            break
    return found


def report(found: Soak) -> dict[str, object]:
    """The result as it is kept: dated, with the machine, the verdict and every sample."""
    slope_of = found.slope()
    mib = [round(value / 2**20, 2) for value in found.private_bytes]
    return {
        "name": "soak",
        "date": time.strftime("%Y-%m-%d"),
        "figures": {
            "requests": found.requests,
            "warm_up_requests": found.after_requests[found.warm_rounds - 1],
            "slope_bytes_per_request": round(slope_of.estimate, 1),
            "slope_low": round(slope_of.low, 1),
            "slope_high": round(slope_of.high, 1),
            "includes_zero": slope_of.includes_zero,
            "peak_mib_at_rest": max(mib),
            "spent_s": round(found.spent_s, 1),
        },
        "outcomes": dict(found.outcomes),
        "machine": describe(),
        "private_mib_at_rest": list(zip(found.after_requests, mib, strict=True)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(description="Whether the server's memory at rest grows with requests.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=40.0, help="end after so many, with what was reached")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="perilune-soak-"))
    settings = {"kv_cache__ram": "48M", "deadlines__interactive_s": "300", "runtime__threads": "1"}
    server = PeriluneServer(folder / "home", **settings)
    try:
        server.start()
        found = soak(
            server, options.requests, options.rounds, 60 * options.minutes, lambda line: print(line, flush=True)
        )
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    if len(found.private_bytes) - found.warm_rounds < MIN_SAMPLES:
        sys.exit(f"only {len(found.private_bytes)} rounds in {options.minutes:g} minutes: too few to tell a slope")
    result = report(found)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["figures"], indent=1))
    if not found.slope().includes_zero:
        sys.exit("memory at rest changes with the number of requests")


if __name__ == "__main__":
    main()
