"""A request that backends answer, through the whole service: documents, windows, fallback, overflow, the report."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from perilune.core import (
    CitationAdded,
    Completed,
    ContextPolicy,
    Grammar,
    GrammarKind,
    PlanKind,
    Planned,
    ReasoningDelta,
    SamplingParams,
    TextDelta,
)
from perilune.errors import ContextTooLong, InvalidRequest, ModelNotFound, Overloaded, PeriluneError
from perilune.service.backends.health import Health, HealthRules
from perilune.service.backends.openai import Address, OpenAIBackend
from perilune.service.backends.protocol import BackendFault, FaultKind
from perilune.service.rates import Rates
from perilune.service.report import report_dict
from perilune.service.routing import Prices, Target
from tests.service.backends.upstream import (
    STREAM_HEAD,
    Seen,
    Upstream,
    Write,
    answering,
    chunk,
    hanging,
    response,
    saying,
    thought_chunk,
    upstream,
    usage_chunk,
)
from tests.service.harness import Bench, request, running, text_of

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "perilune-object.schema.json").read_text())
TEXT = "The lease was signed in March. " * 40 + "The rent is 950 crowns. " + "The garden is shared. " * 40


def target(up: Upstream, name: str = "up", serves: str = "big", window: int = 4096, **options: Any) -> Target:
    backend = OpenAIBackend(Address(name, up.url, "their-model", window, connect_s=1.0, silence_s=2.0, probe_s=0.3))
    return Target(backend, serves, Health(HealthRules(), window, asyncio.get_running_loop().time), **options)


@asynccontextmanager
async def routed(script: Any, **options: Any) -> AsyncIterator[tuple[Bench, Upstream]]:
    """A service with one backend `up` that serves the model `big`."""
    async with upstream(script) as up:
        settings = {key: options.pop(key) for key in ("window", "serves", "prices") if key in options}
        async with running(targets=[target(up, **settings)], **options) as bench:
            yield bench, up


def report_of(events: list[Any]) -> dict[str, Any]:
    last = events[-1]
    assert isinstance(last, Completed)
    told = report_dict(last.report)
    jsonschema.validate(told, SCHEMA)
    return told


async def test_a_backend_answers_and_the_report_says_so() -> None:
    async with routed(saying("Hello ", "there."), prices=Prices(1.0, 2.0)) as (bench, up):
        events = await bench.ask("Who are you?", model="big")
        told = report_of(events)
        assert text_of(events) == "Hello there."
        assert (told["plan"], told["model"], told["backend"]) == ("full", "their-model", "up")
        assert [a["outcome"] for a in told["attempts"]] == ["answered"]
        assert told["cost"] == pytest.approx((7 + 4) / 1e6)
        assert told["measured_ttft_s"] > 0
        assert events[-1].usage.prompt_tokens == 7  # type: ignore[union-attr]
        assert up.seen[0].body["messages"] == [{"role": "user", "content": "Who are you?"}]
        assert not bench.engine.specs  # the local engine did nothing


async def test_what_a_backend_thinks_comes_before_what_it_says_and_cites() -> None:
    data = (
        STREAM_HEAD
        + thought_chunk("A lease, ")
        + thought_chunk("so rent.")
        + chunk("950", "stop")
        + usage_chunk(7, 9)
    )
    async with routed(answering(data)) as (bench, _):
        file_id = await bench.upload(TEXT)
        events = await bench.ask("What is the rent?", model="big", files=(file_id,))
        kinds = [type(event) for event in events]
        thought = [event.text for event in events if isinstance(event, ReasoningDelta)]
        assert "".join(thought) == "A lease, so rent."
        assert text_of(events) == "950"
        assert kinds.index(ReasoningDelta) < kinds.index(CitationAdded) < kinds.index(TextDelta)


async def test_what_a_second_backend_thinks_in_the_middle_of_an_answer_is_not_told() -> None:
    async def broken(request: Seen, write: Write) -> None:
        await write(STREAM_HEAD + thought_chunk("First.") + chunk("The answer "))

    rest = STREAM_HEAD + thought_chunk("Second.") + chunk("goes on.", "stop") + usage_chunk(7, 9)
    async with upstream(broken) as one, upstream(answering(rest)) as two:
        targets = [target(one, "one", prices=Prices(1, 1)), target(two, "two", prices=Prices(2, 2), continues=True)]
        async with running(targets=targets) as bench:
            events = await bench.ask("What?", model="big")
    assert text_of(events) == "The answer goes on."
    assert [event.text for event in events if isinstance(event, ReasoningDelta)] == ["First."]


async def test_models_are_listed_and_unknown_ones_refused() -> None:
    async with routed(saying("x")) as (bench, _):
        assert [card.model_id for card in await bench.service.models()] == ["fake-1", "big"]
        with pytest.raises(ModelNotFound):
            await bench.ask("Hi", model="huge")


async def test_a_document_goes_along_whole_where_it_fits() -> None:
    async with routed(saying("950")) as (bench, up):
        file_id = await bench.upload(TEXT)
        events = await bench.ask("What is the rent?", model="big", files=(file_id,))
        system = up.seen[0].body["messages"][0]["content"]
        assert TEXT in system
        assert "Answer the question from the document" in system
        told = report_of(events)
        assert told["citations"][0]["quote"].strip().startswith("The rent is 950")
        assert told["tokens"]["dropped"] == 0


async def test_only_passages_go_along_where_it_does_not_fit() -> None:
    async with routed(saying("950"), window=400) as (bench, up):
        file_id = await bench.upload(TEXT * 4)
        told = report_of(await bench.ask("What is the rent of 950?", model="big", files=(file_id,), max_tokens=16))
        system = up.seen[0].body["messages"][0]["content"]
        assert "The rent is 950" in system
        assert len(system) < 1600
        assert told["plan"] == "refined"
        assert told["tokens"]["dropped"] > 0
        with pytest.raises(ContextTooLong):
            await bench.ask("What?", model="big", files=(file_id,), policy=ContextPolicy.FULL, max_tokens=16)


async def test_a_backend_that_lies_about_its_window_is_planned_for_anew() -> None:
    async def small(request: Seen, write: Write) -> None:
        if len(json.dumps(request.body)) > 3000:
            await write(response(400, b'{"error": {"code": "context_length_exceeded"}}'))
        else:
            await saying("950")(request, write)

    async with routed(small, window=100_000) as (bench, up):
        file_id = await bench.upload(TEXT * 2)
        told = report_of(await bench.ask("What is the rent of 950?", model="big", files=(file_id,), max_tokens=16))
        assert told["plan"] == "refined"
        assert told["attempts"][0]["outcome"] == "too_long"
        assert told["attempts"][-1]["outcome"] == "answered"
        assert bench.service.backends.view()[0]["window_tokens"] < 100_000
        assert len(up.seen) <= 3


async def test_another_model_stands_in_and_it_is_disclosed() -> None:
    async with routed(answering(b""), fallbacks=(("big", "small"),)) as (bench, _), upstream(saying("ok")) as other:
        router = bench.service.backends.routes.router
        router.targets = (*router.targets, target(other, "other", "small"))
        events = await bench.ask("Hi", model="big")
        told = report_of(events)
        assert text_of(events) == "ok"
        assert (told["plan"], told["backend"]) == ("fallback", "other")
        assert {"fallback_model", "failover"} <= {d["code"] for d in told["degradations"]}
        with pytest.raises(PeriluneError):
            await bench.ask("Hi", model="big", policy=ContextPolicy.FULL)


async def test_a_deadline_that_the_own_model_would_miss_goes_to_a_smaller_one() -> None:
    async with (
        routed(saying("slow"), fallbacks=(("big", "small"),)) as (bench, up),
        upstream(saying("ok")) as other,
    ):
        router = bench.service.backends.routes.router
        for _ in range(40):
            router.targets[0].health.answered(20.0, 100)
        router.targets = (*router.targets, target(other, "other", "small"))
        told = report_of(await bench.ask("Hi", model="big", deadline_s=3.0))
        assert told["backend"] == "other"
        assert not up.seen
        assert report_of(await bench.ask("Hi", model="big", deadline_s=3600.0))["backend"] == "up"


async def test_the_local_engine_overflows_to_a_backend() -> None:
    async with routed(saying("from afar"), fallbacks=(("fake-1", "big"),)) as (bench, _):
        bench.engine.broken = "closed"
        events = await bench.ask("Hi")
        told = report_of(events)
        assert text_of(events) == "from afar"
        assert (told["plan"], told["backend"]) == ("fallback", "up")
        assert "local_unavailable" in {d["code"] for d in told["degradations"]}
        bench.engine.broken = ""
        assert report_of(await bench.ask("Hi"))["backend"] == "local"


async def test_what_would_be_late_here_is_answered_there() -> None:
    slow = Rates(0.05, 0.0, 0.0, 0.001, 0.005, 0.0)
    async with routed(saying("in time"), fallbacks=(("fake-1", "big"),), rates=slow) as (bench, _):
        told = report_of(await bench.ask("word " * 100, deadline_s=5.0))
        assert told["backend"] == "up"
        assert "local_too_late" in {d["code"] for d in told["degradations"]}
        assert not bench.engine.specs


async def test_without_a_stand_in_the_local_error_is_shown() -> None:
    async with routed(saying("x")) as (bench, _):
        bench.engine.broken = "closed"
        with pytest.raises(Overloaded):
            await bench.ask("Hi")


async def test_nobody_left_is_a_clear_refusal_with_a_time() -> None:
    async with routed(answering(response(429, b"{}", retry_after="30"))) as (bench, _):
        with pytest.raises(Overloaded):
            await bench.ask("Hi", model="big")
        with pytest.raises(Overloaded) as refused:
            await bench.ask("Hi", model="big")
        assert 25 < (refused.value.retry_after_s or 0) <= 30


async def test_a_stream_that_breaks_after_text_says_so_and_a_whole_answer_is_tried_again() -> None:
    broken = answering(STREAM_HEAD + chunk("half"))
    async with routed(broken) as (bench, _), upstream(saying("all of it")) as other:
        said: list[str] = []

        async def listen() -> None:
            async for event in bench.service.run(_request(whole=False)):
                said.extend([event.text] if isinstance(event, TextDelta) else [])

        with pytest.raises(PeriluneError) as caught:
            await listen()
        assert caught.value.code == "answer_broken"
        assert said == ["half"]
        router = bench.service.backends.routes.router
        router.targets = (*router.targets, target(other, "other"))
        router.targets[1].health.in_flight = 60  # asked second
        events = [event async for event in bench.service.run(_request(whole=True))]
        router.targets[1].health.in_flight = 0
        assert text_of(events) == "all of it"


def _request(whole: bool) -> Any:
    return replace(request("Hi", model="big"), whole=whole)


@pytest.mark.parametrize(
    "said", [(), (STREAM_HEAD,), (STREAM_HEAD, chunk("a"))], ids=["asked", "begun", "answering"]
)
async def test_leaving_stops_the_backend_within_50_ms(said: tuple[bytes, ...]) -> None:
    """From the caller's leaving to the closed connection, in the median of five."""
    delays = []
    async with routed(hanging(*said)) as (bench, up):
        for number in range(5):
            task = asyncio.create_task(bench.ask("Hi", model="big"))
            while len(up.seen) <= number:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            begun_s = time.perf_counter()
            task.cancel()
            await asyncio.wait_for(up.seen[number].gone.wait(), 20)
            delays.append(time.perf_counter() - begun_s)
            await asyncio.wait({task})
    assert sorted(delays)[2] <= 0.05, delays


async def test_usage_that_a_backend_does_not_tell_is_estimated_and_said() -> None:
    async with routed(answering(STREAM_HEAD + chunk("a") + chunk("b", "stop"))) as (bench, _):
        events = await bench.ask("word " * 50, model="big")
        assert events[-1].usage.prompt_tokens == pytest.approx(68, abs=10)  # type: ignore[union-attr]
        assert "usage_unknown" in {d["code"] for d in report_of(events)["degradations"]}


async def test_a_backend_that_comes_back_is_used_again_within_seconds() -> None:
    async with routed(answering(STREAM_HEAD + chunk("ok", "stop") + usage_chunk(1, 1))) as (bench, up):
        health = bench.service.backends.routes.router.targets[0].health
        for _ in range(8):  # out for a minute by its record
            health.failed(BackendFault(FaultKind.UNREACHABLE, "up", "x"))
        assert health.back_in_s > 30
        async with asyncio.timeout(20):
            while not health.available:
                await asyncio.sleep(0.05)
        assert up.probes
        assert text_of(await bench.ask("Hi", model="big")) == "ok"


async def test_the_plan_is_told_before_the_backend_is_asked() -> None:
    async with routed(saying("x")) as (bench, _):
        kinds = [type(event) for event in await bench.ask("Hi", model="big")]
        assert kinds.index(Planned) < kinds.index(TextDelta)
        plan = next(e.plan for e in await bench.ask("Hi", model="big") if isinstance(e, Planned))
        assert plan.kind is PlanKind.FULL


async def test_what_is_not_passed_on_is_refused() -> None:
    formed = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "[a-z]+"))
    asked = replace(_request(whole=True), sampling=formed)
    async with routed(saying("x"), fallbacks=(("fake-1", "big"),)) as (bench, up):
        for each, param in ((asked, "structured_outputs"), (replace(_request(whole=True), prefix="A"), "messages")):
            with pytest.raises(InvalidRequest, match="aren't passed on") as caught:
                await anext(bench.service.run(each))
            assert caught.value.param == param
        assert not bench.service.backends.routes.stand_ins(replace(asked, model="fake-1"))
        assert not up.seen
