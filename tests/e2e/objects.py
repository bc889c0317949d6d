"""One object of every kind that a tenant can have on a server, and a body for every operation that takes one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .calls import Form, Reply, call
from .conftest import MODEL, Server

TEXT = b"The Oder is 840 km long. The Elbe is 1094 km long. The Rhine is 1233 km long.\n" * 4
QUESTION = "How long is the Oder?"
ASKED: dict[str, Any] = {"model": MODEL, "temperature": 0}
CHAT: dict[str, Any] = {**ASKED, "max_tokens": 8, "messages": [{"role": "user", "content": QUESTION}]}
RESPONSE: dict[str, Any] = {**ASKED, "max_output_tokens": 8, "input": QUESTION}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}


@dataclass(frozen=True)
class Tenant:
    """A caller with a key of their own."""

    server: Server
    key: str

    def call(self, method: str, path: str, body: Any = None) -> Reply:
        return call(self.server, self.key, method, path, body)

    def made(self, path: str, body: Any = None) -> Any:
        reply = self.call("POST", path, body)
        assert reply.status == 200, (path, reply.body)
        return reply.json

    def until(self, path: str, states: tuple[str, ...], within_s: float = 120.0) -> Any:
        end = time.monotonic() + within_s
        while (found := self.call("GET", path).json)["status"] not in states:
            assert time.monotonic() < end, found
            time.sleep(0.1)
        return found


def tenant(server: Server, name: str) -> Tenant:
    done = server.cli("keys", "create", "--json", "--tenant", name, "--role", "admin")
    assert done.returncode == 0, done.stderr
    return Tenant(server, json.loads(done.stdout)["key"])


def upload(who: Tenant, purpose: str, data: bytes, filename: str = "rivers.txt") -> str:
    return str(who.made("/v1/files", Form("file", data, filename, (("purpose", purpose),)))["id"])


def one_of_each(who: Tenant) -> dict[str, str]:
    """Path parameter -> an id; where one name means two kinds, the second is under `kind.parameter`."""
    file_id = upload(who, "user_data", TEXT)
    who.until(f"/v1/files/{file_id}", ("processed",))
    batch_file = upload(who, "batch", json.dumps(LINE).encode() + b"\n", "lines.jsonl")
    store = who.made("/v1/vector_stores", {"name": "rivers", "file_ids": [file_id]})["id"]
    kept = who.made("/v1/responses", {**RESPONSE, "background": True})["id"]
    who.until(f"/v1/responses/{kept}", ("completed", "incomplete"))
    talk = who.made("/v1/conversations", {"items": [{"type": "message", "role": "user", "content": QUESTION}]})[
        "id"
    ]
    who.made("/v1/chat/completions", {**CHAT, "session": "trip"})
    begun = {"filename": "b.txt", "bytes": len(TEXT), "mime_type": "text/plain", "purpose": "user_data"}
    return {
        "file_id": file_id,
        "batch_file_id": batch_file,
        "page": "1",
        "upload_id": who.made("/v1/uploads", begun)["id"],
        "batch_id": who.made(
            "/v1/batches",
            {"input_file_id": batch_file, "endpoint": "/v1/chat/completions", "completion_window": "24h"},
        )["id"],
        "vector_store_id": store,
        "vector_stores.batch_id": who.made(f"/v1/vector_stores/{store}/file_batches", {"file_ids": [batch_file]})[
            "id"
        ],
        "response_id": kept,
        "conversation_id": talk,
        "item_id": who.call("GET", f"/v1/conversations/{talk}/items").json["data"][0]["id"],
        "completion_id": resumable(who),
        "session_id": "trip",
        "feedback_id": who.made("/v1/feedback", {"answer_id": kept, "rating": "down"})["id"],
        "memory.feedback_id": who.made(
            "/v1/memory/feedback", {"question": QUESTION, "file_id": file_id, "page": 1}
        )["id"],
        "model": MODEL,
    }


def resumable(who: Tenant) -> str:
    """A stream that goes on for a while after this."""
    asked = {**CHAT, "stream": True, "stream_options": {"resumable": True}}
    reply = who.call("POST", "/v1/chat/completions", asked)
    return str(json.loads(reply.body.split(b"data: ", 1)[1].split(b"\n")[0])["id"])


def placed(path: str, ids: dict[str, str]) -> str:
    """The path with ids for its parameters."""
    for name in parameters(path):
        kind = path.split("/")[2]
        path = path.replace("{" + name + "}", ids.get(f"{kind}.{name}", ids[name]))
    return path


def parameters(path: str) -> Iterator[str]:
    return (part[1:-1] for part in path.split("/") if part.startswith("{"))


def body_of(method: str, path: str, ids: dict[str, str]) -> Any:
    """A valid body for an operation on one object; None for those that take none."""
    message = {"type": "message", "role": "user", "content": QUESTION}
    bodies: dict[tuple[str, str], Any] = {
        ("POST", "/v1/conversations/{conversation_id}"): {"metadata": {"topic": "rivers"}},
        ("POST", "/v1/conversations/{conversation_id}/items"): {"items": [message]},
        ("POST", "/v1/uploads/{upload_id}/parts"): Form("data", TEXT),
        ("POST", "/v1/uploads/{upload_id}/complete"): {"part_ids": [ids.get("part_id", "part_1")]},
        ("POST", "/v1/vector_stores/{vector_store_id}"): {"name": "streams"},
        ("POST", "/v1/vector_stores/{vector_store_id}/search"): {"query": QUESTION},
        ("POST", "/v1/vector_stores/{vector_store_id}/files"): {"file_id": ids["file_id"]},
        ("POST", "/v1/vector_stores/{vector_store_id}/files/{file_id}"): {"attributes": {"year": 2026}},
        ("POST", "/v1/vector_stores/{vector_store_id}/file_batches"): {"file_ids": [ids["file_id"]]},
        ("PATCH", "/v1/sessions/{session_id}"): {"title": "Rivers"},
        ("POST", "/v1/sessions/{session_id}/fork"): {"turn": 1},
        ("POST", "/v1/chat/completions/{completion_id}"): {"metadata": {"topic": "rivers"}},
    }
    return bodies.get((method, path))
