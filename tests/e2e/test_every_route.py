"""Every operation of the OpenAPI document on a real server: its reply is as the document says, and of what another
tenant has it tells no more than of what isn't there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from perilune.api.openapi_operations import OPERATIONS
from perilune.api.operations.table import Operation
from tests.described import events_in, faults

from .calls import Form, Reply
from .conftest import MODEL, Server, new_home, serving
from .objects import CHAT, QUESTION, RESPONSE, TEXT, Tenant, body_of, one_of_each, parameters, placed, tenant

ONE = [each for each in OPERATIONS if set(parameters(each.path)) - {"model"}]
"""Operations on an object of a tenant."""

NEW: dict[tuple[str, str], Any] = {
    ("POST", "/v1/chat/completions"): CHAT,
    ("POST", "/v1/completions"): {"model": MODEL, "prompt": "The Oder is", "max_tokens": 4},
    ("POST", "/v1/embeddings"): {"model": "multilingual-e5-small-q4", "input": QUESTION},
    ("POST", "/v1/tokenizers/estimate-token-count"): CHAT,
    ("POST", "/v1/estimate"): CHAT,
    **{("POST", f"{root}/v1/messages"): CHAT for root in ("", "/anthropic")},
    **{("POST", f"{root}/v1/messages/count_tokens"): CHAT for root in ("", "/anthropic")},
    ("POST", "/v1/responses"): RESPONSE,
    ("POST", "/v1/responses/input_tokens"): RESPONSE,
    ("POST", "/v1/responses/compact"): {"model": MODEL, "input": [{"role": "user", "content": QUESTION}]},
    ("POST", "/v1/files"): Form("file", TEXT),
    ("POST", "/v1/uploads"): {"filename": "b.txt", "bytes": 9, "mime_type": "text/plain", "purpose": "user_data"},
    ("POST", "/v1/memory/search"): {"query": QUESTION},
    ("PATCH", "/v1/memory/profile"): {"facts": {"residence": "Oslo"}},
    ("PUT", "/v1/kv/attention_debug"): {"on": False},
}
"""Bodies of operations that need no object."""

QUERIES = {"/v1/memory/summary": "?session=trip"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Any) -> Iterator[Server]:
    """A server whose callers need a key."""
    with serving(new_home(tmp_path_factory.mktemp("home"), smollm2_path)) as running:
        yield running


@pytest.fixture(scope="module")
def alice(guarded: Server) -> Tenant:
    return tenant(guarded, "alice")


@pytest.fixture(scope="module")
def hers(alice: Tenant) -> dict[str, str]:
    return one_of_each(alice)


def _name(operation: Operation) -> str:
    return f"{operation.method} {operation.path}"


def test_another_tenants_object_is_no_other_than_none(guarded: Server, alice: Tenant, hers: dict[str, str]) -> None:
    """On every route with an id: the same reply as for an id that nobody has, but for the id itself."""
    mallory = tenant(guarded, "mallory")
    unknown = {name: _unlike(value) for name, value in hers.items()}
    assert len(ONE) > 40
    for each in sorted(ONE, key=_is_end):
        theirs = mallory.call(each.method, placed(each.path, hers), body_of(each.method, each.path, hers))
        nobodys = mallory.call(each.method, placed(each.path, unknown), body_of(each.method, each.path, unknown))
        assert theirs.status == nobodys.status == 404, (_name(each), theirs.body, nobodys.body)
        assert _without(theirs.body, hers) == _without(nobodys.body, unknown), _name(each)
    for each in ONE:
        if each.method == "GET" and each.events is None:
            assert alice.call("GET", placed(each.path, hers)).status in _good(each), _name(each)


_FILE = {"type": "file", "file_id": "{file_id}"}
IN_BODIES: dict[str, tuple[str, str, Any]] = {
    "chat": ("/v1/chat/completions", "messages", {"type": "file", "file": {"file_id": "{file_id}"}}),
    "message": ("/v1/messages", "messages", {"type": "document", "source": _FILE}),
    "response": ("/v1/responses", "input", {"type": "input_file", "file_id": "{file_id}"}),
}


@pytest.mark.parametrize("what", IN_BODIES)
def test_another_tenants_object_in_a_body_is_none_either(guarded: Server, hers: dict[str, str], what: str) -> None:
    path, field, part = IN_BODIES[what]
    asked = RESPONSE if field == "input" else CHAT
    text = {"type": "input_text" if field == "input" else "text", "text": QUESTION}
    _alike(guarded, hers, path, {**asked, field: [{"role": "user", "content": [part, text]}]})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {**RESPONSE, "previous_response_id": "{response_id}"}),
        ("/v1/responses", {**RESPONSE, "conversation": "{conversation_id}"}),
        (
            "/v1/responses",
            {**RESPONSE, "tools": [{"type": "file_search", "vector_store_ids": ["{vector_store_id}"]}]},
        ),
        ("/v1/responses/compact", {"model": MODEL, "previous_response_id": "{response_id}"}),
        ("/v1/chat/completions", {**CHAT, "session_scope": ["{session_id}"]}),
        ("/v1/memory/search", {"query": QUESTION, "sessions": ["{session_id}"]}),
        ("/v1/memory/feedback", {"question": QUESTION, "file_id": "{file_id}", "page": 1}),
        ("/v1/vector_stores", {"file_ids": ["{file_id}"]}),
        (
            "/v1/batches",
            {"input_file_id": "{file_id}", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
        ),
    ],
)
def test_nor_is_one_that_an_answer_would_go_on_from(
    guarded: Server, hers: dict[str, str], path: str, body: dict[str, Any]
) -> None:
    _alike(guarded, hers, path, body)


def _alike(server: Server, hers: dict[str, str], path: str, body: dict[str, Any]) -> None:
    mallory = tenant(server, "mallory")
    unknown = {name: _unlike(value) for name, value in hers.items()}
    theirs, nobodys = (mallory.call("POST", path, _filled(body, ids)) for ids in (hers, unknown))
    assert theirs.status == nobodys.status == 404, (theirs.body, nobodys.body)
    assert _without(theirs.body, hers) == _without(nobodys.body, unknown)


def _filled(value: Any, ids: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _filled(each, ids) for name, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, ids) for each in value]
    return ids[value[1:-1]] if isinstance(value, str) and value.startswith("{") else value


def _unlike(value: str) -> str:
    """An id of the same form that nobody has."""
    return value if value == "1" or value == MODEL else value[:-4] + ("0000" if value[-4:] != "0000" else "1111")


def _without(body: bytes, ids: dict[str, str]) -> str:
    text = re.sub(r"req_[0-9a-f]{32}", "REQUEST", body.decode())
    for value in sorted(ids.values(), key=len, reverse=True):
        text = text if value == "1" else text.replace(value, "ID")
    return text


def test_every_reply_is_as_the_document_says(alice: Tenant, hers: dict[str, str]) -> None:
    """Each operation answers 200, and each field of its reply is described."""
    ids, told = dict(hers), []
    for each in sorted(OPERATIONS, key=_is_end):
        path = placed(each.path, ids) + QUERIES.get(each.path, "")
        reply = alice.call(each.method, path, _body(each, ids))
        if each.path == "/v1/uploads/{upload_id}/parts":
            ids["part_id"] = reply.json["id"]
        told += _told(each, path, reply)
        if reply.status not in _good(each):
            told.append(f"{_name(each)} answered {reply.status}: {reply.body[:300]!r}")
        if each.events is not None and each.answer is not None and each.method == "POST":
            streamed = alice.call("POST", path, {**NEW[each.method, each.path], "stream": True})
            told += _told(each, path, streamed)
            assert len(list(events_in(streamed.body))) > 3, _name(each)
    assert not told, "\n".join(told)


def _is_end(operation: Operation) -> tuple[int, int, int]:
    """What takes something away comes last, and what is within another, or of it, before that."""
    if operation.method != "DELETE":
        return int(operation.path.endswith("/cancel")), 0, 0
    if "{" not in operation.path:
        return 3, 0, 0
    return 2, 0 if "feedback" in operation.path else 1, -operation.path.count("/")


def _good(operation: Operation) -> tuple[int, ...]:
    """The statuses of an operation that does what it can: cancelling may come when all is done, and a text has no
    pictures of its pages (tests/memory and tests/web have some)."""
    if operation.path.endswith("/cancel"):
        return (200, 409)
    return (404,) if operation.path.endswith("/image") else (200,)


def _body(operation: Operation, ids: dict[str, str]) -> Any:
    made = {
        ("POST", "/v1/batches"): {
            "input_file_id": ids["batch_file_id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
        ("POST", "/v1/memory/feedback"): {"question": QUESTION, "file_id": ids["file_id"], "page": 1},
        ("POST", "/v1/feedback"): {"answer_id": ids["response_id"], "rating": "up"},
        ("PATCH", "/v1/memory/summary"): {
            "session": "trip",
            "turn": 1,
            "start": 0,
            "text": "How long is the Oder?",
        },
    }
    key = (operation.method, operation.path)
    return NEW.get(key) or made.get(key) or body_of(operation.method, operation.path, ids)


def _told(operation: Operation, path: str, reply: Reply) -> list[str]:
    found = faults(operation.method, path.partition("?")[0], reply.status, reply.media, reply.body)
    return [f"{_name(operation)} ({reply.status}): {fault}" for fault in found]
