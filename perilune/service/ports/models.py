"""What the service needs of the engine and of a model. Types only.

`Engine` is `engine.loop.EngineLoop`; `Tokenizer`, `Grammars` and `ChatTemplate` come with the model (runtime).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from perilune.core import CachedTokens, EngineEvent, EngineStats, Grammar, SequenceSpec

T = TypeVar("T")


class Engine(Protocol):
    """Runs token streams. Thread-safe; events arrive on the engine thread, in order, ended by EngineFinished."""

    @property
    def alive(self) -> bool:
        """Whether it can still run something: false once a fault or `close` has stopped it for good."""
        ...

    def submit(self, spec: SequenceSpec, emit: Callable[[EngineEvent], None]) -> None:
        """Queue a sequence. Raises `Overloaded` when the queue is full, `ContextTooLong` when it can never fit."""
        ...

    def cancel(self, seq_id: str) -> None:
        """Stop a sequence in any phase; its last event is EngineFinished(CANCELLED). Unknown ids are ignored."""
        ...

    def cached(self, token_ids: Sequence[int], salt: bytes) -> CachedTokens:
        """Leading tokens whose KV exists now, by tier."""
        ...

    def forget(self, owner: str) -> int:
        """Drop an owner's KV from RAM and disk; returns the disk bytes freed."""
        ...

    def stats(self) -> EngineStats: ...


class StreamDecoder(Protocol):
    """Turns token ids into text as they come; holds back bytes of an unfinished character."""

    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class Tokenizer(Protocol):
    """The model's own tokenizer."""

    @property
    def bos_ids(self) -> tuple[int, ...]:
        """What a prompt must begin with where the template does not say it: empty or the bos token."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """End of sequence and end of turn."""
        ...

    def encode(self, text: str) -> list[int]:
        """Plain text: markers of special tokens inside it stay text (no prompt injection)."""
        ...

    def encode_template(self, text: str) -> list[int]:
        """Text of the template: markers become special tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def stream(self) -> StreamDecoder: ...


class Grammars(Protocol):
    """The forms that answers may be held to: `runtime.grammar.GrammarCompiler`."""

    def constrain(self, grammar: Grammar) -> object:
        """Prepare one, so that the engine finds it compiled. Raises `InvalidRequest` for what can't be followed.
        Takes up to a second: call it in a thread."""
        ...


class ChatTemplate(Protocol):
    """The model's chat template, rendered in a sandbox."""

    def render(
        self,
        messages: Sequence[dict[str, str]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """`variables` are what the template may be told beside. Raises `InvalidRequest` when it refuses the
        messages (roles, order)."""
        ...
