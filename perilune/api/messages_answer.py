"""Anthropic's Messages on the wire: the answer, whole or as events, with the `perilune` object beside.

Knows the dialect; doesn't know transport, or how answers come about. An answer is a list of blocks: one of text,
then one for each call. Citations stand on the text block, as page locations.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from perilune.api.completion import finish_reason, unfinished
from perilune.api.messages_request import MessagesCall
from perilune.api.messages_sources import Quotable, Sources
from perilune.api.schema import ChatCall
from perilune.core import (
    ChoiceFinished,
    Citation,
    CitationAdded,
    Completed,
    Event,
    RateState,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from perilune.errors import PeriluneError
from perilune.service.report import report_dict

SIGNATURE = "perilune"
"""Of thoughts: nothing is proven by it; clients send it back with them, and thoughts aren't read again."""

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: PeriluneError, request_id: str | None = None) -> dict[str, object]:
    """An error object; what has no type of its own is the client's or the server's fault by its status."""
    kind = _TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": request_id}


def error_event(error: PeriluneError) -> bytes:
    return _event("error", error_body(error))


def rate_headers(rates: RateState) -> list[tuple[bytes, bytes]]:
    """The dialect's `anthropic-ratelimit-*`, of those rates that are limited."""
    found: list[tuple[bytes, bytes]] = []
    for what, limit, left, reset_s in (
        ("requests", rates.limit_requests, rates.remaining_requests, rates.reset_requests_s),
        ("tokens", rates.limit_tokens, rates.remaining_tokens, rates.reset_tokens_s),
    ):
        if limit is not None:
            full_at = datetime.fromtimestamp(time.time() + (reset_s or 0.0), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            values = (("limit", str(limit)), ("remaining", str(left)), ("reset", full_at))
            found += [(f"anthropic-ratelimit-{what}-{name}".encode(), value.encode()) for name, value in values]
    return found


def message_id(request_id: str) -> str:
    return "msg_" + request_id.removeprefix("req_")


def usage_dict(usage: Usage) -> dict[str, Any]:
    """`input_tokens` are those that no cache held, as the dialect has it."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def stop_of(event: ChoiceFinished) -> dict[str, Any]:
    """`stop_reason` and `stop_sequence`. Raises `InternalError` for an answer that was cut off by the server."""
    reason = _REASONS[finish_reason(event)]
    if event.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": event.stop}
    return {"stop_reason": reason, "stop_sequence": None}


def citation_location(citation: Citation, files: Sequence[str | None]) -> dict[str, Any]:
    """Where a quote stands: page `n` ends before page `n + 1`, as the dialect counts."""
    return {
        "type": "page_location",
        "cited_text": citation.quote,
        "document_index": files.index(citation.file_id) if citation.file_id in files else 0,
        "document_title": citation.filename,
        "file_id": citation.file_id,
        "start_page_number": citation.page,
        "end_page_number": citation.page + 1,
    }


class _Message:
    """What whole and streamed answers share."""

    def __init__(self, call: ChatCall, created_at: int) -> None:
        request = call.request
        sources = call.sources if isinstance(call, MessagesCall) else Sources()
        self._files: Sequence[str | None] = sources.documents or request.file_ids
        self._placer = sources.placer()
        self._base: dict[str, Any] = {
            "id": message_id(request.request_id),
            "type": "message",
            "role": "assistant",
            "model": request.model,
        }


class WholeMessage(_Message):
    """Collects events into one `message` body."""

    def __init__(self, call: ChatCall, created_at: int) -> None:
        super().__init__(call, created_at)
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._citations: list[dict[str, Any]] = []
        self._calls: list[ToolCall] = []
        self._arguments: list[str] = []
        self._stop: dict[str, Any] = {}
        self._end: Completed | None = None

    def add(self, event: Event) -> None:
        match event:
            case TextDelta(text=text):
                self._texts.append(text)
                self._citations += [quoted.citation() for quoted, _ in self._placer.say(text)]
            case ReasoningDelta(text=text):
                self._thoughts.append(text)
            case CitationAdded(Citation() as citation):
                self._citations.append(citation_location(citation, self._files))
            case ToolCallDelta():
                self._called(event)
            case ChoiceFinished():
                self._stop = stop_of(event)
            case Completed():
                self._end = event
            case _:
                pass

    def _called(self, event: ToolCallDelta) -> None:
        if event.call_id is not None:
            self._calls.append(ToolCall(event.call_id, event.name or "", ""))
            self._arguments.append("")
        self._arguments[event.index] += event.arguments

    def body(self) -> dict[str, Any]:
        """Raises `InternalError` when the service ended without saying that it completed."""
        if self._end is None:
            raise unfinished()
        text = "".join(self._texts)
        self._citations += [quoted.citation() for quoted, _ in self._placer.finish()]
        blocks: list[dict[str, Any]] = []
        if self._thoughts:
            blocks.append({"type": "thinking", "thinking": "".join(self._thoughts), "signature": SIGNATURE})
        if text or not (self._calls or self._thoughts):
            blocks.append({"type": "text", "text": text, "citations": self._citations or None})
        for call, arguments in zip(self._calls, self._arguments, strict=True):
            blocks.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": _input(arguments)})
        return {
            **self._base,
            "content": blocks,
            **self._stop,
            "usage": usage_dict(self._end.usage),
            "perilune": report_dict(self._end.report),
        }


class StreamedMessage(_Message):
    """Turns events into `message_start` … `message_stop`."""

    def __init__(self, call: ChatCall, created_at: int) -> None:
        super().__init__(call, created_at)
        self._block = -1
        self._kind: str | None = None  # of the open block
        self._stop: dict[str, Any] = {}
        self._completed = False

    def opening(self) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0}  # not known yet; message_delta says them
        start = {**self._base, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", {"message": start}) + PING

    def encode(self, event: Event) -> bytes:
        match event:
            case TextDelta(text=text) if text:
                return self._in_text({"type": "text_delta", "text": text}) + self._quoted(self._placer.say(text))
            case ReasoningDelta(text=text):
                return self._thinks(text)
            case CitationAdded(Citation() as citation) if self._kind != "tool_use":
                where = citation_location(citation, self._files)
                return self._in_text({"type": "citations_delta", "citation": where})
            case ToolCallDelta():
                return self._call(event)
            case ChoiceFinished():
                self._stop = stop_of(event)
                return b""
            case Completed():
                return self._complete(event)
            case _:
                return b""

    def end(self) -> bytes:
        """Raises `InternalError` when the service ended without saying that it completed."""
        if not self._completed:
            raise unfinished()
        return _event("message_stop", {})

    def _in_text(self, delta: dict[str, Any]) -> bytes:
        begin = b"" if self._kind == "text" else self._begin({"type": "text", "text": ""})
        return begin + self._delta(delta)

    def _quoted(self, placed: Sequence[tuple[Quotable, int]]) -> bytes:
        """Told behind the sentence that they support, while its block is open."""
        cited = [{"type": "citations_delta", "citation": quoted.citation()} for quoted, _ in placed]
        return b"".join(map(self._delta, cited))

    def _thinks(self, text: str) -> bytes:
        block = {"type": "thinking", "thinking": "", "signature": ""}
        begin = b"" if self._kind == "thinking" else self._begin(block)
        return begin + self._delta({"type": "thinking_delta", "thinking": text})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._block, "delta": delta})

    def _call(self, event: ToolCallDelta) -> bytes:
        out = b""
        if event.call_id is not None:
            block: dict[str, Any] = {"type": "tool_use", "id": event.call_id, "name": event.name, "input": {}}
            out = self._begin(block)
        if event.arguments:
            delta = {"type": "input_json_delta", "partial_json": event.arguments}
            out += self._delta(delta)
        return out

    def _begin(self, block: dict[str, Any]) -> bytes:
        out = self._close()
        self._block += 1
        self._kind = block["type"]
        return out + _event("content_block_start", {"index": self._block, "content_block": block})

    def _close(self) -> bytes:
        kind, self._kind = self._kind, None
        if kind is None:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": SIGNATURE}) if kind == "thinking" else b""
        if kind == "text":
            signed = self._quoted(self._placer.finish())
        return signed + _event("content_block_stop", {"index": self._block})

    def _complete(self, event: Completed) -> bytes:
        self._completed = True
        out = self._close()
        if self._block < 0:  # clients expect a block
            out = self._begin({"type": "text", "text": ""}) + self._close()
        usage = usage_dict(event.usage)
        return out + _event(
            "message_delta", {"delta": self._stop, "usage": usage, "perilune": report_dict(event.report)}
        )


def _event(kind: str, payload: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **payload}) + b"\n\n"


PING = _event("ping", {})
"""The dialect's own heartbeat."""


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments; empty where the answer was cut off in the middle of them."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
