"""One request's life, from plan to report, over fakes that keep the real parts' promises."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from perilune.core import (
    ChoiceFinished,
    CitationAdded,
    Completed,
    ContextPolicy,
    Event,
    FinishReason,
    PlanKind,
    Planned,
    PrefillProgress,
    StageStarted,
    TextDelta,
)
from perilune.errors import (
    ContextTooLong,
    IntegrityError,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    Overloaded,
    UnsupportedDocument,
)
from perilune.service.rates import Rates
from perilune.service.report import report_dict
from tests.service.fakes import CharTokenizer, FakeEngine, MemoryLibrary, SparseTokenizer
from tests.service.harness import VOCABULARY, Bench, request, running, text_of

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "perilune-object.schema.json").read_text())
DOCUMENT = "The late fee is two percent. The notice period is ninety days. " * 10
BOOK = "\f".join(f"Chapter {i} speaks of topic{i}. It has a secret number {i * 37}. " * 8 for i in range(60))


def finished(events: list[Event]) -> Completed:
    last = events[-1]
    assert isinstance(last, Completed)
    report = report_dict(last.report)
    jsonschema.validate(report, SCHEMA)
    tokens = last.report.tokens
    assert tokens.exact + tokens.estimated + tokens.summarised + tokens.dropped == tokens.offered
    return last


def codes(events: list[Event]) -> set[str]:
    return {item.code for item in finished(events).report.degradations}


def stages(events: list[Event]) -> list[str]:
    return [event.stage for event in events if isinstance(event, StageStarted)]


async def test_a_plain_question(bench: Bench) -> None:
    events = await bench.ask("How are you?")
    assert text_of(events) == "The answer."
    assert stages(events) == ["composing", "queued", "prefilling", "answering"]
    done = finished(events)
    assert done.report.plan is PlanKind.FULL
    assert done.usage.prompt_tokens == len("\nuser\nHow are you?") + len("assistant\n") + 3 - 1 + 1
    assert done.usage.completion_tokens == len("The answer.") + 1
    assert done.report.measured_ttft_s is not None
    assert 0 < done.report.measured_ttft_s < 1
    assert done.report.degradations == ()
    assert [event for event in events if isinstance(event, ChoiceFinished)] == [
        ChoiceFinished(0, FinishReason.STOP)
    ]


async def test_what_was_read_through_summaries_is_estimated(bench: Bench) -> None:
    whole = finished(await bench.ask("word " * 100)).report.tokens
    assert (whole.estimated, whole.exact) == (0, whole.offered)
    bench.engine.exact_share = 0.25
    part = finished(await bench.ask("word " * 100)).report.tokens
    assert part.offered == whole.offered
    assert part.exact == round(0.25 * part.offered)
    assert part.estimated == part.offered - part.exact
    assert part.dropped == 0


async def test_the_plan_comes_before_the_work_and_progress_has_an_eta(bench: Bench) -> None:
    events = await bench.ask("word " * 300)
    kinds = [type(event) for event in events]
    assert kinds.index(Planned) < kinds.index(PrefillProgress)
    progress = [event for event in events if isinstance(event, PrefillProgress)]
    assert len(progress) > 3
    assert [item.processed_tokens for item in progress] == sorted(item.processed_tokens for item in progress)
    assert progress[0].eta_s > progress[-1].eta_s == 0
    assert progress[-1].processed_tokens == progress[-1].total_tokens


async def test_the_second_question_on_a_document_is_warm_from_any_session(bench: Bench) -> None:
    file_id = await bench.upload(DOCUMENT)
    first = finished(await bench.ask("What is the late fee?", files=(file_id,)))
    assert first.report.plan is PlanKind.WARM
    assert first.report.tokens.cached.ram >= len(DOCUMENT) // 32 * 32
    other = finished(await bench.ask("And the notice period?", files=(file_id,)))
    assert other.report.plan is PlanKind.WARM
    bench.engine.restart()
    restarted = finished(await bench.ask("And the notice period, please?", files=(file_id,)))
    assert restarted.report.plan is PlanKind.WARM
    assert restarted.report.tokens.cached.disk >= len(DOCUMENT) // 32 * 32
    assert restarted.usage.cached_tokens == restarted.report.tokens.cached.total


async def test_only_the_document_goes_to_disk_never_the_conversation(bench: Bench) -> None:
    file_id = await bench.upload(DOCUMENT)
    before = len(bench.engine.disk)
    await bench.ask("secret " * 60, files=(file_id,))
    assert len(bench.engine.disk) == before
    assert bench.engine.specs[-1].shared_tokens == len(bench.engine.specs[-1].token_ids)
    await bench.ask("No document at all, only a long talk. " * 5)
    assert len(bench.engine.disk) == before


async def test_tenants_share_nothing(bench: Bench) -> None:
    mine = await bench.upload(DOCUMENT, tenant="a")
    theirs = await bench.upload(DOCUMENT, tenant="b")
    assert {spec.salt for spec in bench.engine.specs} == {b"a".ljust(32, b"-"), b"b".ljust(32, b"-")}
    with pytest.raises(NotFound):
        await bench.ask("What?", files=(theirs,), tenant="a")
    assert finished(await bench.ask("What?", files=(mine,), tenant="a")).report.plan is PlanKind.WARM


async def test_a_whole_document_still_quotes_where_to_look(bench: Bench) -> None:
    file_id = await bench.upload(DOCUMENT, "contract.txt")
    events = await bench.ask("What is the late fee?", files=(file_id,))
    quoted = [event.citation for event in events if isinstance(event, CitationAdded)]
    assert quoted
    assert "late fee" in quoted[0].quote
    assert quoted[0].filename == "contract.txt"
    assert DOCUMENT[quoted[0].start : quoted[0].end].startswith(quoted[0].quote[:40])
    assert list(finished(events).report.citations) == quoted


async def test_an_answer_outlives_the_quotes_beside_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    file_id = await bench.upload(DOCUMENT)

    def damaged(*args: object) -> None:
        raise IntegrityError("The index of this file is damaged.")

    monkeypatch.setattr(bench.library, "search", damaged)
    events = await bench.ask("What is the late fee?", files=(file_id,))
    assert text_of(events) == "The answer."
    assert finished(events).report.citations == ()
    assert codes(events) == {"no_citations"}


async def test_a_long_document_is_refined_with_citations_before_the_answer(bench: Bench) -> None:
    file_id = await bench.upload(BOOK, "book.txt")
    events = await bench.ask("What is the secret number of topic17?", files=(file_id,))
    report = finished(events).report
    assert report.plan is PlanKind.REFINED
    assert codes(events) == {"over_window"}
    assert report.citations
    assert report.citations[0].page >= 1
    assert any(item.page == 18 for item in report.citations)
    order = [type(event) for event in events]
    assert order.index(CitationAdded) < order.index(TextDelta)
    prompt = CharTokenizer().decode(bench.engine.specs[-1].token_ids)
    assert "[book.txt, page 18]" in prompt
    assert "topic17" in prompt
    assert report.tokens.offered > len(BOOK) * 0.9
    assert report.tokens.dropped > 0
    assert bench.engine.disk == {}, "passages went to disk"


async def test_deleting_a_file_drops_the_passages_that_were_read_of_it(bench: Bench) -> None:
    file_id = await bench.upload(BOOK, "book.txt")
    await bench.ask("What is the secret number of topic17?", files=(file_id,))
    assert bench.engine.ram
    await bench.documents.delete("local", file_id)
    assert bench.engine.ram == {}


async def test_an_estimate_is_the_plan_and_costs_nothing(bench: Bench) -> None:
    file_id = await bench.upload(DOCUMENT)
    before = len(bench.engine.specs)
    plan = await bench.service.estimate(request("What is the late fee?", files=(file_id,)))
    assert len(bench.engine.specs) == before
    events = await bench.ask("What is the late fee?", files=(file_id,))
    (planned,) = [event for event in events if isinstance(event, Planned)]
    assert (planned.plan.kind, planned.plan.context_tokens) == (plan.kind, plan.context_tokens)
    assert plan.bound_ttft_s >= plan.predicted_ttft_s > 0


async def test_the_engine_is_told_whose_work_it_is_and_when_it_is_due(bench: Bench) -> None:
    await bench.ask("Hello", tenant="acme", deadline_s=3.0)
    spec = bench.engine.specs[-1]
    assert spec.tenant == "acme"
    assert spec.deadline_s is not None
    assert 2.0 < spec.deadline_s <= 3.0


async def test_a_refined_prompt_keeps_its_budget() -> None:
    async with running(rates=Rates(1e-3, 0.0, 0.0, 0.01, 0.01, 0.0)) as bench:
        file_id = await bench.upload(BOOK)
        bench.predictor._rates = Rates(1e-3, 0.0, 0.0, 0.01, 0.01, 0.0)
        events = await bench.ask("What is the secret number of topic17?", files=(file_id,), deadline_s=3.0)
        (planned,) = [event for event in events if isinstance(event, Planned)]
        prompt = bench.engine.specs[-1].token_ids
        assert planned.plan.context_tokens <= 2000
        assert planned.plan.context_tokens * 0.7 < len(prompt) <= planned.plan.context_tokens
        assert planned.plan.predicted_ttft_s <= 3.0


async def test_a_document_too_slow_to_read_is_refined_but_full_reads_it_all(bench: Bench) -> None:
    bench.engine.fail = None
    slow = Rates(2e-3, 0.0, 0.0, 0.01, 0.01, 0.0)
    bench.library.add_file("local", "d.txt", "assistants", __import__("io").BytesIO(b""), 1)
    file_id = await bench.upload(DOCUMENT * 6)
    bench.engine.ram.clear()
    bench.engine.disk.clear()
    bench.predictor._rates = slow
    events = await bench.ask("What is the late fee?", files=(file_id,))
    assert finished(events).report.plan is PlanKind.REFINED
    assert "deadline" in codes(events)
    bench.predictor._rates = slow
    events = await bench.ask("What is the late fee?", files=(file_id,), policy=ContextPolicy.FULL)
    assert finished(events).report.plan is not PlanKind.REFINED
    assert finished(events).report.tokens.dropped == 0
    assert codes(events) <= {"late"}


async def test_lost_kv_comes_back_after_a_question_that_missed_it(bench: Bench) -> None:
    files = await bench.upload(DOCUMENT * 4, "a.txt"), await bench.upload(DOCUMENT * 4, "b.txt")
    slow = Rates(2e-3, 0.0, 0.0, 0.01, 0.01, 0.0)
    for asked in (files[:1], files):
        bench.engine.ram.clear()
        bench.engine.disk.clear()
        bench.predictor._rates = slow
        first = finished(await bench.ask("What is the late fee?", files=asked))
        assert first.report.plan is PlanKind.REFINED
        await bench.documents.settled()
        bench.predictor._rates = slow
        second = finished(await bench.ask("What is the notice period?", files=asked))
        assert second.report.plan is PlanKind.WARM
        assert (await bench.documents.get("local", asked[0])).status.value == "processed"
    await bench.documents.delete("local", files[1])
    assert bench.engine.owners() <= {files[0]}


async def test_full_over_the_window_is_refused_before_the_stream_begins(bench: Bench) -> None:
    file_id = await bench.upload(BOOK)
    with pytest.raises(ContextTooLong, match="8,192") as caught:
        await anext(aiter(bench.service.run(request("Why?", files=(file_id,), policy=ContextPolicy.FULL))))
    assert "refined" in caught.value.hint
    with pytest.raises(ContextTooLong, match="8,192"):
        await anext(aiter(bench.service.run(request("long " * 2000))))


async def test_pinned_refined_retrieves_even_from_a_short_document(bench: Bench) -> None:
    file_id = await bench.upload(DOCUMENT)
    events = await bench.ask("What is the late fee?", files=(file_id,), policy=ContextPolicy.REFINED)
    assert finished(events).report.plan is PlanKind.REFINED
    assert codes(events) == {"refined"}


async def test_nothing_found_is_said(bench: Bench) -> None:
    file_id = await bench.upload(BOOK)
    events = await bench.ask("xyzzy plugh?", files=(file_id,))
    assert "nothing_found" in codes(events)
    assert "Chapter 0" in CharTokenizer().decode(bench.engine.specs[-1].token_ids)


async def test_a_question_in_another_language_is_answered_with_a_warning() -> None:
    async with running(language=lambda text: "zh") as bench:
        events = await bench.ask("滞纳金是多少？")
        assert text_of(events)
        assert codes(events) == {"language"}
        assert "Chinese" in finished(events).report.degradations[0].reason
        assert "English" in finished(events).report.degradations[0].reason


# --------------------------------------------------------------------------------- during ingest


async def test_a_question_during_ingest_is_answered_from_what_is_read() -> None:
    async with running(library=MemoryLibrary(page_s=0.03)) as bench:
        file_id = await bench.upload(BOOK, wait=False)
        start = time.monotonic()
        events = await bench.ask("What is the secret number of topic1?", files=(file_id,), deadline_s=1.5)
        assert time.monotonic() - start < 1.4
        assert {"partial_ingest", "refined"} <= codes(events)
        (coverage,) = [d for d in finished(events).report.degradations if d.code == "partial_ingest"]
        assert "of 60" in coverage.reason
        await bench.documents.delete("local", file_id)


async def test_full_is_refused_as_soon_as_too_much_is_read() -> None:
    async with running(library=MemoryLibrary(page_s=0.02), window=1024) as bench:
        file_id = await bench.upload(BOOK, wait=False)
        with pytest.raises(ContextTooLong):
            await bench.ask("Why?", files=(file_id,), policy=ContextPolicy.FULL)
        assert len(bench.library.parsed[file_id]) < 40, "the whole parse was waited for"
        stream = aiter(bench.service.run(request("Why?", files=(file_id,), policy=ContextPolicy.FULL)))
        with pytest.raises(ContextTooLong):
            assert not await anext(stream), "the stream had begun"
        await bench.documents.delete("local", file_id)


async def test_a_short_document_is_waited_for() -> None:
    async with running(library=MemoryLibrary(page_s=0.1)) as bench:
        file_id = await bench.upload(DOCUMENT, wait=False)
        events = await bench.ask("What is the late fee?", files=(file_id,))
        assert finished(events).report.plan is not PlanKind.REFINED
        assert "partial_ingest" not in codes(events)
        await bench.documents.settled()


async def test_an_unreadable_document_is_an_error_that_says_why(bench: Bench) -> None:
    file_id = await bench.upload("BROKEN")
    with pytest.raises(UnsupportedDocument, match="damaged"):
        await bench.ask("What?", files=(file_id,))


# ------------------------------------------------------------------------------------ conversation


async def test_an_overlong_conversation_drops_its_oldest_turns_and_says_so(bench: Bench) -> None:
    history = tuple((role, f"{role}{i} " * 60) for i in range(30) for role in ("user", "assistant"))
    events = await bench.ask("And now?", history=history)
    assert finished(events).report.plan is PlanKind.REFINED
    assert codes(events) == {"over_window", "history_dropped"}
    prompt = CharTokenizer().decode(bench.engine.specs[-1].token_ids)
    assert "user29 " in prompt
    assert "user0 " not in prompt
    assert "And now?" in prompt
    assert prompt.startswith("<|im_start|>user\n")
    with pytest.raises(ContextTooLong):
        await bench.ask("And now?", history=history, policy=ContextPolicy.FULL)


async def test_a_huge_conversation_costs_no_more_than_what_can_fit(bench: Bench) -> None:
    history = tuple((role, "word " * 20_000) for _ in range(40) for role in ("user", "assistant"))
    history += (("user", "My name is Ada. "), ("assistant", "Hello."))
    events = await bench.ask("And now?", history=history)
    assert bench.tokenizer.encoded_chars < 200_000, "all of it was tokenised"
    assert finished(events).report.plan is PlanKind.REFINED
    assert codes(events) == {"over_window", "history_dropped"}
    (dropped,) = [d for d in finished(events).report.degradations if d.code == "history_dropped"]
    assert "oldest 80 messages" in dropped.reason
    assert "My name is Ada" in CharTokenizer().decode(bench.engine.specs[-1].token_ids)
    with pytest.raises(ContextTooLong):
        await bench.ask("And now?", history=history, policy=ContextPolicy.FULL)


async def test_spaces_that_are_few_tokens_do_not_hide_an_omission() -> None:
    async with running(window=4096, tokenizer=SparseTokenizer()) as bench:
        history = (
            ("user", " " * 2900 + "old"),
            ("assistant", "Yes."),
            ("user", " " * 32_000 + "x"),
            ("assistant", "No."),
        )
        assert "history_dropped" in codes(await bench.ask("And now?", history=history))


async def test_the_next_turn_finds_the_conversation_in_ram(bench: Bench) -> None:
    history = (("user", "Tell me a story. " * 20), ("assistant", "Once upon a time. " * 20))
    await bench.ask("Go on.", history=history)
    events = await bench.ask("And then?", history=(*history, ("user", "Go on."), ("assistant", "So.")))
    assert finished(events).report.plan in (PlanKind.RESUME, PlanKind.WARM)
    assert finished(events).usage.cached_tokens > 600


# ----------------------------------------------------------------------------------------- choices


async def test_n_choices_share_one_prefill(bench: Bench) -> None:
    bench.engine.script = lambda spec: f"Choice with seed {spec.sampling.seed}."
    events = await bench.ask("word " * 200, n=3, seed=7)
    assert [text_of(events, i) for i in range(3)] == [f"Choice with seed {7 + i}." for i in range(3)]
    assert sorted(e.choice for e in events if isinstance(e, ChoiceFinished)) == [0, 1, 2]
    assert bench.engine.computed_tokens < 1100 + 2 * 64, "the other choices computed the prompt again"
    assert finished(events).usage.completion_tokens == 3 * len("Choice with seed 7.") + 3


async def test_n_choices_run_even_when_the_first_says_nothing(bench: Bench) -> None:
    bench.engine.script = lambda spec: "" if spec.seq_id.endswith("-0") else "Something."
    events = await bench.ask("Well?", n=2)
    assert text_of(events, 0) == ""
    assert text_of(events, 1) == "Something."


async def test_an_empty_answer_has_no_ttft(bench: Bench) -> None:
    bench.engine.script = lambda spec: ""
    assert finished(await bench.ask("Well?")).report.measured_ttft_s is None


async def test_stop_strings_end_the_answer_and_are_not_in_it(bench: Bench) -> None:
    bench.engine.script = lambda spec: "One. Two. Three. Four."
    bench.engine.token_s = 0.002
    events = await bench.ask("Count.", stop=("Three", "zzz"))
    assert text_of(events) == "One. Two. "
    assert ChoiceFinished(0, FinishReason.STOP, "Three") in events


async def test_max_tokens_cuts_and_is_clipped_to_the_window() -> None:
    async with running(window=512) as bench:
        bench.engine.script = lambda spec: "x" * 10_000
        events = await bench.ask("Go.", max_tokens=5)
        assert text_of(events) == "xxxxx"
        assert ChoiceFinished(0, FinishReason.LENGTH) in events
        events = await bench.ask("Go.", max_tokens=100_000)
        spec = bench.engine.specs[-1]
        assert spec.max_new_tokens == 512 - len(spec.token_ids)
        assert ChoiceFinished(0, FinishReason.LENGTH) in events


async def test_logprobs_come_decoded(bench: Bench) -> None:
    events = await bench.ask("Well?", logprobs=2)
    items = [item for event in events if isinstance(event, TextDelta) for item in event.logprobs]
    assert "".join(item.token for item in items) == "The answer."
    assert items[0].top == (("T", b"T", -0.5), ("U", b"U", -1.5))


# ---------------------------------------------------------------------------------- cancellation


async def consume_until(bench: Bench, stop: Any, **options: Any) -> float:
    """Read events until `stop` is true of one, close, and return the seconds until the engine is clean."""
    async with aclosing(bench.service.run(request("word " * 300, **options))) as events:
        async for event in events:
            if stop(event):
                break
    start = time.monotonic()
    await asyncio.to_thread(bench.engine.assert_clean)
    return time.monotonic() - start


@pytest.mark.parametrize("stage", ["composing", "queued", "prefilling", "answering"])
async def test_closing_stops_the_work_in_every_phase(stage: str) -> None:
    async with running(engine=FakeEngine(prefill_rate=2000, token_s=0.01, chunk=32)) as bench:
        took = await consume_until(bench, lambda e: isinstance(e, StageStarted) and e.stage == stage)
        assert took < 0.05
        assert bench.admission.inside == 0


async def test_a_cancelled_consumer_stops_the_work(bench: Bench) -> None:
    bench.engine.hold.clear()
    task = asyncio.create_task(bench.ask("word " * 100))
    while not bench.engine.specs:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(bench.engine.assert_clean)
    bench.engine.hold.set()


async def test_closing_during_retrieval_or_a_running_ingest_leaves_nothing() -> None:
    library = MemoryLibrary(page_s=0.5)
    async with running(library=library) as bench:
        file_id = await bench.upload(BOOK, wait=False)
        task = asyncio.create_task(bench.ask("What?", files=(file_id,)))
        await asyncio.sleep(0.05)
        start = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - start < 0.05
        assert bench.engine.specs == []
        library.page_s = 0.0
        await bench.documents.delete("local", file_id)


# -------------------------------------------------------------------------------------- refusals


async def test_unknown_models_are_refused_naming_what_is_loaded(bench: Bench) -> None:
    with pytest.raises(ModelNotFound, match="fake-1"):
        await bench.ask("Hi", model="gpt-9")
    assert text_of(await bench.ask("Hi", model="fake"))


@pytest.mark.parametrize(
    ("name", "value"), [("logit_bias", ((VOCABULARY, 1.0),)), ("logit_bias", ((-1, 1.0),)), ("top_p", 1.5)]
)
async def test_sampling_that_the_model_can_not_do_is_refused_before_any_work(
    bench: Bench, name: str, value: object
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await bench.ask("Hi", **{name: value})
    assert caught.value.param == name
    assert not bench.engine.specs
    assert text_of(await bench.ask("Hi", logit_bias=((VOCABULARY - 1, 1.0),)))


async def test_a_base_model_refuses_messages() -> None:
    async with running(template=None) as bench:
        with pytest.raises(InvalidRequest, match="no chat template"):
            await bench.ask("Hi")
        file_id = await bench.upload(DOCUMENT)
        assert (await bench.documents.get("local", file_id)).status.value == "processed"


async def test_more_than_may_wait_is_refused_at_once() -> None:
    async with running(limit=2) as bench:
        bench.engine.hold.clear()
        tasks = [asyncio.create_task(bench.ask("Hi")) for _ in range(2)]
        while len(bench.engine.specs) < 2:
            await asyncio.sleep(0.005)
        start = time.monotonic()
        with pytest.raises(Overloaded):
            await bench.ask("Hi")
        assert time.monotonic() - start < 0.05
        bench.engine.hold.set()
        await asyncio.gather(*tasks)
        assert text_of(await bench.ask("Hi"))


async def test_a_request_that_takes_too_long_is_given_up() -> None:
    async with running(timeout_s=0.2) as bench:
        bench.engine.hold.clear()
        with pytest.raises(Overloaded, match=r"0\.2 s"):
            await bench.ask("Hi")
        await asyncio.to_thread(bench.engine.assert_clean)
        bench.engine.hold.set()


async def test_a_failing_engine_is_an_internal_error(bench: Bench) -> None:
    bench.engine.fail = "The model produced no finite number."
    with pytest.raises(InternalError, match="finite"):
        await bench.ask("Hi")
    bench.engine.fail = None
    assert text_of(await bench.ask("Hi"))


async def test_not_ready_before_start_and_after_close() -> None:
    async with running() as bench:
        assert await bench.service.ready()
        await bench.service.close()
        assert not await bench.service.ready()
        with pytest.raises(Overloaded):
            await bench.ask("Hi")


async def test_the_first_event_comes_at_once() -> None:
    async with running() as bench:
        bench.library.search_s = 0.3
        file_id = await bench.upload(BOOK)
        start = time.monotonic()
        async with aclosing(bench.service.run(request("What of topic3?", files=(file_id,)))) as events:
            assert isinstance(await anext(events), StageStarted)
            assert time.monotonic() - start < 0.1


async def test_warming_up_measures_the_engine() -> None:
    async with running(engine=FakeEngine(prefill_rate=5000)) as bench:
        await bench.service.warm_up()
        assert bench.predictor.measured
        assert 1 / bench.predictor.rates.prefill_s_per_token == pytest.approx(5000, rel=0.4)
        assert bench.engine.ram == {}, "the warm-up left KV behind"


async def test_predictions_are_near_what_is_measured() -> None:
    async with running(engine=FakeEngine(prefill_rate=4000)) as bench:
        await bench.service.warm_up()
        report = finished(await bench.ask("word " * 300)).report
        assert report.measured_ttft_s == pytest.approx(report.predicted_ttft_s, rel=0.5)
