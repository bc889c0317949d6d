"""What a remote server really gets, over HTTP and through the whole service: no planted identifier; the answer is
put back; the settings are followed; nothing of the values is logged."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from perilune.build.backends import departure_of
from perilune.config import BackendSettings, PrivacySettings, Settings
from perilune.core import Completed, TextDelta
from perilune.errors import ConfigError, Forbidden
from perilune.service.backends.health import Health, HealthRules
from perilune.service.backends.openai import Address, OpenAIBackend
from perilune.service.privacy.departure import Deidentified, Policy
from perilune.service.privacy.kinds import Kind, Treatment
from perilune.service.report import report_dict
from perilune.service.routing import Target
from perilune.telemetry import Telemetry
from tests.service.backends.upstream import STREAM_HEAD, Seen, Upstream, Write, chunk, saying, upstream, usage_chunk
from tests.service.harness import Bench, running, text_of

PLANTED = {
    "person": ("Margaret Whitcombe", "王小明"),
    "phone": ("+44 20 7946 0958", "13912345678"),
    "email": ("m.whitcombe@example.org",),
    "national_id": ("11010519491231002X",),
    "address": ("北京市朝阳区建国路88号院3号楼2单元1201室",),
    "bank_card": ("4111 1111 1111 1111",),
}
VALUES = [value for values in PLANTED.values() for value in values]


class Counting:
    """A sink that keeps counters."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}

    def count(self, name: str, value: float, labels: dict[str, str]) -> None:
        key = name + "".join(labels.values())
        self.counts[key] = self.counts.get(key, 0) + value

    def observe(self, name: str, value: float, labels: dict[str, str]) -> None: ...
    def gauge(self, name: str, value: float, labels: dict[str, str]) -> None: ...


@asynccontextmanager
async def remote(
    script: Any, policy: Policy | None = None, **options: Any
) -> AsyncIterator[tuple[Bench, Upstream]]:
    """A service with one de-identified backend that serves the model `big`."""
    async with upstream(script) as up:
        departure = Deidentified(policy or Policy(), Telemetry(options.pop("sink", None)))
        backend = OpenAIBackend(Address("up", up.url, "their-model", 8192), departure)
        health = Health(HealthRules(), 8192, asyncio.get_running_loop().time)
        async with running(targets=[Target(backend, "big", health)], **options) as bench:
            yield bench, up


async def echoing(request: Seen, write: Write) -> None:
    """Says the last message back, a character at a time: every placeholder is cut everywhere."""
    said = request.body["messages"][-1]["content"]
    await write(STREAM_HEAD)
    for char in said:
        await write(chunk(char))
    await write(chunk("", "stop") + usage_chunk(7, len(said)))


def nothing_left(up: Upstream) -> None:
    for seen in up.seen:
        body = json.dumps(seen.body, ensure_ascii=False)
        for value in VALUES:
            assert value not in body, f"{value} left"
            assert json.dumps(value) not in json.dumps(seen.body)


async def test_no_identifier_of_a_question_leaves_and_the_answer_is_put_back() -> None:
    question = "; ".join(VALUES) + ". Who is Margaret, and who 小明?"
    sink = Counting()
    async with remote(echoing, sink=sink) as (bench, up):
        events = await bench.ask(question, model="big")
        assert text_of(events) == question
        nothing_left(up)
        assert "[PERSON_1]" in up.seen[0].body["messages"][-1]["content"]
        assert isinstance(events[-1], Completed)
        told = report_dict(events[-1].report)["taken_out"]
        assert {kind: told[kind] for kind in ("phone", "email", "bank_card")} == {
            "phone": 2,
            "email": 1,
            "bank_card": 1,
        }
        assert sink.counts["privacy_taken_outphone"] == 2


async def test_nor_of_the_system_prompt_a_document_its_name_or_an_earlier_turn() -> None:
    text = f"Lease. The tenant is {PLANTED['person'][0]}, reachable under {PLANTED['phone'][0]}. " * 3
    system = f"You write for {PLANTED['person'][1]} (身份证{PLANTED['national_id'][0]})."
    async with remote(saying("ok")) as (bench, up):
        file_id = await bench.upload(text, name=f"lease {PLANTED['email'][0]}.txt")
        history = (("system", system), ("user", f"我住{PLANTED['address'][0]}"), ("assistant", "ok"))
        await bench.ask("Who is the tenant?", history=history, model="big", files=(file_id,))
        nothing_left(up)
        sent = json.dumps(up.seen[0].body)
        assert "[PERSON_1]" in sent
        assert "[EMAIL_1]" in sent
        assert "[ADDRESS_1]" in sent


async def test_one_person_has_one_stand_in_in_all_messages() -> None:
    async with remote(saying("ok")) as (bench, up):
        history = (("system", "Be kind to Margaret Whitcombe."),)
        await bench.ask("Write to Margaret Whitcombe about Wu Guodong.", history=history, model="big")
        first, second = (message["content"] for message in up.seen[0].body["messages"])
        assert first == "Be kind to [PERSON_1]."
        assert second == "Write to [PERSON_1] about [PERSON_2]."


async def test_stop_strings_leave_without_names_too() -> None:
    async with remote(saying("ok")) as (bench, up):
        await bench.ask("Margaret Whitcombe speaks.", model="big", stop=("Margaret Whitcombe:",))
        assert up.seen[0].body["stop"] == ["[PERSON_1]:"]


async def test_nothing_of_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with remote(echoing) as (bench, _):
        await bench.ask("; ".join(VALUES), model="big")
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("perilune")]
    assert any("taken out" in message and "phone 2" in message for message in ours)
    assert not any(value in message for message in ours for value in VALUES)


async def test_a_kind_that_is_refused_keeps_the_request_here() -> None:
    async with remote(saying("x"), Policy({Kind.BANK_CARD: Treatment.REFUSE})) as (bench, up):
        with pytest.raises(Forbidden):
            await bench.ask("Pay with 4111 1111 1111 1111.", model="big")
        assert not up.seen
        await bench.ask("Pay with cash.", model="big")
        assert len(up.seen) == 1


async def test_a_kind_that_is_dropped_leaves_no_number_to_turn_back() -> None:
    async with remote(echoing, Policy({Kind.PHONE: Treatment.DROP})) as (bench, up):
        events = await bench.ask("Call 13912345678 or mail a.b@example.org.", model="big")
        assert up.seen[0].body["messages"][-1]["content"] == "Call [PHONE] or mail [EMAIL_1]."
        assert text_of(events) == "Call [PHONE] or mail a.b@example.org."


async def test_a_kind_that_is_kept_leaves_and_own_terms_do_not() -> None:
    policy = Policy({Kind.EMAIL: Treatment.KEEP}, terms=("Project Heron", "白鹭计划"))
    async with remote(echoing, policy) as (bench, up):
        events = await bench.ask("project  heron 和白鹭计划: a.b@example.org", model="big")
        assert up.seen[0].body["messages"][-1]["content"] == "[TERM_1] 和[TERM_2]: a.b@example.org"
        assert text_of(events) == "project  heron 和白鹭计划: a.b@example.org"


async def test_a_tenant_that_is_local_only_never_leaves() -> None:
    async with remote(saying("x"), Policy(local_only=frozenset({"acme", "local"}))) as (bench, up):
        with pytest.raises(Forbidden):
            await bench.ask("Hello?", model="big")
        assert not up.seen


async def test_log_probabilities_of_altered_text_are_not_shown() -> None:
    async with remote(saying("[PERSON_1]")) as (bench, _):
        events = await bench.ask("Margaret Whitcombe?", model="big", logprobs=0)
        assert all(not event.logprobs for event in events if isinstance(event, TextDelta))


def settings(**privacy: Any) -> Settings:
    backend = BackendSettings(name="up", url="https://host/v1", model="m")
    return Settings(backends=(backend,), privacy=PrivacySettings(**privacy))


def test_settings_are_checked() -> None:
    departure_of(settings(kinds="phone=drop,order=keep", trusted=("up",)), Telemetry())
    with pytest.raises(ConfigError, match=r"privacy\.kinds names 'fone'"):
        departure_of(settings(kinds={"fone": "drop"}), Telemetry())
    with pytest.raises(ConfigError, match=r"privacy\.trusted names 'down'"):
        departure_of(settings(trusted=("down",)), Telemetry())
