"""An engine that computes nothing: OpenAI's chat dialect, a first token after a fixed time, then 16 chunks at once.

    python -m bench.mock_engine [--port N] [--ttft-ms 20]

What a gateway adds is measured against it (`bench.gateway`). Written on bare asyncio protocols, so that what it
takes itself is small and steady. Prints its port. Knows the wire only.
"""

from __future__ import annotations

import argparse
import asyncio
import json

HOST = "127.0.0.1"
CHUNKS = 16
_USAGE = {"prompt_tokens": 24, "completion_tokens": CHUNKS, "total_tokens": 24 + CHUNKS}


def _event(payload: object) -> bytes:
    data = b"data: " + json.dumps(payload).encode() + b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _chunk(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": reason}
    return _event(
        {"id": "mock", "object": "chat.completion.chunk", "created": 1, "model": "mock", "choices": [choice]}
    )


_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" + _event(
    {"id": "mock", "choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]}
)
_CHUNKS = [_chunk(f"word{number} ") for number in range(CHUNKS)]
_STREAM_END = (
    _chunk("", "stop")
    + _event({"id": "mock", "choices": [], "usage": _USAGE})
    + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
)
_MESSAGE = {"role": "assistant", "content": "".join(f"word{number} " for number in range(CHUNKS))}
_WHOLE = json.dumps(
    {"id": "mock", "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "stop"}], "usage": _USAGE}
).encode()
_MODELS = b'{"object": "list", "data": [{"id": "mock", "object": "model"}]}'


def _json(body: bytes) -> bytes:
    return (
        f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    )


class _Mock(asyncio.Protocol):
    """One connection; requests come one after the other."""

    def __init__(self, ttft_s: float) -> None:
        self._ttft_s = ttft_s
        self._pieces: list[bytes] = []
        self._size = 0
        self._wanted = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        self._size += len(data)
        if self._wanted < 0:
            joined = b"".join(self._pieces)
            self._pieces = [joined]
            end = joined.find(b"\r\n\r\n")
            if end < 0:
                return
            self._wanted = end + 4 + _length(joined[:end])
        if self._size >= self._wanted:
            request = b"".join(self._pieces)
            self._pieces, self._size, self._wanted = [], 0, -1
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        if request.startswith(b"GET"):
            self._transport.write(_json(_MODELS))
            return
        streamed = b'"stream":true' in request or b'"stream": true' in request
        asyncio.get_running_loop().call_later(self._ttft_s, self._say, streamed)

    def _say(self, streamed: bool) -> None:
        if self._transport.is_closing():
            return
        if not streamed:
            self._transport.write(_json(_WHOLE))
            return
        self._transport.write(_STREAM_HEAD)
        for chunk in _CHUNKS:
            self._transport.write(chunk)
        self._transport.write(_STREAM_END)


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def serve(port: int, ttft_s: float) -> None:
    """Until killed. Prints the port once it listens."""
    server = await asyncio.get_running_loop().create_server(lambda: _Mock(ttft_s), HOST, port, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An engine that computes nothing.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft-ms", type=float, default=20.0)
    given = parser.parse_args()
    asyncio.run(serve(given.port, given.ttft_ms / 1000))
