"""/v1/conversations: items that are kept in order and that answers go on from (OpenAI's Conversations).

Knows the wire; what is kept is `memory.conversations`'. Every call sees its caller's tenant only. An answer with
`conversation` reads and adds to one (responses.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from perilune.api.auth import caller_of, require_writer
from perilune.api.limits import number_of, parse_json_object, read_body
from perilune.api.responses import MAX_ITEMS, page
from perilune.api.responses_items import WireItem, kept, messages_of, named
from perilune.api.responses_request import Metadata, validated
from perilune.api.wire import Wire, json_response
from perilune.config import Settings
from perilune.errors import InvalidRequest
from perilune.memory.conversations import ConversationInfo
from perilune.service.ports import ServiceApi

MOST_AT_ONCE = 20
"""Items of one request, as the dialect has it."""

Items = Annotated[list[WireItem], Field(max_length=MOST_AT_ONCE)]
Body = TypeVar("Body", bound=Wire)


class WireNewConversation(Wire):
    items: Items | None = None
    metadata: Metadata | None = None


class WireConversationUpdate(Wire):
    metadata: Metadata | None


class WireNewItems(Wire):
    items: Annotated[Items, Field(min_length=1)]


class Conversations:
    """The endpoints, as handlers of one object."""

    def __init__(self, service: ServiceApi, settings: Settings) -> None:
        self._kept = service.responses.conversations
        self._max_body_bytes = settings.server.max_body

    async def create(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        require_writer(caller)
        raw, wire = await self._body(request, WireNewConversation, empty=True)
        items = _checked(raw.get("items") or (), wire.items or ())
        return json_response(conversation_dict(await self._kept.create(caller.tenant, wire.metadata or {}, items)))

    async def item(self, request: Request) -> Response:
        """GET reads, POST replaces the metadata, DELETE deletes with everything in it."""
        caller, conversation_id = caller_of(request.scope), request.path_params["conversation_id"]
        if request.method == "GET":
            return json_response(conversation_dict(await self._kept.get(caller.tenant, conversation_id)))
        require_writer(caller)
        if request.method == "DELETE":
            await self._kept.delete(caller.tenant, conversation_id)
            shown = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
            return json_response(shown)
        _, wire = await self._body(request, WireConversationUpdate)
        info = await self._kept.update(caller.tenant, conversation_id, wire.metadata or {})
        return json_response(conversation_dict(info))

    async def items(self, request: Request) -> Response:
        """GET lists, newest first unless `order` is `asc`; POST adds up to 20."""
        caller, conversation_id = caller_of(request.scope), request.path_params["conversation_id"]
        if request.method == "POST":
            require_writer(caller)
            raw, wire = await self._body(request, WireNewItems)
            new = _checked(raw["items"], wire.items)
            await self._kept.add(caller.tenant, conversation_id, new)
            return json_response(page(new, False))
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("Wrong value for order.", hint="Use asc or desc.", param="order")
        limit = number_of(query, "limit", 20, 1, MAX_ITEMS)
        found, more = await self._kept.items(
            caller.tenant, conversation_id, query.get("after"), limit, order == "desc"
        )
        return json_response(page(found, more))

    async def one_item(self, request: Request) -> Response:
        """GET reads an item, DELETE removes it and shows the conversation, as the dialect has it."""
        caller, found = caller_of(request.scope), request.path_params
        if request.method == "GET":
            item = await self._kept.item(caller.tenant, found["conversation_id"], found["item_id"])
            return json_response(item)
        require_writer(caller)
        info = await self._kept.delete_item(caller.tenant, found["conversation_id"], found["item_id"])
        return json_response(conversation_dict(info))

    async def _body(self, request: Request, shape: type[Body], empty: bool = False) -> tuple[dict[str, Any], Body]:
        """The body as it came, and checked; `empty`: there need be none."""
        data = await read_body(request.scope, request.receive, self._max_body_bytes)
        raw = parse_json_object(data) if data or not empty else {}
        return raw, validated(shape, raw)


def _checked(raw: Sequence[dict[str, Any]], wire: Sequence[WireItem]) -> list[dict[str, Any]]:
    """Items as they are kept, each with a new id. Raises `InvalidRequest` for those that no answer could read."""
    list(messages_of(wire, None))
    return [named(kept(item)) for item in raw]


def conversation_dict(info: ConversationInfo) -> dict[str, Any]:
    return {
        "id": info.conversation_id,
        "object": "conversation",
        "created_at": int(info.created_at),
        "metadata": dict(info.metadata),
    }
