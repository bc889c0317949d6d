"""/v1/feedback: thumbs, a reason and the right place for an answer of any dialect (spec O9).

Knows the wire; what a rating does is the memory's. Every call sees its caller's tenant only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

import orjson
from pydantic import Field, ValidationError
from starlette.concurrency import iterate_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from perilune.api.auth import caller_of, require_writer
from perilune.api.feedback import MAX_QUESTION_CHARS, WirePlace
from perilune.api.limits import parse_json_object, read_body
from perilune.api.paging import list_dict, part_of
from perilune.api.schema import wrong_field
from perilune.api.wire import Wire, json_response
from perilune.core import Span
from perilune.errors import InvalidRequest
from perilune.memory.ratings import Chosen, NewRating, RatedAnswer, Rating
from perilune.service.ports import ServiceApi

MAX_COMMENT_CHARS = 2_000
_MAX_BODY_BYTES = 64 * 1024

Thumb = Literal["up", "down"]
Reason = Literal[
    "incorrect", "incomplete", "not_found", "wrong_source", "off_topic", "style", "slow", "unsafe", "other"
]
AnswerId = Annotated[str, Field(pattern=r"^(chatcmpl-|cmpl-|resp_|msg_)[A-Za-z0-9]{1,48}$")]


class WireRating(Wire):
    """The body of POST."""

    answer_id: AnswerId
    rating: Thumb
    reason: Reason | None = None
    comment: str | None = Field(None, min_length=1, max_length=MAX_COMMENT_CHARS)
    span: WirePlace | None = None
    question: str | None = Field(None, min_length=1, max_length=MAX_QUESTION_CHARS)


class RatingRoutes:
    """The endpoints, as handlers of one object that holds the service."""

    def __init__(self, service: ServiceApi) -> None:
        self._kept = service.feedback

    async def collection(self, request: Request) -> Response:
        """POST rates an answer, GET lists ratings."""
        return await (self._rate(request) if request.method == "POST" else self._list(request))

    async def _rate(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        require_writer(caller)
        body = parse_json_object(await read_body(request.scope, request.receive, _MAX_BODY_BYTES))
        try:
            wire = WireRating.model_validate(body)
        except ValidationError as error:
            raise wrong_field(error) from None
        span = wire.span.span() if wire.span is not None else None
        given = NewRating(wire.answer_id, wire.rating, wire.reason, wire.comment, span, wire.question)
        return json_response(rating_dict(await self._kept.put(caller.tenant, given)))

    async def _list(self, request: Request) -> Response:
        query = request.query_params
        rating = query.get("rating")
        if rating not in (None, *get_args(Thumb)):
            raise InvalidRequest("Wrong value for rating.", hint="Use up or down.", param="rating")
        chosen = Chosen(rating, query.get("answer_id"), query.get("session"))
        found, more = await self._kept.part(caller_of(request.scope).tenant, chosen, part_of(query))
        return json_response(list_dict([rating_dict(each) for each in found], more))

    async def item(self, request: Request) -> Response:
        """GET retrieves, DELETE deletes, and the search forgets the span."""
        caller, rating_id = caller_of(request.scope), request.path_params["feedback_id"]
        if request.method == "GET":
            return json_response(rating_dict(await self._kept.get(caller.tenant, rating_id)))
        require_writer(caller)
        await self._kept.delete(caller.tenant, rating_id)
        return json_response({"id": rating_id, "object": "feedback", "deleted": True})

    async def export(self, request: Request) -> Response:
        """One JSON object a line, oldest first: evaluation data."""
        found = await self._kept.export(caller_of(request.scope).tenant)
        headers = {"content-disposition": 'attachment; filename="feedback.jsonl"'}
        return StreamingResponse(
            iterate_in_threadpool(_lines(found)), media_type="application/jsonl", headers=headers
        )


def rating_dict(rating: Rating) -> dict[str, Any]:
    return {
        "id": rating.rating_id,
        "object": "feedback",
        "created_at": int(rating.created_at),
        "answer_id": rating.answer_id,
        "rating": rating.rating,
        "reason": rating.reason,
        "comment": rating.comment,
        "span": _span_dict(rating.span) if rating.span is not None else None,
        "kept": rating.kept,
        "session": rating.session_id,
        "turn": rating.turn,
    }


def _span_dict(span: Span) -> dict[str, Any]:
    """As it was given: a place in a file, or in a session."""
    named = {"session": span.source_id, "turn": span.turn} if span.turn is not None else {"file_id": span.source_id}
    place = {"page": span.page, "start": span.start, "end": span.end}
    return named | {name: value for name, value in place.items() if value is not None}


def _lines(found: Iterator[tuple[Rating, RatedAnswer]]) -> Iterator[bytes]:
    for rating, answer in found:
        kept = {
            "question": answer.question,
            "answer": answer.answer,
            "model": answer.model,
            "citations": list(answer.citations) if rating.kept else None,
            "expected": answer.expected,
        }
        yield orjson.dumps(rating_dict(rating) | kept, option=orjson.OPT_APPEND_NEWLINE)
