"""The wire form of a chat answer, whole or in chunks: OpenAI's shapes with the `perilune` object beside.

Knows the dialect; doesn't know transport, or how answers come about. Chunks without choices are legal in the
dialect (the usage chunk is one), so progress uses them too; only clients that ask for progress get them.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import perilune
from perilune.api import sse
from perilune.api.schema import TIER_OF_CLASS, ChatCall
from perilune.api.tools import call_dict
from perilune.core import (
    Admitted,
    ChoiceFinished,
    CitationAdded,
    Completed,
    DecodedLogprob,
    Event,
    FileSearched,
    FileSearchStarted,
    FinishReason,
    Planned,
    PrefillProgress,
    ReasoningDelta,
    StageStarted,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from perilune.errors import InternalError
from perilune.service.report import citation_dict, plan_dict, report_dict

REASONING = ("reasoning_content", "reasoning")
"""What was thought, as DeepSeek's and Moonshot's clients and as OpenRouter's and vLLM's newer ones spell it."""

Progress = StageStarted | Planned | PrefillProgress | CitationAdded

_LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI reports this."""


def completion_id(request_id: str) -> str:
    return "chatcmpl-" + request_id.removeprefix("req_")


def fingerprint(model: str) -> str:
    """Changes when the server or the model does: equal seeds then need not give equal answers."""
    return "fp_" + hashlib.sha256(f"{perilune.__version__}\0{model}".encode()).hexdigest()[:12]


def finish_reason(event: ChoiceFinished) -> str:
    """`stop`, `length` or `tool_calls`. Raises `InternalError` for a choice that was cut off: it must not look
    complete."""
    if event.reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS):
        return event.reason.value
    raise InternalError("The answer was cut off by the server.", hint="Send the request again.")


def usage_dict(usage: Usage) -> dict[str, Any]:
    """Token counts; cached tokens in OpenAI's and in Moonshot's spelling."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "cached_tokens": usage.cached_tokens,
    }


def logprobs_dict(tokens: Sequence[DecodedLogprob]) -> dict[str, Any]:
    return {
        "content": [
            {
                "token": token.token,
                "logprob": finite(token.logprob),
                "bytes": list(token.raw),
                "top_logprobs": [
                    {"token": text, "logprob": finite(value), "bytes": list(raw)} for text, raw, value in token.top
                ],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def obfuscation(delta: str) -> dict[str, str]:
    """Random characters beside a piece of text, so that the events' sizes don't tell its length."""
    return {"obfuscation": secrets.token_urlsafe(16)[: 16 - len(delta) % 16]}


def finite(value: float) -> float:
    return value if math.isfinite(value) else _LOWEST_LOGPROB


class _Answer:
    """What every form of one answer shares."""

    def __init__(self, call: ChatCall, kind: str, created_at: int) -> None:
        request = call.request
        self._call = call
        self._wants_logprobs = request.sampling.logprobs is not None
        self._base: dict[str, Any] = {
            "id": completion_id(request.request_id),
            "object": kind,
            "created": created_at,
            "model": request.model,
            "system_fingerprint": fingerprint(request.model),
            "service_tier": TIER_OF_CLASS[request.service_class],
        }


class WholeAnswer(_Answer):
    """Collects events into one `chat.completion` body."""

    def __init__(self, call: ChatCall, created_at: int) -> None:
        super().__init__(call, "chat.completion", created_at)
        choices = range(call.request.n)
        self._texts: list[list[str]] = [[] for _ in choices]
        self._thoughts: list[list[str]] = [[] for _ in choices]
        self._logprobs: list[list[DecodedLogprob]] = [[] for _ in choices]
        self._reasons: list[str | None] = [None for _ in choices]
        self._calls: list[list[ToolCall]] = [[] for _ in choices]
        self._end: Completed | None = None

    def add(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self._texts[event.choice].append(event.text)
            self._logprobs[event.choice].extend(event.logprobs)
        elif isinstance(event, ReasoningDelta):
            self._thoughts[event.choice].append(event.text)
        elif isinstance(event, ToolCallDelta):
            self._add_call(self._calls[event.choice], event)
        elif isinstance(event, ChoiceFinished):
            self._reasons[event.choice] = finish_reason(event)
        elif isinstance(event, Completed):
            self._end = event

    @staticmethod
    def _add_call(calls: list[ToolCall], event: ToolCallDelta) -> None:
        if event.call_id is not None:
            calls.append(ToolCall(event.call_id, event.name or "", ""))
        calls[event.index] = replace(calls[event.index], arguments=calls[event.index].arguments + event.arguments)

    def _message(self, index: int) -> dict[str, Any]:
        text, calls = "".join(self._texts[index]), self._calls[index]
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if self._thoughts[index]:
            message |= dict.fromkeys(REASONING, "".join(self._thoughts[index]))
        return message | ({"tool_calls": [call_dict(call) for call in calls]} if calls else {})

    def body(self) -> dict[str, Any]:
        """Raises `InternalError` when the service ended without saying that it completed."""
        if self._end is None:
            raise unfinished()
        choices = [
            {
                "index": index,
                "message": self._message(index),
                "logprobs": logprobs_dict(self._logprobs[index]) if self._wants_logprobs else None,
                "finish_reason": self._reasons[index],
            }
            for index in range(self._call.request.n)
        ]
        end = self._end
        return {
            **self._base,
            "choices": choices,
            "usage": usage_dict(end.usage),
            "perilune": report_dict(end.report),
        }


class StreamedAnswer(_Answer):
    """Turns events into `chat.completion.chunk` events, each as bytes ready to send."""

    def __init__(self, call: ChatCall, created_at: int) -> None:
        super().__init__(call, "chat.completion.chunk", created_at)
        if call.include_usage:
            self._base["usage"] = None
        self._open_choices = call.request.n
        self._last_choice: dict[str, Any] | None = None
        self.completed = False

    def opening(self) -> bytes:
        """One chunk a choice, with the role: what a client sees first."""
        return b"".join(
            self._chunk(self._choice(index, {"role": "assistant", "content": ""}))
            for index in range(self._call.request.n)
        )

    def encode(self, event: Event) -> bytes:
        """The bytes that tell a client of `event`; empty when it has nothing to learn yet."""
        if isinstance(event, TextDelta):
            return self._text(event)
        if isinstance(event, ReasoningDelta):
            return self._thinks(event)
        if isinstance(event, ToolCallDelta):
            return self._called(event)
        if isinstance(event, ChoiceFinished):
            return self._finished(event)
        if isinstance(event, Completed):
            return self._completed(event)
        if isinstance(event, Admitted | FileSearchStarted | FileSearched):
            return b""  # the response's head tells it, or another dialect
        return self._progress(event)

    def end(self) -> bytes:
        """The last bytes. Raises `InternalError` when the service ended without saying that it completed."""
        if not self.completed:
            raise unfinished()
        return sse.DONE

    def _text(self, event: TextDelta) -> bytes:
        if not event.text and not event.logprobs:
            return b""
        choice = self._choice(event.choice, {"content": event.text})
        if self._wants_logprobs:
            choice["logprobs"] = logprobs_dict(event.logprobs)
        return self._chunk(choice, event.text)

    def _thinks(self, event: ReasoningDelta) -> bytes:
        """In both spellings: clients look for one of them."""
        return self._chunk(self._choice(event.choice, dict.fromkeys(REASONING, event.text)), event.text)

    def _called(self, event: ToolCallDelta) -> bytes:
        function: dict[str, Any] = {"arguments": event.arguments}
        call: dict[str, Any] = {"index": event.index, "function": function}
        if event.call_id is not None:
            call |= {"id": event.call_id, "type": "function"}
            function["name"] = event.name
        return self._chunk(self._choice(event.choice, {"tool_calls": [call]}), event.arguments)

    def _finished(self, event: ChoiceFinished) -> bytes:
        choice = self._choice(event.choice, {}, finish_reason(event))
        self._open_choices -= 1
        if self._open_choices == 0:
            self._last_choice = choice  # waits for the report that it carries
            return b""
        return self._chunk(choice)

    def _completed(self, event: Completed) -> bytes:
        self.completed = True
        choices = [] if self._last_choice is None else [self._last_choice]
        out = sse.data({**self._base, "choices": choices, "perilune": report_dict(event.report)})
        if self._call.include_usage:
            out += sse.data({**self._base, "choices": [], "usage": usage_dict(event.usage)})
        return out

    def _progress(self, event: Progress) -> bytes:
        """A chunk without choices for clients that asked, else a comment."""
        return progress_bytes(event, self._base, self._call.include_progress)

    def _choice(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _chunk(self, choice: dict[str, Any], delta: str = "") -> bytes:
        hidden = obfuscation(delta) if self._call.obfuscate else {}
        return sse.data({**self._base, "choices": [choice], **hidden})


def progress_bytes(event: Progress, base: Mapping[str, Any], as_chunk: bool) -> bytes:
    """A chunk without choices for clients that asked, else a comment."""
    return sse.data({**base, "choices": [], "perilune": _progress_dict(event)}) if as_chunk else _comment(event)


def _progress_dict(event: Progress) -> dict[str, Any]:
    match event:
        case StageStarted(stage):
            return {"stage": stage}
        case Planned(plan):
            return {"stage": "planned", **plan_dict(plan)}
        case PrefillProgress(processed, total, cached, eta_s):
            return {
                "stage": "prefilling",
                "processed": processed,
                "total": total,
                "cached": cached,
                "eta_s": round(eta_s, 3),
            }
        case CitationAdded(citation):
            return {"stage": "citation", "citation": citation_dict(citation)}


def _comment(event: Progress) -> bytes:
    match event:
        case StageStarted(stage):
            return sse.comment(stage)
        case Planned(plan):
            return sse.comment(f"plan {plan.kind.value}, first token in about {plan.predicted_ttft_s:.1f} s")
        case PrefillProgress(processed, total, cached, eta_s):
            return sse.comment(f"prefilling {processed}/{total} tokens, {cached} cached, {eta_s:.1f} s to go")
        case CitationAdded():
            return b""


def unfinished() -> InternalError:
    return InternalError("The answer ended before it was complete.", hint="Send the request again.")
