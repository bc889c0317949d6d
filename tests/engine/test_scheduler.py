"""The engine step by step: answers, reuse, order, preemption, cancel. No threads, a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from perilune.core import EngineFinished, EngineProgress, FinishReason, KVPolicy, ServiceClass
from perilune.engine.policy import STRETCH
from perilune.errors import InvalidRequest
from perilune.runtime.kv.spec import BlockHash, block_hashes
from perilune.runtime.mri import CancelFlag, StepPlan, StepResult
from tests.engine.harness import SALT, Bench, ingest, spec, text
from tests.engine.tiered import FakeTiers
from tests.fakes import MemoryKVStore, expected_tokens

P0, P1, P2 = ServiceClass.P0_INTERACTIVE, ServiceClass.P1_DOCUMENT, ServiceClass.P2_BATCH


# ------------------------------------------------------------------------------------ one sequence


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 34, 63, 64, 65, 66, 97, 300, 1025])
def test_the_answer_is_the_models_own_cold_and_warm(length: int) -> None:
    prompt = text(1, length)
    right = expected_tokens(prompt, 5)
    for chunk in (32, 50, 4096):
        bench = Bench(chunk_tokens=chunk)
        assert bench.answer(spec("cold", prompt, new=5)).tokens == right
        warm = bench.answer(spec("warm", prompt, new=5))
        assert warm.tokens == right
        assert warm.cached == (max(0, length - 2) // 32 * 32, 0)


def test_a_last_chunk_never_looks_like_decode() -> None:
    """One sampled token runs on decode's weights, so a prompt must not end with such a slice."""
    bench = Bench(chunk_tokens=32)
    for length in range(2, 140):
        bench.answer(spec(f"a{length}", text(2, length), new=1))
    assert all(len(p.token_ids) > 1 for plan in bench.runtime.plans for p in plan.slices)


def test_a_stop_token_is_the_last_one_sent() -> None:
    """It was generated, so whoever counts tokens has to see it."""
    prompt = text(1, 40)
    right = expected_tokens(prompt, 6)
    listener = Bench().answer(spec("a", prompt, new=6, stop=frozenset({right[3]})))
    assert listener.tokens == right[:4]
    assert listener.reason is FinishReason.STOP


def test_length_ends_at_max_new_and_at_the_window() -> None:
    bench = Bench(window=50)
    assert len(bench.answer(spec("a", text(1, 40), new=3)).tokens) == 3
    window = bench.answer(spec("b", text(1, 40), new=1000))
    assert len(window.tokens) == 10
    assert window.reason is FinishReason.LENGTH


def test_a_pool_that_is_full_of_one_answer_ends_it() -> None:
    listener = Bench(num_blocks=3).answer(spec("a", text(1, 60), new=1000))
    assert len(listener.tokens) == 36
    assert listener.reason is FinishReason.LENGTH


def test_progress_grows_to_the_whole_prompt() -> None:
    bench = Bench(chunk_tokens=64)
    listener = bench.answer(spec("a", text(1, 200)))
    done = [event.computed_tokens for event in listener.progress]
    assert done == sorted(done)
    assert done[0] == 0
    assert listener.progress[-1] == EngineProgress("a", 200, 200, 0, 0)


# -------------------------------------------------------------------------------------- prefix reuse


def test_only_the_shared_part_is_reused() -> None:
    bench = Bench()
    document, question = text(1, 320), text(2, 100)
    bench.answer(spec("a", document + question, shared=len(document)))
    before = bench.runtime.computed_tokens
    again = bench.answer(spec("b", document + question, shared=len(document), new=1))
    assert again.cached == (320, 0)
    assert bench.runtime.computed_tokens - before == 100


def test_decoded_text_is_prefilled_again() -> None:
    bench = Bench()
    first = bench.answer(spec("a", text(1, 60), new=80))
    history = text(1, 60) + first.tokens
    second = bench.answer(spec("b", history + text(2, 20), new=3))
    assert second.cached == (32, 0)  # not the block that decode completed
    assert second.tokens == expected_tokens(history + text(2, 20), 3)


def test_salts_never_share() -> None:
    bench = Bench(store=MemoryKVStore())
    prompt = text(1, 320)
    bench.answer(spec("a", prompt, salt=b"one", owner="one"))
    other = bench.answer(spec("b", prompt, salt=b"two", owner="two"))
    assert other.cached == (0, 0)
    assert other.tokens == expected_tokens(prompt, 4)


def test_equal_prompts_at_once_are_computed_once() -> None:
    bench = Bench(chunk_tokens=64)
    prompt = text(1, 640)
    listeners = [bench.add(spec(f"choice{i}", prompt, new=2)) for i in range(4)]
    bench.run()
    assert all(listener.tokens == expected_tokens(prompt, 2) for listener in listeners)
    assert bench.runtime.computed_tokens < 640 + 4 * (32 + 2)


def test_a_follower_goes_on_when_its_leader_is_cancelled() -> None:
    bench = Bench(chunk_tokens=64)
    prompt = text(1, 640)
    bench.add(spec("leader", prompt))
    follower = bench.add(spec("follower", prompt))
    for _ in range(3):
        bench.step()
    bench.stepper.cancel("leader")
    bench.run()
    assert follower.tokens == expected_tokens(prompt, 4)
    assert follower.cached == (192, 0)


def test_a_question_takes_over_from_a_running_ingest_and_the_ingest_from_it() -> None:
    bench = Bench(chunk_tokens=64)
    document = text(1, 640)
    slow = bench.add(ingest("doc", document))
    bench.step()
    asked = bench.add(spec("ask", document + text(2, 40), shared=640, new=2))
    bench.run()
    assert asked.tokens == expected_tokens(document + text(2, 40), 2)
    assert asked.cached == (64, 0)  # what the ingest had by then
    assert slow.reason is FinishReason.STOP
    assert bench.runtime.computed_tokens <= 640 + 40 + 1


# -------------------------------------------------------------------------- order, budget, fairness


def slices(plan: StepPlan | None) -> dict[str, int]:
    return {p.seq_id: len(p.token_ids) for p in plan.slices} if plan else {}


def test_arrivals_join_the_running_batch_and_decode_goes_on() -> None:
    bench = Bench(chunk_tokens=64)
    bench.add(spec("a", text(1, 40), new=50))
    bench.step()
    bench.add(spec("b", text(2, 400), new=50))
    for _ in range(4):
        assert slices(bench.step())["a"] == 1
    bench.run()


def test_classes_run_in_order_and_batch_work_only_when_idle() -> None:
    bench = Bench(chunk_tokens=64)
    batch = bench.add(ingest("p2", text(1, 320)))
    assert "p2" in slices(bench.step())
    bench.add(spec("p1", text(2, 128), service_class=P1, new=1))
    bench.add(spec("p0", text(3, 128), service_class=P0, new=1))
    seen = []
    while batch.finish is None:
        seen += list(slices(bench.step()))
    first = {name: seen.index(name) for name in ("p0", "p1", "p2")}
    assert first["p0"] < first["p1"] < first["p2"]
    assert bench.runtime.computed_tokens == 320 + 128 + 128  # the pause lost nothing


def test_batch_decode_pauses_too() -> None:
    bench = Bench()
    bench.add(spec("p2", text(1, 40), service_class=P2, new=20))
    bench.step()
    bench.add(spec("p0", text(2, 40), new=5))
    plans = [slices(bench.step()) for _ in range(5)]
    assert all("p2" not in plan for plan in plans)
    bench.run()


def test_a_short_question_passes_a_long_one_of_its_class() -> None:
    bench = Bench(num_blocks=400)
    long = bench.add(spec("long", text(1, 8000), new=1))
    short = bench.add(spec("short", text(2, 100), new=1))
    while short.finish is None:
        bench.step()
    assert long.finish is None
    bench.run()


def test_short_questions_do_not_starve_a_long_one() -> None:
    bench = Bench(batch=2, chunk_tokens=32, prefill_s=0.001)
    long = bench.add(spec("long", text(1, 600), new=1))
    for number in range(400):
        bench.add(spec(f"short{number}", text(2 + number, 64), new=1))
        bench.step()
        if long.finish is not None:
            break
    assert long.finish is not None
    assert number < 200


def test_step_time_is_bounded_while_others_decode_and_for_batch_work() -> None:
    for background in (False, True):
        bench = Bench(num_blocks=600, prefill_s=0.0012, decode_s=0.01, guard_s=0.15, solo_s=0.6)
        if background:
            bench.add(ingest("doc", text(1, 3000)))
        else:
            bench.add(spec("decoding", text(1, 40), new=400))
            bench.step()
            bench.add(spec("long", text(2, 3000), new=1))
        for _ in range(25):
            bench.step()
        chunks = [o.seconds for o in bench.watcher.steps if o.prefill_tokens][3:]
        assert max(chunks) < 0.2
        assert max(chunks) > 0.08, "chunks needn't be that small"


def test_a_lone_prompt_runs_in_long_steps() -> None:
    bench = Bench(num_blocks=600, prefill_s=0.0012, solo_s=0.6)
    bench.answer(spec("long", text(1, 6000), new=1))
    middle = [o.seconds for o in bench.watcher.steps if o.prefill_tokens][2:-1]
    assert 0.5 < max(middle) < 0.6 * STRETCH + 0.05  # and a block of rounding


# --------------------------------------------------------------------------- blocks run out, failures


def test_preemption_takes_batch_work_first_and_keeps_its_blocks() -> None:
    bench = Bench(num_blocks=20, chunk_tokens=64)
    slow = bench.add(ingest("doc", text(1, 480)))
    for _ in range(6):
        bench.step()
    asked = bench.add(spec("ask", text(2, 300), new=4))
    bench.run()
    assert asked.tokens == expected_tokens(text(2, 300), 4)
    assert slow.reason is FinishReason.STOP
    assert bench.runtime.computed_tokens < 480 + 304 + 480, "nothing of the ingest was kept"


def test_room_for_a_question_comes_from_batch_work_before_documents() -> None:
    bench = Bench(num_blocks=20, chunk_tokens=64)
    batch = bench.add(spec("p2", text(2, 200), service_class=P2, new=60))
    for _ in range(8):
        bench.step()
    document = bench.add(spec("p1", text(1, 200), service_class=P1, new=60))
    for _ in range(8):
        bench.step()
    bench.add(spec("p0", text(3, 100), service_class=P0, new=4))
    bench.step()
    running = {p.seq_id for p in bench.runtime.plans[-1].slices}
    assert running == {"p0", "p1"}
    bench.run()
    assert document.tokens == expected_tokens(text(1, 200), 60)
    assert batch.tokens == expected_tokens(text(2, 200), 60)


def test_preemption_for_a_question_spares_the_oldest() -> None:
    bench = Bench(num_blocks=20)
    bench.add(spec("older", text(1, 200), service_class=P1, new=60))
    bench.add(spec("younger", text(2, 200), service_class=P1, new=60))
    for _ in range(3):
        bench.step()
    bench.add(spec("p0", text(3, 250), new=4))
    bench.step()
    assert [s.seq_id for s in bench.stepper.sequences if s.preempted] == ["younger"]
    bench.run()


def test_blocks_in_the_plan_are_not_taken_back() -> None:
    """An old prompt needs its last block when a young answer has grown into it."""
    bench = Bench(num_blocks=12, chunk_tokens=32)
    old = bench.add(spec("old", text(1, 300), new=4))
    young = bench.add(spec("young", text(2, 60), new=40))
    bench.run()
    assert old.tokens == expected_tokens(text(1, 300), 4)
    assert young.tokens == expected_tokens(text(2, 60), 40)


@pytest.mark.parametrize("policy", list(KVPolicy))
@pytest.mark.parametrize("shared", [0, 96, 200])
def test_a_preempted_answer_computes_little_again(shared: int, policy: KVPolicy) -> None:
    """Its question and its decoded tokens wait in RAM for it alone. The place in the batch was what lacked."""
    bench = Bench(num_blocks=64, batch=1, tiers=FakeTiers())
    answer = bench.add(spec("p2", text(1, 600), service_class=P2, new=60, shared=shared, kv_policy=policy))
    while len(answer.tokens) < 40:
        bench.step()
    before = bench.runtime.computed_tokens
    bench.answer(spec("p0", text(3, 100), new=1))
    assert answer.tokens == expected_tokens(text(1, 600), 60)
    assert bench.runtime.computed_tokens - before <= 100 + 20 + 32 + 1
    assert len(bench.stepper.cache) == shared // 32 + 3, "nobody else finds what it parked"


def test_what_the_other_needs_is_taken_from_the_parked_tail() -> None:
    bench = Bench(num_blocks=24)
    answer = bench.add(spec("p2", text(1, 320), service_class=P2, new=60, shared=0))
    while len(answer.tokens) < 40:
        bench.step()
    before = bench.runtime.computed_tokens
    bench.answer(spec("p0", text(3, 500), new=1))  # 16 of 24 blocks; 12 were held
    assert answer.tokens == expected_tokens(text(1, 320), 60)
    assert bench.runtime.computed_tokens - before <= 500 + 20 + 5 * 32
    cache = bench.stepper.cache
    left = cache.match_length(block_hashes(text(3, 500), SALT))
    assert len(cache) == left > 0, "what was parked is free when its sequence has ended"


def test_a_parked_answer_that_is_cancelled_leaves_nothing() -> None:
    bench = Bench(num_blocks=64, batch=1, tiers=FakeTiers())
    for policy in KVPolicy:
        bench.add(spec("p2", text(1, 600), service_class=P2, new=60, shared=0, kv_policy=policy))
        for _ in range(20):
            bench.step()
        bench.add(spec("p0", text(3, 20), new=1))
        bench.step()
        assert bench.stepper.pool.cached
        bench.stepper.cancel("p2")
        bench.run()
        assert not bench.stepper.pool.cached
        assert bench.stepper.segments is not None
        assert not bench.stepper.segments.pool.cached


def test_a_cached_prompt_loses_its_tail_first() -> None:
    bench = Bench(num_blocks=12)
    bench.answer(spec("a", text(1, 320), new=1))
    bench.answer(spec("b", text(2, 128), new=1))
    assert bench.answer(spec("again", text(1, 320), new=1)).cached == (8 * 32, 0)


def test_answers_that_outgrow_the_pool_take_turns_and_stay_right() -> None:
    bench = Bench(num_blocks=12)
    listeners = {i: bench.add(spec(f"s{i}", text(i, 60), new=100)) for i in range(4)}
    bench.run()
    for i, listener in listeners.items():
        assert listener.tokens == expected_tokens(text(i, 60), 100)


def test_a_failing_step_ends_only_its_own_sequences() -> None:
    failing = {"bad"}
    bench = Bench(fail=lambda plan: bool(failing & {p.seq_id for p in plan.slices}), batch=1)
    bad = bench.add(spec("bad", text(1, 100)))
    good = bench.add(spec("good", text(2, 100)))
    bench.run()
    assert bad.reason is FinishReason.ERROR
    assert bad.finish is not None
    assert "log has the details" in str(bad.finish.error)
    assert good.tokens == expected_tokens(text(2, 100), 4)


def test_a_context_that_cannot_be_opened_ends_alone() -> None:
    bench = Bench()
    bench.runtime.init_context("taken", [1], spec("x", [1]).sampling)
    bad = bench.add(spec("taken", text(1, 100)))
    good = bench.add(spec("good", text(2, 100)))
    while good.finish is None:
        bench.step()
    assert bad.reason is FinishReason.ERROR
    bench.runtime.release_context("taken")
    bench.check_idle()


def test_a_listener_that_raises_loses_only_its_own_sequence() -> None:
    bench = Bench()
    good = bench.add(spec("good", text(1, 100), new=6))
    bad = bench.add(spec("bad", text(2, 100), new=6))
    bad.events.append(EngineFinished("bad", FinishReason.STOP))  # makes the listener raise
    bench.run()
    assert len(good.tokens) == 6
    assert sorted(bench.ended) == ["bad", "good"]


@pytest.mark.parametrize("fault", [InvalidRequest("too complex"), RuntimeError("a token that can't be chosen")])
def test_a_token_that_cant_be_chosen_ends_its_own_sequence_only(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    good, bad = bench.add(spec("good", text(1, 100), new=6)), bench.add(spec("bad", text(2, 100), new=6))
    forward = bench.runtime.forward_step

    def faulty(plan: StepPlan, cancelled: CancelFlag) -> StepResult:
        result = forward(plan, cancelled)
        return replace(result, faults={"bad": fault} if result.tokens.pop("bad", None) is not None else {})

    monkeypatch.setattr(bench.runtime, "forward_step", faulty)
    bench.run()
    assert (len(good.tokens), len(bad.tokens)) == (6, 0)
    assert bad.reason is FinishReason.ERROR
    assert bad.finish is not None
    assert bad.finish.invalid is isinstance(fault, InvalidRequest)
    bench.check_idle()


# --------------------------------------------------------------------------------------- disk tier


def test_an_ingest_is_saved_and_a_new_engine_loads_it() -> None:
    store = MemoryKVStore()
    document, question = text(1, 3000), text(2, 50)
    Bench(store, num_blocks=200).answer(ingest("doc", document))
    assert [saved[0] for saved in store.saves] == [64, 29]
    bench = Bench(store, num_blocks=200)
    asked = bench.answer(spec("ask", document + question, shared=3000, new=3))
    assert asked.cached == (0, 2976)
    assert asked.tokens == expected_tokens(document + question, 3)
    assert bench.runtime.computed_tokens == 24 + 50 + 2


def test_a_cancelled_ingest_resumes_from_what_it_computed() -> None:
    store = MemoryKVStore()
    document = text(1, 3000)
    first = Bench(store, num_blocks=200, chunk_tokens=320)
    first.add(ingest("doc", document))
    for _ in range(5):
        first.step()
    computed = first.runtime.computed_tokens
    assert 0 < computed < 3000
    first.stepper.cancel("doc")
    first.run()
    second = Bench(store, num_blocks=200)
    again = second.answer(ingest("doc", document))
    assert again.reason is FinishReason.STOP
    assert second.runtime.computed_tokens == 2976 - computed // 32 * 32


def test_an_ingest_that_is_whole_on_disk_computes_nothing() -> None:
    store = MemoryKVStore()
    Bench(store, num_blocks=200).answer(ingest("doc", text(1, 3000)))
    bench = Bench(store, num_blocks=200)
    again = bench.answer(ingest("copy", text(1, 3000), owner="copy"))
    assert again.reason is FinishReason.STOP
    assert bench.runtime.computed_tokens == 0
    store.forget("doc")
    assert [entry.owner for entry in store.entries()] == ["copy"]


class Broken(MemoryKVStore):
    """Loads `good` blocks of every request, then stops or raises."""

    def __init__(self, good: int, raises: bool) -> None:
        super().__init__()
        self.good, self.raises = good, raises

    def load(self, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> int:
        if self.raises:
            raise OSError("a broken promise")
        return super().load(hashes[: self.good], into[: self.good])


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("good", [0, 5])
def test_a_short_load_is_computed(good: int, raises: bool) -> None:
    store = Broken(good, raises)
    prompt = text(1, 640)
    Bench(store).answer(spec("a", prompt, owner="doc"))
    bench = Bench(store)
    asked = bench.answer(spec("b", prompt))
    assert asked.tokens == expected_tokens(prompt, 4)
    assert asked.cached == (0, 0 if raises else good * 32)


def test_others_run_while_one_loads() -> None:
    store = MemoryKVStore()
    Bench(store).answer(spec("a", text(1, 640), owner="doc"))
    bench = Bench(store)
    loading = bench.add(spec("b", text(1, 640)))
    other = bench.add(spec("c", text(2, 100)))
    while other.finish is None:
        bench.step()
    assert not loading.tokens
    bench.run()
    assert loading.tokens == expected_tokens(text(1, 640), 4)


def test_a_disk_slower_than_computing_is_given_up() -> None:
    store = MemoryKVStore()
    prompt = text(1, 640)
    Bench(store).answer(spec("a", prompt, owner="doc"))
    bench = Bench(store, load_floor_s=1.0)
    asked = bench.add(spec("b", prompt))
    assert bench.step() is None
    deadline = bench.stepper.next_deadline_s()
    assert deadline is not None
    bench.now = deadline
    while asked.finish is None:
        assert bench.step() is not None
    assert asked.tokens == expected_tokens(prompt, 4)
    bench.run()  # the late load gives its blocks back and harms nobody
    assert bench.answer(spec("c", prompt)).tokens == expected_tokens(prompt, 4)


def test_cancel_while_loading_keeps_the_blocks_until_the_disk_is_done() -> None:
    store = MemoryKVStore()
    Bench(store).answer(spec("a", text(1, 640), owner="doc"))
    bench = Bench(store)
    asked = bench.add(spec("b", text(1, 640)))
    bench.step()
    bench.stepper.cancel("b")
    assert asked.reason is FinishReason.CANCELLED
    bench.stepper.check_integrity()
    assert bench.stepper.pool.available == 64 - 19
    bench.run()


def test_blocks_being_saved_are_not_reused() -> None:
    store = MemoryKVStore()
    bench = Bench(store, num_blocks=24, save_share=1.0)
    first = bench.add(spec("a", text(1, 600), owner="doc"))
    while first.finish is None:
        bench.step()
    assert bench.saver.calls
    assert bench.stepper.pool.available == 24 - 18
    bench.add(spec("b", text(2, 160), new=2))
    bench.run()
    again = Bench(store).answer(spec("c", text(1, 600)))
    assert again.tokens == expected_tokens(text(1, 600), 4)


def test_an_ingest_waits_for_a_slow_disk_instead_of_filling_the_pool() -> None:
    store = MemoryKVStore()
    bench = Bench(store, num_blocks=160, chunk_tokens=512)
    slow = bench.add(ingest("doc", text(1, 4000)))
    for _ in range(30):
        bench.step()
    assert slow.finish is None
    assert bench.runtime.computed_tokens < 4000
    bench.run()
    assert sum(count for count, _ in store.saves) == 125


def test_only_the_persisted_part_goes_to_disk() -> None:
    store = MemoryKVStore()
    prompt = text(1, 640)
    bench = Bench(store)
    bench.answer(spec("a", prompt, owner="doc", persist=330))
    assert store.saves == [(10, "doc")]
    assert bench.answer(spec("b", prompt)).cached == (608, 0)
    assert Bench(store).answer(spec("c", prompt)).cached == (0, 320)


def test_forget_drops_ram_and_disk_but_not_what_others_own() -> None:
    store = MemoryKVStore()
    bench = Bench(store)
    common = text(9, 64)
    bench.answer(ingest("one", common + text(1, 320)))
    bench.answer(ingest("two", common + text(2, 320)))
    freed = bench.stepper.forget("one")
    bench.saver.run()
    assert freed.result() == 10 * 256
    bench.stepper.check_integrity()
    assert bench.answer(spec("a", common + text(1, 320), new=1)).cached == (64, 0)
    assert bench.answer(spec("b", common + text(2, 320), new=1)).cached == (352, 0)
    assert [entry.owner for entry in store.entries()] == ["two"]


def test_forgetting_a_running_ingest_leaves_nothing_behind() -> None:
    store = MemoryKVStore()
    bench = Bench(store, chunk_tokens=64)
    bench.add(ingest("doc", text(1, 640)))
    for _ in range(4):
        bench.step()
    bench.stepper.forget("doc")
    bench.run()
    assert store.entries() == []
    assert bench.answer(spec("a", text(1, 640), new=1)).cached == (0, 0)


def test_look_ups_count_tokens_by_tier() -> None:
    store = MemoryKVStore()
    Bench(store).answer(ingest("doc", text(1, 640)))
    bench = Bench(store)
    hashes = block_hashes(text(1, 640), SALT)
    assert (bench.stepper.lookup(hashes).ram, bench.stepper.lookup(hashes).disk) == (0, 640)
    bench.answer(spec("a", text(1, 100), new=1))
    assert (bench.stepper.lookup(hashes).ram, bench.stepper.lookup(hashes).disk) == (96, 544)
