"""/v1/responses: answers that are kept and gone on from (OpenAI's Responses), and what is read of them.

Knows routes and the order of things; the shapes are in responses_request.py and responses_answer.py, answers in the
background in responses_background.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perilune.api.auth import caller_of, require_writer
from perilune.api.chat import ChatCompletions, ignoring_result, starting_after
from perilune.api.counting import CountTokens
from perilune.api.dialect import Dialect, Parse, Streamed, Whole
from perilune.api.fields import ignored_header
from perilune.api.limits import number_of, until_disconnect
from perilune.api.meter import AnswerMeter
from perilune.api.responses_answer import StreamedResponse, WholeResponse, error_event
from perilune.api.responses_background import BackgroundRuns
from perilune.api.responses_compact import compact_first
from perilune.api.responses_items import named
from perilune.api.responses_request import ResponseCall, goes_on_from, parse_response
from perilune.api.responses_said import made_of, said_in
from perilune.api.resume import StreamLog
from perilune.api.schema import ChatCall
from perilune.api.wire import json_response, send_json
from perilune.errors import InvalidRequest
from perilune.service.ports import ServiceApi

RESPONSES = Dialect(parse_response, WholeResponse, StreamedResponse, error_event)
MAX_ITEMS = 100


class CreateResponse(ChatCompletions):
    """POST /v1/responses, and the streams of answers in the background. What the answer goes on from is read before
    it, and the answer kept behind it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runs = BackgroundRuns(self._service.responses, self._resumables)

    async def _parsed(self, scope: Scope, body: bytes) -> ChatCall:
        return self._parse(scope, body, await _parse_of(self._service, scope, body))

    async def _prepared(self, call: ChatCall) -> ChatCall:
        assert isinstance(call, ResponseCall)
        return await compact_first(self._service, call)

    @asynccontextmanager
    async def _kept(self, call: ChatCall) -> AsyncIterator[None]:
        assert isinstance(call, ResponseCall)
        archive, tenant = self._service.responses, call.request.tenant
        if not call.store:
            yield
            return
        begun = WholeResponse(call, int(self._now()))
        beginning = asyncio.ensure_future(archive.begin(tenant, call.items, begun.unfinished()))
        try:
            await asyncio.shield(beginning)
            yield
        except BaseException:
            # The row is written in a thread, which a client that leaves doesn't end: it is dropped behind that.
            await asyncio.gather(beginning, return_exceptions=True)
            await archive.drop(tenant, begun.response_id)
            raise

    async def _answered(self, call: ChatCall, send: Send, meter: AnswerMeter) -> None:
        assert isinstance(call, ResponseCall)
        if not call.background:
            await super()._answered(call, send, meter)
            return
        headers, request = ignored_header(call.ignored), call.request
        if call.stream:
            events = self._told(call, meter)
            await self._deliver(events, send, request.request_id, headers, request.arrival_s)
        else:
            answer, _ = await self._begun(call, meter)
            await send_json(send, 200, answer.unfinished(), headers)

    async def _begun(self, call: ChatCall, meter: AnswerMeter) -> tuple[StreamedResponse, StreamLog]:
        """An answer in the background, which is kept from now on, and the log of its events."""
        call = await self._prepared(call)
        answer = StreamedResponse(call, int(self._now()))
        async with self._kept(call):
            return answer, self.runs.start(answer, meter, self._events, self._in_time)

    async def _told(self, call: ChatCall, meter: AnswerMeter) -> AsyncGenerator[tuple[bytes, bool]]:
        _, log = await self._begun(call, meter)
        async with aclosing(log.read(-1)) as events:
            async for event in events:
                yield event

    async def _finished(self, call: ChatCall, answer: Whole | Streamed) -> None:
        assert isinstance(call, ResponseCall)
        assert isinstance(answer, WholeResponse | StreamedResponse)
        body = answer.body()
        if call.store:
            await self._service.responses.finish(call.request.tenant, made_of(answer, body))
        elif call.conversation_id is not None:
            items = said_in(call, body)
            await self._service.responses.conversations.add(call.request.tenant, call.conversation_id, items)

    async def replay(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/responses/{id}?stream=true: the events of an answer in the background, from any of them on."""
        response_id, tenant = scope["path_params"]["response_id"], caller_of(scope).tenant
        if self._resumables.holds(response_id, tenant):
            log = self._resumables.find(response_id, tenant)
        else:
            kept = await self._service.responses.get(tenant, response_id)
            if kept.events is None:
                raise InvalidRequest(
                    "Only responses that were asked for with background can be streamed again.",
                    hint="Leave out stream to get the whole response.",
                    param="stream",
                )
            log = StreamLog.of(tenant, kept.events)
        events = log.read(starting_after(scope))
        rest = self._deliver(events, send, scope["state"]["request_id"])
        await until_disconnect(receive, ignoring_result(rest))


class CountResponse(CountTokens):
    """POST /v1/responses/input_tokens, with what the question goes on from."""

    async def _parse(self, scope: Scope, body: bytes) -> Parse:
        return await _parse_of(self._service, scope, body)


async def _parse_of(service: ServiceApi, scope: Scope, body: bytes) -> Parse:
    """Raises as `ports.Responses.chain`."""
    return partial(parse_response, before=await before_of(service, caller_of(scope).tenant, body))


async def before_of(service: ServiceApi, tenant: str, body: bytes) -> list[dict[str, Any]]:
    """The items that a request goes on from, oldest first. Raises as `ports.Responses.chain`."""
    from_ = goes_on_from(body)
    if from_.conversation_id is not None:
        return await service.responses.conversations.all_items(tenant, from_.conversation_id)
    if from_.previous_id is None:
        return []
    found: list[dict[str, Any]] = []
    for each in await service.responses.chain(tenant, from_.previous_id):
        known = {item.get("id") for item in each.items if item.get("type") == "compaction"}
        found += [*each.items, *(item for item in each.body["output"] if item["id"] not in known)]
    return found


class ResponseItem:
    """GET and DELETE /v1/responses/{id}, as the ASGI application that a route needs: it may stream."""

    def __init__(self, service: ServiceApi, creating: CreateResponse) -> None:
        self._service = service
        self._creating = creating

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if scope["method"] == "GET" and _wants_stream(request):
            await self._creating.replay(scope, receive, send)
            return
        caller, response_id = caller_of(scope), request.path_params["response_id"]
        if scope["method"] == "DELETE":
            require_writer(caller)
            await self._service.responses.delete(caller.tenant, response_id)
            await self._creating.runs.stop(caller.tenant, response_id)
            shown: dict[str, Any] = {"id": response_id, "object": "response", "deleted": True}
        else:
            kept = await self._service.responses.get(caller.tenant, response_id)
            shown = self._creating.runs.now(caller.tenant, response_id) or kept.body
        await send_json(send, 200, shown)


def _wants_stream(request: Request) -> bool:
    """Raises `InvalidRequest` for what is neither true nor false."""
    value = request.query_params.get("stream", "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise InvalidRequest("Wrong value for stream.", hint="Use true or false.", param="stream")
    return value in ("true", "1")


class KeptResponses:
    """POST /v1/responses/{id}/cancel and GET …/input_items."""

    def __init__(self, service: ServiceApi, runs: BackgroundRuns) -> None:
        self._service = service
        self._runs = runs

    async def cancel(self, request: Request) -> Response:
        """Stop an answer in the background; one that has ended stays as it is."""
        caller, response_id = caller_of(request.scope), request.path_params["response_id"]
        require_writer(caller)
        kept = await self._service.responses.get(caller.tenant, response_id)
        if not kept.body.get("background"):
            raise InvalidRequest(
                "Only responses that were asked for with background can be cancelled.",
                hint="Close the connection of another to cancel it.",
                param="response_id",
            )
        await self._runs.stop(caller.tenant, response_id)
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
        return json_response(page(shown, after + len(shown) < len(items)))


def page(items: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page of items with its cursors."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }


def _listed(item: dict[str, Any], item_id: str) -> dict[str, Any]:
    """An input item with what the dialect's clients rely on."""
    return {**named(item), "id": item.get("id") or item_id}
