"""What every `ModelRuntime` must do (spec R6). Subclass `MRIContract` and give it a `runtime` fixture.

Uses only the interface, so that our runtime, llama.cpp and vLLM can be run against it. Token ids are small, and
greedy tokens are compared, since kernels of different engines differ in their last bits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest

from perilune.core import BLOCK_TOKENS, SamplingParams
from perilune.errors import InvalidStateError
from perilune.runtime.mri import (
    MRI_VERSION,
    CancelFlag,
    ModelRuntime,
    SequenceSlice,
    StepAbandoned,
    StepPlan,
)

GREEDY = SamplingParams()
PROMPT = [(7 * index + 11) % 250 + 3 for index in range(70)]


def piece(
    seq_id: str, tokens: Sequence[int], start: int, table: Sequence[int], *, sample: bool = False
) -> SequenceSlice:
    return SequenceSlice(seq_id, tokens, start, table, sample)


def step(runtime: ModelRuntime, *slices: SequenceSlice) -> dict[str, int]:
    return runtime.forward_step(StepPlan(slices), CancelFlag()).tokens


def generate(
    runtime: ModelRuntime,
    seq_id: str,
    prompt: Sequence[int],
    table: Sequence[int],
    *,
    count: int = 6,
    sampling: SamplingParams = GREEDY,
) -> list[int]:
    """Prefill and decode alone, then close."""
    runtime.init_context(seq_id, prompt, sampling)
    tokens = [step(runtime, piece(seq_id, prompt, 0, table, sample=True))[seq_id]]
    while len(tokens) < count:
        at = len(prompt) + len(tokens) - 1
        tokens.append(step(runtime, piece(seq_id, tokens[-1:], at, table, sample=True))[seq_id])
    runtime.release_context(seq_id)
    return tokens


class MRIContract:
    """The suite. The runtime needs at least 16 blocks, and a vocabulary of at least 256 tokens."""

    @pytest.fixture
    def runtime(self) -> ModelRuntime:
        raise NotImplementedError

    def test_version_and_shape(self, runtime: ModelRuntime) -> None:
        assert runtime.capabilities.version.split(".")[0] == MRI_VERSION.split(".")[0]
        assert runtime.num_blocks >= 16
        assert runtime.max_context_tokens >= 4 * BLOCK_TOKENS
        assert runtime.kv_spec.block_bytes > 0
        assert runtime.kv_spec.fingerprint

    def test_open_twice_is_an_invalid_state(self, runtime: ModelRuntime) -> None:
        runtime.init_context("a", PROMPT, GREEDY)
        with pytest.raises(InvalidStateError):
            runtime.init_context("a", PROMPT, GREEDY)
        runtime.release_context("a")
        runtime.init_context("a", PROMPT, GREEDY)
        runtime.release_context("a")
        runtime.release_context("a")
        runtime.release_context("never opened")

    def test_step_of_a_closed_sequence(self, runtime: ModelRuntime) -> None:
        with pytest.raises(InvalidStateError):
            step(runtime, piece("closed", PROMPT, 0, [0, 1, 2], sample=True))

    def test_only_sampled_sequences_answer(self, runtime: ModelRuntime) -> None:
        for name in ("a", "b"):
            runtime.init_context(name, PROMPT, GREEDY)
        tokens = step(runtime, piece("a", PROMPT, 0, [0, 1, 2], sample=True), piece("b", PROMPT, 0, [3, 4, 5]))
        assert set(tokens) == {"a"}
        for name in ("a", "b"):
            runtime.release_context(name)

    def test_chunks_give_what_one_step_gives(self, runtime: ModelRuntime) -> None:
        table = [4, 9, 2]
        whole = generate(runtime, "whole", PROMPT, table)
        for cuts in ([1], [32], [5, 6, 40], [31, 33, 64, 69]):
            runtime.init_context("cut", PROMPT, GREEDY)
            bounds = [0, *cuts, len(PROMPT)]
            for first, last in pairwise(bounds):
                ends = last == len(PROMPT)
                tokens = step(runtime, piece("cut", PROMPT[first:last], first, table, sample=ends))
            assert tokens["cut"] == whole[0], cuts
            runtime.release_context("cut")

    def test_blocks_may_lie_anywhere(self, runtime: ModelRuntime) -> None:
        first = generate(runtime, "a", PROMPT, [0, 1, 2])
        assert generate(runtime, "a", PROMPT, [runtime.num_blocks - 1, 7, 3]) == first

    def test_batch_gives_what_each_gives_alone(self, runtime: ModelRuntime) -> None:
        prompts = {"a": PROMPT, "b": PROMPT[:33], "c": PROMPT[20:65]}
        tables = {"a": [0, 1, 2], "b": [3, 4], "c": [5, 6]}
        alone = {name: generate(runtime, name, prompts[name], tables[name], count=4) for name in prompts}
        for name, prompt in prompts.items():
            runtime.init_context(name, prompt, GREEDY)
        together = {
            name: [token]
            for name, token in step(
                runtime, *(piece(n, prompts[n], 0, tables[n], sample=True) for n in prompts)
            ).items()
        }
        while len(together["a"]) < 4:
            slices = []
            for name, tokens in together.items():
                at = len(prompts[name]) + len(tokens) - 1
                slices.append(piece(name, tokens[-1:], at, tables[name], sample=True))
            for name, token in step(runtime, *slices).items():
                together[name].append(token)
        for name in prompts:
            runtime.release_context(name)
        assert together == alone

    def test_prefill_and_decode_share_a_step(self, runtime: ModelRuntime) -> None:
        alone = generate(runtime, "a", PROMPT, [0, 1, 2], count=3)
        other = generate(runtime, "b", PROMPT[3:50], [3, 4], count=1)
        runtime.init_context("a", PROMPT, GREEDY)
        runtime.init_context("b", PROMPT[3:50], GREEDY)
        first = step(runtime, piece("a", PROMPT, 0, [0, 1, 2], sample=True))
        both = step(
            runtime,
            piece("b", PROMPT[3:50], 0, [3, 4], sample=True),
            piece("a", [first["a"]], len(PROMPT), [0, 1, 2], sample=True),
        )
        assert first["a"] == alone[0]
        assert both == {"a": alone[1], "b": other[0]}
        runtime.release_context("a")
        runtime.release_context("b")

    def test_seed_decides_in_any_batch(self, runtime: ModelRuntime) -> None:
        sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=8)
        alone = generate(runtime, "a", PROMPT, [0, 1, 2], sampling=sampling)
        assert generate(runtime, "a", PROMPT, [0, 1, 2], sampling=sampling) == alone
        others = {
            tuple(generate(runtime, "a", PROMPT, [0, 1, 2], sampling=SamplingParams(temperature=1.0, seed=seed)))
            for seed in range(6, 10)
        }
        assert others != {tuple(alone)}

    def test_logprobs_where_offered(self, runtime: ModelRuntime) -> None:
        if not runtime.capabilities.logprobs:
            pytest.skip("not offered")
        runtime.init_context("a", PROMPT, SamplingParams(logprobs=3))
        result = runtime.forward_step(StepPlan((piece("a", PROMPT, 0, [0, 1, 2], sample=True),)), CancelFlag())
        logprob = result.logprobs["a"]
        assert logprob.token_id == result.tokens["a"] == logprob.top[0][0]
        assert len(logprob.top) == 3
        assert 0 >= logprob.logprob == logprob.top[0][1] >= logprob.top[1][1]
        runtime.release_context("a")

    def test_set_flag_abandons_and_nothing_advances(self, runtime: ModelRuntime) -> None:
        sampling = SamplingParams(temperature=1.0, seed=3)
        expected = generate(runtime, "a", PROMPT, [0, 1, 2], sampling=sampling, count=1)
        runtime.init_context("a", PROMPT, sampling)
        flag = CancelFlag()
        flag.set()
        plan = StepPlan((piece("a", PROMPT, 0, [0, 1, 2], sample=True),))
        with pytest.raises(StepAbandoned):
            runtime.forward_step(plan, flag)
        flag.clear()
        assert runtime.forward_step(plan, flag).tokens["a"] == expected[0]
        runtime.release_context("a")

    def test_kv_bytes_move(self, runtime: ModelRuntime) -> None:
        """KV copied to other blocks, as tiers do, continues as the original does."""
        if not runtime.capabilities.kv_bytes:
            pytest.skip("not offered")
        head, tail = PROMPT[:64], PROMPT[64:]
        runtime.init_context("a", PROMPT, GREEDY)
        step(runtime, piece("a", head, 0, [0, 1]))
        expected = step(runtime, piece("a", tail, 64, [0, 1, 2], sample=True))["a"]
        saved = [bytes(runtime.block_view(block)) for block in (0, 1)]
        assert all(len(data) == runtime.kv_spec.block_bytes for data in saved)
        assert saved[0] != saved[1]
        runtime.evict_kv([0, 1])
        for block, data in zip((10, 11), saved, strict=True):
            runtime.block_view(block)[:] = data
        assert step(runtime, piece("a", tail, 64, [10, 11, 12], sample=True))["a"] == expected
        runtime.release_context("a")

    def test_a_step_writes_its_own_slots_only(self, runtime: ModelRuntime) -> None:
        if not runtime.capabilities.kv_bytes:
            pytest.skip("not offered")
        generate(runtime, "a", PROMPT, [0, 1, 2], count=1)
        before = {block: bytes(runtime.block_view(block)) for block in (0, 1, 2)}
        generate(runtime, "b", PROMPT[:40], [5, 6], count=3)
        assert {block: bytes(runtime.block_view(block)) for block in (0, 1, 2)} == before

    def test_eviction_and_summary(self, runtime: ModelRuntime) -> None:
        generate(runtime, "a", PROMPT, [0, 1, 2], count=1)
        reply = runtime.evict_kv([0, 1])
        assert reply.evicted_blocks == 2
        if runtime.capabilities.kv_summary:
            summary = runtime.get_kv_summary()
            assert summary.total_blocks == runtime.num_blocks
            assert 0 <= summary.resident_bytes <= summary.total_blocks * summary.block_bytes

    def test_summary_and_eviction_during_a_step(self, runtime: ModelRuntime) -> None:
        """From another thread: refused while a step runs, and the step's result is untouched."""
        if not runtime.capabilities.kv_summary:
            pytest.skip("not offered")
        length = min(runtime.max_context_tokens, runtime.num_blocks * BLOCK_TOKENS)
        prompt = [PROMPT[index % len(PROMPT)] for index in range(length)]
        table = list(range(-(-length // BLOCK_TOKENS)))
        expected = generate(runtime, "a", prompt, table, count=1)
        refused, done = [], threading.Event()

        def interfere() -> None:
            while not done.is_set():
                try:
                    runtime.get_kv_summary()
                    runtime.evict_kv([])
                except InvalidStateError as error:
                    refused.append(error)
                time.sleep(0.0005)

        thread = threading.Thread(target=interfere)
        runtime.init_context("a", prompt, GREEDY)
        thread.start()
        try:
            tokens = None
            for _ in range(50):
                try:
                    tokens = step(runtime, piece("a", prompt, 0, table, sample=True))
                except InvalidStateError:
                    continue
                if refused:
                    break
        finally:
            done.set()
            thread.join()
        assert refused, "no call fell into a step"
        assert tokens == {"a": expected[0]}
        runtime.release_context("a")
