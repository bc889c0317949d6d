"""Workers over their real pipe, token tapes, and the accounting of other people's load."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import peers
from bench.corpus import TokenTape, text
from bench.driver import Worker, WorkerError, interleave
from bench.machine import CpuClock, process_cpu_s
from bench.worker import LoadSpec, Server, serve


class CountingEngine:
    """Adds one to the last token."""

    def __init__(self, spec: LoadSpec) -> None:
        self.spec = spec

    def prefill(self, token_ids: list[int]) -> int:
        return token_ids[-1] + 1

    def decode(self, token_ids: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
        return [token_ids[-1] + 1 + i for i in range(new_tokens)], [0.5] * (new_tokens - 1)

    def close(self) -> None: ...


def talk(*requests: dict[str, object]) -> list[dict[str, object]]:
    replies = io.StringIO()
    lines = io.StringIO("".join(json.dumps(request) + "\n" for request in requests))
    serve(Server(CountingEngine), lines, replies)
    return [json.loads(line) for line in replies.getvalue().splitlines()]


def test_a_worker_answers_each_request_and_survives_a_bad_one() -> None:
    load = {"op": "load", "model": "m", "threads": 2, "max_context_tokens": 64}
    replies = talk(
        {"op": "prefill", "token_ids": [1]},  # nothing is loaded yet
        load,
        {"op": "prefill", "token_ids": [1, 5]},
        {"op": "decode", "token_ids": [7], "new_tokens": 3},
        {"op": "dance"},
        {"op": "close"},
    )
    assert "no model is loaded" in str(replies[0]["error"])
    assert replies[2]["token"] == 6
    assert replies[3] == {"tokens": [8, 9, 10], "seconds": [0.5, 0.5]}
    assert "dance" in str(replies[4]["error"])
    assert replies[5] == {}


@pytest.fixture
def bench_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERILUNE_BENCH_HOME", str(tmp_path))
    return tmp_path


def test_a_real_worker_process_reports_failure_and_ends(bench_home: Path) -> None:
    assert peers.home() == bench_home
    worker = Worker("machine", Path(sys.executable), {})
    with pytest.raises(WorkerError, match="only calibrates"):
        worker.call("load", 60, model="m", threads=1, max_context_tokens=1)
    with pytest.raises(WorkerError, match="did not answer"):
        worker.call("calibrate", 0.0, threads=1)
    worker.close()
    with pytest.raises(WorkerError, match="ended"):
        Worker("no_such_engine", Path(sys.executable), {}).call("load", 60)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_engines_take_turns_in_every_round(bench_home: Path) -> None:
    workers = {name: Worker("machine", Path(sys.executable), {}) for name in ("a", "b")}
    order: list[tuple[int, int]] = []

    def turn(worker: Worker, number: int) -> tuple[int, float]:
        order.append((number, worker.pid))
        assert [is_stopped(w.pid) for w in workers.values()] == [w is not worker for w in workers.values()]
        return 10, 2.0

    readings = interleave(workers, 2, "test", turn)
    assert not any(is_stopped(worker.pid) for worker in workers.values())
    for worker in workers.values():
        worker.close()
    a, b = workers["a"].pid, workers["b"].pid
    assert order == [(0, a), (0, b), (1, a), (1, b)]
    assert [(r.engine, r.round, r.rate) for r in readings] == [
        ("a", 0, 5.0),
        ("b", 0, 5.0),
        ("a", 1, 5.0),
        ("b", 1, 5.0),
    ]


def test_a_tape_never_hands_out_a_stretch_twice() -> None:
    tape = TokenTape(list(range(10)))
    assert tape.take(4) == [0, 1, 2, 3]
    assert tape.take(4) == [4, 5, 6, 7]
    assert tape.take(4) == [1, 2, 3, 4]  # a new lap starts one token later: its first block is new
    with pytest.raises(ValueError, match="holds 10"):
        tape.take(11)
    with pytest.raises(ValueError, match="empty"):
        TokenTape([])


def test_the_corpus_is_large_enough_for_a_full_run() -> None:
    # Five rounds of 2K and 8K and the decode contexts: about 60,000 tokens of at most 6 characters.
    assert len(text()) > 360_000


def test_cpu_accounting_sees_a_child_and_tells_it_from_others() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = CpuClock.now([child.pid])
        spent_before_s = process_cpu_s(os.getpid())
        time.sleep(0.5)
        now = CpuClock.now([child.pid])
        assert now.own_s > before.own_s
        # The child is our descendant, so our own figure includes it.
        assert process_cpu_s(os.getpid()) - spent_before_s >= now.own_s - before.own_s - 0.05
        without = now.foreign_share(before)
        blind = CpuClock(now.wall_s, now.machine_s, before.own_s).foreign_share(before)
        assert blind > without
    finally:
        child.kill()
        child.wait()
