"""/v1/batches: create, retrieve, list, cancel (OpenAI's Batches, with Moonshot's windows).

Knows the wire; batches are the service's, and their input and output are files.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from perilune.api.auth import caller_of, require_writer
from perilune.api.file_terms import WireExpiry
from perilune.api.limits import number_of, parse_json_object, read_body
from perilune.api.schema import wrong_field
from perilune.api.wire import Wire, json_response
from perilune.memory.batches import Batch, BatchStatus
from perilune.memory.paging import Part
from perilune.service.ports import ServiceApi

MAX_LIMIT = 100
_MAX_BODY_BYTES = 64 * 1024
_STAMPED = [status.value for status in BatchStatus if status is not BatchStatus.VALIDATING]

Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]


class WireBatch(Wire):
    """The body of POST /v1/batches."""

    input_file_id: str = Field(min_length=1, max_length=128)
    endpoint: str = Field(max_length=64)
    completion_window: str = Field(max_length=16)
    metadata: dict[Key, Value] | None = Field(None, max_length=16)
    output_expires_after: WireExpiry | None = None


def batch_dict(batch: Batch) -> dict[str, Any]:
    """The batch object."""
    usage = batch.usage
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": list(batch.errors)} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status.value,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": int(batch.created_at),
        "expires_at": int(batch.expires_at),
        **{f"{name}_at": _second(batch.times.get(name)) for name in _STAMPED},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
        "metadata": None if batch.metadata is None else dict(batch.metadata),
    }


def _second(at: float | None) -> int | None:
    return None if at is None else int(at)


class Batches:
    """The endpoints, as handlers of one object that holds the service."""

    def __init__(self, service: ServiceApi) -> None:
        self._batches = service.batches

    async def collection(self, request: Request) -> Response:
        """POST creates, GET lists."""
        return await (self._create(request) if request.method == "POST" else self._list(request))

    async def _create(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        require_writer(caller)
        body = parse_json_object(await read_body(request.scope, request.receive, _MAX_BODY_BYTES))
        try:
            wire = WireBatch.model_validate(body)
        except ValidationError as error:
            raise wrong_field(error) from None
        expiry = wire.output_expires_after
        batch = await self._batches.create(
            caller,
            wire.endpoint,
            wire.input_file_id,
            wire.completion_window,
            wire.metadata,
            None if expiry is None else float(expiry.seconds),
        )
        return json_response(batch_dict(batch))

    async def _list(self, request: Request) -> Response:
        query = request.query_params
        part = Part(number_of(query, "limit", 20, 1, MAX_LIMIT), query.get("after"))
        batches, more = await self._batches.page(caller_of(request.scope).tenant, part)
        return json_response(
            {
                "object": "list",
                "data": [batch_dict(batch) for batch in batches],
                "first_id": batches[0].batch_id if batches else None,
                "last_id": batches[-1].batch_id if batches else None,
                "has_more": more,
            }
        )

    async def item(self, request: Request) -> Response:
        batch = await self._batches.get(caller_of(request.scope).tenant, request.path_params["batch_id"])
        return json_response(batch_dict(batch))

    async def cancel(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        require_writer(caller)
        batch = await self._batches.cancel(caller.tenant, request.path_params["batch_id"])
        return json_response(batch_dict(batch))
