"""`perilune simulate`: one table of policies, which says that it is simulated; as JSON; errors with a hint."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perilune.cli.main import app
from perilune.cli.simulate import Options, excerpt, machine_named
from perilune.core import ServiceClass
from perilune.engine.compare import MACHINES
from perilune.engine.policy import EngineLimits
from perilune.engine.step_cost import LinearCost
from perilune.engine.traces import TraceRequest, read_trace
from perilune.errors import InvalidRequest


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    chance, path = random.Random(1), tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 400 * n, "input_length": chance.randrange(50, 20_000), "output_length": 5, "hash_ids": [n]}
        for n in range(60)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def options(**changes: object) -> Options:
    base = Options("a100-8b", ["fcfs"], 2, 0.1, 1.0, 3.0, 30.0, 0.0, 1, True)
    return Options(**{**asdict(base), **changes})  # type: ignore[arg-type]


def test_a_table_of_policies(trace: Path) -> None:
    command = [
        "simulate",
        str(trace),
        "--seeds",
        "2",
        "--minutes",
        "0.2",
        "--policy",
        "fcfs",
        "--policy",
        "deadline",
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert "simulated" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["fcfs", "deadline"]
    assert "±" in lines[1]


def test_json(trace: Path) -> None:
    done = CliRunner().invoke(
        app, ["simulate", str(trace), "--seeds", "2", "--minutes", "0.1", "--policy", "static", "--json"]
    )
    told = json.loads(done.stdout)
    assert told["simulated"] is True
    assert set(told["policies"]["static"]["p0_in_time"]) == {"mean", "low", "high"}


@pytest.mark.parametrize("wrong", [["--policy", "best"], ["--machine", "none"]])
def test_unknown_names_are_refused_with_a_hint(trace: Path, wrong: list[str]) -> None:
    done = CliRunner().invoke(app, ["simulate", str(trace), *wrong])
    assert isinstance(done.exception, InvalidRequest)
    assert done.exception.hint


def test_every_seed_plays_another_part(trace: Path) -> None:
    requests = read_trace(trace)
    first, second = excerpt(requests, options(), 1), excerpt(requests, options(), 2)
    assert first != second
    assert first == excerpt(requests, options(), 1)
    assert all(0 <= r.arrival_s <= 6.0 for r in first)
    fast = excerpt(requests, options(scale=2.0), 1)
    assert len(fast) > 1.5 * len(first)
    assert all(r.arrival_s <= 6.0 for r in fast)


def test_what_the_trace_leaves_open_is_filled_in(trace: Path) -> None:
    made = excerpt(read_trace(trace), options(minutes=10.0, batch_share=0.5, tenants=3), 1)
    assert {r.service_class for r in made} == set(ServiceClass)
    assert len({r.tenant for r in made}) == 3
    named = [TraceRequest(0.0, 10, 1, ServiceClass.P2_BATCH, "ann", 7.0)]
    assert excerpt(named, options(batch_share=0.5), 1)[0].deadline_s == 7.0


def test_a_fitted_machine_is_read(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    cost = LinearCost(0.01, 0.001, 0.0, 0.01, 0.0)
    kept = {
        "name": "fitted",
        "cost": asdict(cost),
        "blocks": 9,
        "window_tokens": 64,
        "limits": asdict(EngineLimits()),
    }
    path.write_text(json.dumps(kept), encoding="utf-8")
    assert machine_named(str(path)).cost == cost
    assert machine_named("a100-8b") is MACHINES["a100-8b"]
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(InvalidRequest):
        machine_named(str(path))
