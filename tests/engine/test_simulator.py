"""The simulator: the engine's own parts in virtual time, traces of three formats, the constants of a step."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from perilune.core import FinishReason, ServiceClass
from perilune.engine.compare import POLICIES, figures, interval, jain, policy_named, summarise
from perilune.engine.policy import EngineLimits
from perilune.engine.scheduling import FirstComeFirstServed
from perilune.engine.simulator import Machine, Simulation
from perilune.engine.step_cost import A100_8B, LinearCost, StepShape, fit, shape_of
from perilune.engine.traces import TraceRequest, at_rate, read_trace
from perilune.errors import InvalidRequest
from perilune.runtime.mri import SequenceSlice, StepPlan

COST = LinearCost(0.01, 0.001, 0.0, 0.002, 0.0)
MACHINE = Machine("test", COST, 100, 2000, EngineLimits(batch=4, queue=3))
MOONCAKE = """\
{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 3500, "input_length": 9000, "output_length": 7, "hash_ids": [0, 1, 3]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
OWN = '{"arrival_s": 5, "prompt_tokens": 100, "new_tokens": 3, "service_class": "P2", "tenant": "ann", "ttl_s": 9}'


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return path


def test_mooncake(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, MOONCAKE))
    assert (first.arrival_s, second.arrival_s) == (0.0, 2.5)
    assert (second.prompt_tokens, second.new_tokens) == (9000, 7)
    assert [r.service_class for r in (first, second)] == [0, 1]
    assert first.block_names()[:32] == second.block_names()[:32]
    assert first.block_names()[32] != second.block_names()[32]
    assert len(first.block_names()) == 1100 // 32


def test_azure(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, AZURE))
    assert second.arrival_s == pytest.approx(4.314579)
    assert (first.prompt_tokens, first.new_tokens, first.hash_ids) == (374, 44, ())


def test_own_log(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, OWN)) == [TraceRequest(0.0, 100, 3, ServiceClass.P2_BATCH, "ann", None, 9)]


def test_the_servers_log(tmp_path: Path) -> None:
    """Only its lines about answers."""
    lines = [{"message": "request", "status": 200}, {"message": "answer", **json.loads(OWN)}]
    assert len(read_trace(written(tmp_path, "\n".join(json.dumps(line) for line in lines)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,b\n1,2\n",
        "{",
        '{"arrival_s": 1}',
        "TIMESTAMP,ContextTokens\nx,1\n",
        "[1]",
        '{"arrival_s": 0, "prompt_tokens": -4, "new_tokens": 1}',
    ],
)
def test_other_files_are_refused_with_a_hint(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_trace(written(tmp_path, text))
    assert caught.value.hint
    with pytest.raises(InvalidRequest):
        read_trace(tmp_path / "none")


def test_times_add_up() -> None:
    """Two chunks of a lone prompt, then a decode step a token."""
    machine = Machine("test", COST, 100, 2000, EngineLimits(chunk_tokens=512, solo_s=100.0))
    outcome = Simulation(machine, FirstComeFirstServed()).run([TraceRequest(1.0, 1024, 3)])[0]
    assert outcome.ttft_s == pytest.approx(2 * 0.01 + 1.024)
    assert outcome.end_s == pytest.approx(1.0 + 2 * 0.01 + 1.024 + 2 * 0.012)
    assert (outcome.reason, outcome.spent_tokens) == (FinishReason.LENGTH, 1026)


def test_prefixes_are_reused_as_the_trace_says() -> None:
    shared = [TraceRequest(at, 1600, 1, hash_ids=(1, 2, 3)) for at in (0.0, 10.0)]
    first, second = Simulation(MACHINE, FirstComeFirstServed()).run(shared)
    assert first.spent_tokens == 1600
    assert second.spent_tokens == 1600 - 3 * 512


def test_queues_have_bounds() -> None:
    outcomes = Simulation(MACHINE, FirstComeFirstServed()).run([TraceRequest(0.0, 500, 4) for _ in range(9)])
    assert [o.refused for o in outcomes].count(True) == 6
    assert figures(outcomes)["shed"] == pytest.approx(6 / 9)
    too_long = Simulation(MACHINE, FirstComeFirstServed()).run([TraceRequest(0.0, 1999, 4)])
    assert too_long[0].refused


def mixed(seed: int, count: int = 120) -> list[TraceRequest]:
    chance, now_s, made = random.Random(seed), 0.0, []
    for _ in range(count):
        now_s += chance.expovariate(2.0)
        service_class = ServiceClass(chance.choice([0, 0, 0, 1, 2]))
        size = chance.randrange(2, 1500)
        ttl_s = chance.choice([None, None, 2.0])
        hashes = tuple(chance.randrange(3) for _ in range(size // 512))
        made.append(
            TraceRequest(now_s, size, chance.randrange(1, 90), service_class, f"t{size % 3}", None, ttl_s, hashes)
        )
    return made


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_ends_everybody_and_leaks_nothing(name: str) -> None:
    simulation = Simulation(MACHINE, policy_named(name))
    outcomes = simulation.run(mixed(1))
    assert all(o.refused or o.reason is not None for o in outcomes)
    simulation.stepper.check_integrity()
    assert simulation.stepper.pool.available == simulation.stepper.pool.total
    again = Simulation(MACHINE, policy_named(name)).run(mixed(1))
    assert [(o.ttft_s, o.end_s) for o in again] == [(o.ttft_s, o.end_s) for o in outcomes]


def test_rates_scale() -> None:
    assert at_rate([TraceRequest(8.0, 1, 1)], 2.0)[0].arrival_s == 4.0


def test_fitted_constants_are_found_again() -> None:
    chance, true = random.Random(2), LinearCost(0.02, 5e-4, 3e-8, 4e-3, 2e-7)
    steps = []
    for _ in range(200):
        tokens, rows = chance.randrange(0, 800), chance.randrange(0, 9)
        shape = StepShape(tokens, tokens * chance.uniform(0, 8000), rows, rows * chance.randrange(1, 8000))
        steps.append((shape, true.seconds(shape) * chance.uniform(0.98, 1.02)))
    found = fit(steps)
    assert found.token_s == pytest.approx(true.token_s, rel=0.05)
    assert found.row_s == pytest.approx(true.row_s, rel=0.1)
    assert min(found.step_s, found.token_context_s, found.row_context_s) >= 0
    shape = StepShape(256, 256 * 4000.0, 4, 9000)
    assert found.seconds(shape) == pytest.approx(true.seconds(shape), rel=0.03)


def test_shapes() -> None:
    chunk = SequenceSlice("a", range(64), 128, (0, 1), False)
    row = SequenceSlice("b", [5], 300, (2,), True)
    assert shape_of(StepPlan((chunk, row))) == StepShape(64, 64 * 160.0, 1, 301)


def test_a_big_machine_is_bound_by_memory_when_it_decodes_and_by_arithmetic_when_it_prefills() -> None:
    one, many = A100_8B.seconds(StepShape(rows=1)), A100_8B.seconds(StepShape(rows=32))
    assert many < 1.1 * one
    assert A100_8B.seconds(StepShape(8192)) > 1.8 * A100_8B.seconds(StepShape(4096))


def test_intervals() -> None:
    found = interval([0.5, 0.6, 0.7])
    assert found.mean == pytest.approx(0.6)
    assert found.high - found.mean == pytest.approx(4.30 * 0.1 / 3**0.5)
    assert summarise([{"x": 1.0}])["x"].low == 1.0
    assert jain([1, 1, 1]) == 1.0
    assert jain([1, 0, 0]) == pytest.approx(1 / 3)


def test_unknown_policies_are_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        policy_named("best")
    assert "deadline" in caught.value.hint


def test_logs_are_json(tmp_path: Path) -> None:
    """What `TraceRequest` says of itself can be read back."""
    row = {"arrival_s": 0.0, "prompt_tokens": 10, "new_tokens": 1, "service_class": 1, "deadline_s": 2.5}
    made = read_trace(written(tmp_path, json.dumps(row)))[0]
    assert (made.service_class, made.deadline_s) == (ServiceClass.P1_DOCUMENT, 2.5)


def test_rates_are_measured_before_the_first_request() -> None:
    """Else the first ones would be judged by a guess, and refused for nothing."""
    fast = Machine("fast", LinearCost(0.003, 1e-4, 0.0, 1e-3, 0.0), 1000, 8000, EngineLimits())
    outcome = Simulation(fast, policy_named("deadline-refuse")).run([TraceRequest(0.0, 4000, 2, deadline_s=1.0)])[0]
    assert outcome.within(1.0)
