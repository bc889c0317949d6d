"""Text that is local-only never reaches an embedding server elsewhere: nothing of it is in any request."""

from __future__ import annotations

import ast
import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import perilune
from perilune.config import MemorySettings
from perilune.memory.embed.protocol import EmbedderUnavailable
from perilune.memory.embed.remote import RemoteEmbedder
from perilune.memory.library import Library
from perilune.memory.locality import Locality
from perilune.memory.memory import Memory, Turn
from perilune.memory.scope import Scope
from perilune.memory.store import Store
from tests.memory.conftest import MAX_BYTES

SECRET = "zanzibar"
WAIT_S = 60.0


class _Listening(http.server.ThreadingHTTPServer):
    """An embeddings server that keeps all that it hears."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.heard: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Listening

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.heard.append(body.lower())
        count = len(json.loads(body)["input"])
        data = [{"index": at, "embedding": [1.0, 0.1 * at]} for at in range(count)]
        answer = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Listening]:
    """A server that counts as another machine's, although tests have only this one."""
    server = _Listening()
    monkeypatch.setattr(RemoteEmbedder, "remote", True)
    yield server
    server.shutdown()
    server.server_close()


def opened(store: Store, home: Path, server: _Listening, *tenants: str) -> Memory:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    memory = Memory.open(store, home, MemorySettings(embedder=url, embedder_model="m", local_only=tenants))
    memory.start()
    return memory


def add(library: Library, text: str, local_only: bool, tenant: str = "local") -> str:
    import io

    record = library.add_file(tenant, "a.txt", "user_data", io.BytesIO(text.encode()), MAX_BYTES, local_only)
    list(library.parse(tenant, record.file_id))
    assert library.get_file(tenant, record.file_id).local_only is local_only
    return record.file_id


@pytest.mark.timeout(300)
def test_nothing_local_only_is_embedded_elsewhere(store: Store, tmp_path: Path, elsewhere: _Listening) -> None:
    memory = opened(store, tmp_path, elsewhere)
    library = Library(store, tmp_path, memory=memory)
    add(library, f"The spy lives in {SECRET}.", True)
    open_id = add(library, "The cook lives in Lisbon.", False)
    memory.add_turns("local", "private", [Turn("me", f"I fly to {SECRET} on Monday.")], local_only=True)
    memory.add_turns("local", "private", [Turn("me", f"Not a word about {SECRET}!")])  # it stays what it was
    memory.add_turns("local", "open", [Turn("me", "Tea is fine.")])
    assert memory.settled(WAIT_S)
    heard = "\n".join(elsewhere.heard)
    assert "lisbon" in heard
    assert "tea is fine" in heard
    assert SECRET not in heard
    before = len(elsewhere.heard)
    found = memory.search(f"Who lives in {SECRET}?", Scope("local"), 5)
    assert SECRET in found.hits[0].text
    assert "by words only" in found.missing[0]
    assert len(elsewhere.heard) == before, "a question left"
    memory._indexer.suspect()
    memory._indexer._check()  # what has no vector on purpose isn't missing
    assert memory._index.size().vectors == 2
    memory.locality.mark("local", "private", False)
    memory.changed()
    assert memory.settled(WAIT_S)
    assert memory._index.size().vectors == 4
    assert "i fly to zanzibar" in "\n".join(elsewhere.heard)
    assert "the spy" not in "\n".join(elsewhere.heard)
    assert memory.locality.kept("local", ["private", open_id]) == frozenset()
    memory.close()


@pytest.mark.timeout(300)
def test_a_tenant_of_the_settings_keeps_everything(store: Store, tmp_path: Path, elsewhere: _Listening) -> None:
    memory = opened(store, tmp_path, elsewhere, "acme")
    memory.add_turns("acme", "s", [Turn("me", f"I fly to {SECRET} on Monday.")])
    memory.add_turns("local", "s", [Turn("me", "Tea is fine.")])
    assert memory.settled(WAIT_S)
    memory.search(f"When do I fly to {SECRET}?", Scope("acme"), 5)
    memory.search("What is fine?", Scope("local"), 5)
    heard = "\n".join(elsewhere.heard)
    assert SECRET not in heard
    assert "what is fine" in heard
    assert Locality(store, ["*"]).kept("anybody", ["s"]) == {"s"}
    memory.close()


def test_only_these_modules_send_text_to_an_embedder_and_each_asks_first() -> None:
    root = Path(perilune.__file__).parent
    callers = set()
    for path in root.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        names = {node.attr for node in attributes}
        used = [node for node in attributes if node.attr == "embed" and "embedder" in ast.unparse(node.value)]
        if used and "memory/embed" not in path.as_posix():
            callers.add(path.relative_to(root).as_posix())
            assert names & {"may_ask", "kept_entries"}, f"{path} embeds without asking"
    assert callers == {f"memory/{name}.py" for name in ("indexer", "retrieve", "gather", "feedback", "memory")}


@pytest.mark.parametrize(
    ("url", "remote"),
    [("http://127.0.0.1:1/v1", False), ("http://localhost/v1", False), ("http://[::1]:1/v1", False)]
    + [(f"https://{host}/v1", True) for host in ("example.org", "10.0.0.7", "localhost.example.org")],
)
def test_what_counts_as_elsewhere(url: str, remote: bool) -> None:
    assert RemoteEmbedder(url, "m").remote is remote


def test_a_question_that_must_stay_here_is_not_sent_for_its_meaning(
    store: Store, tmp_path: Path, elsewhere: _Listening
) -> None:
    """The semantic answer cache asks by `Memory.vector`."""
    memory = opened(store, tmp_path, elsewhere, "ada")
    with pytest.raises(EmbedderUnavailable):
        memory.vector("ada", f"Where is {SECRET}?")
    assert not any(SECRET in text for text in elsewhere.heard)
    assert len(memory.vector("bob", f"Where is {SECRET}?")) == 2
    memory.close()
