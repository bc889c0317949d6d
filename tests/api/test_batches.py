"""Batches by OpenAI's client over a scripted service: real files, rows and queue. What can go wrong with them."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from perilune.api.batch_lines import BATCH_ENDPOINTS
from perilune.config import Settings
from perilune.core import ServiceClass
from perilune.errors import EngineBusy, InternalError, QuotaExceeded, RateLimited
from perilune.service.batch import runner
from perilune.service.batch.lines import EMBEDDINGS, InputCheck, InputLimits
from perilune.service.ports import Caller

from .conftest import Serve, Server, eventually
from .fakes import MODEL, Fail, FakeService, Pause, answer
from .stored import Stored, stored_service

CHAT = "/v1/chat/completions"
WITHIN_S = 30.0
OVER = ("completed", "failed", "expired", "cancelled")


def line(number: int, text: str = "Hello.", url: str = CHAT, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        "custom_id": f"l{number}",
        "method": "POST",
        "url": url,
        "body": {"model": MODEL, "messages": messages, **body},
    }


def jsonl(*lines: Any) -> bytes:
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)


@asynccontextmanager
async def running(
    serve: Serve, home: Path, service: FakeService | None = None, key: str = "any", **options: Any
) -> AsyncIterator[tuple[Server, Stored]]:
    service = service or FakeService()
    now = options.pop("now", [time.time()])
    async with stored_service(home, service, now, **options) as stored, serve(service, key) as server:
        yield server, stored


async def begun(server: Server, data: bytes, endpoint: str = CHAT, **more: Any) -> Batch:
    file = await server.client.files.create(file=("in.jsonl", data), purpose="batch")
    arguments: dict[str, Any] = {"completion_window": "24h", **more}
    return await server.client.batches.create(input_file_id=file.id, endpoint=endpoint, **arguments)


async def ended(server: Server, batch: Batch) -> Batch:
    async with asyncio.timeout(WITHIN_S):
        while batch.status not in OVER:
            await asyncio.sleep(0.02)
            batch = await server.client.batches.retrieve(batch.id)
    return batch


async def rows(server: Server, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = await server.client.files.content(file_id)
    return [json.loads(each) for each in content.text.splitlines()]


async def test_life_of_a_batch(serve: Serve, tmp_path: Path) -> None:
    async with running(serve, tmp_path) as (server, stored):
        lines = [line(number, f"Question {number}") for number in range(300)]
        lines[7]["body"]["model"] = "no-such-model"
        lines[9]["body"]["max_tokens"] = -1
        batch = await begun(server, jsonl(*lines), metadata={"job": "nightly"})
        assert (batch.object, batch.status, batch.completion_window) == ("batch", "validating", "24h")
        assert (batch.endpoint, batch.metadata) == (CHAT, {"job": "nightly"})
        assert batch.expires_at == batch.created_at + 86_400
        batch = await ended(server, batch)
        counts = batch.request_counts
        assert counts is not None
        assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 300, 298, 2)
        assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
        assert batch.usage is not None
        assert (batch.usage.input_tokens, batch.usage.output_tokens) == (298 * 96, 298 * 5)
        assert batch.usage.input_tokens_details.cached_tokens == 298 * 32
        done, failed = await rows(server, batch.output_file_id), await rows(server, batch.error_file_id)
        assert [row["custom_id"] for row in done] == [f"l{n}" for n in range(300) if n not in (7, 9)]
        assert [row["custom_id"] for row in failed] == ["l7", "l9"]
        assert done[0]["response"]["status_code"] == 200
        assert done[0]["response"]["body"]["choices"][0]["message"]["content"] == "The answer is 42."
        assert done[0]["response"]["body"]["service_tier"] == "batch"
        assert [row["response"]["status_code"] for row in failed] == [404, 400]
        assert failed[1]["response"]["body"]["error"]["param"] == "max_tokens"
        assert len({row["id"] for row in done + failed}) == 300
        assert all(row["error"] is None for row in done + failed)
        assert {request.service_class for request in stored.service.requests} == {ServiceClass.P2_BATCH}
        output = await server.client.files.retrieve(batch.output_file_id or "")
        assert (output.purpose, output.status, output.filename) == (
            "batch_output",
            "processed",
            f"{batch.id}_output.jsonl",
        )
        listed = [each.id async for each in server.client.files.list(purpose="batch_output")]
        assert set(listed) == {batch.output_file_id, batch.error_file_id}
        with pytest.raises(openai.ConflictError):
            await server.client.batches.cancel(batch.id)


async def test_other_endpoints_go_through_the_same_seam(serve: Serve, tmp_path: Path) -> None:
    """Whatever endpoint is registered answers lines, as batch work: a new dialect needs nothing else."""
    async with running(serve, tmp_path) as (server, stored):
        endpoints = stored.service.batches._runner.endpoints
        assert endpoints == set(BATCH_ENDPOINTS)
        for endpoint in sorted(endpoints - {"/v1/embeddings"}):
            messages = line(0)["body"]["messages"]
            asked = {CHAT: {"messages": messages}, "/v1/responses": {"input": "Hi"}}.get(endpoint, {"prompt": "Hi"})
            body = {"model": MODEL, **asked}
            wanted = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
            batch = await ended(server, await begun(server, jsonl(wanted), endpoint))
            (row,) = await rows(server, batch.output_file_id)
            assert row["response"]["body"]["model"] == MODEL
            assert stored.service.requests[-1].service_class is ServiceClass.P2_BATCH, endpoint
            assert batch.usage is not None
            assert batch.usage.output_tokens == 5


def broken(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    found = line(1)
    change(found)
    return found


WRONG = {
    "invalid_json_line": [b"{", b"[1]", b'"text"', b'{"custom_id": "\xff"}', b"null", b'{"custom_id": NaN}'],
    "missing_required_parameter": [
        broken(lambda found: found.pop("custom_id")),
        broken(lambda found: found.update(custom_id="x" * 513)),
        broken(lambda found: found.update(custom_id=7)),
        broken(lambda found: found.update(body="text")),
    ],
    "duplicate_custom_id": [line(0)],
    "invalid_method": [broken(lambda found: found.update(method="GET"))],
    "invalid_url": [broken(lambda found: found.update(url="/v1/responses")), broken(lambda f: f.pop("url"))],
    "unsupported_parameter": [line(1, stream=True)],
    "line_too_large": [line(1, "x" * 3_000)],
}


async def test_a_wrong_input_fails_and_says_where(serve: Serve, tmp_path: Path) -> None:
    limits = InputLimits(3, 2_000, 20_000)
    async with running(serve, tmp_path, limits=limits) as (server, stored):
        cases = [(code, jsonl(line(0), b"", each), 3) for code, found in WRONG.items() for each in found]
        cases += [
            ("empty_file", b"\n \n", None),
            ("too_many_tasks", jsonl(*(line(n) for n in range(4))), None),
            ("file_too_large", b"\n" * 20_001, None),
        ]
        batches = [(code, number, await begun(server, data)) for code, data, number in cases]
        for code, number, batch in batches:
            batch = await ended(server, batch)
            assert batch.status == "failed", code
            assert batch.failed_at is not None
            assert batch.errors is not None
            assert batch.errors.data is not None
            found = batch.errors.data[0]
            assert (found.code, found.line) == (code, number)
            assert found.message
            assert batch.output_file_id is None
            assert batch.request_counts is not None
            assert batch.request_counts.total == 0
        assert stored.service.requests == [], "nothing of a wrong input is run"


def test_a_hundred_errors_are_told() -> None:
    check = InputCheck(CHAT, InputLimits(1_000, 2_000, 20_000))
    assert list(check.read(io.BytesIO(b"{\n" * 500))) == []
    assert [error["line"] for error in check.errors] == list(range(1, 101))


def test_embedding_inputs_are_counted() -> None:
    check = InputCheck(EMBEDDINGS, InputLimits(1_000, 1_000_000, 20_000_000))
    lines = [{**line(n, url=EMBEDDINGS), "body": {"model": MODEL, "input": ["x"] * 20_000}} for n in range(3)]
    assert len(list(check.read(io.BytesIO(jsonl(*lines))))) == 2
    assert [(error["code"], error["line"]) for error in check.errors] == [("too_many_inputs", 3)]


async def test_a_byte_order_mark_and_no_last_newline(serve: Serve, tmp_path: Path) -> None:
    async with running(serve, tmp_path) as (server, _):
        data = b"\xef\xbb\xbf" + jsonl(line(0, "月"), line(1)).rstrip()
        batch = await ended(server, await begun(server, data))
        assert [row["custom_id"] for row in await rows(server, batch.output_file_id)] == ["l0", "l1"]


async def test_wrong_requests_are_refused(serve: Serve, tmp_path: Path) -> None:
    async with running(serve, tmp_path) as (server, _):
        file = await server.client.files.create(file=("in.jsonl", jsonl(line(0))), purpose="batch")
        document = await server.client.files.create(file=("a.txt", b"text"), purpose="user_data")
        good: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        for change, param in (
            ({"endpoint": "/v1/models"}, "endpoint"),
            ({"completion_window": "11h"}, "completion_window"),
            ({"completion_window": "8d"}, "completion_window"),
            ({"completion_window": "soon"}, "completion_window"),
            ({"metadata": {"k": "x" * 513}}, None),
            ({"metadata": {f"k{n}": "v" for n in range(17)}}, "metadata"),
            ({"input_file_id": document.id}, "input_file_id"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after.seconds"),
        ):
            reply = await server.http.post("/v1/batches", json={**good, **change})
            body = await reply.json()
            assert reply.status == 400, (change, body)
            assert param is None or body["error"]["param"] == param
        reply = await server.http.post("/v1/batches", json={**good, "input_file_id": "file-none"})
        assert reply.status == 404
        assert (await server.http.get("/v1/batches/batch_none")).status == 404
        assert (await server.http.post("/v1/batches/batch_none/cancel")).status == 404
        for query in ("limit=0", "limit=101", "after=batch_none"):
            assert (await server.http.get(f"/v1/batches?{query}")).status == 400
        for window in ("12h", "7d", "168h"):
            assert (await server.http.post("/v1/batches", json={**good, "completion_window": window})).status == 200


async def test_tenants_are_apart(serve: Serve, tmp_path: Path) -> None:
    keys = {name: Caller(name, "user", key_id=f"key-{name}") for name in ("mine", "other")}
    keys["reader"] = Caller("mine", "read-only")
    service = FakeService(keys=keys)
    async with running(serve, tmp_path, service, key="mine") as (server, _):
        batch = await ended(server, await begun(server, jsonl(line(0))))
        other = server.client.with_options(api_key="other")
        reader = server.client.with_options(api_key="reader")
        for call in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(batch.id)
        with pytest.raises(openai.NotFoundError):
            await other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        with pytest.raises(openai.NotFoundError):
            await other.files.content(batch.output_file_id or "")
        with pytest.raises(openai.BadRequestError):
            await other.batches.list(after=batch.id)
        assert [each.id async for each in other.batches.list()] == []
        assert (await reader.batches.retrieve(batch.id)).id == batch.id
        with pytest.raises(openai.PermissionDeniedError):
            await reader.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        assert all(request.tenant == "mine" for request in service.requests)
        assert {request.key_id for request in service.requests} == {"key-mine"}


async def test_pages(serve: Serve, tmp_path: Path) -> None:
    now = [1_000_000_000.0]
    async with running(serve, tmp_path, now=now) as (server, _):
        ids = []
        for _ in range(5):
            now[0] += 1
            ids.append((await begun(server, jsonl(line(0)))).id)
        assert [each.id async for each in server.client.batches.list(limit=2)] == ids[::-1]
        page = await server.client.batches.list(limit=2, after=ids[3])
        assert [each.id for each in page.data] == [ids[2], ids[1]]
        assert page.has_more


async def test_cancelling_keeps_what_was_done(serve: Serve, tmp_path: Path) -> None:
    service = FakeService()
    async with running(serve, tmp_path, service, concurrency=2) as (server, stored):
        batch = await begun(server, jsonl(*(line(n) for n in range(200))))
        await eventually(lambda: len(service.requests) > 20, WITHIN_S)
        service.script = [Pause(600)]
        await eventually(lambda: service.open == 2, WITHIN_S)
        batch = await server.client.batches.cancel(batch.id)
        assert batch.status in ("cancelling", "cancelled")
        batch = await ended(server, batch)
        assert (batch.status, service.open) == ("cancelled", 0)
        assert None not in (batch.cancelling_at, batch.cancelled_at)
        done, undone = await rows(server, batch.output_file_id), await rows(server, batch.error_file_id)
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (len(done), 0)
        assert done
        assert [row["custom_id"] for row in done + undone] == [f"l{n}" for n in range(200)]
        assert {row["error"]["code"] for row in undone} == {"batch_cancelled"}
        assert [each.batch_id for each in stored.rows.unended()] == []


async def test_an_expired_batch_says_which_lines_were_not_run(serve: Serve, tmp_path: Path) -> None:
    now = [time.time()]
    service = FakeService()
    async with running(serve, tmp_path, service, now=now, concurrency=1) as (server, stored):
        batch = await begun(server, jsonl(*(line(n) for n in range(100))), completion_window="12h")
        await eventually(lambda: len(service.requests) > 5, WITHIN_S)
        service.script = [Pause(600)]
        await eventually(lambda: service.reached.is_set(), WITHIN_S)
        now[0] += 12 * 3600
        await stored.service.batches.tend()
        batch = await ended(server, batch)
        assert (batch.status, service.open) == ("expired", 0)
        done, undone = await rows(server, batch.output_file_id), await rows(server, batch.error_file_id)
        assert [row["custom_id"] for row in done + undone] == [f"l{n}" for n in range(100)]
        assert {row["error"]["code"] for row in undone} == {"batch_expired"}


async def test_busy_and_limited_lines_wait_and_faults_are_tried_again(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_WAIT_S", (0.01, 0.05))

    class Moody(FakeService):
        async def run(self, request: Any) -> Any:
            said = request.messages[0].text
            tries = sum(each.messages[0].text == said for each in self.requests)
            kinds = {
                "busy": EngineBusy("Full.", hint=""),
                "limited": RateLimited("Too many.", retry_after_s=0.01),
                "fault": InternalError("Oops."),
                "odd": RuntimeError("secret detail"),
                "quota": QuotaExceeded("The budget is used."),
            }
            lasting = said in ("odd", "quota")
            self.script = [Fail(kinds[said])] if said in kinds and (lasting or tries < 2) else answer(request)
            async for event in super().run(request):
                yield event

    service = Moody()
    async with running(serve, tmp_path, service, concurrency=1) as (server, _):
        said = ("busy", "limited", "fault", "odd", "quota", "fine")
        batch = await ended(server, await begun(server, jsonl(*(line(n, text) for n, text in enumerate(said)))))
        assert batch.status == "completed"
        done, failed = await rows(server, batch.output_file_id), await rows(server, batch.error_file_id)
        assert [row["custom_id"] for row in done] == ["l0", "l1", "l2", "l5"]
        assert [(row["custom_id"], row["response"]["status_code"]) for row in failed] == [("l3", 500), ("l4", 429)]
        assert "secret" not in json.dumps(failed)
        tries = [sum(each.messages[0].text == text for each in service.requests) for text in said]
        assert tries == [3, 3, 3, 3, 1, 1]


async def test_another_life_goes_on_where_the_last_one_was(serve: Serve, tmp_path: Path) -> None:
    now = [time.time()]
    service = FakeService()
    lines = [line(n, f"Question {n}") for n in range(300)]
    async with running(serve, tmp_path, service, now=now) as (server, _):
        batch = await begun(server, jsonl(*lines))
        await eventually(lambda: len(service.requests) > 150, WITHIN_S)
    service = FakeService()
    async with running(serve, tmp_path, service, now=now) as (server, stored):
        batch = await ended(server, batch)
        done = await rows(server, batch.output_file_id)
        assert [row["custom_id"] for row in done] == [f"l{n}" for n in range(300)]
        assert 0 < len(service.requests) < 155, "what was done before isn't done again"
        assert stored.rows.unended() == []


async def test_a_lost_queue_is_made_anew(serve: Serve, tmp_path: Path) -> None:
    now = [time.time()]
    service = FakeService()
    async with running(serve, tmp_path, service, now=now) as (server, _):
        batch = await begun(server, jsonl(*(line(n) for n in range(200))))
        await eventually(lambda: len(service.requests) > 20, WITHIN_S)
    for path in tmp_path.glob("batches.db*"):
        path.unlink()
    async with running(serve, tmp_path, FakeService(), now=now) as (server, _):
        batch = await ended(server, batch)
        assert len(await rows(server, batch.output_file_id)) == 200


@pytest.mark.parametrize("broken_by", ["a folder", "garbage"])
async def test_a_queue_that_can_not_be_opened_loses_no_batch(serve: Serve, tmp_path: Path, broken_by: str) -> None:
    path = tmp_path / "batches.db"
    if broken_by == "a folder":
        path.mkdir()
    else:
        path.write_bytes(b"no database " * 1_000)
    async with running(serve, tmp_path) as (server, stored):
        batch = await begun(server, jsonl(line(0)))
        assert batch.status == "validating"
        assert stored.service.requests == []
        path.rmdir() if path.is_dir() else path.unlink()
        stored.service.batches.wake()
        batch = await ended(server, batch)
        assert batch.status == "completed"


async def test_one_that_can_not_be_put_while_others_are_waits_for_the_next_look(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(serve, tmp_path) as (server, stored):
        batches = stored.service.batches
        unended, looking, go_on = batches._store.unended, threading.Event(), threading.Event()

        def slowly_unended() -> list[Any]:
            found = unended()
            if not looking.is_set():
                looking.set()
                go_on.wait(10)
            return found

        async def full(*_: str) -> None:
            raise OSError("no space left on device")

        monkeypatch.setattr(batches, "_queued", False)
        monkeypatch.setattr(batches._store, "unended", slowly_unended)
        batches.wake()
        await asyncio.to_thread(looking.wait, 10)
        with monkeypatch.context() as patch:
            patch.setattr(batches._queue, "put", full)
            batch = await begun(server, jsonl(line(0)))
        go_on.set()
        batches.wake()
        await asyncio.sleep(0.1)
        batches.wake()
        assert (await ended(server, batch)).status == "completed"


def test_fifty_thousand_lines_are_taken_and_long_ones() -> None:
    """The usual limits; a line of a megabyte among them."""
    usual = Settings().batch
    limits = InputLimits(usual.max_lines, 4 << 20, usual.max_input)
    many = [json.dumps(line(n)).encode() + b"\n" for n in range(50_001)]
    many[7] = json.dumps(line(7, "x" * 1_000_000)).encode() + b"\n"
    check = InputCheck(CHAT, limits)
    found = list(check.read(io.BytesIO(b"".join(many[:50_000]))))
    assert (len(found), check.total, check.errors) == (50_000, 50_000, [])
    assert found[7].size_bytes > 1_000_000
    more = InputCheck(CHAT, limits)
    assert len(list(more.read(io.BytesIO(b"".join(many))))) == 50_001
    assert [error["code"] for error in more.errors] == ["too_many_tasks"]


def test_every_wrong_line_is_told_with_its_number() -> None:
    """Good lines between bad ones; blank lines and the byte order mark count as lines of the file."""
    data = b"\xef\xbb\xbf" + jsonl(
        line(0), b"", b"\xff\xfe", line(0), line(2), line(3, url="/v1/none"), b"[" * 3_000
    )
    check = InputCheck(CHAT, InputLimits(100, 10_000, 100_000))
    assert [each.custom_id for each in check.read(io.BytesIO(data))] == ["l0", "l2"]
    assert [(error["line"], error["code"]) for error in check.errors] == [
        (3, "invalid_json_line"),
        (4, "duplicate_custom_id"),
        (6, "invalid_url"),
        (7, "invalid_json_line"),
    ]


async def test_a_deleted_input_and_a_revoked_key_end_a_batch(serve: Serve, tmp_path: Path) -> None:
    revoked: set[str] = set()
    service = FakeService(keys={"k": Caller("local", "user", key_id="key-1")})
    async with running(serve, tmp_path, service, key="k", concurrency=1, revoked=revoked) as (server, _):
        batch = await begun(server, jsonl(*(line(n) for n in range(300))))
        await eventually(lambda: len(service.requests) > 5, WITHIN_S)
        await server.client.files.delete(batch.input_file_id)
        batch = await ended(server, batch)
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert batch.errors.data[0].code == "input_file_deleted"
        done, undone = await rows(server, batch.output_file_id), await rows(server, batch.error_file_id)
        assert [row["custom_id"] for row in done + undone] == [f"l{n}" for n in range(300)]
        revoked.add("key-1")
        batch = await ended(server, await begun(server, jsonl(line(0))))
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert batch.errors.data[0].code == "key_revoked"


async def test_results_go_with_the_document_that_they_quote(serve: Serve, tmp_path: Path) -> None:
    class Citing(FakeService):
        cited = ""

        async def run(self, request: Any) -> Any:
            from dataclasses import replace

            from perilune.core import CitationAdded, Completed

            async for event in super().run(request):
                if isinstance(event, Completed):
                    event = replace(
                        event,
                        report=replace(
                            event.report,
                            citations=tuple(replace(each, file_id=self.cited) for each in event.report.citations),
                        ),
                    )
                elif isinstance(event, CitationAdded):
                    event = replace(event, citation=replace(event.citation, file_id=self.cited))
                yield event

    service = Citing()
    async with running(serve, tmp_path, service) as (server, stored):
        document = await server.client.files.create(file=("a.txt", b"the far side"), purpose="user_data")
        service.cited = document.id
        batch = await ended(server, await begun(server, jsonl(line(0))))
        assert document.id in (await server.client.files.content(batch.output_file_id or "")).text
        await server.client.files.delete(document.id)
        await stored.service.batches.tend()
        found = await server.client.batches.retrieve(batch.id)
        assert (found.status, found.output_file_id) == ("completed", None)
        with pytest.raises(openai.NotFoundError):
            await server.client.files.content(batch.output_file_id or "")


async def test_forgetting_a_tenant_stops_and_removes_its_batches(serve: Serve, tmp_path: Path) -> None:
    service = FakeService()
    async with running(serve, tmp_path, service, concurrency=1) as (server, stored):
        batch = await begun(server, jsonl(*(line(n) for n in range(300))))
        await eventually(lambda: len(service.requests) > 5, WITHIN_S)
        await stored.service.batches.forget_tenant("local")
        asked = len(service.requests)
        with pytest.raises(openai.NotFoundError):
            await server.client.batches.retrieve(batch.id)
        await asyncio.sleep(0.3)
        assert len(service.requests) == asked
        assert service.open == 0


async def test_output_files_may_expire(serve: Serve, tmp_path: Path) -> None:
    now = [time.time()]
    async with running(serve, tmp_path, now=now) as (server, stored):
        expiry = {"anchor": "created_at", "seconds": 3600}
        batch = await ended(server, await begun(server, jsonl(line(0)), output_expires_after=expiry))
        output = await server.client.files.retrieve(batch.output_file_id or "")
        assert output.expires_at == output.created_at + 3600
        source = await server.client.files.retrieve(batch.input_file_id)
        assert source.expires_at == source.created_at + 30 * 86_400
        now[0] += 3601
        with pytest.raises(openai.NotFoundError):
            await server.client.files.content(output.id)
        assert [record.file_id for record in stored.library.due_files()] == [output.id]
        assert [each.id async for each in server.client.files.list()] == [source.id]
