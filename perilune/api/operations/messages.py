"""Anthropic's Messages, under its own root and under /anthropic."""

from __future__ import annotations

from perilune.api.messages_request import WireMessages
from perilune.api.operations.table import (
    ANSWERING,
    COUNT,
    NONE,
    OBJECT,
    TEXT,
    Operation,
    Schema,
    event,
    many,
    one_of,
    or_null,
    ref,
    shape,
    some,
    typed,
)

_DOCUMENT: dict[str, Schema] = {"cited_text": TEXT, "document_index": COUNT, "document_title": or_null(TEXT)}
_BLOCKS: dict[str, Schema] = {"start_block_index": COUNT, "end_block_index": COUNT}
_TOOL_USE = typed("tool_use", id=TEXT, name=TEXT, input=OBJECT)
_THINKING = typed("thinking", thinking=TEXT, signature=TEXT)
_STOPPED: dict[str, Schema] = {
    "stop_reason": one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
    "stop_sequence": or_null(TEXT),
}
_MESSAGE: dict[str, Schema] = {"id": TEXT, "role": {"const": "assistant"}, "model": TEXT}

_EVENTS: dict[str, Schema] = {
    "message_start": typed(
        "message_start",
        message=typed(
            "message",
            **_MESSAGE,
            content=NONE,
            stop_reason={"type": "null"},
            stop_sequence={"type": "null"},
            usage=shape(input_tokens=COUNT, output_tokens=COUNT),
        ),
    ),
    "content_block_start": typed(
        "content_block_start", index=COUNT, content_block=some(typed("text", text=TEXT), _THINKING, _TOOL_USE)
    ),
    "content_block_delta": typed(
        "content_block_delta",
        index=COUNT,
        delta=some(
            typed("text_delta", text=TEXT),
            typed("citations_delta", citation=ref("MessageCitation")),
            typed("thinking_delta", thinking=TEXT),
            typed("signature_delta", signature=TEXT),
            typed("input_json_delta", partial_json=TEXT),
        ),
    ),
    "content_block_stop": typed("content_block_stop", index=COUNT),
    "message_delta": typed(
        "message_delta", delta=shape(**_STOPPED), usage=ref("MessageUsage"), perilune=ref("PeriluneObject")
    ),
    "message_stop": typed("message_stop"),
    "ping": typed("ping"),
    "error": ref("AnthropicError"),
}

SCHEMAS: dict[str, Schema] = {
    "MessageUsage": shape(
        input_tokens=COUNT, output_tokens=COUNT, cache_creation_input_tokens=COUNT, cache_read_input_tokens=COUNT
    ),
    "MessageCitation": some(
        typed("page_location", **_DOCUMENT, file_id=TEXT, start_page_number=COUNT, end_page_number=COUNT),
        typed("char_location", **_DOCUMENT, start_char_index=COUNT, end_char_index=COUNT),
        typed("content_block_location", **_DOCUMENT, **_BLOCKS),
        typed(
            "search_result_location", cited_text=TEXT, search_result_index=COUNT, source=TEXT, title=TEXT, **_BLOCKS
        ),
    ),
    "Message": typed(
        "message",
        **_MESSAGE,
        content=many(
            some(typed("text", text=TEXT, citations=or_null(many(ref("MessageCitation")))), _THINKING, _TOOL_USE)
        ),
        **_STOPPED,
        usage=ref("MessageUsage"),
        perilune=ref("PeriluneObject"),
    ),
    "MessageEvent": some(*(event(data, name) for name, data in _EVENTS.items())),
}

OPERATIONS: tuple[Operation, ...] = tuple(
    operation
    for root in ("", "/anthropic")
    for operation in (
        Operation(
            "POST",
            f"{root}/v1/messages",
            "Answer in Anthropic's dialect",
            ref("Message"),
            WireMessages,
            events="MessageEvent",
            fails=ANSWERING,
        ),
        Operation(
            "POST",
            f"{root}/v1/messages/count_tokens",
            "Tokens of a prompt, in Anthropic's dialect",
            shape(input_tokens=COUNT),
            WireMessages,
            fails=ANSWERING,
        ),
    )
)
