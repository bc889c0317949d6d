"""OpenAI's Responses on the wire: the answer, whole or as numbered events, with the `perilune` object beside.

Knows the dialect; doesn't know transport, or how answers come about. An answer is a list of items: a compaction
where one was made, what the model thought, a message, then one for each call. Citations are annotations of the
message's text.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from perilune.api.completion import finish_reason, logprobs_dict, obfuscation, unfinished
from perilune.api.file_search import SearchItem
from perilune.api.responses_request import ResponseCall
from perilune.api.schema import TIER_OF_CLASS, ChatCall
from perilune.core import (
    ChoiceFinished,
    Citation,
    CitationAdded,
    Completed,
    Event,
    FileSearched,
    FileSearchStarted,
    ReasoningDelta,
    StoreHit,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from perilune.errors import Overloaded, PeriluneError
from perilune.service.attribution import Placer
from perilune.service.report import report_dict


def response_id(request_id: str) -> str:
    return "resp_" + request_id.removeprefix("req_")


def usage_dict(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def annotation(citation: Citation, index: int) -> dict[str, Any]:
    """A citation at character `index` of the text; `page`, `start`, `end` and `quote` are ours."""
    return {
        "type": "file_citation",
        "file_id": citation.file_id,
        "filename": citation.filename,
        "index": index,
        "page": citation.page,
        "start": citation.start,
        "end": citation.end,
        "quote": citation.quote,
    }


@dataclass(slots=True)
class _Text:
    """The message item."""

    item_id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(16)}")
    pieces: list[str] = field(default_factory=list)
    annotations: list[dict[str, Any]] = field(default_factory=list)
    placer: Placer[Citation] = field(default_factory=Placer)
    cited: set[str] = field(default_factory=set)  # files
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def cite(self, citation: Citation) -> None:
        self.cited.add(citation.file_id)
        self.placer.cite(citation, citation.quote)

    def say(self, text: str) -> list[dict[str, Any]]:
        """The annotations whose sentence has ended with this."""
        self.pieces.append(text)
        return self._annotate(self.placer.say(text))

    def finish(self) -> list[dict[str, Any]]:
        """The annotations that no sentence has."""
        return self._annotate(self.placer.end())

    def _annotate(self, placed: Sequence[tuple[Citation, int]]) -> list[dict[str, Any]]:
        found = [annotation(citation, index) for citation, index in placed]
        self.annotations += found
        return found

    def part(self) -> dict[str, Any]:
        text = "".join(self.pieces)
        return {"type": "output_text", "text": text, "annotations": self.annotations, "logprobs": self.logprobs}

    def item(self, status: str) -> dict[str, Any]:
        content = [self.part()] if status != "in_progress" else []
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}


@dataclass(slots=True)
class _Thought:
    """A reasoning item."""

    item_id: str = field(default_factory=lambda: f"rs_{secrets.token_hex(16)}")
    pieces: list[str] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": "".join(self.pieces)}

    def item(self, status: str) -> dict[str, Any]:
        content = [self.part()] if status != "in_progress" else []
        return {"id": self.item_id, "type": "reasoning", "status": status, "summary": [], "content": content}


@dataclass(slots=True)
class _Call:
    """A function_call item."""

    call_id: str
    name: str
    item_id: str = field(default_factory=lambda: f"fc_{secrets.token_hex(16)}")
    arguments: str = ""

    def item(self, status: str) -> dict[str, Any]:
        return {
            "id": self.item_id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
        }


_Opened = _Thought | _Text | _Call
_Item = SearchItem | _Opened


class _Response:
    """What whole and streamed answers share: the items so far, and the body around them."""

    def __init__(self, call: ChatCall, created_at: int) -> None:
        assert isinstance(call, ResponseCall)
        self.call = call
        self.response_id = response_id(call.request.request_id)
        self.status = "queued" if call.background else "in_progress"
        self._created_at = created_at
        self._search: SearchItem | None = None
        self._thought: _Thought | None = None
        self._text: _Text | None = None
        self._calls: list[_Call] = []
        self._reason = "stop"
        self._end: Completed | None = None

    @property
    def _items(self) -> list[_Item]:
        found = (self._search, self._thought, self._text)
        return [*(item for item in found if item is not None), *self._calls]

    @property
    def quoted(self) -> frozenset[str]:
        """The files that the answer quotes."""
        cited = self._text.cited if self._text else ()
        return frozenset([*cited, *(hit.file_id for hit in (self._search.hits if self._search else ()))])

    def body(self) -> dict[str, Any]:
        """The finished answer. Raises `InternalError` when the service ended without saying that it completed."""
        if self._end is None:
            raise unfinished()
        if not self._text and not self._calls and not self._thought and not self.call.request.prewarm:
            self._text = _Text()
        if self._text:
            self._text.finish()
        cut = self._reason == "length"
        status = "incomplete" if cut else "completed"
        made = [item.item(status if item is self._items[-1] else "completed") for item in self._items]
        return self._base(status) | {
            "completed_at": int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [*self.call.compacted, *made],
            "usage": usage_dict(self._end.usage),
            "perilune": report_dict(self._end.report),
        }

    def unfinished(self) -> dict[str, Any]:
        """The answer as far as it is known before it is finished."""
        return self._base(self.status)

    def _base(self, status: str) -> dict[str, Any]:
        request = self.call.request
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": request.model,
            "output": [],
            "service_tier": TIER_OF_CLASS[request.service_class],
            "usage": None,
            **(self.call.echo or {}),
        }


def ended(body: dict[str, Any], status: str, error: PeriluneError | None = None) -> dict[str, Any]:
    """An answer that has come to no end: `failed`, with the error, or `cancelled`."""
    code = "rate_limit_exceeded" if error is not None and error.status == 429 else "server_error"
    if error is not None and error.status in (400, 404):
        code = "invalid_prompt"
    shown = None if error is None else {"code": code, "message": str(error)}
    return {**body, "status": status, "error": shown}


def interrupted(body: dict[str, Any]) -> dict[str, Any]:
    """An answer whose server stopped."""
    return ended(body, "failed", Overloaded("The server stopped before it was answered.", hint="Ask again."))


class WholeResponse(_Response):
    """Collects events into one `response` body."""

    def add(self, event: Event) -> None:
        match event:
            case TextDelta(text=text) if text or event.logprobs:
                self._text = self._text or _Text()
                self._text.say(text)
                self._text.logprobs += shown_logprobs(self.call, event)
            case FileSearchStarted(queries):
                self._search = SearchItem(queries, self.call.include_results)
            case FileSearched(hits) if self._search is not None:
                self._search.hits = hits
            case ReasoningDelta(text=text):
                self._thought = self._thought or _Thought()
                self._thought.pieces.append(text)
            case CitationAdded(Citation() as citation):
                self._text = self._text or _Text()
                self._text.cite(citation)
            case ToolCallDelta():
                if event.call_id is not None:
                    self._calls.append(_Call(event.call_id, event.name or ""))
                self._calls[event.index].arguments += event.arguments
            case ChoiceFinished():
                self._reason = finish_reason(event)
            case Completed():
                self._end = event
            case _:
                pass


class StreamedResponse(_Response):
    """Turns events into `response.created` … `response.completed`."""

    def __init__(self, call: ChatCall, created_at: int) -> None:
        super().__init__(call, created_at)
        self._number = -1
        self._open: _Opened | None = None

    def opening(self) -> bytes:
        out = self._event("created", response=self.unfinished())
        out += self._event("queued" if self.call.background else "in_progress", response=self.unfinished())
        return out if self.call.background else out + self._compaction()

    def started(self) -> bytes:
        """A queued answer is being made."""
        self.status = "in_progress"
        return self._event("in_progress", response=self.unfinished()) + self._compaction()

    def encode(self, event: Event) -> bytes:
        match event:
            case TextDelta(text=text) if text or event.logprobs:
                return self._said(text, shown_logprobs(self.call, event))
            case FileSearchStarted(queries):
                return self._searches(queries)
            case FileSearched(hits) if self._search is not None:
                return self._searched(self._search, hits)
            case ReasoningDelta(text=text):
                return self._thinks(text)
            case CitationAdded(Citation() as citation):
                return self._cited(citation)
            case ToolCallDelta():
                return self._called(event)
            case ChoiceFinished():
                self._reason = finish_reason(event)
                return b""
            case Completed():
                self._end = event
                return self._close()
            case _:
                return b""

    def end(self) -> bytes:
        body = self.body()
        return self._event(body["status"], response=body)

    def stopped(self, body: dict[str, Any]) -> bytes:
        """The last event of an answer that failed or was cancelled; `body` says which."""
        return self._event("failed", response=body)

    # ------------------------------------------------------------------------------------------- items

    def _compaction(self) -> bytes:
        out = b""
        for index, item in enumerate(self.call.compacted):
            out += self._event("output_item.added", output_index=index, item=item)
            out += self._event("compaction.compacting", output_index=index, item_id=item["id"])
            out += self._event("output_item.done", output_index=index, item=item)
        return out

    def _searches(self, queries: Sequence[str]) -> bytes:
        self._search = SearchItem(queries, self.call.include_results)
        place = {"output_index": self._index(self._search)}
        out = self._event("output_item.added", **place, item=self._search.item("in_progress"))
        for stage in ("in_progress", "searching"):
            out += self._event(f"file_search_call.{stage}", **place, item_id=self._search.item_id)
        return out

    def _searched(self, search: SearchItem, hits: Sequence[StoreHit]) -> bytes:
        search.hits = hits
        place = {"output_index": self._index(search)}
        out = self._event("file_search_call.completed", **place, item_id=search.item_id)
        return out + self._event("output_item.done", **place, item=search.item("completed"))

    def _thinks(self, text: str) -> bytes:
        begin = b""
        if self._thought is None:
            self._thought = self._open = _Thought()
            item, part = self._thought.item("in_progress"), self._thought.part()
            begin = self._event("output_item.added", output_index=self._index(self._thought), item=item)
            begin += self._event("content_part.added", **self._place(self._thought), part=part)
        self._thought.pieces.append(text)
        return begin + self._delta("reasoning_text.delta", **self._place(self._thought), delta=text)

    def _said(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        begin, message = self._message()
        placed = message.say(text)
        message.logprobs += logprobs
        out = self._delta("output_text.delta", **self._place(message), delta=text, logprobs=logprobs)
        return begin + out + self._annotations(message, placed)

    def _delta(self, kind: str, **payload: Any) -> bytes:
        return self._event(kind, **payload, **(obfuscation(payload["delta"]) if self.call.obfuscate else {}))

    def _cited(self, citation: Citation) -> bytes:
        """Told behind the sentence that it supports."""
        begin, message = self._message()
        message.cite(citation)
        return begin

    def _annotations(self, message: _Text, placed: Sequence[dict[str, Any]]) -> bytes:
        first, place = len(message.annotations) - len(placed), self._place(message)
        return b"".join(
            self._event("output_text.annotation.added", **place, annotation_index=first + at, annotation=found)
            for at, found in enumerate(placed)
        )

    def _message(self) -> tuple[bytes, _Text]:
        """(what begins it, the message)."""
        if self._text is not None:
            return b"", self._text
        begin = self._close()
        self._text = self._open = _Text()
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = self._text.item("in_progress")
        begin += self._event("output_item.added", output_index=self._index(self._text), item=item)
        return begin + self._event("content_part.added", **self._place(self._text), part=part), self._text

    def _called(self, event: ToolCallDelta) -> bytes:
        out = b""
        if event.call_id is not None:
            out = self._close()
            self._calls.append(_Call(event.call_id, event.name or ""))
            self._open = self._calls[-1]
            item = self._calls[-1].item("in_progress")
            out += self._event("output_item.added", output_index=self._index(self._calls[-1]), item=item)
        call = self._calls[event.index]
        call.arguments += event.arguments
        if event.arguments:
            where = {"item_id": call.item_id, "output_index": self._index(call)}
            out += self._delta("function_call_arguments.delta", **where, delta=event.arguments)
        return out

    def _close(self) -> bytes:
        """What ends the open item."""
        item, self._open = self._open, None
        if item is None:
            return b""
        index = self._index(item)
        if isinstance(item, _Call):
            where = {"item_id": item.item_id, "output_index": index}
            out = self._event("function_call_arguments.done", **where, name=item.name, arguments=item.arguments)
        else:
            out = self._annotations(item, item.finish()) if isinstance(item, _Text) else b""
            place, part = self._place(item), item.part()
            kind = "output_text" if isinstance(item, _Text) else "reasoning_text"
            logprobs = {"logprobs": part["logprobs"]} if isinstance(item, _Text) else {}
            out += self._event(f"{kind}.done", **place, text=part["text"], **logprobs)
            out += self._event("content_part.done", **place, part=part)
        status = "incomplete" if self._reason == "length" else "completed"
        return out + self._event("output_item.done", output_index=index, item=item.item(status))

    def _index(self, item: _Item) -> int:
        before = len(self.call.compacted)
        return before + next(index for index, each in enumerate(self._items) if each is item)

    def _place(self, item: _Text | _Thought) -> dict[str, Any]:
        return {"item_id": item.item_id, "output_index": self._index(item), "content_index": 0}

    def _event(self, kind: str, **payload: Any) -> bytes:
        self._number += 1
        return event_bytes(f"response.{kind}", {"sequence_number": self._number, **payload})


def shown_logprobs(call: ResponseCall, event: TextDelta) -> list[dict[str, Any]]:
    return logprobs_dict(event.logprobs)["content"] if call.include_logprobs else []


def event_bytes(kind: str, payload: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **payload}) + b"\n\n"


def error_event(error: PeriluneError) -> bytes:
    found = {"sequence_number": 0, "code": error.code, "message": str(error), "param": error.param}
    return event_bytes("error", found)
