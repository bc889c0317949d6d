"""Kept answers and conversations in the database: what ends one that is being made, quotas, pages, deletion."""

from __future__ import annotations

from typing import Any

import pytest

from perilune.errors import InvalidRequest, NotFound, TooLarge
from perilune.memory import conversations
from perilune.memory.entries import remove_tenant
from perilune.memory.responses import Made, ResponseStore, forget_quotes
from perilune.memory.store import Store

TENANT = "local"


def body(name: str, status: str = "completed", **more: Any) -> dict[str, Any]:
    return {"id": name, "status": status, "output": [], **more}


def keep(store: ResponseStore, name: str, size: int = 0, **more: Any) -> bool:
    store.begin(TENANT, [], body(name, "in_progress", **more))
    return store.finish(TENANT, Made(body(name, **more, text="x" * size)))


def item(name: str, text: str = "Hello.") -> dict[str, Any]:
    return {"id": name, "type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def test_what_is_deleted_while_an_answer_is_made_isnt_kept(store: Store) -> None:
    kept = ResponseStore(store)
    talk = kept.conversations.create(TENANT, {}, [])
    kept.begin(TENANT, [{"content": [{"type": "input_file", "file_id": "file-1"}]}], body("names"))
    kept.begin(TENANT, [], body("quotes"))
    kept.begin(TENANT, [], body("talks", conversation={"id": talk.conversation_id}))
    keep(kept, "first")
    kept.begin(TENANT, [], body("follows", previous_response_id="first"))
    for name in ("deleted", "left"):
        kept.begin(TENANT, [], body(name))

    with store.write() as connection:
        forget_quotes(connection, TENANT, "file-1")
    kept.conversations.delete(TENANT, talk.conversation_id)
    kept.delete(TENANT, "first")
    kept.delete(TENANT, "deleted")

    quoting = Made(body("quotes"), quoted=frozenset({"file-1"}))
    gone = ("names", "talks", "follows", "deleted")
    assert [kept.finish(TENANT, Made(body(name))) for name in gone] == [False] * len(gone)
    assert not kept.finish(TENANT, quoting)
    for name in (*gone, "quotes"):
        with pytest.raises(NotFound):
            kept.get(TENANT, name)
    with store.write() as connection:
        remove_tenant(connection, TENANT)
    assert not kept.finish(TENANT, Made(body("left")))


def test_what_a_process_left_unfinished_is_cleared_up_by_the_next_of_its_home(store: Store) -> None:
    first, other = ResponseStore(store, runner="a"), ResponseStore(store, runner="b")
    first.begin(TENANT, [], body("background", "queued", background=True))
    first.begin(TENANT, [], body("waited for", "in_progress", background=False))
    other.begin(TENANT, [], body("elsewhere", "queued", background=True))
    keep(first, "done", background=True)
    assert ResponseStore(store, runner="a").recover(lambda found: found | {"status": "failed"}) == 2
    status = {name: first.get(TENANT, name).body["status"] for name in ("background", "elsewhere", "done")}
    assert status == {"background": "failed", "elsewhere": "queued", "done": "completed"}
    with pytest.raises(NotFound):
        first.get(TENANT, "waited for")
    with pytest.raises(InvalidRequest, match="failed"):
        first.chain(TENANT, "background")


def test_beyond_the_quota_the_oldest_answers_go_but_no_forerunner(store: Store) -> None:
    ticks = iter(range(100))
    kept = ResponseStore(store, clock=lambda: float(next(ticks)), quota_bytes=3000)
    keep(kept, "root", 700)
    for name in ("old", "older"):
        keep(kept, name, 700)
    keep(kept, "newest", 700, previous_response_id="root")
    keep(kept, "newest again", 700, previous_response_id="newest")
    assert [each.body["id"] for each in kept.chain(TENANT, "newest again")] == ["root", "newest", "newest again"]
    for name in ("old", "older"):
        with pytest.raises(NotFound):
            kept.get(TENANT, name)


def test_streams_are_kept_with_their_answers(store: Store) -> None:
    kept = ResponseStore(store)
    kept.begin(TENANT, [], body("a", "queued"))
    kept.finish(TENANT, Made(body("a"), events=b"data: 1\n\n"))
    assert kept.get(TENANT, "a").events == b"data: 1\n\n"


def test_a_conversations_items_in_pages(store: Store) -> None:
    talks = ResponseStore(store).conversations
    talk = talks.create(TENANT, {"topic": "rivers"}, [item("msg_0")])
    name = talk.conversation_id
    talks.add(TENANT, name, [item(f"msg_{number}") for number in range(1, 7)])
    assert [each["id"] for each in talks.all_items(TENANT, name)] == [f"msg_{number}" for number in range(7)]

    for newest_first, order in ((False, range(7)), (True, range(6, -1, -1))):
        seen: list[str] = []
        more, after = True, None
        while more:
            found, more = talks.items(TENANT, name, after, 3, newest_first)
            seen += [each["id"] for each in found]
            after = seen[-1]
        assert seen == [f"msg_{number}" for number in order]
    assert talks.item(TENANT, name, "msg_3")["id"] == "msg_3"
    assert talks.delete_item(TENANT, name, "msg_3") == talk
    for missing in (lambda: talks.item(TENANT, name, "msg_3"), lambda: talks.items(TENANT, name, "msg_3", 1, True)):
        with pytest.raises(NotFound):
            missing()
    talks.add(TENANT, name, [item("msg_7")])
    assert [each["id"] for each in talks.all_items(TENANT, name)][-2:] == ["msg_6", "msg_7"]
    assert talks.update(TENANT, name, {}).metadata == {}


def test_another_tenants_conversation_is_not_found(store: Store) -> None:
    talks = ResponseStore(store).conversations
    name = talks.create(TENANT, {}, [item("msg_0")]).conversation_id
    for call in (
        lambda: talks.get("other", name),
        lambda: talks.update("other", name, {}),
        lambda: talks.delete("other", name),
        lambda: talks.add("other", name, [item("msg_1")]),
        lambda: talks.items("other", name, None, 1, True),
        lambda: talks.all_items("other", name),
        lambda: talks.item("other", name, "msg_0"),
        lambda: talks.delete_item("other", name, "msg_0"),
    ):
        with pytest.raises(NotFound):
            call()
    assert len(talks.all_items(TENANT, name)) == 1


def test_deletion_takes_items_and_answers_along(store: Store) -> None:
    kept = ResponseStore(store)
    talks = kept.conversations
    name = talks.create(TENANT, {}, [item("msg_0")]).conversation_id
    keep(kept, "in it", conversation={"id": name})
    talks.add(TENANT, name, [item("msg_1", "See file-1.")])
    with store.write() as connection:
        forget_quotes(connection, TENANT, "file-1")
    assert [each["id"] for each in talks.all_items(TENANT, name)] == ["msg_0"]
    talks.delete(TENANT, name)
    with pytest.raises(NotFound):
        kept.get(TENANT, "in it")
    with store.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM conversation_items").scalar() == 0


def test_conversations_are_bounded_and_age(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    talks = ResponseStore(store, clock=lambda: now_s, quota_bytes=2000).conversations
    name = talks.create(TENANT, {}, [item("msg_0", "x" * 800)]).conversation_id
    now_s = 5.0
    second = talks.create(TENANT, {}, [item("msg_0", "x" * 800)]).conversation_id
    with pytest.raises(TooLarge, match="responses_quota"):
        talks.add(TENANT, name, [item("msg_1", "x" * 800)])
    monkeypatch.setattr(conversations, "MAX_CHARS", 1000)
    with pytest.raises(InvalidRequest, match="characters"):
        talks.add(TENANT, name, [item("msg_1", "x" * 200)])
    assert talks.expire(1.0) == 1
    with pytest.raises(NotFound):
        talks.get(TENANT, name)
    talks.get(TENANT, second)
