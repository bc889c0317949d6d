"""Small steps that the MRI's conformance suite is made of. Uses only the interface."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from perilune.core import BLOCK_TOKENS, SamplingParams, TokenLogprob
from perilune.runtime.mri import CancelFlag, ModelRuntime, SequenceSlice, StepAbandoned, StepPlan, StepResult

GREEDY = SamplingParams()
PROMPT = [(7 * index + 11) % 250 + 3 for index in range(70)]

TOLERANCE = 0.2
"""Nats by which a token's log probability may differ: a decode step may have weights and kernels of its own."""

Draw = tuple[int, TokenLogprob | None]


def piece(
    seq_id: str, tokens: Sequence[int], start: int, table: Sequence[int], *, sample: bool = False
) -> SequenceSlice:
    return SequenceSlice(seq_id, tokens, start, table, sample)


def run(runtime: ModelRuntime, *slices: SequenceSlice) -> StepResult:
    return runtime.forward_step(StepPlan(slices), CancelFlag())


def step(runtime: ModelRuntime, *slices: SequenceSlice) -> dict[str, int]:
    return run(runtime, *slices).tokens


def draws(result: StepResult) -> dict[str, Draw]:
    return {name: (token, result.logprobs.get(name)) for name, token in result.tokens.items()}


def watched(runtime: ModelRuntime) -> SamplingParams:
    """Greedy, with log probabilities where they are offered: they tell a near tie from a mistake."""
    return SamplingParams(logprobs=5) if runtime.capabilities.logprobs else GREEDY


def generate(
    runtime: ModelRuntime,
    seq_id: str,
    prompt: Sequence[int],
    table: Sequence[int],
    *,
    count: int = 6,
    sampling: SamplingParams | None = None,
) -> list[Draw]:
    """Prefill and decode alone, then close."""
    runtime.init_context(seq_id, prompt, sampling or watched(runtime))
    found = [draws(run(runtime, piece(seq_id, prompt, 0, table, sample=True)))[seq_id]]
    while len(found) < count:
        at = len(prompt) + len(found) - 1
        found.append(draws(run(runtime, piece(seq_id, [found[-1][0]], at, table, sample=True)))[seq_id])
    runtime.release_context(seq_id)
    return found


def long_prompt(runtime: ModelRuntime) -> tuple[list[int], list[int]]:
    """The longest prompt that fits, at most 2,048 tokens, and a table for it."""
    length = min(runtime.max_context_tokens, runtime.num_blocks * BLOCK_TOKENS, 2048)
    return [PROMPT[index % len(PROMPT)] for index in range(length)], list(range(-(-length // BLOCK_TOKENS)))


def assert_same(runtime: ModelRuntime, found: Sequence[Draw], expected: Sequence[Draw]) -> None:
    """The same tokens. Where `chunk_invariant` is False a near tie may fall either way; what follows differs."""
    exact = runtime.capabilities.chunk_invariant
    assert len(found) == len(expected)
    for (token, logprob), (wanted, reference) in zip(found, expected, strict=True):
        if logprob is not None and reference is not None:
            mine, theirs = dict(logprob.top), dict(reference.top)
            for shared in mine.keys() & theirs.keys():
                assert abs(mine[shared] - theirs[shared]) <= TOLERANCE, (logprob, reference)
            if token != wanted and not exact:
                assert abs(theirs[wanted] - theirs.get(token, -99.0)) <= 2 * TOLERANCE, (logprob, reference)
                return
        assert token == wanted, (found, expected)


def time_to_abandon(runtime: ModelRuntime, plan: StepPlan, delay_s: float) -> float | None:
    """Seconds from setting the flag to `StepAbandoned`; None if the step was over before."""
    flag, set_at = CancelFlag(), []

    def cancel() -> None:
        set_at.append(time.perf_counter())
        flag.set()

    timer = threading.Timer(delay_s, cancel)
    timer.start()
    try:
        runtime.forward_step(plan, flag)
    except StepAbandoned:
        return time.perf_counter() - set_at[0]
    finally:
        timer.join()
    return None
