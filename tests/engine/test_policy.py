"""Step sizes follow measured speeds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.engine.policy import ChunkBudget, ChunkController, EngineLimits
from perilune.engine.sequence import EngineSequence
from tests.engine.harness import Listener, spec, text


def sequence(serial: int, arrival_s: float = 0.0, tokens: int = 640) -> EngineSequence:
    return EngineSequence(spec(f"s{serial}", text(1, tokens)), Listener(), [], serial, arrival_s)


def learned(fixed_s: float, token_s: float, context_s: float, seconds: float, context: int) -> int:
    """The chunk that a controller settles on, on a machine of this speed."""
    controller = ChunkController(EngineLimits())
    budget = ChunkBudget(seconds, 1, solo=False)
    for _ in range(60):
        chunk = controller.chunk(context, budget)
        controller.observe([(context, chunk)], 0, fixed_s + chunk * (token_s + context_s * context))
    return controller.chunk(context, budget)


@given(
    token_s=st.floats(0.0002, 0.004),
    fixed_s=st.floats(0.0, 0.05),
    context=st.sampled_from([0, 100, 2000, 8000]),
)
def test_chunks_settle_on_the_step_time(token_s: float, fixed_s: float, context: int) -> None:
    context_s = 1e-7
    chunk = learned(fixed_s, token_s, context_s, 0.15, context)
    step_s = fixed_s + chunk * (token_s + context_s * context)
    half_block_s = step_s / (2 * chunk / 32)  # rounding to whole blocks can't do better
    assert step_s <= 0.15 + half_block_s + 1e-9 or chunk == 32
    assert step_s >= 0.15 - half_block_s - 1e-9


def test_rates_of_other_contexts_are_borrowed_until_measured() -> None:
    controller = ChunkController(EngineLimits())
    controller.observe([(0, 320)], 0, 0.32)
    assert controller.prefill_s(5000) == pytest.approx(0.001)
    controller.observe([(5000, 320)], 0, 0.96)
    assert controller.prefill_s(5000) == pytest.approx(0.003)
    assert controller.prefill_s(0) == pytest.approx(0.001)
    assert controller.predict_s(0, 10_000) == pytest.approx(4096 * 0.001 + 5904 * 0.003, rel=0.01)


def test_one_step_that_stood_still_is_hardly_believed_and_lasting_slowness_soon() -> None:
    controller = ChunkController(EngineLimits())
    for _ in range(20):
        controller.observe([(4096, 320)], 0, 0.32)
    controller.observe([(4096, 320)], 0, 60.0)
    assert controller.prefill_s(4096) < 0.002
    for _ in range(10):
        controller.observe([(4096, 320)], 0, 3.2)
    assert controller.prefill_s(4096) == pytest.approx(0.01, rel=0.1)


def test_decode_time_is_taken_off_the_guard() -> None:
    controller = ChunkController(EngineLimits(guard_s=0.15))
    for _ in range(20):
        controller.observe([], 4, 0.05)
    assert controller.budget(4, 1).seconds == pytest.approx(0.1)


def test_a_lone_prompt_may_take_longer_and_batch_work_may_not() -> None:
    controller = ChunkController(EngineLimits(guard_s=0.1, solo_s=0.5))
    assert controller.budget(0, 1).seconds == 0.5
    assert controller.budget(0, 0).seconds == 0.1


@given(limit=st.integers(1, 400), tokens=st.integers(1, 400), done=st.integers(0, 399))
def test_chunks_never_leave_one_token(limit: int, tokens: int, done: int) -> None:
    subject = sequence(1, tokens=tokens)
    subject.computed = min(done, tokens - 1)
    size = subject.next_chunk(limit)
    left = subject.remaining - size
    assert 0 <= size <= min(limit, subject.remaining)
    assert left != 1
    assert size > 0 or limit < 2


def test_a_lone_prompt_is_cut_evenly() -> None:
    """No small last step: each costs nearly as much as a large one."""
    controller = ChunkController(EngineLimits(), initial_tokens_per_s=1000.0)
    budget = ChunkBudget(1.0, 1, solo=True)
    for remaining in range(2, 9000, 97):
        size = controller.chunk(0, budget, remaining)
        steps = -(-remaining // size)
        assert size <= 1.25 * 1000 + 32
        assert size * steps - remaining < 32 * steps
    assert controller.chunk(0, ChunkBudget(1.0, 1, solo=False), 2048) == 992
