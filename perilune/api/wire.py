"""JSON responses: the one way a body leaves this server, for raw ASGI endpoints and for starlette's."""

from __future__ import annotations

from collections.abc import Iterable

import orjson
from starlette.responses import Response
from starlette.types import Send

Headers = Iterable[tuple[bytes, bytes]]


async def send_json(send: Send, status: int, payload: object, headers: Headers = ()) -> None:
    """One complete JSON response on a raw ASGI channel."""
    data = orjson.dumps(payload)
    base = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*base, *headers]})
    await send({"type": "http.response.body", "body": data})


def json_response(payload: object, status: int = 200) -> Response:
    return Response(orjson.dumps(payload), status, media_type="application/json")
