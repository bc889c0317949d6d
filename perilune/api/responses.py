"""/v1/responses: answers that are kept and gone on from (OpenAI's Responses), and what is read of them.

Knows routes and the order of things; the shapes are in responses_request.py and responses_answer.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from perilune.api.auth import caller_of, require_writer
from perilune.api.chat import ChatCompletions
from perilune.api.counting import CountTokens
from perilune.api.dialect import Dialect, Parse, Streamed, Whole
from perilune.api.limits import number_of
from perilune.api.responses_answer import StreamedResponse, WholeResponse, error_event
from perilune.api.responses_request import ResponseCall, parse_response, previous_of
from perilune.api.schema import ChatCall
from perilune.api.wire import json_response
from perilune.service.ports import ServiceApi

RESPONSES = Dialect(parse_response, WholeResponse, StreamedResponse, error_event)
MAX_ITEMS = 100


class CreateResponse(ChatCompletions):
    """POST /v1/responses. What the answer goes on from is read before it, and the answer kept behind it."""

    async def _parsed(self, scope: Scope, body: bytes) -> ChatCall:
        return self._parse(scope, body, await _parse_of(self._service, scope, body))

    async def _finished(self, call: ChatCall, answer: Whole | Streamed) -> None:
        assert isinstance(call, ResponseCall)
        assert isinstance(answer, WholeResponse | StreamedResponse)
        if call.store:
            await self._service.responses.add(call.request.tenant, call.items, answer.body())


class CountResponse(CountTokens):
    """POST /v1/responses/input_tokens, with what the question goes on from."""

    async def _parse(self, scope: Scope, body: bytes) -> Parse:
        return await _parse_of(self._service, scope, body)


async def _parse_of(service: ServiceApi, scope: Scope, body: bytes) -> Parse:
    """Raises as `ports.Responses.chain`."""
    previous = previous_of(body)
    if previous is None:
        return parse_response
    kept = await service.responses.chain(caller_of(scope).tenant, previous)
    before = [item for each in kept for item in (*each.items, *each.body["output"])]
    return partial(parse_response, before=before)


class KeptResponses:
    """GET and DELETE /v1/responses/{id}, GET …/input_items."""

    def __init__(self, service: ServiceApi) -> None:
        self._service = service

    async def item(self, request: Request) -> Response:
        caller, response_id = caller_of(request.scope), request.path_params["response_id"]
        if request.method == "DELETE":
            require_writer(caller)
            await self._service.responses.delete(caller.tenant, response_id)
            return json_response({"id": response_id, "object": "response", "deleted": True})
        return json_response((await self._service.responses.get(caller.tenant, response_id)).body)

    async def input_items(self, request: Request) -> Response:
        """Newest first unless `order` is `asc`, after the item `after`, as the dialect has it."""
        caller, response_id = caller_of(request.scope), request.path_params["response_id"]
        kept = await self._service.responses.get(caller.tenant, response_id)
        items = [_listed(item, f"{response_id}-{index}") for index, item in enumerate(kept.items)]
        query = request.query_params
        if query.get("order", "desc") != "asc":
            items.reverse()
        after = next((index + 1 for index, item in enumerate(items) if item["id"] == query.get("after")), 0)
        shown = items[after : after + number_of(query, "limit", 20, 1, MAX_ITEMS)]
        return json_response(
            {
                "object": "list",
                "data": shown,
                "first_id": shown[0]["id"] if shown else None,
                "last_id": shown[-1]["id"] if shown else None,
                "has_more": after + len(shown) < len(items),
            }
        )


def _listed(item: dict[str, Any], item_id: str) -> dict[str, Any]:
    """An input item with what the dialect's clients rely on."""
    content = item.get("content")
    if isinstance(content, str):
        item = {**item, "content": [{"type": "input_text", "text": content}]}
    return {"type": "message", "status": "completed", "id": item_id, **item}
