"""What every backend offers: one chat completion as a stream of events, faults with a kind, and a probe.

Types only. A backend gets plain messages: documents and memory are text in them by then. Implementations are
`LocalChat` (the engine of this process) and `OpenAIBackend` (any OpenAI-compatible URL); tests/contracts/backend.py
holds both to what is written here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from perilune.core import (
    ChoiceFinished,
    ReasoningDelta,
    SamplingParams,
    ServiceClass,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    Tools,
    Usage,
)
from perilune.errors import ContextTooLong, Forbidden, InvalidRequest, Overloaded, PeriluneError, Unreachable


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message as text. `role` is system, user, assistant or tool; `tool_calls` are an assistant's, and
    `tool_call_id` is whose result a message of the role tool is."""

    role: str
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """What a backend is asked. `deadline_s` is how long the first token may take from now; None: no matter.

    `tools` are offered; `sampling.grammar` is the form of the answer, a JSON Schema or none.
    With `continues` the last message is the assistant's and unfinished: the answer goes on right behind it.
    """

    request_id: str
    tenant: str
    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    service_class: ServiceClass = ServiceClass.P0_INTERACTIVE
    deadline_s: float | None = None
    continues: bool = False
    tools: Tools = field(default_factory=Tools)

    @property
    def chars(self) -> int:
        """Characters of all messages: what tokens are estimated from."""
        return sum(len(message.text) for message in self.messages)


@dataclass(frozen=True, slots=True)
class BackendDone:
    """The last event of a call that ran. `counted` is false where the backend told no usage: then the completion
    tokens are the pieces of text that came, and the prompt's are unknown (0). `taken_out`: see `Departed`."""

    usage: Usage
    counted: bool = True
    taken_out: Mapping[str, int] = field(default_factory=dict)


BackendEvent = ReasoningDelta | TextDelta | ToolCallDelta | ChoiceFinished | BackendDone


class FaultKind(StrEnum):
    """Why a backend didn't answer; decides what is tried next."""

    UNREACHABLE = "unreachable"  # no connection, or it broke
    TIMED_OUT = "timed_out"  # connected and silent for too long
    BROKEN = "broken"  # what came isn't the dialect, or ended half-way
    LIMITED = "limited"  # 429: asked too much of it
    OVERLOADED = "overloaded"  # 5xx, or our own bound on it is reached
    TOO_LONG = "too_long"  # the prompt is longer than its window
    REFUSED = "refused"  # 4xx: the request itself; another backend would refuse it, too
    DENIED = "denied"  # 401, 403, 404: key, model or address are wrong
    KEPT = "kept"  # the text may not leave for it


SICK = frozenset({FaultKind.UNREACHABLE, FaultKind.TIMED_OUT, FaultKind.BROKEN, FaultKind.OVERLOADED})
"""Faults that speak against the backend's health. A 429 only cools it down; a wrong key needs a person."""


class BackendFault(Exception):
    """A backend failed. `detail` is for people and never quotes what the backend sent, nor any prompt."""

    def __init__(self, kind: FaultKind, backend: str, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.backend = backend
        self.detail = detail
        self.retry_after_s = retry_after_s

    def shown(self) -> PeriluneError:
        """The error a caller sees when nothing else answered."""
        message = f"The backend {self.backend} {self.detail}"
        if self.kind is FaultKind.TOO_LONG:
            return ContextTooLong(message, hint="Send less, or use a model with a longer window.", param="messages")
        if self.kind is FaultKind.REFUSED:
            return InvalidRequest(message, hint="Leave out what this backend doesn't take.")
        if self.kind is FaultKind.KEPT:
            return Forbidden(message, hint="Use the local model, or ask an administrator.")
        if self.kind in (FaultKind.LIMITED, FaultKind.OVERLOADED):
            return Overloaded(message, hint="Try again in a few seconds.", retry_after_s=self.retry_after_s)
        return Unreachable(message, hint="Try again; GET /v1/backends shows each one's state.")


class Backend(Protocol):
    """An engine that answers chats. Used from one event loop."""

    @property
    def name(self) -> str:
        """How configuration and reports call it."""
        ...

    @property
    def model_id(self) -> str:
        """The model it runs, by its own name."""
        ...

    @property
    def window_tokens(self) -> int:
        """Prompt and answer together, at most."""
        ...

    def chat(self, call: Call) -> AsyncGenerator[BackendEvent, None]:
        """Run a call: text and finished choices, then one `BackendDone`.

        Closing the generator stops the work at the backend, in every phase. Raises `BackendFault`, before or
        between events, and nothing else of its own.
        """
        ...

    async def probe(self) -> None:
        """Ask for a sign of life. Raises `BackendFault`."""
        ...

    async def close(self) -> None:
        """Drop every connection. Idempotent."""
        ...
