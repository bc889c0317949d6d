"""The one place where text leaves for a remote backend (spec M12).

`OpenAIBackend` builds its bodies from a `Departed` and from nothing else, and only a `Departure` makes those; a
test holds that no other module of the service has an HTTP client. Knows text; doesn't know sockets or dialects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from perilune.service.backends.protocol import ChatMessage


@dataclass(frozen=True, slots=True)
class Leaving:
    """All of a request's text, before it leaves, and where to. `stops` are the stop strings."""

    tenant: str
    backend: str
    request_id: str
    messages: tuple[ChatMessage, ...]
    stops: tuple[str, ...] = ()


class Reverser(Protocol):
    """Undoes in the answer what was done to the question. One for each answer; `choice` counts from 0."""

    def push(self, choice: int, text: str) -> str:
        """The text to show now. It may hold some back until the next piece tells what it is."""
        ...

    def flush(self, choice: int) -> str:
        """What was held back, once the choice is finished."""
        ...


@dataclass(frozen=True, slots=True)
class Departed:
    """What does leave. `altered`: it isn't what was written, so that tokens' log probabilities aren't shown.
    `taken_out` counts the personal identifiers that don't leave, by kind."""

    messages: tuple[ChatMessage, ...]
    stops: tuple[str, ...]
    reverser: Reverser
    altered: bool = False
    taken_out: Mapping[str, int] = field(default_factory=dict)


class Departure(Protocol):
    """Decides what leaves."""

    async def leave(self, leaving: Leaving) -> Departed:
        """What may leave of it. Raises `errors.Forbidden` where nothing may."""
        ...


class Unchanged:
    """A reverser that has nothing to undo."""

    def push(self, choice: int, text: str) -> str:
        return text

    def flush(self, choice: int) -> str:
        return ""


class AsWritten:
    """The departure that lets everything leave as it is."""

    async def leave(self, leaving: Leaving) -> Departed:
        return Departed(leaving.messages, leaving.stops, Unchanged())
