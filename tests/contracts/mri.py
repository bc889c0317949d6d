"""What every `ModelRuntime` must do (spec R6, docs/mri.md). Subclass `MRIContract` and give it a `make` fixture.

Uses only the interface, so that any engine behind it can be run against it. Token ids are small, and tokens are
compared, since kernels of different engines differ in their last bits. Threads: `mri_threads`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from perilune.core import BLOCK_TOKENS, SamplingParams
from perilune.errors import InvalidRequest, InvalidStateError, Overloaded
from perilune.runtime.mri import CancelFlag, ModelRuntime, SequenceSlice, StepAbandoned, StepPlan
from perilune.runtime.mri_session import InitProgress, MRISession
from perilune.runtime.mri_version import SUPPORTED_VERSIONS, evict_reply_fields, negotiate, read_evict_reply
from tests.contracts.mri_tools import (
    GREEDY,
    PROMPT,
    Draw,
    assert_same,
    draws,
    generate,
    long_prompt,
    piece,
    run,
    step,
    time_to_abandon,
    watched,
)

Make = Callable[[], ModelRuntime]


class MRIContract:
    """The suite. `make` loads the model anew: at least 16 blocks, and a vocabulary of at least 256 tokens.

    `cancel_s` is how soon a running step must end; the best of some tries counts, since the machine may be busy.
    """

    cancel_s = 0.05

    @pytest.fixture(scope="class")
    def make(self) -> Make:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def shared_runtime(self, make: Make) -> Iterator[ModelRuntime]:
        runtime = make()
        yield runtime
        runtime.close()

    @pytest.fixture
    def runtime(self, shared_runtime: ModelRuntime) -> Iterator[ModelRuntime]:
        yield shared_runtime
        shared_runtime.evict_kv(range(shared_runtime.num_blocks))

    # ----------------------------------------------------------------------------------- versions and properties

    def test_version_and_shape(self, runtime: ModelRuntime) -> None:
        assert runtime.capabilities.version in SUPPORTED_VERSIONS
        assert negotiate("1.0", runtime.capabilities.version) == "1.0"
        assert runtime.num_blocks >= 16
        assert runtime.max_context_tokens >= 4 * BLOCK_TOKENS
        assert runtime.max_context_tokens <= runtime.num_blocks * BLOCK_TOKENS or runtime.tiers is not None
        assert runtime.kv_spec.block_bytes > 0
        assert runtime.kv_spec.fingerprint
        assert runtime.capabilities.max_branches == 0 or runtime.capabilities.max_branches >= 16

    def test_eviction_replies_of_both_versions(self, runtime: ModelRuntime) -> None:
        generate(runtime, "a", PROMPT, [0, 1, 2], count=1)
        reply = runtime.evict_kv([0, 1])
        for version in SUPPORTED_VERSIONS:
            understood = read_evict_reply(evict_reply_fields(reply, version), version)
            assert understood.evicted_blocks == 2
            assert understood.freed_bytes == (0 if version == "1.0" else 2 * runtime.kv_spec.block_bytes)

    # ---------------------------------------------------------------------------------------------- illegal calls

    def test_open_twice_is_an_invalid_state(self, runtime: ModelRuntime) -> None:
        runtime.init_context("a", PROMPT, GREEDY)
        with pytest.raises(InvalidStateError):
            runtime.init_context("a", PROMPT, GREEDY)
        runtime.release_context("a")
        runtime.init_context("a", PROMPT, GREEDY)
        runtime.release_context("a")
        runtime.release_context("a")
        runtime.release_context("never opened")

    def test_bad_sampling_leaves_the_sequence_closed(self, runtime: ModelRuntime) -> None:
        with pytest.raises(InvalidRequest, match="temperature"):
            runtime.init_context("a", PROMPT, SamplingParams(temperature=-1.0))
        runtime.init_context("a", PROMPT, GREEDY)
        runtime.release_context("a")

    def test_step_of_a_sequence_that_is_not_open(self, runtime: ModelRuntime) -> None:
        with pytest.raises(InvalidStateError):
            step(runtime, piece("closed", PROMPT, 0, [0, 1, 2], sample=True))
        runtime.init_context("a", PROMPT, GREEDY)
        runtime.release_context("a")
        with pytest.raises(InvalidStateError):
            step(runtime, piece("a", PROMPT, 0, [0, 1, 2], sample=True))

    def test_a_plan_outside_its_bounds_changes_nothing(self, runtime: ModelRuntime) -> None:
        expected = generate(runtime, "a", PROMPT, [0, 1, 2], count=2)
        outside, window = runtime.num_blocks, runtime.max_context_tokens
        runtime.init_context("a", PROMPT, watched(runtime))
        first = draws(run(runtime, piece("a", PROMPT, 0, [0, 1, 2], sample=True)))["a"]
        at, next_token = len(PROMPT), [first[0]]
        full = [index % runtime.num_blocks for index in range(-(-window // BLOCK_TOKENS) + 1)]
        for bad in (
            (piece("a", next_token, at, [0, 1], sample=True),),  # too few blocks
            (piece("a", next_token, at, [0, 1, outside], sample=True),),
            (piece("a", next_token, at, [0, -1, 2], sample=True),),
            (piece("a", [], at, [0, 1, 2], sample=True),),
            (piece("a", [2**31 - 1], at, [0, 1, 2], sample=True),),  # a token outside the vocabulary
            (piece("a", [-1], at, [0, 1, 2], sample=True),),
            (piece("a", [5], -1, [0, 1, 2], sample=True),),
            (piece("a", [5], window, full, sample=True),),
            (piece("a", next_token, at, [0, 1, 2], sample=True),) * 2,  # a sequence twice
        ):
            with pytest.raises(ValueError, match=r"block|slice|token|twice"):
                step(runtime, *bad)
        second = draws(run(runtime, piece("a", next_token, at, [0, 1, 2], sample=True)))["a"]
        runtime.release_context("a")
        assert_same(runtime, [first, second], expected)

    def test_kv_that_is_not_there_is_never_read(self, runtime: ModelRuntime) -> None:
        """An evicted block, one that nobody wrote, a hole in the middle: no answer from torn KV."""
        expected = generate(runtime, "a", PROMPT, [0, 1, 2], count=1)
        runtime.evict_kv(range(runtime.num_blocks))
        runtime.init_context("a", PROMPT, watched(runtime))
        tail = piece("a", PROMPT[64:], 64, [0, 1, 2], sample=True)
        with pytest.raises(InvalidStateError):
            step(runtime, tail)
        step(runtime, piece("a", PROMPT[:64], 0, [0, 1]))
        for torn in ([0], [1], [0, 1]):
            runtime.evict_kv(torn)
            with pytest.raises(InvalidStateError):
                step(runtime, tail)
            step(runtime, piece("a", PROMPT[:64], 0, [0, 1]))
        assert_same(runtime, [draws(run(runtime, tail))["a"]], expected)
        runtime.release_context("a")

    def test_what_is_not_offered_is_refused(self, runtime: ModelRuntime) -> None:
        for outside in (-1, runtime.num_blocks):
            with pytest.raises(ValueError, match="block"):
                runtime.block_view(outside)
        if not runtime.capabilities.kv_bytes:
            with pytest.raises(InvalidStateError):
                runtime.block_view(0)
        if not runtime.capabilities.kv_summary:
            with pytest.raises(InvalidStateError):
                runtime.get_kv_summary()

    def test_closed_for_good(self, make: Make) -> None:
        runtime = make()
        runtime.init_context("a", PROMPT, GREEDY)
        runtime.close()
        runtime.close()
        for call in (
            lambda: runtime.init_context("b", PROMPT, GREEDY),
            lambda: step(runtime, piece("a", PROMPT, 0, [0, 1, 2])),
            lambda: runtime.evict_kv([0]),
            lambda: runtime.get_kv_summary(),
        ):
            with pytest.raises(InvalidStateError):
                call()

    # ------------------------------------------------------------------------------------------------------ steps

    def test_only_sampled_sequences_answer(self, runtime: ModelRuntime) -> None:
        for name in ("a", "b"):
            runtime.init_context(name, PROMPT, GREEDY)
        tokens = step(runtime, piece("a", PROMPT, 0, [0, 1, 2], sample=True), piece("b", PROMPT, 0, [3, 4, 5]))
        assert set(tokens) == {"a"}
        assert not step(runtime), "an empty plan is a step without answers"
        for name in ("a", "b"):
            runtime.release_context(name)

    def test_chunks_give_what_one_step_gives(self, runtime: ModelRuntime) -> None:
        table = [4, 9, 2]
        whole = generate(runtime, "whole", PROMPT, table, count=1)
        for cuts in ([1], [32], [5, 6, 40], [31, 33, 64, 69]):
            runtime.init_context("cut", PROMPT, watched(runtime))
            for first, last in pairwise([0, *cuts, len(PROMPT)]):
                ends = last == len(PROMPT)
                result = run(runtime, piece("cut", PROMPT[first:last], first, table, sample=ends))
            assert_same(runtime, [draws(result)["cut"]], whole)
            runtime.release_context("cut")

    def test_a_chunk_may_be_given_again(self, runtime: ModelRuntime) -> None:
        """From any earlier position, whole blocks or not; what lay behind it is overwritten."""
        table = [0, 1, 2]
        expected = generate(runtime, "a", PROMPT, table, count=2)
        runtime.init_context("a", PROMPT, watched(runtime))
        for start, end in ((0, 50), (20, 60), (20, 45), (45, 64), (32, 64), (0, 40)):
            step(runtime, piece("a", PROMPT[start:end], start, table))
        first = draws(run(runtime, piece("a", PROMPT[40:], 40, table, sample=True)))["a"]
        second = draws(run(runtime, piece("a", [first[0]], 70, table, sample=True)))["a"]
        runtime.release_context("a")
        assert_same(runtime, [first, second], expected)

    def test_blocks_may_lie_anywhere(self, runtime: ModelRuntime) -> None:
        first = generate(runtime, "a", PROMPT, [0, 1, 2])
        assert_same(runtime, generate(runtime, "a", PROMPT, [runtime.num_blocks - 1, 7, 3]), first)
        assert_same(runtime, generate(runtime, "a", PROMPT, [2, 0, 1]), first)

    def test_batch_gives_what_each_gives_alone(self, runtime: ModelRuntime) -> None:
        prompts = {"a": PROMPT, "b": PROMPT[:33], "c": PROMPT[20:65]}
        tables = {"a": [0, 1, 2], "b": [3, 4], "c": [5, 6]}
        alone = {name: generate(runtime, name, prompts[name], tables[name], count=4) for name in prompts}
        for name, prompt in prompts.items():
            runtime.init_context(name, prompt, watched(runtime))
        first = run(runtime, *(piece(n, prompts[n], 0, tables[n], sample=True) for n in prompts))
        together: dict[str, list[Draw]] = {name: [draw] for name, draw in draws(first).items()}
        while len(together["a"]) < 4:
            slices = []
            for name, found in together.items():
                at = len(prompts[name]) + len(found) - 1
                slices.append(piece(name, [alone[name][len(found) - 1][0]], at, tables[name], sample=True))
            for name, draw in draws(run(runtime, *slices)).items():
                together[name].append(draw)
        for name in prompts:
            runtime.release_context(name)
            assert_same(runtime, together[name], alone[name])

    def test_prefill_and_decode_share_a_step(self, runtime: ModelRuntime) -> None:
        alone = generate(runtime, "a", PROMPT, [0, 1, 2], count=3)
        other = generate(runtime, "b", PROMPT[3:50], [3, 4], count=1)
        runtime.init_context("a", PROMPT, watched(runtime))
        runtime.init_context("b", PROMPT[3:50], watched(runtime))
        first = draws(run(runtime, piece("a", PROMPT, 0, [0, 1, 2], sample=True)))
        decode = piece("a", [alone[0][0]], len(PROMPT), [0, 1, 2], sample=True)
        both = draws(run(runtime, piece("b", PROMPT[3:50], 0, [3, 4], sample=True), decode))
        assert_same(runtime, [first["a"], both["a"]], alone[:2])
        assert_same(runtime, [both["b"]], other)
        runtime.release_context("a")
        runtime.release_context("b")

    def test_sequences_share_a_prefix(self, runtime: ModelRuntime) -> None:
        """Blocks in several tables at once; each branch goes its own way, and outlives the others."""
        head, tails = PROMPT[:64], {"a": PROMPT[64:], "b": PROMPT[10:30], "c": PROMPT[30:40]}
        alone = {n: generate(runtime, n, head + tail, [8, 9, 10], count=3) for n, tail in tails.items()}
        runtime.evict_kv([8, 9, 10])
        tables = {name: [0, 1, 2 + index] for index, name in enumerate(tails)}
        for name, tail in tails.items():
            runtime.init_context(name, head + tail, watched(runtime))
        step(runtime, piece("a", head, 0, [0, 1]))
        found: dict[str, list[Draw]] = {name: [] for name in tails}
        names = list(tails)
        for turn in range(3):
            slices = [
                piece(name, tails[name], 64, tables[name], sample=True)
                if turn == 0
                else piece(
                    name, [alone[name][turn - 1][0]], 63 + len(tails[name]) + turn, tables[name], sample=True
                )
                for name in names
            ]
            for name, draw in draws(run(runtime, *slices)).items():
                found[name].append(draw)
            gone = names.pop(0)
            runtime.release_context(gone)
            runtime.evict_kv([tables[gone][2]])
        for name, draw_list in found.items():
            assert_same(runtime, draw_list, alone[name][: len(draw_list)])

    def test_seed_decides(self, runtime: ModelRuntime) -> None:
        sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=8)
        alone = [token for token, _ in generate(runtime, "a", PROMPT, [0, 1, 2], sampling=sampling)]
        again = [token for token, _ in generate(runtime, "a", PROMPT, [0, 1, 2], sampling=sampling)]
        assert again == alone
        others = set()
        for seed in range(6, 10):
            params = SamplingParams(temperature=1.0, seed=seed)
            others.add(tuple(token for token, _ in generate(runtime, "a", PROMPT, [0, 1, 2], sampling=params)))
        assert others != {tuple(alone)}

    def test_logprobs_where_offered(self, runtime: ModelRuntime) -> None:
        if not runtime.capabilities.logprobs:
            pytest.skip("not offered")
        runtime.init_context("a", PROMPT, SamplingParams(logprobs=3))
        result = run(runtime, piece("a", PROMPT, 0, [0, 1, 2], sample=True))
        logprob = result.logprobs["a"]
        assert logprob.token_id == result.tokens["a"] == logprob.top[0][0]
        assert len(logprob.top) == 3
        assert 0 >= logprob.logprob == logprob.top[0][1] >= logprob.top[1][1]
        runtime.release_context("a")

    # ----------------------------------------------------------------------------------------- cancelling, resuming

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
        assert runtime.forward_step(plan, flag).tokens["a"] == expected[0][0]
        runtime.release_context("a")

    def test_a_running_step_ends_in_time(self, runtime: ModelRuntime) -> None:
        """The flag is set in the middle of the longest step there is; the same plan then gives what it gave."""
        prompt, table = long_prompt(runtime)
        plan = StepPlan((SequenceSlice("a", prompt, 0, table, True),))
        runtime.init_context("a", prompt, watched(runtime))
        began = time.perf_counter()
        expected = draws(runtime.forward_step(plan, CancelFlag()))["a"]
        step_s = time.perf_counter() - began
        waits_s = []
        for share in (0.2, 0.5, 0.7, 0.1, 0.3, 0.4, 0.6, 0.8):
            waited_s = time_to_abandon(runtime, plan, share * step_s)
            if waited_s is not None:
                waits_s.append(waited_s)
        assert waits_s, "no flag fell into a step"
        assert min(waits_s) <= self.cancel_s
        assert_same(runtime, [draws(runtime.forward_step(plan, CancelFlag()))["a"]], [expected])
        runtime.release_context("a")

    def test_a_sequence_leaves_a_step_that_others_share(self, runtime: ModelRuntime) -> None:
        """Its blocks come back inside `left`; the others' answers stay what they are alone."""
        expected = generate(runtime, "a", PROMPT, [0, 1, 2], count=1)
        prompt, table = (part[: 12 * BLOCK_TOKENS] for part in long_prompt(runtime))
        table = [block + 3 for block in table[:12]]
        gone: set[str] = set()

        def left() -> set[str]:
            if not gone:
                runtime.release_context("b")
                runtime.evict_kv(table)
                gone.add("b")
            return gone

        for name, tokens in (("a", PROMPT), ("b", prompt)):
            runtime.init_context(name, tokens, watched(runtime))
        flag = CancelFlag(left)
        flag.wake()
        slices = (piece("b", prompt, 0, table, sample=True), piece("a", PROMPT, 0, [0, 1, 2], sample=True))
        result = draws(runtime.forward_step(StepPlan(slices), flag))
        assert_same(runtime, [result["a"]], expected)
        assert gone.isdisjoint(result), "an answer for nobody"
        runtime.release_context("a")
        runtime.release_context("b")

    def test_init_context_is_chunked_resumable_and_tells(self, runtime: ModelRuntime) -> None:
        expected = generate(runtime, "a", PROMPT, [0, 1, 2], count=3)
        runtime.evict_kv([0, 1, 2])
        session = MRISession(runtime)
        told: list[InitProgress] = []
        with session.init_context("a", PROMPT, watched(runtime), chunk_tokens=20) as context:
            flag = CancelFlag()

            def report(progress: InitProgress) -> None:
                told.append(progress)
                if progress.computed_tokens == 40:
                    flag.set()

            with pytest.raises(StepAbandoned):
                context.prefill(report, flag)
            flag.clear()
            assert context.progress.computed_tokens == 40, "the chunks that were done stay done"
            assert context.prefill(told.append, flag).computed_tokens == len(PROMPT)
            assert [progress.computed_tokens for progress in told] == [20, 40, 60, 70]
            with pytest.raises(InvalidStateError):
                context.advance()
            context.next_token()
            context.next_token()
            assert_same(runtime, [(t, None) for t in context.generated], [(t, None) for t, _ in expected])
        assert session.free_blocks == runtime.num_blocks
        with pytest.raises(InvalidStateError):
            context.next_token()

    def test_a_context_without_room_keeps_its_state(self, runtime: ModelRuntime) -> None:
        session = MRISession(runtime)
        held = session.take(session.free_blocks - 2)
        with session.init_context("a", PROMPT, chunk_tokens=32) as context:
            with pytest.raises(Overloaded):
                context.prefill()
            assert context.progress.computed_tokens == 64
            session.give_back(held)
            context.prefill()
            assert context.ready

    # --------------------------------------------------------------------------------------------------- KV

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

    def test_eviction_is_whole_blocks_or_nothing(self, runtime: ModelRuntime) -> None:
        expected = generate(runtime, "a", PROMPT, [0, 1, 2], count=2)
        size = runtime.kv_spec.block_bytes
        runtime.init_context("a", PROMPT, watched(runtime))
        first = draws(run(runtime, piece("a", PROMPT, 0, [0, 1, 2], sample=True)))["a"]
        for outside in (-1, runtime.num_blocks):
            with pytest.raises(ValueError, match="block"):
                runtime.evict_kv([0, 1, outside])
        assert runtime.evict_kv([]).evicted_blocks == 0
        reply = runtime.evict_kv([7, 7, 8])
        assert (reply.evicted_blocks, reply.freed_bytes) == (2, 0), "nothing was in them"
        second = draws(run(runtime, piece("a", [first[0]], 70, [0, 1, 2], sample=True)))["a"]
        assert_same(runtime, [first, second], expected)
        runtime.release_context("a")
        reply = runtime.evict_kv([0, 1, 1, 7])
        assert (reply.evicted_blocks, reply.freed_bytes) == (3, 2 * size)
        assert runtime.evict_kv([0, 1, 2]).freed_bytes == size

    def test_summary_counts_written_blocks(self, runtime: ModelRuntime) -> None:
        if not runtime.capabilities.kv_summary:
            pytest.skip("not offered")
        size = runtime.kv_spec.block_bytes

        def resident() -> int:
            summary = runtime.get_kv_summary()
            assert summary.total_blocks == runtime.num_blocks
            assert summary.block_bytes == size
            return summary.resident_bytes

        assert resident() == 0
        generate(runtime, "a", PROMPT, [0, 1, 2], count=1)
        assert resident() == 3 * size, "a partly filled block counts as one; release keeps KV"
        generate(runtime, "b", PROMPT, [0, 1, 2], count=1)
        assert resident() == 3 * size
        runtime.evict_kv([1, 9])
        assert resident() == 2 * size
        runtime.evict_kv(range(runtime.num_blocks))
        assert resident() == 0
