"""/v1/feedback over the real memory: shapes, refusals, export, tenants that never meet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perilune.core import KeptAnswer
from perilune.memory.ratings import Ratings
from perilune.service.sessions import SessionService
from perilune.telemetry import Telemetry
from tests.api.conftest import Serve
from tests.api.fakes import FakeService
from tests.api.test_sessions import KEYS, as_
from tests.memory.test_summaries import Kept

PATH = "/v1/feedback"
ASKED, SAID = "Where is the violin?", "I can't tell."
UP: dict[str, Any] = {"answer_id": "chatcmpl-a1", "rating": "up"}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    kept = Kept(tmp_path)
    kept.sessions.add("acme", "trip", [("user", "The violin is in the attic.", 99.0)])
    kept.sessions.add(
        "acme", "trip", [("user", ASKED, 100.0), ("assistant", SAID, 101.5)], answer=KeptAnswer("req_a1", "smol")
    )

    async def no_kv(owner: str) -> None:
        raise AssertionError(owner)

    conversations = SessionService(kept.sessions, no_kv, Telemetry())
    ratings = Ratings(kept.store, kept.memory.marks, lambda: 1764460800.25)
    yield FakeService(keys=dict(KEYS), conversations=conversations, ratings=ratings)
    kept.memory.close()
    kept.store.close()


async def test_rated_read_listed_exported_deleted(serve: Serve, service: FakeService) -> None:
    body = {"answer_id": "chatcmpl-a1", "rating": "down", "reason": "not_found", "comment": "It is there."}
    body["span"] = {"session": "trip", "turn": 1}
    async with serve(service) as server:
        assert (await server.http.post(PATH, json=body, **as_("r"))).status == 403
        made = await (await server.http.post(PATH, json=body, **as_("a"))).json()
        rest = {"object": "feedback", "created_at": 1764460800, "kept": True, "session": "trip", "turn": 2}
        assert made == {"id": made["id"], **body, **rest}
        assert await (await server.http.get(f"{PATH}/{made['id']}", **as_("r"))).json() == made
        listed = await (await server.http.get(f"{PATH}?rating=down&session=trip&limit=5", **as_("r"))).json()
        cursors = {"first_id": made["id"], "last_id": made["id"], "has_more": False}
        assert listed == {"object": "list", "data": [made], **cursors}
        assert (await (await server.http.get(f"{PATH}?rating=up", **as_("a"))).json())["data"] == []
        search = await server.http.post("/v1/memory/search", json={"query": ASKED}, **as_("a"))
        assert (await search.json())["data"][0]["turn"] == 1
        exported = await server.http.get(f"{PATH}/export", **as_("r"))
        assert exported.content_type == "application/jsonl"
        text = {"question": ASKED, "answer": SAID, "model": "smol", "citations": []}
        assert [json.loads(line) for line in (await exported.text()).splitlines()] == [
            made | text | {"expected": "The violin is in the attic."}
        ]
        assert (await server.http.delete(f"{PATH}/{made['id']}", **as_("r"))).status == 403
        gone = await (await server.http.delete(f"{PATH}/{made['id']}", **as_("a"))).json()
        assert gone == {"id": made["id"], "object": "feedback", "deleted": True}
        assert (await server.http.get(f"{PATH}/{made['id']}", **as_("a"))).status == 404
        assert await (await server.http.get(f"{PATH}/export", **as_("a"))).text() == ""


async def test_another_tenant_sees_nothing(serve: Serve, service: FakeService) -> None:
    async with serve(service) as server:
        made = await (await server.http.post(PATH, json=UP, **as_("a"))).json()
        for reply in (
            await server.http.get(f"{PATH}/{made['id']}", **as_("b")),
            await server.http.delete(f"{PATH}/{made['id']}", **as_("b")),
            await server.http.post(
                PATH, json={**UP, "span": {"session": "trip", "turn": 1}, "question": ASKED}, **as_("b")
            ),
        ):
            assert reply.status == 404
        assert (await server.http.get(f"{PATH}?after={made['id']}", **as_("b"))).status == 400
        assert (await (await server.http.get(PATH, **as_("b"))).json())["data"] == []
        theirs = await (await server.http.post(PATH, json=UP, **as_("b"))).json()
        assert (theirs["kept"], theirs["session"]) == (False, None)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"answer_id": None}, "answer_id"),
        ({"answer_id": "file-1"}, "answer_id"),
        ({"answer_id": "msg_" + "a" * 60}, "answer_id"),
        ({"rating": "good"}, "rating"),
        ({"reason": "because"}, "reason"),
        ({"comment": "x" * 2001}, "comment"),
        ({"comment": ""}, "comment"),
        ({"question": "What?"}, "question"),
        ({"span": {"session": "trip"}}, "span"),
        ({"span": {"session": "trip", "turn": 1, "start": 4}}, "span"),
        ({"span": {"session": "trip", "turn": 1, "start": 4, "end": 4}}, "span"),
        ({"span": {"file_id": "file-1", "page": 0}}, "span.page"),
        ({"answer_id": "msg_0", "span": {"session": "trip", "turn": 1}}, "question"),
    ],
)
async def test_bad_feedback(serve: Serve, service: FakeService, more: dict[str, object], param: str) -> None:
    async with serve(service) as server:
        reply = await server.http.post(PATH, json={**UP, **more}, **as_("a"))
        assert reply.status == 400
        assert (await reply.json())["error"]["param"] == param
        for query in ("limit=0", "limit=101", "order=up", "rating=bad", "before=feedback_x"):
            assert (await server.http.get(f"{PATH}?{query}", **as_("a"))).status == 400
