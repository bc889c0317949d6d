"""A search engine that finds one page, as SearXNG tells it: where a page wants one, which no package brings."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FOUND = {"title": "Ferries", "url": "https://example.org/ferries", "content": "The ferry to Brill leaves at nine."}


class _Engine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # the base class names it so
        body = json.dumps({"query": "", "results": [FOUND], "answers": []}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Tests are quiet."""


@contextmanager
def search_engine() -> Iterator[int]:
    """Its port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Engine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
