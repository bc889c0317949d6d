"""Every operation of the HTTP API as data: what it takes, what it answers, how it can fail.

Knows wire models and shapes; openapi.py makes the document of it. A test compares the table with the routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from perilune.api.batches import WireBatch
from perilune.api.completions import WireCompletion
from perilune.api.conversations import WireConversationUpdate, WireNewConversation, WireNewItems
from perilune.api.embeddings import WireEmbedding
from perilune.api.feedback import WireFeedback
from perilune.api.memory import WireCorrection, WireEdit
from perilune.api.messages_request import WireMessages
from perilune.api.ratings import WireRating
from perilune.api.responses_compact import WireCompactBody
from perilune.api.responses_request import WireResponse
from perilune.api.schema import WireChat
from perilune.api.sessions import WireFork, WireSession
from perilune.api.sessions import WireSearch as WireMemorySearch
from perilune.api.uploads import WireComplete, WireUpload
from perilune.api.vector_store_schema import (
    WireFileBatch,
    WireFileChanges,
    WireNewStore,
    WireSearch,
    WireStoreChanges,
    WireStoreFile,
)

Schema = Mapping[str, Any]
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
YES: Schema = {"type": "boolean"}
ANY: Schema = {}
OBJECT: Schema = {"type": "object"}

USUAL = (400, 401, 403, 408, 413, 431, 500, 503)
"""What any request can meet: a fault of its own, no key, no right, a limit, a server that starts or fails."""

ANSWERING = (404, 409, 422, 429, 502)
"""And one that asks a model: an unknown model or id, a state that forbids it, a document, a limit, a backend."""


def shape(kind: str | None = None, **fields: Schema) -> Schema:
    """An object with these fields, all of them there, and others."""
    found: dict[str, Schema] = ({"object": {"const": kind}} if kind else {}) | fields
    return {"type": "object", "properties": found, "required": list(found)}


def listed(item: Schema, *more: str) -> Schema:
    fields: dict[str, Schema] = {"data": {"type": "array", "items": item}, **dict.fromkeys(more, ANY)}
    return shape("list", **fields)


def deleted(kind: str) -> Schema:
    return shape(kind, deleted={"const": True})


@dataclass(frozen=True, slots=True)
class Query:
    name: str
    schema: Schema
    required: bool = False


LIMIT, ORDER = (
    Query("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
    Query("order", {"enum": ["asc", "desc"]}),
)
PAGE = (LIMIT, ORDER, Query("after", TEXT), Query("before", TEXT))
PAGED = ("first_id", "last_id", "has_more")


@dataclass(frozen=True, slots=True)
class Operation:
    """`answers` maps a media type to its schema; `stream` says that `stream: true` answers with events instead.
    `form` is a multipart body. `may_be_empty`: the body may be left out."""

    method: str
    path: str
    summary: str
    answers: Mapping[str, Schema]
    body: type[BaseModel] | None = None
    form: Schema | None = None
    may_be_empty: bool = False
    stream: bool = False
    queries: tuple[Query, ...] = ()
    fails: tuple[int, ...] = (404,)
    open: bool = False
    headers: tuple[str, ...] = field(default=())


def json_of(schema: Schema) -> Mapping[str, Schema]:
    return {"application/json": schema}


CHAT = shape("chat.completion", id=TEXT, created=WHOLE, model=TEXT, choices={"type": "array"}, usage=OBJECT)
COMPLETION = shape("text_completion", id=TEXT, created=WHOLE, model=TEXT, choices={"type": "array"}, usage=OBJECT)
RESPONSE = shape("response", id=TEXT, created_at=WHOLE, model=TEXT, status=TEXT, output={"type": "array"})
MESSAGE = shape(
    id=TEXT,
    type={"const": "message"},
    role={"const": "assistant"},
    model=TEXT,
    content={"type": "array"},
    usage=OBJECT,
)
CONVERSATION = shape("conversation", id=TEXT, created_at=WHOLE, metadata=OBJECT)
FILE = shape("file", id=TEXT, bytes=WHOLE, created_at=WHOLE, filename=TEXT, purpose=TEXT, status=TEXT)
UPLOAD = shape("upload", id=TEXT, bytes=WHOLE, created_at=WHOLE, filename=TEXT, purpose=TEXT, status=TEXT)
BATCH = shape(
    "batch", id=TEXT, endpoint=TEXT, status=TEXT, input_file_id=TEXT, created_at=WHOLE, request_counts=OBJECT
)
STORE = shape("vector_store", id=TEXT, created_at=WHOLE, status=TEXT, file_counts=OBJECT)
STORE_FILE = shape("vector_store.file", id=TEXT, created_at=WHOLE, vector_store_id=TEXT, status=TEXT)
STORE_BATCH = shape("vector_store.files_batch", id=TEXT, created_at=WHOLE, status=TEXT, file_counts=OBJECT)
SESSION = shape("session", id=TEXT)
MODEL = shape("model", id=TEXT, created=WHOLE, owned_by=TEXT)
LINES: Mapping[str, Schema] = {"application/jsonl": TEXT}


def _answering() -> list[Operation]:
    post, fails = "POST", ANSWERING
    return [
        Operation(post, "/v1/chat/completions", "Answer a chat", json_of(CHAT), WireChat, stream=True, fails=fails),
        Operation(
            "GET",
            "/v1/chat/completions/{completion_id}",
            "The rest of a resumable stream",
            {"text/event-stream": TEXT},
            queries=(Query("starting_after", {"type": "integer", "minimum": -1}),),
        ),
        Operation(
            "DELETE",
            "/v1/chat/completions/{completion_id}",
            "Stop a resumable stream",
            json_of(deleted("chat.completion.deleted")),
        ),
        Operation(
            post,
            "/v1/completions",
            "Continue a text",
            json_of(COMPLETION),
            WireCompletion,
            stream=True,
            fails=fails,
        ),
        *[
            Operation(
                post,
                f"{root}/v1/messages",
                "Answer in Anthropic's dialect",
                json_of(MESSAGE),
                WireMessages,
                stream=True,
                fails=fails,
            )
            for root in ("", "/anthropic")
        ],
        *[
            Operation(
                post,
                f"{root}/v1/messages/count_tokens",
                "Tokens of a prompt, in Anthropic's dialect",
                json_of(shape(input_tokens=WHOLE)),
                WireMessages,
                fails=fails,
            )
            for root in ("", "/anthropic")
        ],
        Operation(
            post, "/v1/responses", "Answer, and keep it", json_of(RESPONSE), WireResponse, stream=True, fails=fails
        ),
        Operation(
            "GET",
            "/v1/responses/{response_id}",
            "A kept answer, or the rest of its stream",
            {**json_of(RESPONSE), "text/event-stream": TEXT},
            fails=(404, 409),
            queries=(Query("stream", YES), Query("starting_after", {"type": "integer", "minimum": 0})),
        ),
        Operation("DELETE", "/v1/responses/{response_id}", "Forget a kept answer", json_of(deleted("response"))),
        Operation(
            post,
            "/v1/responses/{response_id}/cancel",
            "Stop an answer in the background",
            json_of(RESPONSE),
            fails=(404, 409),
        ),
        Operation(
            "GET",
            "/v1/responses/{response_id}/input_items",
            "What was asked",
            json_of(listed(OBJECT, *PAGED)),
            queries=(LIMIT, ORDER, Query("after", TEXT)),
        ),
        Operation(
            post,
            "/v1/responses/input_tokens",
            "Tokens of a prompt",
            json_of(shape("response.input_tokens", input_tokens=WHOLE)),
            WireResponse,
            fails=fails,
        ),
        Operation(
            post,
            "/v1/responses/compact",
            "Make a conversation shorter",
            json_of(shape("response.compaction")),
            WireCompactBody,
            fails=fails,
        ),
        Operation(
            post,
            "/v1/conversations",
            "Begin a conversation",
            json_of(CONVERSATION),
            WireNewConversation,
            may_be_empty=True,
            fails=(404, 422),
        ),
        Operation("GET", "/v1/conversations/{conversation_id}", "A conversation", json_of(CONVERSATION)),
        Operation(
            post,
            "/v1/conversations/{conversation_id}",
            "Change its metadata",
            json_of(CONVERSATION),
            WireConversationUpdate,
        ),
        Operation(
            "DELETE",
            "/v1/conversations/{conversation_id}",
            "Delete a conversation",
            json_of(deleted("conversation.deleted")),
        ),
        Operation(
            "GET",
            "/v1/conversations/{conversation_id}/items",
            "Its items",
            json_of(listed(OBJECT, *PAGED)),
            queries=(LIMIT, ORDER, Query("after", TEXT)),
        ),
        Operation(
            post,
            "/v1/conversations/{conversation_id}/items",
            "Add items",
            json_of(listed(OBJECT, *PAGED)),
            WireNewItems,
            fails=(404, 409, 422),
        ),
        Operation("GET", "/v1/conversations/{conversation_id}/items/{item_id}", "One item", json_of(OBJECT)),
        Operation(
            "DELETE", "/v1/conversations/{conversation_id}/items/{item_id}", "Delete an item", json_of(CONVERSATION)
        ),
        Operation(
            post,
            "/v1/embeddings",
            "Vectors of texts",
            json_of(listed(shape("embedding", index=WHOLE, embedding=ANY), "model", "usage")),
            WireEmbedding,
            fails=fails,
        ),
        Operation(
            post,
            "/v1/tokenizers/estimate-token-count",
            "Tokens of a chat, in Moonshot's dialect",
            json_of(shape(data=shape(total_tokens=WHOLE))),
            WireChat,
            fails=fails,
        ),
        Operation(
            post,
            "/v1/estimate",
            "How a chat would be answered, and how soon",
            json_of(shape("estimate", model=TEXT, plan=TEXT, predicted_ttft_s=NUMBER)),
            WireChat,
            fails=fails,
        ),
    ]


def _files() -> list[Operation]:
    form = {
        "type": "object",
        "properties": {"file": {"type": "string", "format": "binary"}, "purpose": TEXT, "local_only": TEXT},
        "required": ["file"],
    }
    part = {"type": "object", "properties": {"data": {"type": "string", "format": "binary"}}, "required": ["data"]}
    listing = (
        Query("limit", {"type": "integer", "minimum": 1, "maximum": 10_000}),
        ORDER,
        Query("after", TEXT),
        Query("purpose", TEXT),
    )
    fails = (404, 409)
    return [
        Operation("POST", "/v1/files", "Upload a file", json_of(FILE), form=form, fails=(409, 422)),
        Operation("GET", "/v1/files", "List files", json_of(listed(FILE, *PAGED)), queries=listing, fails=()),
        Operation("GET", "/v1/files/{file_id}", "A file and its ingest", json_of(FILE)),
        Operation(
            "DELETE",
            "/v1/files/{file_id}",
            "Delete a file and all made of it",
            json_of(deleted("file")),
            fails=fails,
        ),
        Operation(
            "GET",
            "/v1/files/{file_id}/content",
            "The file, or its text",
            {"application/octet-stream": TEXT, "text/plain": TEXT},
            queries=(Query("format", {"enum": ["raw", "text"]}),),
            fails=(404, 409, 422),
        ),
        Operation(
            "GET",
            "/v1/files/{file_id}/pages/{page}",
            "One page's text",
            json_of(shape("file.page", page=WHOLE)),
            fails=(404, 409, 422),
        ),
        Operation(
            "GET",
            "/v1/files/{file_id}/pages/{page}/image",
            "A picture of a page",
            {"image/png": TEXT},
            queries=(Query("width", {"type": "integer", "minimum": 100, "maximum": 2000}),),
            fails=(404, 409, 422),
        ),
        Operation("POST", "/v1/uploads", "Begin an upload in parts", json_of(UPLOAD), WireUpload, fails=(409, 422)),
        Operation(
            "POST",
            "/v1/uploads/{upload_id}/parts",
            "Send a part",
            json_of(shape("upload.part", id=TEXT)),
            form=part,
            fails=fails,
        ),
        Operation(
            "POST",
            "/v1/uploads/{upload_id}/complete",
            "Make the parts a file",
            json_of(UPLOAD),
            WireComplete,
            fails=(404, 409, 422),
        ),
        Operation("POST", "/v1/uploads/{upload_id}/cancel", "Drop an upload", json_of(UPLOAD), fails=fails),
        Operation(
            "GET",
            "/v1/batches",
            "List batches",
            json_of(listed(BATCH, *PAGED)),
            queries=(LIMIT, Query("after", TEXT)),
            fails=(404,),
        ),
        Operation("POST", "/v1/batches", "Begin a batch", json_of(BATCH), WireBatch, fails=(404, 409, 422, 429)),
        Operation("GET", "/v1/batches/{batch_id}", "A batch", json_of(BATCH)),
        Operation("POST", "/v1/batches/{batch_id}/cancel", "Cancel a batch", json_of(BATCH), fails=fails),
    ]


def _stores() -> list[Operation]:
    root, one = "/v1/vector_stores", "/v1/vector_stores/{vector_store_id}"
    file, batch = f"{one}/files/{{file_id}}", f"{one}/file_batches/{{batch_id}}"
    states = (*PAGE, Query("filter", {"enum": ["in_progress", "completed", "failed", "cancelled"]}))
    found = {
        "type": "object",
        "properties": {"data": {"type": "array"}},
        "required": ["object", "data", "has_more"],
    }
    fails = (404, 409, 422)
    return [
        Operation("GET", root, "List vector stores", json_of(listed(STORE, *PAGED)), queries=PAGE),
        Operation(
            "POST", root, "Make a vector store", json_of(STORE), WireNewStore, may_be_empty=True, fails=fails
        ),
        Operation("GET", one, "A vector store", json_of(STORE)),
        Operation("POST", one, "Change it", json_of(STORE), WireStoreChanges, may_be_empty=True, fails=fails),
        Operation("DELETE", one, "Delete it; files stay", json_of(deleted("vector_store.deleted"))),
        Operation("POST", f"{one}/search", "Search its files", json_of(found), WireSearch, fails=fails),
        Operation("GET", f"{one}/files", "Its files", json_of(listed(STORE_FILE, *PAGED)), queries=states),
        Operation("POST", f"{one}/files", "Add a file", json_of(STORE_FILE), WireStoreFile, fails=fails),
        Operation("GET", file, "A file of it", json_of(STORE_FILE)),
        Operation("POST", file, "Change a file's attributes", json_of(STORE_FILE), WireFileChanges, fails=fails),
        Operation("DELETE", file, "Take a file out", json_of(deleted("vector_store.file.deleted"))),
        Operation("GET", f"{file}/content", "A file's text", json_of(found), fails=fails),
        Operation("POST", f"{one}/file_batches", "Add files", json_of(STORE_BATCH), WireFileBatch, fails=fails),
        Operation("GET", batch, "How adding goes", json_of(STORE_BATCH)),
        Operation("POST", f"{batch}/cancel", "Stop adding", json_of(STORE_BATCH), fails=fails),
        Operation(
            "GET", f"{batch}/files", "The files that are added", json_of(listed(STORE_FILE, *PAGED)), queries=states
        ),
    ]


def _memory() -> list[Operation]:
    session, source = "/v1/sessions/{session_id}", (Query("session", TEXT), Query("file_id", TEXT))
    turns = (
        Query("after", {"type": "integer", "minimum": 0, "maximum": 999_999_999}),
        Query("limit", {"type": "integer", "minimum": 1, "maximum": 1000}),
        Query("format", {"enum": ["markdown", "json"]}),
    )
    return [
        Operation(
            "GET",
            "/v1/sessions",
            "List sessions",
            json_of(listed(SESSION, "has_more", "next_cursor")),
            queries=(Query("limit", {"type": "integer", "minimum": 1, "maximum": 1000}), Query("cursor", TEXT)),
        ),
        Operation(
            "GET",
            session,
            "A session's turns, or the session as a file",
            {**json_of(OBJECT), "text/markdown": TEXT},
            queries=turns,
        ),
        Operation("PATCH", session, "Change title or place", json_of(SESSION), WireSession, fails=(404, 409)),
        Operation(
            "DELETE", session, "Delete a session and all made of it", json_of(deleted("session")), fails=(404, 409)
        ),
        Operation(
            "POST", f"{session}/fork", "Take its first turns over", json_of(SESSION), WireFork, fails=(404, 409)
        ),
        Operation(
            "DELETE",
            "/v1/memory",
            "Delete all that is kept of the tenant",
            json_of(deleted("memory")),
            fails=(404, 409),
        ),
        Operation("POST", "/v1/memory/search", "Search turns and documents", json_of(OBJECT), WireMemorySearch),
        Operation(
            "GET",
            "/v1/memory/profile",
            "What is known of the user",
            json_of(shape("profile", data={"type": "array"})),
            queries=(Query("history", YES),),
            fails=(404,),
        ),
        Operation(
            "PATCH",
            "/v1/memory/profile",
            "Set or erase keys",
            json_of(shape("profile", data={"type": "array"})),
            WireEdit,
        ),
        Operation(
            "DELETE",
            "/v1/memory/profile",
            "Erase a key, or all",
            json_of(deleted("profile")),
            queries=(Query("key", TEXT),),
        ),
        Operation(
            "GET",
            "/v1/memory/summary",
            "A rolling summary",
            json_of(shape("summary", data={"type": "array"})),
            queries=source,
            fails=(404, 409),
        ),
        Operation(
            "PATCH", "/v1/memory/summary", "Correct a sentence", json_of(OBJECT), WireCorrection, fails=(404, 409)
        ),
        Operation("GET", "/v1/memory/export", "Everything kept of the user", LINES),
        Operation(
            "GET",
            "/v1/memory/feedback",
            "Places that a search missed",
            json_of(listed(OBJECT)),
            queries=(Query("limit", {"type": "integer", "minimum": 1, "maximum": 1000}),),
        ),
        Operation(
            "POST",
            "/v1/memory/feedback",
            "Where a search should have looked",
            json_of(shape("memory.feedback", id=ANY)),
            WireFeedback,
            fails=(404, 409, 422),
        ),
        Operation(
            "DELETE", "/v1/memory/feedback/{feedback_id}", "Take it back", json_of(deleted("memory.feedback"))
        ),
        Operation(
            "GET",
            "/v1/feedback",
            "Ratings of answers",
            json_of(listed(OBJECT, *PAGED)),
            queries=(
                *PAGE,
                Query("rating", {"enum": ["up", "down"]}),
                Query("answer_id", TEXT),
                Query("session", TEXT),
            ),
        ),
        Operation("POST", "/v1/feedback", "Rate an answer", json_of(OBJECT), WireRating, fails=(404, 409, 422)),
        Operation("GET", "/v1/feedback/export", "All ratings", LINES),
        Operation("GET", "/v1/feedback/{feedback_id}", "A rating", json_of(OBJECT)),
        Operation("DELETE", "/v1/feedback/{feedback_id}", "Take a rating back", json_of(deleted("feedback"))),
    ]


def _running() -> list[Operation]:
    return [
        Operation("GET", "/v1/models", "What can be asked", json_of(listed(MODEL)), fails=()),
        Operation("GET", "/v1/models/{model}", "A model", json_of(MODEL)),
        Operation(
            "GET",
            "/v1/users/me/balance",
            "What a key may still spend, in Moonshot's dialect",
            json_of(shape(code=WHOLE, data=shape(available_balance=NUMBER, cash_balance=NUMBER), status=YES)),
            fails=(),
        ),
        Operation("GET", "/v1/backends", "Backends and their state", json_of(listed(OBJECT)), fails=()),
        Operation("GET", "/v1/machine", "What this machine offers", json_of(OBJECT), fails=()),
        Operation(
            "GET",
            "/v1/kv/health",
            "KV and attention",
            json_of(OBJECT),
            queries=(Query("steps", {"type": "integer", "minimum": 0, "maximum": 256}),),
            fails=(),
        ),
        Operation(
            "PUT", "/v1/kv/attention_debug", "Measure decode steps, or stop", json_of(shape(on=YES)), fails=()
        ),
        Operation(
            "GET", "/health", "Whether the process answers", json_of(shape(status=TEXT)), fails=(), open=True
        ),
        Operation("GET", "/ready", "Whether it can be asked", json_of(shape(status=TEXT)), fails=(), open=True),
        Operation("GET", "/version", "The version", json_of(shape(version=TEXT)), fails=(), open=True),
        Operation("GET", "/openapi.json", "This document", json_of(OBJECT), fails=(), open=True),
        Operation("GET", "/metrics", "Prometheus' metrics", {"text/plain": TEXT}, fails=()),
    ]


OPERATIONS: tuple[Operation, ...] = (*_answering(), *_files(), *_stores(), *_memory(), *_running())
