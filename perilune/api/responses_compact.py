"""POST /v1/responses/compact, and compaction before an answer (`context_management`).

Knows the dialect's shapes and where a conversation is cut; what a compaction says is `service/compaction.py`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator
from starlette.types import Receive, Scope, Send

from perilune.api.auth import caller_of
from perilune.api.fields import ignored_fields, ignored_header
from perilune.api.limits import parse_json_object, read_body
from perilune.api.responses_answer import usage_dict
from perilune.api.responses_items import (
    Item,
    WireItem,
    as_items,
    compaction_item,
    kept,
    messages_of,
    named,
    read_items,
)
from perilune.api.responses_request import ConversationId, ResponseCall, validated
from perilune.api.schema import ModelName, check_count
from perilune.api.wire import Wire, send_json
from perilune.config import Settings
from perilune.core import Request, Usage
from perilune.errors import InvalidRequest
from perilune.service.compaction import compacted
from perilune.service.ports import ServiceApi

DEFAULT_SHARE = 0.75
"""Of the window: prompts that are longer are compacted, where no threshold is given."""


class WireCompactBody(Wire):
    """The body of POST /v1/responses/compact."""

    model: ModelName
    input: Annotated[
        list[WireItem] | None, BeforeValidator(as_items, json_schema_input_type=str | list[WireItem] | None)
    ] = None
    instructions: str | None = None
    previous_response_id: ConversationId | None = None


async def compact_first(service: ServiceApi, call: ResponseCall) -> ResponseCall:
    """The call, whose earlier answers are a compaction where the prompt would be longer than its threshold. Cut is
    before the last message of a user: calls and results behind it are still needed."""
    if call.compaction is None:
        return call
    limit = call.compaction.compact_threshold or await _default_threshold(service, call.request.model)
    items = [*call.before, *call.items]
    cut = max((at for at, item in enumerate(items) if item.get("role") == "user"), default=0)
    if cut < len(call.before) or not any(item.get("role") != "user" for item in items[:cut]):
        return call
    if await service.count_tokens(call.request) <= limit:
        return call
    item = compaction_item(await _summary(items[:cut]))
    own = cut - len(call.before)
    new = [*call.items[:own], item, *call.items[own:]]
    instructions = (call.echo or {}).get("instructions")
    messages = tuple(messages_of(read_items([*call.before, *new]), instructions))
    return replace(call, request=replace(call.request, messages=messages), items=tuple(new), compacted=(item,))


async def _default_threshold(service: ServiceApi, model: str) -> int:
    windows = [card.max_context_tokens for card in await service.models() if card.model_id == model]
    return int(DEFAULT_SHARE * (windows or [card.max_context_tokens for card in await service.models()])[0])


async def _summary(items: Sequence[Item]) -> str:
    messages = list(messages_of(read_items(items), None))
    return await asyncio.to_thread(compacted, messages)


class Compact:
    """The endpoint. `before` reads what a body goes on from."""

    def __init__(
        self,
        service: ServiceApi,
        settings: Settings,
        before: Callable[[ServiceApi, str, bytes], Awaitable[list[dict[str, Any]]]],
    ) -> None:
        self._service = service
        self._settings = settings
        self._before = before

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._settings.server.max_body)
        tenant = caller_of(scope).tenant
        raw = parse_json_object(body)
        own = as_items(raw.get("input"))
        before = await self._before(self._service, tenant, body)
        check_count(
            {"messages": [*before, *own] if isinstance(own, list) else own}, self._settings.server.max_messages
        )
        wire = validated(WireCompactBody, raw)
        items = (
            [*before, *(kept(item) for item in own if isinstance(item, dict))] if isinstance(own, list) else before
        )
        if not items:
            raise InvalidRequest("There is nothing to compact.", hint="Send input.", param="input")
        messages = tuple(messages_of(read_items(items), wire.instructions))
        request = Request(scope["state"]["request_id"], tenant, wire.model, messages, time.monotonic())
        tokens = await self._service.count_tokens(request)
        users = [item if item.get("id") else named(item) for item in items if item.get("role") == "user"]
        found = {
            "id": "resp_" + request.request_id.removeprefix("req_"),
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*users, compaction_item(await _summary(items))],
            "usage": usage_dict(Usage(tokens, 0, 0)),
        }
        ignored = ignored_fields(raw, WireCompactBody.model_fields, "responses")
        await send_json(send, 200, found, ignored_header(ignored))
