"""A server of OpenAI's chat dialect that says what a test tells it to, as fast as it is told to.

`perilune serve` asks it as a backend, so the page under test speaks to a real server; only the words come from
here: no model writes a given piece of hostile text, or exactly a hundred tokens a second.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "scripted"


@dataclass
class Script:
    """What is said next: pieces of text, `per_s` of them a second (0: at once), behind a `thought`. `asked` has the
    requests."""

    pieces: list[str] = field(default_factory=lambda: ["Well", " said", "."])
    per_s: float = 0.0
    thought: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    port: int = 0

    def say(self, *pieces: str, per_s: float = 0.0, thought: str = "") -> None:
        self.pieces, self.per_s, self.thought = list(pieces), per_s, thought


class ScriptedServer:
    """Listens until `close`."""

    def __init__(self) -> None:
        self.script = Script()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self.script))
        self._server.daemon_threads = True
        self.script.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def settings(self) -> dict[str, str]:
        """How a perilune server comes to know of it."""
        backend = {
            "name": MODEL,
            "url": f"http://127.0.0.1:{self.script.port}/v1",
            "model": MODEL,
            "serves": MODEL,
            "context_tokens": 1_000_000,
        }
        return {"PERILUNE_BACKENDS": json.dumps([backend]), "PERILUNE_PRIVACY__TRUSTED": json.dumps([MODEL])}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(script: Script) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Tests read what was asked from the script."""

        def do_GET(self) -> None:
            self._json({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 1_000_000}]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            script.asked.append(request)
            pieces, per_s = list(script.pieces), script.per_s
            if not request.get("stream"):
                message = {"role": "assistant", "content": "".join(pieces)}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                self._json(
                    {"id": "s", "object": "chat.completion", "model": MODEL, "choices": [choice], "usage": _USAGE}
                )
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            self._event({"reasoning_content": script.thought}, None)
            start_s = time.monotonic()
            for number, piece in enumerate(pieces):
                if per_s:
                    time.sleep(max(0.0, start_s + number / per_s - time.monotonic()))
                if not self._event({"content": piece}, None):
                    return
            self._event({}, "stop")
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

        def _event(self, delta: dict[str, str], reason: str | None) -> bool:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            chunk = {"id": "s", "object": "chat.completion.chunk", "model": MODEL, "choices": [choice]}
            if reason:
                chunk["usage"] = _USAGE
            try:
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                self.wfile.flush()
            except OSError:  # whoever asked has left
                self.close_connection = True
                return False
            return True

        def _json(self, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


_USAGE = {"prompt_tokens": 10, "completion_tokens": 10, "total_tokens": 20}
