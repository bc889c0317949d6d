"""/v1/sessions and /v1/memory/search over the real memory: shapes, limits, and tenants that never meet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from perilune.core import KeptAnswer
from perilune.memory.indexer import Indexer
from perilune.memory.memory import Memory
from perilune.memory.session_ids import session_owner
from perilune.memory.sessions import Sessions
from perilune.memory.store import Store
from perilune.memory.vectors.lance import LanceIndex
from perilune.service.ports import Caller
from perilune.service.sessions import SessionService
from perilune.telemetry import Telemetry
from tests.api.conftest import Serve
from tests.api.fakes import MODEL, FakeService

KEYS = {"a": Caller("acme", "user"), "b": Caller("bolt", "admin"), "r": Caller("acme", "read-only")}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello."}]}
NAME = "trip / 旅行?"
PATH = "/v1/sessions/trip%20%2F%20%E6%97%85%E8%A1%8C%3F"


def as_(key: str) -> dict[str, dict[str, str]]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


@pytest.fixture
def dropped() -> list[str]:
    """Owners whose KV was dropped."""
    return []


@pytest.fixture
def service(tmp_path: Path, dropped: list[str]) -> Iterator[FakeService]:
    store = Store(tmp_path)
    index = LanceIndex(tmp_path / "index", "none", 1)
    memory = Memory(store, index, None, indexer=Indexer(store, index, None))
    memory.start()
    kept = Sessions(store, memory)
    kept.add("acme", NAME, [("user", "My locker has the number 4471.", 100.0), ("assistant", "Noted.", 101.5)])
    kept.add("acme", "older", [("user", "Rain again.", 50.0)])

    async def forget_kv(owner: str) -> None:
        dropped.append(owner)

    yield FakeService(keys=dict(KEYS), conversations=SessionService(kept, forget_kv, Telemetry()))
    memory.close()
    store.close()


async def test_list_read_search_delete(serve: Serve, service: FakeService, dropped: list[str]) -> None:
    async with serve(service) as server:
        listed = await (await server.http.get("/v1/sessions", **as_("a"))).json()
        newest = {"id": NAME, "object": "session", "turns": 2, "created_at": 100.0, "last_at": 101.5}
        newest |= {"title": "My locker has the number 4471.", "updated_at": 101.5}
        newest |= {"local_only": False, "parent": None}
        assert [each["id"] for each in listed["data"]] == [NAME, "older"]
        assert listed["data"][0] == newest
        assert (await (await server.http.get("/v1/sessions?limit=1", **as_("a"))).json())["has_more"]
        shown = await (await server.http.get(f"{PATH}?after=1", **as_("a"))).json()
        assert [(turn["turn"], turn["speaker"], turn["text"]) for turn in shown["data"]] == [
            (2, "assistant", "Noted.")
        ]
        body = {"query": "Which number has my locker?", "sessions": [NAME]}
        found = await (await server.http.post("/v1/memory/search", json=body, **as_("a"))).json()
        assert (found["data"][0]["session"], found["data"][0]["turn"]) == (NAME, 1)
        everywhere = await (await server.http.post("/v1/memory/search", json={"query": "rain"}, **as_("r"))).json()
        assert everywhere["data"][0]["session"] == "older"
        assert (found["kind"], found["evidence"], found["confidence"], found["missing"]) == ("lookup", [], None, [])
        assert (await server.http.delete(PATH, **as_("r"))).status == 403
        assert not dropped
        assert (await (await server.http.delete(PATH, **as_("a"))).json())["deleted"]
        assert dropped == [session_owner("acme", NAME)]
        assert (await server.http.get(PATH, **as_("a"))).status == 404


@pytest.mark.parametrize(
    ("times", "sessions"),
    [
        ({}, [NAME, "older"]),
        ({"since": 60}, [NAME]),
        ({"until": 60}, ["older"]),
        ({"until": "1970-01-01T00:01:00+00:00"}, ["older"]),
        ({"since": "1970-01-01", "until": "1970-01-01"}, [NAME, "older"]),
        ({"since": "1970-01-02"}, []),
        ({"until": "1969-12-31"}, []),
    ],
)
async def test_search_within_times(
    serve: Serve, service: FakeService, times: dict[str, object], sessions: list[str]
) -> None:
    async with serve(service) as server:
        body = {"query": "locker rain", **times}
        found = await (await server.http.post("/v1/memory/search", json=body, **as_("a"))).json()
        assert sorted({hit["session"] for hit in found["data"]}) == sorted(sessions)
        body = {"query": "rain", "since": "yesterday"}
        refused = await server.http.post("/v1/memory/search", json=body, **as_("a"))
        assert (refused.status, (await refused.json())["error"]["param"]) == (400, "since")


async def test_title_pages_and_forks(serve: Serve, service: FakeService) -> None:
    async with serve(service) as server:
        first = await (await server.http.get("/v1/sessions?limit=1", **as_("r"))).json()
        rest = await (await server.http.get(f"/v1/sessions?cursor={first['next_cursor']}", **as_("r"))).json()
        assert [each["id"] for each in (*first["data"], *rest["data"])] == [NAME, "older"]
        assert (rest["has_more"], rest["next_cursor"]) == (False, None)
        assert (await server.http.get("/v1/sessions?cursor=!", **as_("r"))).status == 400
        assert (await server.http.patch(PATH, json={"title": "x"}, **as_("r"))).status == 403
        named = await (await server.http.patch(PATH, json={"title": "Trip 2"}, **as_("a"))).json()
        assert (named["title"], named["local_only"]) == ("Trip 2", False)
        assert (await server.http.patch(PATH, json={}, **as_("a"))).status == 400
        assert (await server.http.patch(PATH, json={"title": "a\nb"}, **as_("a"))).status == 400
        assert (await server.http.patch(PATH, json={"title": "x"}, **as_("b"))).status == 404
        assert (await server.http.post(f"{PATH}/fork", json={"turn": 1}, **as_("r"))).status == 403
        assert (await server.http.post(f"{PATH}/fork", json={"turn": 1}, **as_("b"))).status == 404
        assert (await server.http.post(f"{PATH}/fork", json={"turn": 3}, **as_("a"))).status == 400
        made = await (await server.http.post(f"{PATH}/fork", json={"turn": 1}, **as_("a"))).json()
        assert (made["parent"], made["turns"], made["title"]) == ({"session": NAME, "turn": 1}, 1, "Trip 2")
        shown = await (await server.http.get(f"/v1/sessions/{made['id']}", **as_("a"))).json()
        assert [turn["text"] for turn in shown["data"]] == ["My locker has the number 4471."]
        taken = await server.http.post(f"{PATH}/fork", json={"turn": 0, "id": "older"}, **as_("a"))
        assert taken.status == 409
        empty = await (await server.http.post("/v1/sessions/older/fork", json={"turn": 0}, **as_("a"))).json()
        assert (empty["turns"], empty["title"]) == (0, None)
        assert (await server.http.delete(PATH, **as_("a"))).status == 200
        left = await (await server.http.get(f"/v1/sessions/{made['id']}", **as_("a"))).json()
        assert (left["parent"], len(left["data"])) == (None, 1)


async def test_a_count_gives_its_set(serve: Serve, service: FakeService) -> None:
    async with serve(service) as server:
        body = {"query": "How often was there rain?", "limit": 1}
        found = await (await server.http.post("/v1/memory/search", json=body, **as_("a"))).json()
        assert found["kind"] == "count"
        assert [hit["text"] for hit in found["evidence"]] == ["Rain again."]


async def test_another_tenant_sees_nothing(serve: Serve, service: FakeService, dropped: list[str]) -> None:
    async with serve(service) as server:
        assert (await (await server.http.get("/v1/sessions", **as_("b"))).json())["data"] == []
        assert (await server.http.get(PATH, **as_("b"))).status == 404
        assert (await server.http.delete(PATH, **as_("b"))).status == 404
        named = {"query": "locker", "sessions": [NAME]}
        assert (await server.http.post("/v1/memory/search", json=named, **as_("b"))).status == 404
        found = await (await server.http.post("/v1/memory/search", json={"query": "locker"}, **as_("b"))).json()
        assert found["data"] == []
        assert (await server.http.get(PATH)).status == 401
        assert (await server.http.get(PATH, **as_("a"))).status == 200
        assert not dropped


@pytest.mark.parametrize(
    ("more", "session", "recall"),
    [
        ({}, None, ()),
        ({"session": "s"}, "s", ("s",)),
        ({"session": "s", "session_scope": "session"}, "s", ("s",)),
        ({"session": "s", "session_scope": "none"}, "s", ()),
        ({"session": "s", "session_scope": ["t", "s", "t"]}, "s", ("t", "s")),
        ({"session_scope": ["t"]}, None, ("t",)),
    ],
)
async def test_fields_of_a_chat_request(
    serve: Serve, more: dict[str, object], session: str | None, recall: tuple[str, ...]
) -> None:
    async with serve() as server:
        assert (await server.http.post("/v1/chat/completions", json={**CHAT, **more})).status == 200
        assert (server.service.requests[-1].session_id, server.service.requests[-1].recall) == (session, recall)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"session": ""}, "session"),
        ({"session": "x" * 65}, "session"),
        ({"session": "a\nb"}, "session"),
        ({"session": "file-abc"}, "session"),
        ({"session": 7}, "session"),
        ({"session": "  "}, "session"),
        ({"session_scope": "all"}, "session_scope"),
        ({"session_scope": "session"}, "session_scope"),
        ({"session_scope": ["s", "file-abc"]}, "session_scope[1]"),
        ({"session_scope": 7}, "session_scope"),
    ],
)
async def test_bad_fields_of_a_chat_request(serve: Serve, more: dict[str, object], param: str) -> None:
    async with serve() as server:
        reply = await server.http.post("/v1/chat/completions", json={**CHAT, **more})
        assert reply.status == 400
        assert (await reply.json())["error"]["param"] == param


async def test_a_read_only_key_does_not_add_to_a_session(serve: Serve, service: FakeService) -> None:
    async with serve(service) as server:
        chat = "/v1/chat/completions"
        assert (await server.http.post(chat, json={**CHAT, "session": "s"}, **as_("r"))).status == 403
        assert (await server.http.post(chat, json={**CHAT, "session_scope": ["older"]}, **as_("r"))).status == 200


@pytest.mark.parametrize(
    "body", [{}, {"query": ""}, {"query": "x", "limit": 0}, {"query": "x", "sessions": []}, {"query": "x" * 9000}]
)
async def test_bad_searches(serve: Serve, service: FakeService, body: dict[str, object]) -> None:
    async with serve(service) as server:
        assert (await server.http.post("/v1/memory/search", json=body, **as_("a"))).status == 400
        for query in ("limit=0", "limit=x", "limit=1001"):
            assert (await server.http.get(f"/v1/sessions?{query}", **as_("a"))).status == 400


async def test_feedback_is_given_listed_and_taken_back(serve: Serve, service: FakeService) -> None:
    path, asked = "/v1/memory/feedback", "Where do I keep my violin?"
    async with serve(service) as server:
        body = {"question": asked, "session": NAME, "turn": 1}
        assert (await server.http.post(path, json=body, **as_("r"))).status == 403
        assert (await server.http.post(path, json=body, **as_("b"))).status == 404
        made = await (await server.http.post(path, json=body, **as_("a"))).json()
        found = await (await server.http.post("/v1/memory/search", json={"query": asked}, **as_("a"))).json()
        assert found["data"][0]["turn"] == 1
        (listed,) = (await (await server.http.get(path, **as_("a"))).json())["data"]
        assert (listed["id"], listed["question"], listed["source"]) == (made["id"], asked, NAME)
        assert (await (await server.http.get(path, **as_("b"))).json())["data"] == []
        assert (await server.http.delete(f"{path}/{made['id']}", **as_("b"))).status == 404
        assert (await server.http.delete(f"{path}/{made['id']}", **as_("a"))).status == 200
        assert (await (await server.http.get(path, **as_("a"))).json())["data"] == []


@pytest.mark.parametrize(
    "place",
    [
        {},
        {"session": "s"},
        {"turn": 1},
        {"session": "s", "turn": 0},
        {"file_id": "file-a"},
        {"file_id": "file-a", "start": 5, "end": 5},
        {"file_id": "file-a", "page": 1, "session": "s", "turn": 1},
        {"file_id": "file-a", "page": 1, "session": "s"},
    ],
)
async def test_feedback_without_one_place_is_refused(
    serve: Serve, service: FakeService, place: dict[str, object]
) -> None:
    async with serve(service) as server:
        reply = await server.http.post("/v1/memory/feedback", json={"question": "Where?", **place}, **as_("a"))
        assert reply.status == 400


async def test_a_session_is_kept_here_and_let_go(serve: Serve, service: FakeService) -> None:
    async with serve(service) as server:
        for on in (True, False):
            reply = await server.http.patch(PATH, json={"local_only": on}, **as_("a"))
            assert (await reply.json())["local_only"] is on
            assert bool(await service.conversations.kept_here("acme", [NAME])) is on
        assert (await server.http.patch(PATH, json={"local_only": True}, **as_("r"))).status == 403
        assert (await server.http.patch(PATH, json={"local_only": True}, **as_("b"))).status == 404
        assert (await server.http.patch(PATH, json={"local_only": "yes"}, **as_("a"))).status == 400


async def test_everything_of_a_tenant_is_deleted(serve: Serve, service: FakeService) -> None:
    async with serve(service) as server:
        assert (await server.http.delete("/v1/memory", **as_("r"))).status == 403
        assert (await server.http.delete("/v1/memory", **as_("b"))).status == 200
        assert len((await (await server.http.get("/v1/sessions", **as_("a"))).json())["data"]) == 2
        assert (await server.http.delete("/v1/memory", **as_("a"))).status == 200
        assert (await (await server.http.get("/v1/sessions", **as_("a"))).json())["data"] == []


def kept_answer(file_id: str = "file-gone") -> KeptAnswer:
    report = {
        "plan": "refined",
        "deadline_s": 5.0,
        "measured_ttft_s": 1.24,
        "tokens": {"offered": 1000, "exact": 400, "estimated": 0, "summarised": 0, "dropped": 600},
        "citations": [
            {"session": NAME, "turn": 1, "quote": "", "speaker": "", "at": None},
            {"file_id": file_id, "page": 3, "anchor": "", "start": 0, "end": 9, "filename": "a.pdf", "quote": "x"},
        ],
    }
    details = {"finish_reason": "cancelled", "total_s": 2.0, "files": [file_id], "usage": None, "perilune": report}
    return KeptAnswer("req_77", MODEL, details)


async def test_answers_have_their_card_and_the_session_is_a_file(serve: Serve, service: FakeService) -> None:
    store = service.conversations._store()
    said = [("user", "Which number?", 200.0), ("assistant", "It is\n4471.", 201.0)]
    store.add("acme", NAME, said, answer=kept_answer())
    async with serve(service) as server:
        shown = await (await server.http.get(PATH, **as_("r"))).json()
        assert [turn["files"] for turn in shown["data"]] == [[], [], ["file-gone"], []]
        assert [turn["answer"] is not None for turn in shown["data"]] == [False, False, False, True]
        answer = shown["data"][3]["answer"]
        assert (answer["id"], answer["finish_reason"], answer["plan"]) == ("chatcmpl-77", "cancelled", "refined")
        assert [each["quote"] for each in answer["citations"]] == ["My locker has the number 4471.", ""]
        last = await (await server.http.get(f"{PATH}?after=3", **as_("r"))).json()
        assert last["data"] == shown["data"][3:]
        saved = await server.http.get(f"{PATH}?format=markdown", **as_("r"))
        assert saved.headers["content-disposition"].endswith("My%20locker%20has%20the%20number%204471..md")
        text = await saved.text()
        assert "## 4. Perilune, 1970-01-01 00:03 UTC\n\nIt is\n4471.\n" in text
        assert "*plan refined; first word after 1.2 s of 5 s; 400 of 1,000 tokens read exactly" in text
        assert "stopped*\n\n- turn 1: “My locker has the number 4471.”\n- (deleted since)\n" in text
        as_json = await (await server.http.get(f"{PATH}?format=json", **as_("r"))).json()
        assert as_json["data"] == shown["data"]
        assert (await server.http.get(f"{PATH}?format=pdf", **as_("r"))).status == 400
        assert (await server.http.get(f"{PATH}?format=json", **as_("b"))).status == 404
