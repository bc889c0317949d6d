"""Answers given again: only where they would be the same, only to who asked, never after their documents."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from perilune.core import Completed, PlanKind
from perilune.errors import ConfigError, NotFound
from perilune.service.caches.answers import CachePolicy
from perilune.service.caches.faq import CuratedAnswers
from perilune.service.report import report_dict
from tests.service.harness import Bench, running, text_of

SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "perilune-object.schema.json").read_text())
EXACT = CachePolicy(exact=True)
TEXT = "The rent is 950 crowns. The garden is shared. "


def told(events: list[Any]) -> dict[str, Any]:
    last = events[-1]
    assert isinstance(last, Completed)
    report = report_dict(last.report)
    jsonschema.validate(report, SCHEMA)
    return report


async def again(bench: Bench, question: str, **options: Any) -> str | None:
    """Ask; how the answer was found, None where it was made."""
    hit = told(await bench.ask(question, **options))["answer_cache"]
    return None if hit is None else hit["kind"]


async def test_off_it_keeps_nothing() -> None:
    async with running() as bench:
        assert [await again(bench, "Who?") for _ in range(2)] == [None, None]


async def test_the_same_question_gets_the_same_answer_without_the_engine() -> None:
    async with running(cache=EXACT) as bench:
        first = await bench.ask("Who are you?")
        runs = len(bench.engine.specs)
        second = await bench.ask("Who are you?")
        assert text_of(second) == text_of(first)
        assert len(bench.engine.specs) == runs
        report = told(second)
        assert report["plan"] == PlanKind.CACHED
        assert report["answer_cache"]["question"] == "Who are you?"
        assert told(first)["answer_cache"] is None


@pytest.mark.parametrize(
    "other",
    [
        {"question": "Who are you"},
        {"tenant": "acme"},
        {"temperature": 0.5},
        {"max_tokens": 9},
        {"history": (("user", "Hi"), ("assistant", "Hello"))},
        {"stop": ("x",)},
    ],
)
async def test_another_question_is_answered_anew(other: dict[str, Any]) -> None:
    async with running(cache=EXACT) as bench:
        await bench.ask("Who are you?")
        given = {"question": "Who are you?", **other}
        assert told(await bench.ask(**given))["answer_cache"] is None


async def test_sampled_answers_are_not_kept() -> None:
    async with running(cache=EXACT) as bench:
        assert [await again(bench, "Who?", temperature=0.7) for _ in range(2)] == [None, None]


async def test_a_tenant_finds_only_its_own() -> None:
    async with running(cache=EXACT) as bench:
        file_id = await bench.upload(TEXT, tenant="acme")
        assert await again(bench, "Rent?", tenant="acme", files=(file_id,)) is None
        assert await again(bench, "Rent?", tenant="acme", files=(file_id,)) == "exact"
        with pytest.raises(NotFound):
            await bench.ask("Rent?", tenant="other", files=(file_id,))
        assert await again(bench, "Who?", tenant="acme") is None
        assert await again(bench, "Who?", tenant="other") is None


async def test_a_changed_document_is_another_question() -> None:
    async with running(cache=EXACT) as bench:
        old = await bench.upload(TEXT)
        await bench.ask("Rent?", files=(old,))
        assert told(await bench.ask("Rent?", files=(old,)))["answer_cache"]["kind"] == "exact"
        new = await bench.upload(TEXT.replace("950", "990"))
        assert told(await bench.ask("Rent?", files=(new,)))["answer_cache"] is None


async def test_deleting_a_document_drops_its_answers() -> None:
    async with running(cache=EXACT) as bench:
        file_id = await bench.upload(TEXT)
        await bench.ask("Rent?", files=(file_id,))
        caches = bench.service._caches
        assert caches.kept("local") == 1
        await bench.documents.delete("local", file_id)
        assert caches.kept("local") == 0
        with pytest.raises(NotFound):
            await bench.ask("Rent?", files=(file_id,))


async def test_an_answer_is_not_given_after_its_time() -> None:
    now = [0.0]
    async with running(cache=replace(EXACT, ttl_s=60.0), clock=lambda: now[0]) as bench:
        assert await again(bench, "Who?") is None
        now[0] = 59.0
        assert await again(bench, "Who?") == "exact"
        now[0] = 60.0
        assert await again(bench, "Who?") is None


async def test_a_tenant_has_its_quota_and_the_oldest_go_first() -> None:
    async with running(cache=replace(EXACT, tenant_bytes=16_384)) as bench:
        for number in range(12):
            await again(bench, f"Question {number}?")
        await again(bench, "Mine?", tenant="acme")
        for number in range(12, 24):
            await again(bench, f"Question {number}?")
        assert 1 < bench.service._caches.kept("local") < 12
        assert await again(bench, "Question 23?") == "exact"
        assert await again(bench, "Question 0?") is None
        assert await again(bench, "Mine?", tenant="acme") == "exact"


VECTORS = {"en": [1.0, 0.0], "like": [0.96, 0.28]}


def vectors(tenant: str, question: str) -> list[float]:
    return VECTORS["like" if question.startswith("Please") else "en"]


async def test_a_question_that_is_alike_and_verified_gets_the_answer_and_says_so() -> None:
    async with running(cache=CachePolicy(semantic=True), vectors=vectors) as bench:
        await bench.ask("What is the monthly rent of the flat?")
        events = await bench.ask("Please, what is the monthly rent of the flat")
        assert told(events)["answer_cache"]["kind"] == "semantic"
        assert told(events)["answer_cache"]["question"] == "What is the monthly rent of the flat?"
        for question in ("What is the yearly rent of the house?", "Who pays the monthly rent of the flat?"):
            assert told(await bench.ask(question))["answer_cache"] is None
        assert told(await bench.ask("What is the monthly rent of the flat?", tenant="acme"))["answer_cache"] is None


async def test_curated_answers_are_for_all_and_only_for_bare_questions(tmp_path: Path) -> None:
    path = tmp_path / "faq.yaml"
    path.write_text("- questions: ['When are you open?', 你们几点开门]\n  answer: At nine.\n", encoding="utf-8")
    async with running(curated=CuratedAnswers(path)) as bench:
        for question in ("when are you OPEN", "你们几点开门？"):
            events = await bench.ask(question, tenant="acme")
            assert text_of(events) == "At nine."
            assert told(events)["answer_cache"]["kind"] == "faq"
        assert await again(bench, "When are you closed?") is None
        assert await again(bench, "When are you open?", history=(("system", "You are a library."),)) is None
        path.write_text("- questions: ['When are you open?']\n  answer: At ten, now.\n", encoding="utf-8")
        assert text_of(await bench.ask("When are you open?")) == "At ten, now."
        path.write_text("- broken", encoding="utf-8")
        assert text_of(await bench.ask("When are you open?")) == "At ten, now."


@pytest.mark.parametrize(
    "text", ["{", "a: 1", "- answer: x", "- questions: []\n  answer: x", "- questions: ['?']\n  answer: x"]
)
def test_a_bad_file_of_curated_answers_is_a_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "faq.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"faq\.yaml"):
        CuratedAnswers(path)


def auc(first: list[float], second: list[float]) -> float:
    """Chance that one of the first is less than one of the second."""
    pairs = [(a, b) for a in first for b in second]
    return sum((a < b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)


async def test_time_tells_a_tenant_nothing_of_what_another_asked() -> None:
    """Spec X2: a classifier by time does no better than chance across tenants; within one it does, so it could."""

    async def ttft(bench: Bench, question: str, tenant: str) -> float:
        seconds = told(await bench.ask(question, tenant=tenant))["measured_ttft_s"]
        assert isinstance(seconds, float)
        return seconds

    async with running(cache=EXACT) as bench:
        asked, unasked, own = [], [], []
        for number in range(40):
            await ttft(bench, f"Is the secret word number {number:02}?", "victim")
            await ttft(bench, f"Is the other word number {number:02}?", "spy")
            pair = [
                (asked, f"Is the secret word number {number:02}?"),
                (unasked, f"Is the hidden word number {number:02}?"),
            ]
            for times, question in pair if number % 2 else reversed(pair):
                times.append(await ttft(bench, question, "spy"))
            own.append(await ttft(bench, f"Is the other word number {number:02}?", "spy"))
        assert auc(own, unasked) > 0.75
        assert 0.3 < auc(asked, unasked) < 0.7
        hits = [told(await bench.ask(f"Is the secret word number {n:02}?", tenant="third")) for n in range(5)]
        assert all(hit["answer_cache"] is None for hit in hits)
