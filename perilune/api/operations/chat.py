"""OpenAI's Chat Completions, Completions and Embeddings, and what Moonshot and we have beside them."""

from __future__ import annotations

from perilune.api.completions import WireCompletion
from perilune.api.embeddings import WireEmbedding
from perilune.api.operations.table import (
    ANSWERING,
    COUNT,
    DONE,
    NULL,
    NUMBER,
    TEXT,
    WHOLE,
    YES,
    Operation,
    Query,
    Schema,
    deleted,
    event,
    listed,
    many,
    one_of,
    or_null,
    ref,
    shape,
    some,
    thing,
    typed,
)
from perilune.api.schema import WireChat

_REASON = one_of("stop", "length", "tool_calls")
_TIER = one_of("default", "flex", "batch")
_BYTES = many({"type": "integer", "minimum": 0, "maximum": 255})
_THOUGHTS = {"reasoning_content": TEXT, "reasoning": TEXT}
_BASE: dict[str, Schema] = {
    "id": TEXT,
    "created": WHOLE,
    "model": TEXT,
    "system_fingerprint": TEXT,
    "service_tier": _TIER,
}
_TOLD = {"perilune": some(ref("PeriluneObject"), ref("Progress")), "usage": or_null(ref("Usage"))}

SCHEMAS: dict[str, Schema] = {
    "Usage": shape(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=shape(cached_tokens=COUNT),
        completion_tokens_details=shape(reasoning_tokens=COUNT),
        cached_tokens=COUNT,
    ),
    "TokenLogprob": shape(
        token=TEXT,
        logprob=NUMBER,
        bytes=_BYTES,
        top_logprobs=many(shape(token=TEXT, logprob=NUMBER, bytes=_BYTES)),
    ),
    "ChatLogprobs": shape(content=many(ref("TokenLogprob")), refusal=NULL),
    "ToolCall": typed("function", id=TEXT, function=shape(name=TEXT, arguments=TEXT)),
    "ChatMessage": shape(
        {**_THOUGHTS, "tool_calls": many(ref("ToolCall"))},
        role={"const": "assistant"},
        content=or_null(TEXT),
        refusal=NULL,
    ),
    "ChatCompletion": thing(
        "chat.completion",
        **_BASE,
        choices=many(
            shape(
                index=COUNT,
                message=ref("ChatMessage"),
                logprobs=or_null(ref("ChatLogprobs")),
                finish_reason=_REASON,
            )
        ),
        usage=ref("Usage"),
        perilune=ref("PeriluneObject"),
    ),
    "ChatDelta": shape(
        {
            "role": {"const": "assistant"},
            "content": TEXT,
            **_THOUGHTS,
            "tool_calls": many(
                shape(
                    {"id": TEXT, "type": {"const": "function"}},
                    index=COUNT,
                    function=shape({"name": TEXT}, arguments=TEXT),
                )
            ),
        }
    ),
    "ChatCompletionChunk": thing(
        "chat.completion.chunk",
        {**_TOLD, "obfuscation": TEXT},
        **_BASE,
        choices=many(
            shape(
                index=COUNT,
                delta=ref("ChatDelta"),
                logprobs=or_null(ref("ChatLogprobs")),
                finish_reason=or_null(_REASON),
            )
        ),
    ),
    "ChatEvent": some(event(ref("ChatCompletionChunk")), event(ref("Error")), DONE),
    "Progress": some(
        shape(stage=one_of("searching", "retrieving", "composing", "queued", "prefilling", "answering")),
        shape(
            stage={"const": "planned"},
            plan=TEXT,
            deadline_s=NUMBER,
            predicted_ttft_s=NUMBER,
            fidelity=NUMBER,
            context_tokens=COUNT,
            uncached_tokens=COUNT,
            degradations=many(ref("PeriluneDegradation")),
        ),
        shape(stage={"const": "prefilling"}, processed=COUNT, total=COUNT, cached=COUNT, eta_s=NUMBER),
        shape(
            stage={"const": "citation"}, citation=some(ref("PeriluneObject.passage"), ref("PeriluneObject.turn"))
        ),
    ),
    "PeriluneDegradation": shape(code=TEXT, reason=TEXT),
    "CompletionLogprobs": shape(
        tokens=many(TEXT),
        token_logprobs=many(NUMBER),
        top_logprobs=many({"type": "object", "additionalProperties": NUMBER}),
        text_offset=many(COUNT),
    ),
    "CompletionChoice": shape(
        index=COUNT,
        text=TEXT,
        logprobs=or_null(ref("CompletionLogprobs")),
        finish_reason=or_null(one_of("stop", "length")),
    ),
    "Completion": thing(
        "text_completion",
        **_BASE,
        choices=many(ref("CompletionChoice")),
        usage=ref("Usage"),
        perilune=ref("PeriluneObject"),
    ),
    "CompletionChunk": thing("text_completion", _TOLD, **_BASE, choices=many(ref("CompletionChoice"))),
    "CompletionEvent": some(event(ref("CompletionChunk")), event(ref("Error")), DONE),
    "Estimate": thing(
        "estimate",
        model=TEXT,
        plan=TEXT,
        deadline_s=NUMBER,
        predicted_ttft_s=NUMBER,
        bound_ttft_s=NUMBER,
        in_time=YES,
        fidelity=NUMBER,
        prompt_tokens=COUNT,
        cached_tokens=COUNT,
        degradations=many(ref("PeriluneDegradation")),
    ),
}

_ONE_CHAT = "/v1/chat/completions/{completion_id}"
_VECTOR = some(many(NUMBER), TEXT)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "Answer a chat",
        ref("ChatCompletion"),
        WireChat,
        events="ChatEvent",
        fails=ANSWERING,
    ),
    Operation(
        "GET",
        _ONE_CHAT,
        "The rest of a resumable stream",
        events="ChatEvent",
        queries=(Query("starting_after", {"type": "integer", "minimum": -1}),),
        fails=(404, 409),
    ),
    Operation("DELETE", _ONE_CHAT, "Stop a resumable stream", deleted("chat.completion.deleted")),
    Operation(
        "POST",
        "/v1/completions",
        "Continue a text",
        ref("Completion"),
        WireCompletion,
        events="CompletionEvent",
        fails=ANSWERING,
    ),
    Operation(
        "POST",
        "/v1/embeddings",
        "Vectors of texts",
        listed(
            thing("embedding", index=COUNT, embedding=_VECTOR),
            model=TEXT,
            usage=shape(prompt_tokens=COUNT, total_tokens=COUNT),
        ),
        WireEmbedding,
        fails=ANSWERING,
    ),
    Operation(
        "POST",
        "/v1/tokenizers/estimate-token-count",
        "Tokens of a chat, in Moonshot's dialect",
        shape(data=shape(total_tokens=COUNT)),
        WireChat,
        fails=ANSWERING,
    ),
    Operation(
        "POST",
        "/v1/estimate",
        "How a chat would be answered, and how soon",
        ref("Estimate"),
        WireChat,
        fails=ANSWERING,
    ),
)
