"""/v1/vector_stores: stores, their files and batches, and the search of them (spec S1).

Knows routes; the shapes are in vector_store_schema.py. Every call sees its caller's tenant only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from perilune.api.auth import caller_of, require_writer
from perilune.api.limits import parse_json_object, read_body
from perilune.api.paging import list_dict, part_of
from perilune.api.schema import wrong_field
from perilune.api.vector_store_schema import (
    WireFileBatch,
    WireFileChanges,
    WireNewStore,
    WireSearch,
    WireStoreChanges,
    WireStoreFile,
    batch_dict,
    file_dict,
    filter_of,
    hit_dict,
    page_dict,
    store_dict,
)
from perilune.api.wire import Wire, json_response
from perilune.errors import InvalidRequest
from perilune.memory.vector_stores import Changes, NewStoreFile
from perilune.service.ports import ServiceApi

_MAX_BODY_BYTES = 4 * 1024**2
_STATES = ("in_progress", "completed", "failed", "cancelled")
_STORE = "/v1/vector_stores/{vector_store_id}"

Body = TypeVar("Body", bound=Wire)


class VectorStoreRoutes:
    """The endpoints, as handlers of one object that holds the service."""

    def __init__(self, service: ServiceApi, clock: Callable[[], float] = time.time) -> None:
        self._kept = service.vector_stores
        self._documents = service.documents
        self._clock = clock

    def routes(self) -> list[Route]:
        files, batches = f"{_STORE}/files", f"{_STORE}/file_batches"
        every = ["GET", "POST", "DELETE"]
        return [
            Route("/v1/vector_stores", self.collection, methods=["GET", "POST"]),
            Route(_STORE, self.item, methods=every),
            Route(f"{_STORE}/search", self.search, methods=["POST"]),
            Route(files, self.files, methods=["GET", "POST"]),
            Route(files + "/{file_id}", self.file, methods=every),
            Route(files + "/{file_id}/content", self.content),
            Route(batches, self.batches, methods=["POST"]),
            Route(batches + "/{batch_id}", self.batch),
            Route(batches + "/{batch_id}/cancel", self.cancel, methods=["POST"]),
            Route(batches + "/{batch_id}/files", self.batch_files),
        ]

    # ----------------------------------------------------------------------------------------------- stores

    async def collection(self, request: Request) -> Response:
        """POST makes a store, GET lists them."""
        tenant = caller_of(request.scope).tenant
        if request.method == "GET":
            part = part_of(request.query_params)
            found, more = await self._kept.run(lambda kept: kept.part(tenant, part))
            return json_response(list_dict([store_dict(each, self._clock()) for each in found], more))
        wire = await _written(request, WireNewStore)
        days = wire.expires_after.days if wire.expires_after is not None else None
        files = [NewStoreFile(file_id) for file_id in wire.file_ids or ()]
        made = await self._kept.run(
            lambda kept: kept.create(tenant, wire.name or "", wire.description, days, wire.metadata or {}, files)
        )
        return json_response(store_dict(made, self._clock()))

    async def item(self, request: Request) -> Response:
        """GET retrieves, POST updates, DELETE deletes; the files stay."""
        tenant, store_id = caller_of(request.scope).tenant, request.path_params["vector_store_id"]
        if request.method == "GET":
            found = await self._kept.run(lambda kept: kept.get(tenant, store_id))
            return json_response(store_dict(found, self._clock()))
        if request.method == "DELETE":
            require_writer(caller_of(request.scope))
            await self._kept.run(lambda kept: kept.delete(tenant, store_id))
            return json_response({"id": store_id, "object": "vector_store.deleted", "deleted": True})
        changes = _changes(await _written(request, WireStoreChanges))
        changed = await self._kept.run(lambda kept: kept.update(tenant, store_id, changes))
        return json_response(store_dict(changed, self._clock()))

    async def search(self, request: Request) -> Response:
        """The best passages, best first. A read-only key may search."""
        body = parse_json_object(await read_body(request.scope, request.receive, _MAX_BODY_BYTES))
        wire = _validated(WireSearch, body)
        tenant, store_id = caller_of(request.scope).tenant, request.path_params["vector_store_id"]
        threshold = (wire.ranking_options.score_threshold if wire.ranking_options is not None else None) or 0.0
        found = await self._kept.search(
            tenant, [store_id], wire.query, filter_of(wire.filters), wire.max_num_results, threshold
        )
        data = [hit_dict(hit) for hit in found]
        return json_response(page_dict("search_results", data, search_query=wire.query))

    # ------------------------------------------------------------------------------------------------ files

    async def files(self, request: Request) -> Response:
        """POST puts a file into the store, GET lists its files."""
        tenant, store_id = caller_of(request.scope).tenant, request.path_params["vector_store_id"]
        if request.method == "GET":
            return await self._listed(request, None)
        wire = await _written(request, WireStoreFile)
        return json_response(
            file_dict(await self._kept.run(lambda kept: kept.attach(tenant, store_id, wire.new())))
        )

    async def file(self, request: Request) -> Response:
        """GET retrieves, POST sets attributes, DELETE takes the file out; the file itself stays."""
        tenant = caller_of(request.scope).tenant
        store_id, file_id = request.path_params["vector_store_id"], request.path_params["file_id"]
        if request.method == "GET":
            return json_response(file_dict(await self._kept.run(lambda kept: kept.file(tenant, store_id, file_id))))
        if request.method == "DELETE":
            require_writer(caller_of(request.scope))
            await self._kept.run(lambda kept: kept.detach(tenant, store_id, file_id))
            return json_response({"id": file_id, "object": "vector_store.file.deleted", "deleted": True})
        attributes = (await _written(request, WireFileChanges)).attributes or {}
        changed = await self._kept.run(lambda kept: kept.set_attributes(tenant, store_id, file_id, attributes))
        return json_response(file_dict(changed))

    async def content(self, request: Request) -> Response:
        """The text that is read of a file so far."""
        tenant = caller_of(request.scope).tenant
        store_id, file_id = request.path_params["vector_store_id"], request.path_params["file_id"]
        file = await self._kept.run(lambda kept: kept.file(tenant, store_id, file_id))
        text = await self._documents.text(tenant, file_id)
        more = {"file_id": file_id, "filename": file.filename, "attributes": dict(file.attributes)}
        return json_response(page_dict("file_content", [{"type": "text", "text": text}], **more))

    # ---------------------------------------------------------------------------------------------- batches

    async def batches(self, request: Request) -> Response:
        """POST puts files into the store together, all or none."""
        tenant, store_id = caller_of(request.scope).tenant, request.path_params["vector_store_id"]
        files = (await _written(request, WireFileBatch)).new()
        return json_response(batch_dict(await self._kept.run(lambda kept: kept.add_batch(tenant, store_id, files))))

    async def batch(self, request: Request) -> Response:
        tenant, store_id, batch_id = _batch_of(request)
        return json_response(batch_dict(await self._kept.run(lambda kept: kept.batch(tenant, store_id, batch_id))))

    async def cancel(self, request: Request) -> Response:
        """Files that aren't read yet won't be searched in this store; they go on being read as files."""
        require_writer(caller_of(request.scope))
        tenant, store_id, batch_id = _batch_of(request)
        found = await self._kept.run(lambda kept: kept.cancel_batch(tenant, store_id, batch_id))
        return json_response(batch_dict(found))

    async def batch_files(self, request: Request) -> Response:
        return await self._listed(request, request.path_params["batch_id"])

    async def _listed(self, request: Request, batch_id: str | None) -> Response:
        tenant, store_id = caller_of(request.scope).tenant, request.path_params["vector_store_id"]
        state = request.query_params.get("filter")
        if state not in (None, *_STATES):
            raise InvalidRequest("Wrong value for filter.", hint=f"Use {', '.join(_STATES)}.", param="filter")
        part = part_of(request.query_params)
        found, more = await self._kept.run(lambda kept: kept.files(tenant, store_id, part, state, batch_id))
        return json_response(list_dict([file_dict(each) for each in found], more))


def _batch_of(request: Request) -> tuple[str, str, str]:
    """(tenant, store, batch)."""
    named: dict[str, Any] = request.path_params
    return caller_of(request.scope).tenant, named["vector_store_id"], named["batch_id"]


async def _written(request: Request, shape: type[Body]) -> Body:
    """The body of a call that changes something; an empty one is {}. Raises `Forbidden` and `InvalidRequest`."""
    require_writer(caller_of(request.scope))
    data = await read_body(request.scope, request.receive, _MAX_BODY_BYTES)
    return _validated(shape, parse_json_object(data or b"{}"))


def _validated(shape: type[Body], body: dict[str, Any]) -> Body:
    try:
        return shape.model_validate(body)
    except ValidationError as error:
        raise wrong_field(error) from None


def _changes(wire: WireStoreChanges) -> Changes:
    """What was sent; null empties."""
    sent = {"expires_days" if name == "expires_after" else name for name in wire.model_fields_set}
    days = wire.expires_after.days if wire.expires_after is not None else None
    return Changes(frozenset(sent), wire.name or "", days, wire.metadata or {})
