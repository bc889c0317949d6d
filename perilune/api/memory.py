"""/v1/memory/profile, /v1/memory/summary and /v1/memory/export: what is known of the user, shown, edited, erased.

Knows the wire; what is kept is the service's. Every call sees its caller's tenant only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from perilune.api.auth import caller_of, require_writer
from perilune.api.limits import parse_json_object, read_body
from perilune.api.schema import SessionId, wrong_field
from perilune.api.wire import Wire, json_response
from perilune.core import ProfileFact, SummarySentence
from perilune.errors import InvalidRequest
from perilune.service.ports import ServiceApi

MAX_EDITS = 100
_EXPORT_BATCH = 200
_MAX_BODY_BYTES = 64 * 1024
_MAX_PLACE = 2**31 - 1
W = TypeVar("W", bound=Wire)


class WireEdit(Wire):
    """The body of PATCH /v1/memory/profile."""

    facts: Annotated[dict[str, str | None], Field(min_length=1, max_length=MAX_EDITS)]


class WireCorrection(Wire):
    """The body of PATCH /v1/memory/summary: a sentence of a session's turn, or of a file's page."""

    session: SessionId | None = None
    file_id: Annotated[str | None, Field(max_length=128)] = None
    turn: Annotated[int | None, Field(ge=1, le=_MAX_PLACE)] = None
    page: Annotated[int | None, Field(ge=1, le=_MAX_PLACE)] = None
    start: int = Field(ge=0, le=_MAX_PLACE)
    text: str | None


class MemoryViews:
    """The endpoints, as handlers of one object that holds the service."""

    def __init__(self, service: ServiceApi) -> None:
        self._kept = service.conversations

    async def profile(self, request: Request) -> Response:
        """GET shows, with `?history=true` what was true before, too; PATCH sets or erases keys; DELETE erases
        all, or `?key=`."""
        caller = caller_of(request.scope)
        if request.method == "GET":
            history = request.query_params.get("history", "false")
            if history not in ("true", "false"):
                raise InvalidRequest("history is true or false.", param="history")
            return await self._profile(caller.tenant, history == "true")
        require_writer(caller)
        if request.method == "PATCH":
            wire = await _body(request, WireEdit)
            await self._kept.edit_profile(caller.tenant, wire.facts)
            return await self._profile(caller.tenant, False)
        gone = await self._kept.erase_profile(caller.tenant, request.query_params.get("key"))
        return json_response({"object": "profile", "deleted": True, "statements": gone})

    async def _profile(self, tenant: str, history: bool) -> Response:
        facts = await self._kept.profile(tenant, history)
        return json_response({"object": "profile", "data": [fact_dict(fact) for fact in facts]})

    async def summary(self, request: Request) -> Response:
        """GET `?session=` or `?file_id=` shows the rolling summary; PATCH corrects a sentence of it."""
        caller = caller_of(request.scope)
        if request.method == "PATCH":
            require_writer(caller)
            wire = await _body(request, WireCorrection)
            source = _source(wire.session, wire.file_id)
            number = wire.turn if wire.session is not None else wire.page
            if number is None:
                name = "turn" if wire.session is not None else "page"
                raise InvalidRequest(f"{name} is missing.", hint="The summary shows it.", param=name)
            await self._kept.correct_summary(caller.tenant, source, number, wire.start, wire.text)
        else:
            source = _source(request.query_params.get("session"), request.query_params.get("file_id"))
        sentences = await self._kept.summary(caller.tenant, source)
        return json_response({"object": "summary", "data": [sentence_dict(each) for each in sentences]})

    async def export(self, request: Request) -> Response:
        """GET: everything kept about the user, as JSON Lines."""
        records = await self._kept.export(caller_of(request.scope).tenant)
        headers = {"content-disposition": 'attachment; filename="memory.jsonl"'}
        return StreamingResponse(_lines(records), media_type="application/jsonl", headers=headers)


async def _lines(records: Iterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    def some() -> bytes:
        return b"".join(orjson.dumps(each) + b"\n" for each in islice(records, _EXPORT_BATCH))

    while data := await run_in_threadpool(some):
        yield data


async def _body(request: Request, wire: type[W]) -> W:
    try:
        return wire.model_validate(
            parse_json_object(await read_body(request.scope, request.receive, _MAX_BODY_BYTES))
        )
    except ValidationError as error:
        raise wrong_field(error) from None


def _source(session: str | None, file_id: str | None) -> str:
    if (session is None) == (file_id is None):
        raise InvalidRequest("Name one source: session or file_id.", param="session")
    return session if session is not None else file_id or ""


def fact_dict(fact: ProfileFact) -> dict[str, Any]:
    """A fact; `session` is null for what was written by hand."""
    return {
        "key": fact.key,
        "value": fact.value,
        "since": fact.since,
        "until": fact.until,
        "written_at": fact.written_at,
        "session": fact.session_id,
        "turn": fact.turn,
        "start": fact.start,
        "end": fact.end,
    }


def sentence_dict(sentence: SummarySentence) -> dict[str, Any]:
    """A sentence of a session or of a file."""
    of_file = sentence.source_id.startswith("file-")
    return {
        "file_id" if of_file else "session": sentence.source_id,
        "page" if of_file else "turn": sentence.number,
        **({} if of_file else {"speaker": sentence.speaker}),
        "start": sentence.start,
        "end": sentence.end,
        "text": sentence.text,
        "corrected": sentence.corrected,
    }
