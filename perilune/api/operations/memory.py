"""Sessions, search, profile, summaries and feedback: what is kept of a caller's conversations."""

from __future__ import annotations

from perilune.api.feedback import WireFeedback
from perilune.api.memory import WireCorrection, WireEdit
from perilune.api.operations.table import (
    CHANGING,
    COUNT,
    NUMBER,
    OBJECT,
    PAGE,
    TEXT,
    WHOLE,
    YES,
    Operation,
    Query,
    Schema,
    deleted,
    fields_of,
    limit,
    listed,
    many,
    one_of,
    or_null,
    paged,
    ref,
    shape,
    some,
    thing,
    typed,
)
from perilune.api.ratings import WireRating
from perilune.api.sessions import WireFork, WireSearch, WireSession
from perilune.core import ProfileFact, Usage

_AT = or_null(NUMBER)
_TURN: dict[str, Schema] = {"session": TEXT, "turn": COUNT, "speaker": TEXT, "at": _AT, "text": TEXT}
_SESSION: dict[str, Schema] = {
    "id": TEXT,
    "title": or_null(TEXT),
    "turns": COUNT,
    "created_at": _AT,
    "updated_at": _AT,
    "last_at": _AT,
    "local_only": YES,
    "parent": or_null(shape(session=TEXT, turn=or_null(COUNT))),
}
_PLACE: dict[str, Schema] = {"page": COUNT, "start": COUNT, "end": COUNT}
_SPOKEN: dict[str, Schema] = {"start": COUNT, "end": COUNT, "text": TEXT, "corrected": YES}
_RATING: dict[str, Schema] = {
    "id": TEXT,
    "created_at": WHOLE,
    "answer_id": TEXT,
    "rating": one_of("up", "down"),
    "reason": or_null(TEXT),
    "comment": or_null(TEXT),
    "span": or_null(
        some(
            shape({"start": COUNT, "end": COUNT}, session=TEXT, turn=COUNT),
            shape(_PLACE, file_id=TEXT),
        )
    ),
    "kept": YES,
    "session": or_null(TEXT),
    "turn": or_null(COUNT),
}

SCHEMAS: dict[str, Schema] = {
    "Session": thing("session", **_SESSION),
    "Turn": thing(
        "session.turn",
        **_TURN,
        files=many(TEXT),
        answer=or_null(
            {
                "description": "Its perilune object, as far as it is known; `gone`: what it cites was deleted.",
                "type": "object",
                "properties": {
                    "id": TEXT,
                    "finish_reason": or_null(TEXT),
                    "total_s": or_null(NUMBER),
                    "usage": or_null(shape(**fields_of(Usage))),
                    "reasoning": TEXT,
                },
                "required": ["id", "finish_reason", "total_s", "usage"],
            }
        ),
    ),
    "Hit": some(
        thing("session.turn", **_TURN, score=NUMBER),
        thing("file.passage", file_id=TEXT, **_PLACE, text=TEXT, score=NUMBER),
    ),
    "Profile": thing(
        "profile",
        data=many(
            shape(
                key=TEXT,
                value=TEXT,
                since=NUMBER,
                until=_AT,
                written_at=NUMBER,
                session=or_null(TEXT),
                turn=or_null(COUNT),
                start=or_null(COUNT),
                end=or_null(COUNT),
            )
        ),
    ),
    "Summary": thing(
        "summary",
        data=many(
            some(
                shape(session=TEXT, turn=COUNT, speaker=TEXT, **_SPOKEN),
                shape(file_id=TEXT, page=COUNT, **_SPOKEN),
            )
        ),
    ),
    "Rating": thing("feedback", **_RATING),
    "RatingLine": thing(
        "feedback",
        **_RATING,
        question=or_null(TEXT),
        answer=or_null(TEXT),
        model=or_null(TEXT),
        citations=or_null(many(OBJECT)),
        expected=or_null(TEXT),
    ),
    "MemoryLine": some(
        typed("profile.fact", **fields_of(ProfileFact)),
        typed(
            "summary.correction",
            source=TEXT,
            entry=COUNT,
            start=COUNT,
            end=COUNT,
            text=or_null(TEXT),
            written_at=NUMBER,
        ),
        typed("file", id=TEXT, filename=TEXT, bytes=COUNT, sha256=TEXT, created_at=NUMBER, status=TEXT),
        typed("turn", **_TURN),
    ),
}

_ONE = "/v1/sessions/{session_id}"
_STATES = (404, 409)
_FOUND = listed(
    ref("Hit"),
    kind=one_of("lookup", "order", "count", "whole"),
    evidence=many(ref("Hit")),
    confidence=or_null(NUMBER),
    missing=many(TEXT),
)
_MARK = thing("memory.feedback", id=TEXT, question=TEXT, source=TEXT, created_at=NUMBER)
_READING = (
    Query("after", {"type": "integer", "minimum": 0, "maximum": 999_999_999}),
    limit(1000),
    Query("format", one_of("markdown", "json")),
)
_RATED = (*PAGE, Query("rating", one_of("up", "down")), Query("answer_id", TEXT), Query("session", TEXT))

SESSIONS: tuple[Operation, ...] = (
    Operation(
        "GET",
        "/v1/sessions",
        "List sessions",
        listed(ref("Session"), has_more=YES, next_cursor=or_null(TEXT)),
        queries=(limit(1000), Query("cursor", TEXT)),
    ),
    Operation(
        "GET",
        _ONE,
        "A session's turns, or the session as a file",
        shape({"has_more": YES}, object={"const": "session"}, **_SESSION, data=many(ref("Turn"))),
        texts=("text/markdown",),
        queries=_READING,
    ),
    Operation("PATCH", _ONE, "Change title or place", ref("Session"), WireSession, fails=_STATES),
    Operation("DELETE", _ONE, "Delete a session and all made of it", deleted("session"), fails=_STATES),
    Operation("POST", f"{_ONE}/fork", "Take its first turns over", ref("Session"), WireFork, fails=_STATES),
)

MEMORY: tuple[Operation, ...] = (
    Operation(
        "DELETE",
        "/v1/memory",
        "Delete all that is kept of the tenant",
        thing("memory", deleted={"const": True}),
        fails=_STATES,
    ),
    Operation("POST", "/v1/memory/search", "Search turns and documents", _FOUND, WireSearch),
    Operation(
        "GET", "/v1/memory/profile", "What is known of the user", ref("Profile"), queries=(Query("history", YES),)
    ),
    Operation("PATCH", "/v1/memory/profile", "Set or erase keys", ref("Profile"), WireEdit),
    Operation(
        "DELETE",
        "/v1/memory/profile",
        "Erase a key, or all",
        thing("profile", deleted={"const": True}, statements=COUNT),
        queries=(Query("key", TEXT),),
    ),
    Operation(
        "GET",
        "/v1/memory/summary",
        "A rolling summary",
        ref("Summary"),
        queries=(Query("session", TEXT), Query("file_id", TEXT)),
        fails=_STATES,
    ),
    Operation("PATCH", "/v1/memory/summary", "Correct a sentence", ref("Summary"), WireCorrection, fails=_STATES),
    Operation("GET", "/v1/memory/export", "Everything kept of the user", lines="MemoryLine"),
    Operation("GET", "/v1/memory/feedback", "Places that a search missed", listed(_MARK), queries=(limit(1000),)),
    Operation(
        "POST",
        "/v1/memory/feedback",
        "Where a search should have looked",
        thing("memory.feedback", id=TEXT),
        WireFeedback,
        fails=CHANGING,
    ),
    Operation("DELETE", "/v1/memory/feedback/{feedback_id}", "Take it back", deleted("memory.feedback")),
)

FEEDBACK: tuple[Operation, ...] = (
    Operation("GET", "/v1/feedback", "Ratings of answers", paged(ref("Rating")), queries=_RATED),
    Operation("POST", "/v1/feedback", "Rate an answer", ref("Rating"), WireRating, fails=CHANGING),
    Operation("GET", "/v1/feedback/export", "All ratings", lines="RatingLine"),
    Operation("GET", "/v1/feedback/{feedback_id}", "A rating", ref("Rating")),
    Operation("DELETE", "/v1/feedback/{feedback_id}", "Take a rating back", deleted("feedback")),
)
