"""OpenAI's Responses and Conversations: answers that are kept, and items that answers go on from."""

from __future__ import annotations

from perilune.api.conversations import WireConversationUpdate, WireNewConversation, WireNewItems
from perilune.api.operations.table import (
    AFTER,
    ANSWERING,
    ANY,
    CHANGING,
    COUNT,
    NONE,
    NULL,
    NUMBER,
    OBJECT,
    ORDER,
    TEXT,
    WHOLE,
    YES,
    Operation,
    Query,
    Schema,
    deleted,
    event,
    limit,
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
from perilune.api.responses_compact import WireCompactBody
from perilune.api.responses_request import WireResponse

_STATUS = one_of("queued", "in_progress", "completed", "incomplete", "failed", "cancelled")
_ITEM_STATUS = one_of("in_progress", "completed", "incomplete")
_METADATA: Schema = {"type": "object", "additionalProperties": TEXT}
_ATTRIBUTES: Schema = {"type": "object", "additionalProperties": some(TEXT, NUMBER, YES)}
_REASONING_PART = typed("reasoning_text", text=TEXT)
_PLACE: dict[str, Schema] = {"item_id": TEXT, "output_index": COUNT, "content_index": COUNT}
_CALL: dict[str, Schema] = {"item_id": TEXT, "output_index": COUNT}
_HIDDEN: dict[str, Schema] = {"obfuscation": TEXT}
_WHOLE_RESPONSE: dict[str, Schema] = {"response": ref("Response")}
_ITEM: dict[str, Schema] = {"output_index": COUNT, "item": ref("OutputItem")}
_SEARCHED = dict.fromkeys(("in_progress", "searching", "completed"), _CALL)
_PART: dict[str, Schema] = {**_PLACE, "part": some(ref("OutputText"), _REASONING_PART)}

_EVENTS: dict[str, tuple[dict[str, Schema], dict[str, Schema]]] = {
    **{name: (_WHOLE_RESPONSE, {}) for name in ("created", "queued", "in_progress", "completed")},
    **{name: (_WHOLE_RESPONSE, {}) for name in ("incomplete", "failed")},
    "output_item.added": (_ITEM, {}),
    "output_item.done": (_ITEM, {}),
    "compaction.compacting": (_CALL, {}),
    **{f"file_search_call.{stage}": (fields, {}) for stage, fields in _SEARCHED.items()},
    "content_part.added": (_PART, {}),
    "content_part.done": (_PART, {}),
    "reasoning_text.delta": ({**_PLACE, "delta": TEXT}, _HIDDEN),
    "reasoning_text.done": ({**_PLACE, "text": TEXT}, {}),
    "output_text.delta": ({**_PLACE, "delta": TEXT, "logprobs": many(ref("TokenLogprob"))}, _HIDDEN),
    "output_text.done": ({**_PLACE, "text": TEXT, "logprobs": many(ref("TokenLogprob"))}, {}),
    "output_text.annotation.added": ({**_PLACE, "annotation_index": COUNT, "annotation": ref("FileCitation")}, {}),
    "function_call_arguments.delta": ({**_CALL, "delta": TEXT}, _HIDDEN),
    "function_call_arguments.done": ({**_CALL, "name": TEXT, "arguments": TEXT}, {}),
}
"""Event, without `response.` -> what it tells beside its number, and what it may tell."""


def _event(name: str, fields: dict[str, Schema], optional: dict[str, Schema]) -> Schema:
    return event(typed(name, optional, sequence_number=COUNT, **fields), name)


SCHEMAS: dict[str, Schema] = {
    "ResponseUsage": shape(
        input_tokens=COUNT,
        input_tokens_details=shape(cached_tokens=COUNT),
        output_tokens=COUNT,
        output_tokens_details=shape(reasoning_tokens=COUNT),
        total_tokens=COUNT,
    ),
    "FileCitation": typed(
        "file_citation",
        file_id=TEXT,
        filename=TEXT,
        index=COUNT,
        page=COUNT,
        start=COUNT,
        end=COUNT,
        quote=TEXT,
    ),
    "OutputText": typed(
        "output_text", text=TEXT, annotations=many(ref("FileCitation")), logprobs=many(ref("TokenLogprob"))
    ),
    "Compaction": typed("compaction", id=TEXT, encrypted_content=TEXT),
    "OutputItem": some(
        typed(
            "message", id=TEXT, status=_ITEM_STATUS, role={"const": "assistant"}, content=many(ref("OutputText"))
        ),
        typed(
            "reasoning",
            id=TEXT,
            status=_ITEM_STATUS,
            summary=NONE,
            content=many(_REASONING_PART),
        ),
        typed("function_call", id=TEXT, status=_ITEM_STATUS, call_id=TEXT, name=TEXT, arguments=TEXT),
        typed(
            "file_search_call",
            id=TEXT,
            status=_ITEM_STATUS,
            queries=many(TEXT),
            results=or_null(
                many(
                    shape(
                        file_id=TEXT,
                        filename=TEXT,
                        score=NUMBER,
                        attributes=_ATTRIBUTES,
                        text=TEXT,
                        page=COUNT,
                        start=COUNT,
                        end=COUNT,
                    )
                )
            ),
        ),
        ref("Compaction"),
    ),
    "ItemPart": shape(
        {"text": or_null(TEXT), "file_id": or_null(TEXT), "refusal": or_null(TEXT), "annotations": many(OBJECT)},
        type=TEXT,
    ),
    "InputItem": shape(
        {
            "status": ANY,
            "role": or_null(one_of("user", "assistant", "system", "developer")),
            **dict.fromkeys(("content", "output", "summary"), some(TEXT, many(ref("ItemPart")), NULL)),
            **dict.fromkeys(("call_id", "name", "arguments", "encrypted_content"), or_null(TEXT)),
        },
        type=TEXT,
        id=TEXT,
    ),
    "Item": some(ref("InputItem"), ref("OutputItem")),
    "Response": thing(
        "response",
        {"completed_at": WHOLE, "perilune": ref("PeriluneObject")},
        id=TEXT,
        created_at=WHOLE,
        status=_STATUS,
        error=or_null(shape(code=TEXT, message=TEXT)),
        incomplete_details=or_null(shape(reason={"const": "max_output_tokens"})),
        model=TEXT,
        output=many(ref("OutputItem")),
        service_tier=one_of("default", "flex", "batch"),
        usage=or_null(ref("ResponseUsage")),
        instructions=or_null(TEXT),
        max_output_tokens=or_null(COUNT),
        temperature=or_null(NUMBER),
        top_p=or_null(NUMBER),
        previous_response_id=or_null(TEXT),
        metadata=_METADATA,
        parallel_tool_calls=YES,
        store=YES,
        text=OBJECT,
        tool_choice=some(TEXT, OBJECT),
        tools=many(OBJECT),
        truncation=one_of("auto", "disabled"),
        background=YES,
        conversation=or_null(shape(id=TEXT)),
        reasoning=shape(effort=or_null(TEXT), summary=NULL),
        top_logprobs=COUNT,
    ),
    "ResponseEvent": some(
        *(_event(f"response.{name}", *fields) for name, fields in _EVENTS.items()),
        _event("error", {"code": TEXT, "message": TEXT, "param": or_null(TEXT)}, {}),
    ),
    "Conversation": thing("conversation", id=TEXT, created_at=WHOLE, metadata=_METADATA),
}

_ONE = "/v1/responses/{response_id}"
_TALK = "/v1/conversations/{conversation_id}"
_ITEMS = (limit(100), ORDER, AFTER)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/v1/responses",
        "Answer, and keep it",
        ref("Response"),
        WireResponse,
        events="ResponseEvent",
        fails=ANSWERING,
    ),
    Operation(
        "GET",
        _ONE,
        "A kept answer, or the rest of its stream",
        ref("Response"),
        events="ResponseEvent",
        queries=(Query("stream", YES), Query("starting_after", {"type": "integer", "minimum": 0})),
        fails=(404, 409),
    ),
    Operation("DELETE", _ONE, "Forget a kept answer", deleted("response")),
    Operation("POST", f"{_ONE}/cancel", "Stop an answer in the background", ref("Response"), fails=(404, 409)),
    Operation("GET", f"{_ONE}/input_items", "What was asked", paged(ref("Item")), queries=_ITEMS),
    Operation(
        "POST",
        "/v1/responses/input_tokens",
        "Tokens of a prompt",
        thing("response.input_tokens", input_tokens=COUNT),
        WireResponse,
        fails=ANSWERING,
    ),
    Operation(
        "POST",
        "/v1/responses/compact",
        "Make a conversation shorter",
        thing(
            "response.compaction",
            id=TEXT,
            created_at=WHOLE,
            output=many(ref("Item")),
            usage=ref("ResponseUsage"),
        ),
        WireCompactBody,
        fails=ANSWERING,
    ),
    Operation(
        "POST",
        "/v1/conversations",
        "Begin a conversation",
        ref("Conversation"),
        WireNewConversation,
        may_be_empty=True,
        fails=(404, 422),
    ),
    Operation("GET", _TALK, "A conversation", ref("Conversation")),
    Operation("POST", _TALK, "Change its metadata", ref("Conversation"), WireConversationUpdate),
    Operation("DELETE", _TALK, "Delete a conversation", deleted("conversation.deleted")),
    Operation("GET", f"{_TALK}/items", "Its items", paged(ref("Item")), queries=_ITEMS),
    Operation("POST", f"{_TALK}/items", "Add items", paged(ref("Item")), WireNewItems, fails=CHANGING),
    Operation("GET", f"{_TALK}/items/{{item_id}}", "One item", ref("Item")),
    Operation("DELETE", f"{_TALK}/items/{{item_id}}", "Delete an item", ref("Conversation")),
)
