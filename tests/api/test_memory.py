"""/v1/memory/profile, summary and export over the real memory: shapes, refusals, tenants that never meet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from perilune.memory.session_ids import profile_owner, session_owner
from perilune.service.sessions import SessionService
from perilune.telemetry import Telemetry
from tests.api.conftest import Serve
from tests.api.fakes import MODEL, FakeService
from tests.api.test_sessions import KEYS, as_
from tests.memory.test_summaries import Kept

PROFILE, SUMMARY, EXPORT = "/v1/memory/profile", "/v1/memory/summary", "/v1/memory/export"
TURN = "My train leaves at 8.15 from Brill. I live in Bonn."


@pytest.fixture
def dropped() -> list[str]:
    """Owners whose KV was dropped."""
    return []


@pytest.fixture
def service(tmp_path: Path, dropped: list[str]) -> Iterator[FakeService]:
    kept = Kept(tmp_path)
    kept.sessions.add("acme", "trip", [("user", TURN, 100.0), ("assistant", "Noted.", 101.5)], learn=True)

    async def forget_kv(owner: str) -> None:
        dropped.append(owner)

    yield FakeService(keys=dict(KEYS), conversations=SessionService(kept.sessions, forget_kv, Telemetry()))
    kept.memory.close()
    kept.store.close()


async def test_the_profile(serve: Serve, service: FakeService, dropped: list[str]) -> None:
    bonn = {
        "key": "residence",
        "value": "Bonn",
        "since": 100.0,
        "until": None,
        "written_at": 100.0,
        "session": "trip",
        "turn": 1,
        "start": 36,
        "end": 51,
    }
    async with serve(service) as server:
        shown = await (await server.http.get(PROFILE, **as_("r"))).json()
        assert shown == {"object": "profile", "data": [bonn]}
        edit = {"facts": {"residence": "Oslo", "team": "Blue"}}
        assert (await server.http.patch(PROFILE, json=edit, **as_("r"))).status == 403
        edited = await (await server.http.patch(PROFILE, json=edit, **as_("a"))).json()
        assert [(each["key"], each["value"], each["session"]) for each in edited["data"]] == [
            ("residence", "Oslo", None),
            ("team", "Blue", None),
        ]
        assert not dropped
        old = await (await server.http.get(f"{PROFILE}?history=true", **as_("a"))).json()
        assert [each["value"] for each in old["data"]] == ["Bonn", "Oslo", "Blue"]
        assert old["data"][0]["until"] == old["data"][1]["since"]
        assert (await (await server.http.get(PROFILE, **as_("b"))).json())["data"] == []
        assert (await server.http.delete(f"{PROFILE}?key=team", **as_("r"))).status == 403
        gone = await (await server.http.delete(f"{PROFILE}?key=team", **as_("a"))).json()
        assert gone == {"object": "profile", "deleted": True, "statements": 1}
        assert (await server.http.delete(f"{PROFILE}?key=team", **as_("a"))).status == 404
        await server.http.patch(PROFILE, json={"facts": {"residence": None}}, **as_("a"))
        assert (await (await server.http.get(f"{PROFILE}?history=true", **as_("a"))).json())["data"] == []
        assert (await (await server.http.delete(PROFILE, **as_("b"))).json())["statements"] == 0
        assert dropped == [profile_owner("acme"), profile_owner("acme"), profile_owner("bolt")]
        assert (await server.http.get(PROFILE)).status == 401


async def test_the_summary(serve: Serve, service: FakeService) -> None:
    sentence = {
        "session": "trip",
        "turn": 1,
        "speaker": "user",
        "start": 0,
        "end": 35,
        "text": "My train leaves at 8.15 from Brill.",
        "corrected": False,
    }
    async with serve(service) as server:
        shown = await (await server.http.get(f"{SUMMARY}?session=trip", **as_("r"))).json()
        assert shown["object"] == "summary"
        assert shown["data"][0] == sentence
        wrong = {"session": "trip", "turn": 1, "start": 0, "text": "My train leaves at 9.00."}
        assert (await server.http.patch(SUMMARY, json=wrong, **as_("r"))).status == 403
        corrected = await (await server.http.patch(SUMMARY, json=wrong, **as_("a"))).json()
        assert corrected["data"][0] == {**sentence, "text": wrong["text"], "corrected": True}
        await server.http.patch(SUMMARY, json={**wrong, "text": None}, **as_("a"))
        again = await (await server.http.get(f"{SUMMARY}?session=trip", **as_("r"))).json()
        assert again["data"][0] == sentence
        assert (await server.http.get(f"{SUMMARY}?session=trip", **as_("b"))).status == 404
        assert (await server.http.patch(SUMMARY, json=wrong, **as_("b"))).status == 404
        assert (await server.http.patch(SUMMARY, json={**wrong, "start": 2}, **as_("a"))).status == 404


async def test_export_is_json_lines(serve: Serve, service: FakeService) -> None:
    async with serve(service) as server:
        reply = await server.http.get(EXPORT, **as_("r"))
        assert reply.headers["content-type"] == "application/jsonl"
        records = [json.loads(line) for line in (await reply.text()).splitlines()]
        assert [each["type"] for each in records] == ["profile.fact", "turn", "turn"]
        assert records[1]["text"] == TURN
        assert await (await server.http.get(EXPORT, **as_("b"))).text() == ""
        assert (await server.http.get(EXPORT)).status == 401


async def test_forgetting_a_session_forgets_its_facts(
    serve: Serve, service: FakeService, dropped: list[str]
) -> None:
    async with serve(service) as server:
        assert (await server.http.delete("/v1/sessions/trip", **as_("a"))).status == 200
        assert (await (await server.http.get(PROFILE, **as_("a"))).json())["data"] == []
        assert (await server.http.get(f"{SUMMARY}?session=trip", **as_("a"))).status == 404
        assert await (await server.http.get(EXPORT, **as_("a"))).text() == ""
        assert dropped == [session_owner("acme", "trip")]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", f"{PROFILE}?history=yes", None),
        ("PATCH", PROFILE, {}),
        ("PATCH", PROFILE, {"facts": {}}),
        ("PATCH", PROFILE, {"facts": {"k": 7}}),
        ("PATCH", PROFILE, {"facts": {"": "x"}}),
        ("PATCH", PROFILE, {"facts": {"k": "x" * 201}}),
        ("PATCH", PROFILE, {"facts": {str(at): "x" for at in range(101)}}),
        ("GET", SUMMARY, None),
        ("GET", f"{SUMMARY}?session=trip&file_id=file-1", None),
        ("PATCH", SUMMARY, {"session": "trip", "start": 0, "text": "x"}),
        ("PATCH", SUMMARY, {"session": "trip", "turn": 1, "start": 0}),
        ("PATCH", SUMMARY, {"session": "trip", "turn": 0, "start": 0, "text": "x"}),
        ("PATCH", SUMMARY, {"session": "trip", "turn": 1, "start": 2**31, "text": "x"}),
        ("PATCH", SUMMARY, {"turn": 1, "start": 0, "text": "x"}),
        ("PATCH", SUMMARY, {"session": "trip", "turn": 1, "start": 0, "text": "a\nb"}),
    ],
)
async def test_what_is_refused(
    serve: Serve, service: FakeService, method: str, path: str, body: dict[str, object] | None
) -> None:
    async with serve(service) as server:
        reply = await server.http.request(method, path, json=body, **as_("a"))
        assert (reply.status, (await reply.json())["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(("more", "used"), [({}, True), ({"profile": True}, True), ({"profile": False}, False)])
async def test_a_chat_request_may_leave_the_profile_out(serve: Serve, more: dict[str, bool], used: bool) -> None:
    chat = {"model": MODEL, "session": "s", "messages": [{"role": "user", "content": "Hello."}]}
    async with serve() as server:
        assert (await server.http.post("/v1/chat/completions", json={**chat, **more})).status == 200
        assert server.service.requests[-1].profile is used
