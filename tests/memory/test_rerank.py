"""The cross-encoder's stage: over HTTP, within its deadline, and never in the way of a search."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perilune.config import MemorySettings
from perilune.errors import ConfigError
from perilune.memory.memory import Memory, Turn
from perilune.memory.model_server import NoAnswer
from perilune.memory.rerank import RemoteReranker
from perilune.memory.retrieve import Found
from perilune.memory.scope import Scope
from perilune.memory.store import Store

QUESTION = "Which colour has the lighthouse?"
TURNS = [
    "The lighthouse lost its colour chart.",
    "Which lighthouse has which keeper?",
    "Vermilion is what the lighthouse wears.",
    "The lighthouse has a lamp.",
    "Soup again.",
]
WANTED = TURNS[2]


class Encoder(http.server.ThreadingHTTPServer):
    """Speaks the wire format, and scores by what a test says. Holds its answers back while `go` isn't set."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.heard: list[dict[str, Any]] = []
        self.score: Callable[[str], float] = lambda passage: float("Vermilion" in passage)
        self.answer: bytes | None = None
        self.status = 200
        self.go = threading.Event()
        self.go.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Encoder

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, self.headers["Authorization"]) == ("/v1/rerank", "Bearer secret")
        self.server.heard.append(asked)
        self.server.go.wait(30)
        scores = [self.server.score(passage) for passage in asked["documents"]]
        results = [{"index": at, "relevance_score": score} for at, score in enumerate(scores)]
        answer = (
            self.server.answer
            or json.dumps({"results": sorted(results, key=lambda r: -r["relevance_score"])}).encode()
        )
        try:
            self.send_response(self.server.status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
        except OSError:
            pass  # it wasn't waited for

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def encoder() -> Iterator[Encoder]:
    server = Encoder()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.go.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def memory(store: Store, tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.setenv("RERANK_KEY", "secret")
    settings = MemorySettings(
        embedder="off",
        reranker=encoder.url,
        reranker_model="cross",
        reranker_key_env="RERANK_KEY",
        reranker_hits=4,
        reranker_within_s=20,
    )
    opened = Memory.open(store, tmp_path, settings)
    opened.add_turns("local", "talk", [Turn("me", text) for text in TURNS])
    yield opened
    opened.close()


def asked(memory: Memory, limit: int = 5) -> Found:
    return memory.search(QUESTION, Scope("local"), limit)


def texts(found: Found) -> list[str]:
    return [hit.text for hit in found.hits]


def test_it_orders_the_best_hits(memory: Memory, encoder: Encoder) -> None:
    encoder.score = lambda _: 0.0
    plain = asked(memory)
    assert WANTED in texts(plain)[1:4]
    encoder.score = lambda passage: float("Vermilion" in passage)
    found = asked(memory)
    assert texts(found)[0] == WANTED
    assert texts(found)[1:] == [text for text in texts(plain) if text != WANTED]
    assert [hit.score for hit in found.hits] == [hit.score for hit in plain.hits], "another scale"
    assert found.missing == ()
    assert {"model": "cross", "query": QUESTION, "documents": texts(plain)[:4], "top_n": 4} == encoder.heard[0]


def test_it_reads_more_hits_than_are_asked_for(memory: Memory) -> None:
    assert texts(asked(memory, 1)) == [WANTED]


def test_a_late_one_is_skipped(memory: Memory, encoder: Encoder) -> None:
    encoder.score = lambda _: 0.0
    order = texts(asked(memory))
    encoder.go.clear()
    reranker = memory.retriever._reranker
    assert isinstance(reranker, RemoteReranker)
    reranker._within_s = 0.05
    for _ in range(4):  # more than may wait at once
        start_s = time.monotonic()
        found = asked(memory)
        assert time.monotonic() - start_s < 10
        assert texts(found) == order
        assert len(found.missing) == 1
        assert found.missing[0].startswith("The re-ranker wasn't waited for: ")  # its deadline, or the connection's


@pytest.mark.parametrize(
    ("status", "answer", "why"),
    [
        (500, b"{}", "status 500"),
        (200, b"not json", "can't be read"),
        (200, b"[" * 100_000, "can't be read"),
        (200, b"[]", "can't be read"),
        (200, b'{"results": [{"index": 0}]}', "can't be read"),
        (200, b'{"results": [{"index": 0, "relevance_score": 1}]}', "one score a passage"),
        (200, b'{"results": [{"index": 0, "relevance_score": NaN}]}', "one score a passage"),
        (200, b'{"results": [{"index": 7, "relevance_score": 1}]}', "one score a passage"),
    ],
)
def test_nonsense_is_done_without(memory: Memory, encoder: Encoder, status: int, answer: bytes, why: str) -> None:
    encoder.score = lambda _: 0.0
    order = texts(asked(memory))
    encoder.status, encoder.answer = status, answer
    found = asked(memory)
    assert texts(found) == order
    assert why in found.missing[0]


def test_a_dead_one_is_done_without() -> None:
    reranker = RemoteReranker("http://127.0.0.1:9/v1", "cross", within_s=20)
    with pytest.raises(NoAnswer, match="did not answer"):
        reranker.scores("a", ["b", "c"])
    reranker.close()


def test_what_stays_here_is_not_sent(memory: Memory, encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteReranker, "remote", True)
    memory.add_turns("local", "private", [Turn("me", "The lighthouse of Kestrel Point is mine.")], local_only=True)
    found = asked(memory)
    assert WANTED in texts(found)
    assert "stays on this one" in found.missing[0]
    assert not encoder.heard


@pytest.mark.parametrize(
    "url", ["nonsense", "ftp://x/v1", "http://", "http://x:port/v1", "http://x:99999/v1", "http://x:0/v1"]
)
def test_a_bad_url_is_a_clear_error(url: str) -> None:
    with pytest.raises(ConfigError, match="re-ranking server"):
        RemoteReranker(url, "x")


def test_a_host_without_a_name_is_done_without() -> None:
    reranker = RemoteReranker("http://a..b/v1", "x", within_s=20)
    with pytest.raises(NoAnswer, match="did not answer"):
        reranker.scores("a", ["b"])
    reranker.close()
