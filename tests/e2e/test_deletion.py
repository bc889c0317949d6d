"""Deletion over the real server: a marker that went everywhere is nowhere afterwards, in no byte and in no row."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from perilune.memory.memory import INDEX_FOLDER
from perilune.memory.store import Store
from tests.e2e.conftest import MODEL, Server, new_home, serving
from tests.memory.test_purge import MARK, OTHER, holding, rows_with, versions_with

WAIT_S = 240.0


def call(server: Server, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = json.dumps(body).encode() if body is not None else None
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}{path}", data, headers, method=method)
    with urllib.request.urlopen(request) as reply:
        found: dict[str, Any] = json.load(reply)
        return found


def ask(server: Server, name: str, file_id: str | None, **more: Any) -> None:
    parts: list[dict[str, Any]] = [{"type": "text", "text": f"What does {name} owe to {name} Bank?"}]
    if file_id is not None:
        parts.insert(0, {"type": "file", "file": {"file_id": file_id}})
    messages = [{"role": "user", "content": parts}]
    server.client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=4,
        temperature=0,
        extra_body=more,
    )


def use(server: Server, name: str) -> tuple[str, str]:
    """Upload, ask, talk, search and give feedback with a name in all of it; the ids of document and session."""
    text = "\n\n".join(f"Clause {at}. Mr {name} owes {name} Bank {at} crowns." for at in range(60))
    file_id = server.client.files.create(file=(f"{name}.txt", text.encode()), purpose="user_data").id
    server.client.files.wait_for_processing(file_id, poll_interval=0.1)
    session = f"talk of {name}"
    ask(server, name, file_id, session=session)
    ask(server, name, None, session=session)
    ask(server, name, None)
    for sessions in ([session], None):
        call(server, "POST", "/v1/memory/search", {"query": f"{name} Bank", "sessions": sessions})
    call(server, "POST", "/v1/memory/feedback", {"question": f"Who is {name}?", "file_id": file_id, "page": 1})
    return file_id, session


def until(what: Any) -> None:
    end_s = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < end_s, "it took too long"
        time.sleep(0.5)


@pytest.mark.timeout(1200)
def test_nothing_of_what_is_deleted_stays_under_home(tmp_path: Path, smollm2_path: Path) -> None:
    home = new_home(tmp_path, smollm2_path)
    with serving(home) as server:
        file_id, session = use(server, MARK)
        use(server, OTHER)
        until(lambda: versions_with(home / INDEX_FOLDER, MARK))
    assert file_id in server.cli("kv", "ls", "--json").stdout  # which needs the KV folder for itself
    with serving(home) as server:
        ask(server, MARK, file_id, session=session)
        places = {name.split("/")[0] for name in holding(home, MARK)}
        assert {"files", "index"} < places
        assert any(name.startswith("perilune.db") for name in places)
        server.client.files.delete(file_id)
        call(server, "DELETE", f"/v1/sessions/{session.replace(' ', '%20')}")
        until(lambda: not holding(home, MARK))
        assert versions_with(home / INDEX_FOLDER, MARK) == []
        store = Store(home)
        assert rows_with(store, MARK) == []
        assert {"files", "entries", "feedback"} <= set(rows_with(store, OTHER))
        call(server, "DELETE", "/v1/memory")
        until(lambda: not holding(home, OTHER))
        assert rows_with(store, OTHER) == []
        store.close()
    assert json.loads(server.cli("kv", "ls", "--json").stdout)["entries"] == []
    assert holding(home, MARK) == holding(home, OTHER) == []
