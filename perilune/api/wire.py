"""JSON in and out: how bodies are typed, and the one way one leaves this server, for raw ASGI endpoints and for
starlette's."""

from __future__ import annotations

from collections.abc import Iterable

import orjson
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response
from starlette.types import Send

Headers = Iterable[tuple[bytes, bytes]]


class Wire(BaseModel):
    """A body, or part of one. Strict: a number in quotes is not a number, and NaN is none either."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


async def send_json(send: Send, status: int, payload: object, headers: Headers = ()) -> None:
    """One complete JSON response on a raw ASGI channel."""
    data = orjson.dumps(payload)
    base = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*base, *headers]})
    await send({"type": "http.response.body", "body": data})


def json_response(payload: object, status: int = 200) -> Response:
    return Response(orjson.dumps(payload), status, media_type="application/json")
