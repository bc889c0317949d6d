"""/v1/kv: the health view of KV and attention, and the switch of attention debug; for the role admin only
(`auth.ADMIN_PATHS`). Knows the wire; figures and findings are the service's.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from perilune.api.limits import parse_json_object, read_body
from perilune.api.wire import json_response
from perilune.errors import InvalidRequest
from perilune.service.ports import ServiceApi

MAX_STEPS = 256
_MAX_BODY_BYTES = 1024


class KV:
    def __init__(self, service: ServiceApi) -> None:
        self._service = service

    async def health(self, request: Request) -> Response:
        """`?steps=N` adds the newest N measured steps, layer by layer. Raises `InvalidRequest`."""
        asked = request.query_params.get("steps", "0")
        if not (asked.isascii() and asked.isdigit() and len(asked) < 5 and int(asked) <= MAX_STEPS):
            raise InvalidRequest(f"steps must be a number from 0 to {MAX_STEPS}.", param="steps")
        return json_response(await asyncio.to_thread(self._service.kv.view, int(asked)))

    async def attention_debug(self, request: Request) -> Response:
        """Body `{"on": true}` or `{"on": false}`. Raises `InvalidRequest`."""
        body = parse_json_object(await read_body(request.scope, request.receive, _MAX_BODY_BYTES))
        if body.keys() != {"on"} or not isinstance(body["on"], bool):
            raise InvalidRequest(
                "The body must say whether attention debug is on, and nothing else.",
                hint='Send {"on": true} or {"on": false}.',
                param="on",
            )
        self._service.kv.debug(body["on"])
        return json_response({"on": body["on"]})
