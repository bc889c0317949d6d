"""/v1/memory/feedback: where a user found what a search or an answer had not, so that it is found next time.

Knows the wire; what a mark does is the memory's. Every call sees its caller's tenant only.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, ValidationError, model_validator
from starlette.requests import Request
from starlette.responses import Response

from perilune.api.auth import caller_of, require_writer
from perilune.api.limits import number_of, parse_json_object, read_body
from perilune.api.schema import SessionId, wrong_field
from perilune.api.wire import Wire, json_response
from perilune.core import Feedback, Span
from perilune.service.ports import ServiceApi

MAX_LIMIT = 1_000
DEFAULT_LIMIT = 100
MAX_QUESTION_CHARS = 4_000
_MAX_BODY_BYTES = 64 * 1024
_MAX_PLACE = 2**40


class WirePlace(Wire):
    """A turn of a session, or a page or character range of a file."""

    session: SessionId | None = None
    turn: int | None = Field(None, ge=1, le=_MAX_PLACE)
    file_id: str | None = Field(None, min_length=1, max_length=128)
    page: int | None = Field(None, ge=1, le=_MAX_PLACE)
    start: int | None = Field(None, ge=0, le=_MAX_PLACE)
    end: int | None = Field(None, ge=1, le=_MAX_PLACE)

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        turn = self.session is not None and self.turn is not None
        ranged = self.start is not None and self.end is not None and self.start < self.end
        part = self.file_id is not None and (self.page is not None or ranged)
        if turn == part or (self.session is not None) == (self.file_id is not None):
            raise ValueError("give session and turn, or file_id with page or with start and end")
        if not ranged and (self.start is not None or self.end is not None):
            raise ValueError("start and end are given together, start before end")
        return self

    def span(self) -> Span:
        """The place that is named."""
        return Span(self.session or self.file_id or "", self.turn, self.page, self.start, self.end)


class WireFeedback(WirePlace):
    """The body of POST: a question, and the place of its answer."""

    question: str = Field(min_length=1, max_length=MAX_QUESTION_CHARS)


class FeedbackRoutes:
    """The endpoints, as handlers of one object that holds the service."""

    def __init__(self, service: ServiceApi) -> None:
        self._kept = service.conversations

    async def collection(self, request: Request) -> Response:
        """POST marks a span, GET lists marks, the newest first."""
        return await (self._mark(request) if request.method == "POST" else self._list(request))

    async def _mark(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        require_writer(caller)
        body = parse_json_object(await read_body(request.scope, request.receive, _MAX_BODY_BYTES))
        try:
            wire = WireFeedback.model_validate(body)
        except ValidationError as error:
            raise wrong_field(error) from None
        feedback_id = await self._kept.mark(caller.tenant, wire.question, wire.span())
        return json_response({"id": feedback_id, "object": "memory.feedback"})

    async def _list(self, request: Request) -> Response:
        limit = number_of(request.query_params, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)
        found = await self._kept.marks(caller_of(request.scope).tenant, limit)
        return json_response({"object": "list", "data": [feedback_dict(each) for each in found]})

    async def item(self, request: Request) -> Response:
        """DELETE: what was marked is found as before."""
        caller = caller_of(request.scope)
        require_writer(caller)
        feedback_id: str = request.path_params["feedback_id"]
        await self._kept.unmark(caller.tenant, feedback_id)
        return json_response({"id": feedback_id, "object": "memory.feedback", "deleted": True})


def feedback_dict(feedback: Feedback) -> dict[str, Any]:
    return {
        "id": feedback.feedback_id,
        "object": "memory.feedback",
        "question": feedback.question,
        "source": feedback.source_id,
        "created_at": feedback.at,
    }
