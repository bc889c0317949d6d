"""`perilune capacity`: the rate that arithmetic says, how many replicas, what is advised, and how it fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest

from perilune.cli.capacity import LEAST_REQUESTS, NotHeld, Options, Search, advice, own_rate, part
from perilune.cli.console import StatusLine
from perilune.engine.compare import MACHINES
from perilune.engine.policy import EngineLimits
from perilune.engine.step_cost import LinearCost
from perilune.engine.traces import TraceRequest
from perilune.errors import InvalidRequest
from tests.cli.conftest import Command

PROMPT_TOKENS = 1000


def requests(number: int = 40, every_s: float = 2.0, tokens: int = PROMPT_TOKENS) -> list[TraceRequest]:
    return [TraceRequest(every_s * n, tokens, 1, hash_ids=(2 * n, 2 * n + 1)) for n in range(number)]


def options(**changes: object) -> Options:
    base = Options(None, 0.95, "a100-8b", "deadline", 3, 0.1, 3.0, 30.0, 60.0, True)
    return Options(**{**asdict(base), **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A trace of a request every two seconds, and a machine that does one a second."""
    write_trace(tmp_path / "trace.jsonl", requests())
    cost = LinearCost(0.0, 1 / PROMPT_TOKENS, 0.0, 0.0, 0.0)
    limits = asdict(EngineLimits(queue=100_000, guard_s=0.5, solo_s=2.0))
    kept = {"name": "one-a-second", "cost": asdict(cost), "blocks": 400, "window_tokens": 8192, "limits": limits}
    (tmp_path / "machine.json").write_text(json.dumps(kept), encoding="utf-8")
    return tmp_path


def write_trace(path: Path, told: Sequence[TraceRequest]) -> None:
    rows = [{"arrival_s": r.arrival_s, "prompt_tokens": r.prompt_tokens, "new_tokens": r.new_tokens} for r in told]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_the_rate_is_the_one_that_the_machine_does(folder: Path, call: Command) -> None:
    """Every request takes a second, and they come evenly: one a second is the most."""
    done = call("capacity", "trace.jsonl", "--machine", "machine.json", "--minutes", "0.1", "--json")
    assert (done.code, done.err) == (0, "")
    told = json.loads(done.out)
    assert told["simulated"] is True
    assert told["narrow"] is True
    assert [each["seed"] for each in told["seeds"]] == [0, 1, 2]
    for each in told["seeds"]:
        assert 0.88 < each["held"] <= 1.03
        assert 0.98 < each["missed"] <= each["held"] * 1.12
    assert told["requests_per_second"]["low"] <= told["requests_per_second"]["mean"] <= 1.03
    assert told["load_requests_per_second"] == pytest.approx(0.5, rel=0.03)
    assert told["replicas"] == 1
    assert told["advice"]


def test_a_load_needs_replicas(folder: Path, call: Command) -> None:
    """Shares of a load come unevenly, so each holds a little less than the machine does."""
    words = ("capacity", "trace.jsonl", "--machine", "machine.json", "--requests-per-second", "5")
    done = call(*words, "--minutes", "0.1")
    assert done.code == 0, done.err
    one, load = done.out.splitlines()
    assert one.startswith("One replica holds 0.")
    assert "±" in one
    assert "(simulated" in one
    needed = int(load.split(" need ")[1].split()[0])
    assert load.startswith("5 requests/s need ")
    assert "(simulated)" in load
    assert 6 <= needed <= 14
    assert "SIMULATED on one-a-second" in done.err
    assert "simulating: seed 1 of 3" in done.err
    assert "\x1b" not in done.err
    assert "advice: " in done.err


def test_what_no_number_of_replicas_holds(folder: Path, call: Command) -> None:
    done = call("capacity", "trace.jsonl", "--machine", "machine.json", "--p0", "0.5")
    assert (done.code, done.out) == (1, "")
    assert "No number of replicas" in done.err
    assert "hint: " in done.err


@pytest.mark.parametrize(
    "wrong",
    [
        ("trace.jsonl", "--machine", "none"),
        ("trace.jsonl", "--policy", "best"),
        ("trace.jsonl", "--seeds", "2"),
        ("trace.jsonl", "--requests-per-second", "inf"),
        ("trace.jsonl", "--p0", "nan"),
        ("trace.jsonl", "--time-limit", "nan"),
        ("none.jsonl",),
        ("once.jsonl",),
        ("almost-once.jsonl",),
        ("batch.jsonl",),
        ("endless.jsonl",),
        ("huge.jsonl",),
        ("late.jsonl",),
        ("deep.jsonl",),
    ],
)
def test_what_cannot_be_used_is_refused(folder: Path, call: Command, wrong: tuple[str, ...]) -> None:
    write_trace(folder / "once.jsonl", requests(every_s=0.0))
    write_trace(folder / "almost-once.jsonl", requests(every_s=1e-300))
    write_trace(folder / "endless.jsonl", requests(every_s=1e307))
    row = {"arrival_s": 0, "prompt_tokens": 1, "new_tokens": 1}
    for name, more in (("batch", {"service_class": "P2"}), ("late", {"deadline_s": "soon"})):
        rows = [{**row, "arrival_s": at, **more} for at in range(9)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "huge.jsonl").write_text(json.dumps(row).replace("1", "1e400"), encoding="utf-8")
    (folder / "deep.jsonl").write_text("[" * 100_000, encoding="utf-8")
    done = call("capacity", *wrong)
    assert (done.code, done.out) == (2, "")
    assert done.err


def test_a_part_is_a_share_of_the_load() -> None:
    told = requests(400, 0.25)  # four a second
    for rate in (0.5, 4.0, 40.0):
        played = part(told, options(minutes=2.0), 1, own_rate(told), rate)
        assert len(played) == max(LEAST_REQUESTS, rate * 120)
        assert len(played) / played[-1].arrival_s == pytest.approx(rate)
        assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(played))
        names = [number for r in played for number in r.hash_ids]
        assert len(set(names)) == len(names)  # no turn finds an earlier one's prefixes
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(played)]
    assert max(gaps) < 2 * 0.025
    assert part(told, options(), 1, 4.0, 0.5) == part(told, options(), 1, 4.0, 0.5)
    assert part(told, options(), 1, 4.0, 0.5) != part(told, options(), 2, 4.0, 0.5)


@pytest.mark.timeout(20)
def test_a_tiny_share_of_a_load_is_found_at_once() -> None:
    played = part(requests(), options(), 1, 1e6, 1e-3)
    assert len(played) == LEAST_REQUESTS
    assert len(played) / played[-1].arrival_s == pytest.approx(1e-3)
    assert len({r.hash_ids for r in played}) == LEAST_REQUESTS


def test_time_that_is_up() -> None:
    told = requests(tokens=100)
    search = Search(MACHINES["a100-8b"], options(), told, 0.5, 0, 0.0, StatusLine(quiet=True))
    with pytest.raises(InvalidRequest, match="No rate was found") as caught:
        search.run(None)
    assert "--time-limit" in (caught.value.hint or "")


def test_bursts_that_no_replica_holds() -> None:
    """Alone each is in time; but all come at once, and all arrive at one replica."""
    told = requests(400, every_s=0.0, tokens=300)
    search = Search(MACHINES["a100-8b"], options(p0_s=0.06), told, 0.01, 0, float("inf"), StatusLine(quiet=True))
    with pytest.raises(NotHeld, match="requests/s"):
        search.run(None)


def test_advice_when_not_to_use_it() -> None:
    assert advice(requests(tokens=8000), options()) == []
    assert "long-context serving isn't" in advice(requests(), options())[0]
    mixed = [*requests(90), *requests(10, tokens=8000)]
    assert advice(mixed, options()) == []
    assert "50 ms" in advice(requests(tokens=8000), options(p0_s=0.05))[0]
