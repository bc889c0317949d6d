"""/v1/sessions and /v1/memory/search: kept conversations are listed, read, searched and deleted.

Knows the wire; what is kept is the service's. Every call sees its caller's tenant only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Self
from urllib.parse import quote

from pydantic import Field, ValidationError, model_validator
from starlette.requests import Request
from starlette.responses import Response

from perilune.api.auth import caller_of, require_writer
from perilune.api.limits import number_of, parse_json_object, read_body
from perilune.api.schema import MAX_SESSIONS, SessionId, wrong_field
from perilune.api.session_file import EXPORTS
from perilune.api.wire import Wire, json_response
from perilune.core import Passage, SearchResult, SessionInfo, SessionTurn, Times
from perilune.errors import InvalidRequest, NotFound
from perilune.memory.session_ids import is_session_id
from perilune.memory.session_rows import MAX_TITLE_CHARS, cursor_of
from perilune.service.ports import ServiceApi

MAX_LIMIT = 1_000
DEFAULT_LIMIT = 100
MAX_HITS = 100
MAX_QUERY_CHARS = 8_192
_MAX_BODY_BYTES = 64 * 1024
_DAY_S = 86_400 - 1e-3
_MAX_TURN = 999_999_999


class WireSearch(Wire):
    """The body of POST /v1/memory/search."""

    query: str = Field(min_length=1, max_length=MAX_QUERY_CHARS)
    sessions: Annotated[list[SessionId], Field(min_length=1, max_length=MAX_SESSIONS)] | None = None
    limit: int = Field(10, ge=1, le=MAX_HITS)
    since: float | str | None = None
    until: float | str | None = None


class WireSession(Wire):
    """The body of PATCH /v1/sessions/ID: one of them, or both."""

    local_only: bool | None = None
    title: Annotated[str, Field(max_length=MAX_TITLE_CHARS)] | None = None

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("give title, local_only or both")
        return self


class WireFork(Wire):
    """The body of POST /v1/sessions/ID/fork."""

    turn: int = Field(ge=0, le=_MAX_TURN)
    id: SessionId | None = None


class Sessions:
    """The endpoints, as handlers of one object that holds the service."""

    def __init__(self, service: ServiceApi) -> None:
        self._service = service
        self._kept = service.conversations

    async def collection(self, request: Request) -> Response:
        """GET: the sessions, the one with the newest turn first; `limit` of them, behind a `cursor`."""
        limit = number_of(request.query_params, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)
        cursor = request.query_params.get("cursor")
        found = await self._kept.sessions(caller_of(request.scope).tenant, limit + 1, cursor)
        shown, more = found[:limit], len(found) > limit
        following = cursor_of(shown[-1]) if more else None
        data = [session_dict(info) for info in shown]
        return json_response({"object": "list", "data": data, "has_more": more, "next_cursor": following})

    async def item(self, request: Request) -> Response:
        """GET reads, DELETE deletes, PATCH changes its title and where its text may go."""
        if request.method == "PATCH":
            return await self._patch(request)
        return await (self._delete(request) if request.method == "DELETE" else self._read(request))

    async def _patch(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        require_writer(caller)
        session_id = session_id_of(request)
        body = parse_json_object(await read_body(request.scope, request.receive, _MAX_BODY_BYTES))
        try:
            wire = WireSession.model_validate(body)
        except ValidationError as error:
            raise wrong_field(error) from None
        if "title" in wire.model_fields_set:
            await self._kept.set_title(caller.tenant, session_id, wire.title)
        if wire.local_only is not None:
            await self._kept.keep_here(caller.tenant, session_id, wire.local_only)
        return json_response(session_dict(await self._kept.get(caller.tenant, session_id)))

    async def fork(self, request: Request) -> Response:
        """POST: a new session with the first turns of this one."""
        caller = caller_of(request.scope)
        require_writer(caller)
        session_id = session_id_of(request)
        body = parse_json_object(await read_body(request.scope, request.receive, _MAX_BODY_BYTES))
        try:
            wire = WireFork.model_validate(body)
        except ValidationError as error:
            raise wrong_field(error) from None
        return json_response(session_dict(await self._kept.fork(caller.tenant, session_id, wire.turn, wire.id)))

    async def _read(self, request: Request) -> Response:
        tenant, session_id = caller_of(request.scope).tenant, session_id_of(request)
        after = number_of(request.query_params, "after", 0, 0, _MAX_TURN)
        limit = number_of(request.query_params, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)
        info = await self._kept.get(tenant, session_id)
        if (form := request.query_params.get("format")) is not None:
            return await self._file(info, tenant, form)
        turns = await self._kept.turns(tenant, session_id, after, limit + 1)
        answers = await self._kept.answers(tenant, session_id, max(1, after), after + limit)
        data = [kept_turn_dict(turn, answers) for turn in turns[:limit]]
        return json_response({**session_dict(info), "data": data, "has_more": len(turns) > limit})

    async def _file(self, info: SessionInfo, tenant: str, form: str) -> Response:
        """The whole session, to be saved."""
        if form not in EXPORTS:
            raise InvalidRequest("Wrong value for format.", hint="Use markdown or json.", param="format")
        turns = await self._kept.turns(tenant, info.session_id, 0, info.turns)
        answers = await self._kept.answers(tenant, info.session_id, 1, info.turns)
        data = [kept_turn_dict(turn, answers) for turn in turns]
        whole = {**session_dict(info), "data": data}
        suffix, media_type, written = EXPORTS[form]
        name = quote(f"{info.title or info.session_id}{suffix}", safe="")
        headers = {
            "content-disposition": f"attachment; filename*=utf-8''{name}",
            "x-content-type-options": "nosniff",
        }
        return Response(await asyncio.to_thread(written, whole), media_type=media_type, headers=headers)

    async def _delete(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        require_writer(caller)
        session_id = session_id_of(request)
        await self._kept.delete(caller.tenant, session_id)
        return json_response({"id": session_id, "object": "session", "deleted": True})

    async def everything(self, request: Request) -> Response:
        """DELETE: all documents and sessions of the caller's tenant, and all that was made of them."""
        caller = caller_of(request.scope)
        require_writer(caller)
        await self._service.forget_everything(caller.tenant)
        return json_response({"object": "memory", "deleted": True})

    async def search(self, request: Request) -> Response:
        """POST: the best turns of the named sessions; without names, of all of them and of all documents."""
        body = parse_json_object(await read_body(request.scope, request.receive, _MAX_BODY_BYTES))
        try:
            wire = WireSearch.model_validate(body)
        except ValidationError as error:
            raise wrong_field(error) from None
        tenant = caller_of(request.scope).tenant
        times = Times(_instant(wire.since, "since"), _instant(wire.until, "until"))
        found = await self._kept.search(tenant, wire.sessions, wire.query, wire.limit, times)
        return json_response(search_dict(found))


def session_id_of(request: Request) -> str:
    """The id in the path. Raises `NotFound` for one that no session can have."""
    session_id: str = request.path_params["session_id"]
    if not is_session_id(session_id):
        raise NotFound("There is no such session.", hint="GET /v1/sessions lists yours.", param="session")
    return session_id


def _instant(given: float | str | None, field: str) -> float | None:
    """Seconds since the epoch of a number, an ISO 8601 time, or a date: its beginning for `since`, its end for
    `until`. Without a zone it is UTC. Raises `InvalidRequest`."""
    if not isinstance(given, str):
        return given
    try:
        at = datetime.fromisoformat(given)
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        whole_day = field == "until" and len(given) <= len("2026-03-01")
        return at.timestamp() + (_DAY_S if whole_day else 0)
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"{field} is no time.", hint="Give a date like 2026-03-01, an ISO 8601 time, or seconds.", param=field
        ) from None


def search_dict(found: SearchResult) -> dict[str, Any]:
    """What a search found: see docs/api.md."""
    return {
        "object": "list",
        "data": [hit_dict(hit) for hit in found.hits],
        "kind": found.kind,
        "evidence": [hit_dict(hit) for hit in found.evidence],
        "confidence": None if found.confidence is None else round(found.confidence, 4),
        "missing": list(found.missing),
    }


def session_dict(info: SessionInfo) -> dict[str, Any]:
    return {
        "id": info.session_id,
        "object": "session",
        "title": info.title,
        "turns": info.turns,
        "created_at": info.first_at,
        "updated_at": info.last_at,
        "last_at": info.last_at,
        "local_only": info.local_only,
        "parent": None if info.parent_id is None else {"session": info.parent_id, "turn": info.parent_turn},
    }


def turn_dict(turn: SessionTurn) -> dict[str, Any]:
    return {
        "object": "session.turn",
        "session": turn.session_id,
        "turn": turn.turn,
        "speaker": turn.speaker,
        "at": turn.at,
        "text": turn.text,
    }


def kept_turn_dict(turn: SessionTurn, answers: Mapping[int, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """A turn with the files that were asked about, or with how it came about. `answers` are by their question's
    turn, which an answer to nothing doesn't have."""
    if turn.speaker != "assistant":
        _, details = answers.get(turn.turn, ("", {}))
        return {**turn_dict(turn), "files": details.get("files", []), "answer": None}
    answer = answers.get(turn.turn - 1) or answers.get(turn.turn)
    return {**turn_dict(turn), "files": [], "answer": None if answer is None else answer_dict(*answer)}


def answer_dict(key: str, details: Mapping[str, Any]) -> dict[str, Any]:
    """How an answer came about: the `perilune` object that it had, and what the dialects tell beside it."""
    kept = {name: details.get(name) for name in ("finish_reason", "total_s", "usage")}
    thought = {name: details[name] for name in ("reasoning",) if name in details}
    return {"id": f"chatcmpl-{key}", **kept, **thought, **(details.get("perilune") or {})}


def hit_dict(hit: SessionTurn | Passage) -> dict[str, Any]:
    """A found turn, or a found passage of a file."""
    if isinstance(hit, SessionTurn):
        return {**turn_dict(hit), "score": hit.score}
    return {
        "object": "file.passage",
        "file_id": hit.file_id,
        "page": hit.page,
        "start": hit.start,
        "end": hit.end,
        "text": hit.text,
        "score": hit.score,
    }
