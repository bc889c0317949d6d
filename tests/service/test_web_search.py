"""Results of a web search become a cited document; a search that fails is disclosed; nothing else is fetched."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from aiohttp import web

from perilune.core import Event
from perilune.errors import ConfigError, InvalidRequest
from perilune.service.backends.departure import AsWritten
from perilune.service.backends.protocol import BackendFault, FaultKind
from perilune.service.backends.searxng import MAX_ANSWER_BYTES, SearXNG
from perilune.service.privacy.departure import Deidentified, Policy
from perilune.telemetry import Telemetry
from tests.service.backends.searx import Reply, raw, results, searx
from tests.service.harness import Bench, request, running
from tests.service.test_routed import report_of

FERRY = ("Ferry times", "https://harbour.example/ferry", "The ferry to Brill leaves at 9:40 from pier 3.")
MAIL = ("Write to us", "https://harbour.example/mail", "Ask the harbour office.")


async def ask(bench: Bench, question: str, web_results: int = 5, local_only: bool = False) -> list[Event]:
    asked = replace(request(question), web_results=web_results, local_only=local_only)
    return [event async for event in bench.service.run(asked)]


def codes(events: list[Event]) -> set[str]:
    return {each["code"] for each in report_of(events)["degradations"]}


async def test_what_was_found_is_read_cited_and_deletable() -> None:
    async with searx(results(FERRY, MAIL)) as server:
        async with running(web=SearXNG(server.url, AsWritten(), 2.0)) as bench:
            events = await ask(bench, "When does the ferry leave?")
            prompt = bench.tokenizer.decode(bench.engine.specs[-1].token_ids)
            assert "leaves at 9:40 from pier 3" in prompt
            assert FERRY[1] in prompt
            report = report_of(events)
            assert report["citations"][0]["filename"] == "Web search: When does the ferry leave?.md"
            assert "9:40" in report["citations"][0]["quote"]
            (record,) = await bench.documents.list("local")
            assert record.purpose == "web_search"
            await bench.documents.delete("local", record.file_id)
        assert server.asked == [{"q": "When does the ferry leave?", "format": "json"}]
        assert server.paths == ["/search"], "no result's page is fetched"


async def test_nothing_is_searched_unasked_and_wanting_it_in_vain_is_an_error() -> None:
    async with searx(results(FERRY)) as server, running(web=SearXNG(server.url, AsWritten(), 2.0)) as bench:
        await ask(bench, "When does the ferry leave?", web_results=0)
        assert not server.asked
    async with running() as bench:
        with pytest.raises(InvalidRequest, match="searches no web"):
            await ask(bench, "When does the ferry leave?")


async def test_what_stays_here_asks_nobody() -> None:
    async with searx(results(FERRY)) as server, running(web=SearXNG(server.url, AsWritten(), 2.0)) as bench:
        events = await ask(bench, "My locker is 4471. Where is it?", local_only=True)
        assert codes(events) == {"no_web_results"}
        assert not server.asked


async def test_identifiers_do_not_leave_in_a_search() -> None:
    departure = Deidentified(Policy(local_only=frozenset({"quiet"})), Telemetry())
    async with searx(results(FERRY)) as server:
        engine = SearXNG(server.url, departure, 2.0)
        await engine.search("local", "r1", "Who is anna.smit@harbour.example of the ferry?", 5)
        assert "anna.smit" not in server.asked[0]["q"]
        with pytest.raises(BackendFault) as refused:
            await engine.search("quiet", "r2", "ferry", 5)
        assert refused.value.kind is FaultKind.KEPT
        assert len(server.asked) == 1


async def _slow(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(2)
    raise AssertionError


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (_slow, FaultKind.TIMED_OUT),
        (raw(b"<html>"), FaultKind.BROKEN),
        (raw(b"[]"), FaultKind.BROKEN),
        (raw(b'{"results": 3}'), FaultKind.BROKEN),
        (raw(b" " * (MAX_ANSWER_BYTES + 1)), FaultKind.BROKEN),
        (raw(b"", 403), FaultKind.DENIED),
        (raw(b"", 302, [("location", "http://127.0.0.1:1/secret")]), FaultKind.DENIED),
        (raw(b"", 500), FaultKind.DENIED),
    ],
)
async def test_a_search_that_fails_costs_only_its_results(reply: Reply, kind: FaultKind) -> None:
    async with searx(reply) as server:
        engine = SearXNG(server.url, AsWritten(), 0.5)
        with pytest.raises(BackendFault) as fault:
            await engine.search("local", "r", "ferry", 5)
        assert fault.value.kind is kind
        async with running(web=engine) as bench:
            assert codes(await ask(bench, "ferry?")) == {"no_web_results"}
    with pytest.raises(BackendFault, match="reached"):  # gone by now
        await engine.search("local", "r", "ferry", 5)


async def test_only_what_is_usable_of_a_result_is_taken() -> None:
    found = [
        FERRY,
        ("again", FERRY[1], "the same page"),
        ("script", "javascript:alert(1)", "x"),
        ("file", "file:///etc/passwd", "x"),
        ("no extract", "https://a.example/", ""),
        ("x" * 500, "https://b.example/", "y\n# heading " * 2_000),
    ]
    body = json.dumps({"results": [{"title": t, "url": u, "content": c} for t, u, c in found] + [3, None, {}]})
    async with searx(raw(body.encode())) as server:
        taken = await SearXNG(server.url, AsWritten(), 2.0).search("local", "r", "ferry", 9)
        assert [each.url for each in taken] == [FERRY[1], "https://b.example/"]
        assert len(taken[1].title) == 200
        assert len(taken[1].extract) == 2_000
        assert "\n" not in taken[1].extract, "an extract makes no headings of its own"
        assert len(await SearXNG(server.url, AsWritten(), 2.0).search("local", "r", "ferry", 1)) == 1


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://user:secret@host", "searx.example", "http://h/?q="])
def test_an_address_that_is_none_is_said_at_start(url: str) -> None:
    with pytest.raises(ConfigError, match=r"web_search\.url"):
        SearXNG(url, AsWritten(), 2.0)
