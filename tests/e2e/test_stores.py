"""What is kept, on a PostgreSQL server: documents, vector stores, sessions, answers, what people think of them,
over `perilune serve` and the unmodified OpenAI client. (The other tests here run on SQLite.)"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.conftest import MODEL, Server, new_home, serving

PREFACE = Path("/usr/share/debian-reference/pr01.zh-cn.html")
CARD = Path("/usr/share/doc/octave/refcard-a4.pdf")
LOCKER = "My locker at the Brill station has the number 4471."

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def server(postgres: str, tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Server]:
    home = new_home(tmp_path_factory.mktemp("home"), smollm2_path)
    with serving(home, PERILUNE_DATABASE=postgres) as running:
        yield running
    assert not (home / "perilune.db").exists()


def call(server: Server, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}{path}", data, method=method)
    with urllib.request.urlopen(request) as reply:
        found: bytes = reply.read()
        return found


def test_a_life(server: Server) -> None:
    """Upload, store, search, ask with citations, session, feedback that teaches, export, deletion."""
    client = server.client
    store = client.vector_stores.create(name="Octave", metadata={"kind": "manuals"})
    ids = []
    for path, year in ((PREFACE, 2023), (CARD, 1999)):
        with path.open("rb") as data:
            file = client.vector_stores.files.upload_and_poll(
                vector_store_id=store.id, file=data, attributes={"year": year}, poll_interval_ms=100
            )
        assert file.status == "completed"
        ids.append(file.id)
    asked = "Which operator transposes a matrix?"
    found = client.vector_stores.search(store.id, query=asked, max_num_results=5).data
    assert {each.file_id for each in found} <= set(ids)
    assert "ransp" in "".join(each.content[0].text for each in found)
    newer = {"type": "gt", "key": "year", "value": 2000}
    only = client.vector_stores.search(store.id, query="Debian", filters=newer).data  # type: ignore[arg-type]
    assert {each.file_id for each in only} == {ids[0]}

    check_file_search(server, store.id, ids[1], asked)
    answer = ask(server, [{"type": "file", "file": {"file_id": ids[1]}}, {"type": "text", "text": asked}], "octave")
    cited = (answer.model_extra or {})["perilune"]["citations"]
    assert {each["file_id"] for each in cited} == {ids[1]}
    text = call(server, "GET", f"/v1/files/{ids[1]}/content?format=text").decode()
    assert all(text[each["start"] : each["end"]].strip().startswith(each["quote"].rstrip("…")) for each in cited)

    ask(server, LOCKER, "trip")
    ask(server, "The number is of no use.", "trip")
    question = "How do I get at my things?"
    told = ask(server, question, "trip")
    span = {"session": "trip", "turn": 1}
    rating = {"answer_id": told.id, "rating": "down", "reason": "not_found", "span": span}
    kept = json.loads(call(server, "POST", "/v1/feedback", rating))
    assert (kept["kept"], kept["session"], kept["turn"]) == (True, "trip", 5)
    again = (ask(server, question, "trip").model_extra or {})["perilune"]["citations"]
    assert LOCKER in [each["quote"] for each in again]
    (line,) = call(server, "GET", "/v1/feedback/export").splitlines()
    exported = json.loads(line)
    assert (exported["question"], exported["answer"], exported["expected"], exported["model"]) == (
        question,
        told.choices[0].message.content,
        LOCKER,
        MODEL,
    )

    call(server, "DELETE", "/v1/sessions/trip")
    assert json.loads(call(server, "GET", "/v1/feedback"))["data"] == []
    client.files.delete(ids[1])
    assert client.vector_stores.retrieve(store.id).file_counts.total == 1
    assert client.vector_stores.delete(store.id).deleted
    client.files.delete(ids[0])
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.retrieve(store.id)


def test_kept_responses_are_rated_and_keys_are_kept_apart(server: Server) -> None:
    first = server.client.responses.create(model=MODEL, input="Name a river.", max_output_tokens=8)
    then = server.client.responses.create(
        model=MODEL, input="Another one.", previous_response_id=first.id, max_output_tokens=8
    )
    call(server, "POST", "/v1/feedback", {"answer_id": then.id, "rating": "up"})
    (line,) = call(server, "GET", "/v1/feedback/export").splitlines()
    exported = json.loads(line)
    assert (exported["question"], exported["answer"]) == ("Another one.", then.output_text)
    admin, made = (
        json.loads(server.cli("keys", "create", "--tenant", tenant, "--role", role, "--json").stdout)
        for tenant, role in (("local", "admin"), ("acme", "user"))
    )
    server.key = admin["key"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=made["key"], max_retries=0) as theirs:
        with pytest.raises(openai.NotFoundError):
            theirs.responses.retrieve(first.id)
        assert theirs.vector_stores.list().data == []
        assert theirs.files.list().data == []
    shown = json.loads(server.cli("keys", "ls", "--json").stdout)
    assert made["id"] in json.dumps(shown)


def check_file_search(server: Server, store_id: str, file_id: str, asked: str) -> None:
    """The file of the answer is found, read and cited; the events come in order."""
    tool: Any = {
        "type": "file_search",
        "vector_store_ids": [store_id],
        "filters": {"type": "lt", "key": "year", "value": 2000},
    }
    include: Any = ["file_search_call.results"]
    stream = server.client.responses.create(
        model=MODEL, input=asked, tools=[tool], include=include, max_output_tokens=8, stream=True
    )
    events = list(stream)
    kinds = [event.type for event in events]
    searching = [f"response.file_search_call.{stage}" for stage in ("in_progress", "searching", "completed")]
    assert [kind for kind in kinds if kind in searching] == searching
    assert kinds.index(searching[-1]) < kinds.index("response.output_text.delta")
    assert "response.output_text.annotation.added" in kinds
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    search, message = last.response.output
    assert search.type == "file_search_call"
    assert {each.file_id for each in search.results or []} == {file_id}
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert {each.file_id for each in part.annotations} == {file_id}  # type: ignore[union-attr]
    with pytest.raises(openai.NotFoundError):
        server.client.responses.create(model=MODEL, input=asked, tools=[{**tool, "vector_store_ids": ["vs_no"]}])


def ask(server: Server, content: Any, session: str) -> Any:
    return server.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": content}],
        max_tokens=8,
        temperature=0,
        extra_body={"session": session},
    )
