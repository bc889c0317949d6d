"""The seam `Embedder`: texts to vectors. Three implementations, one contract suite.

An embedder only adds to the word search: when it fails, `EmbedderUnavailable` says why, and searches go on with
words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from perilune.errors import Unreachable
from perilune.memory.vectors.protocol import Vector

Role = Literal["query", "passage"]


class EmbedderUnavailable(Unreachable):
    """The embedder did not answer. Searches find by words alone until it does."""

    code = "embedder_unavailable"


@dataclass(frozen=True, slots=True)
class Embedded:
    """Vectors (texts, width) of length 1, and how many tokens the texts were."""

    model: str
    vectors: Vector
    tokens: int


class Embedder(Protocol):
    """Thread-safe. Queries don't wait for passages."""

    @property
    def model(self) -> str:
        """Names the vector space: vectors of different models are never compared."""
        ...

    @property
    def width(self) -> int:
        """Numbers in a vector. Raises `EmbedderUnavailable` where that must be asked and can't."""
        ...

    @property
    def remote(self) -> bool:
        """Whether texts leave this machine: then only those may be given that `locality` lets go."""
        ...

    @property
    def languages(self) -> frozenset[str] | None:
        """ISO codes that it understands; None: many, English and Chinese among them."""
        ...

    def embed(self, texts: Sequence[str], role: Role) -> Vector:
        """Vectors (texts, width) of length 1, in order. Raises `EmbedderUnavailable`."""
        ...

    @property
    def window_tokens(self) -> int | None:
        """Tokens of a text that it reads; None where that isn't known."""
        ...

    def tokens(self, texts: Sequence[str], role: Role) -> list[int]:
        """How many tokens each text is, as the model reads it; an estimate where the model is asked over HTTP.
        Raises `EmbedderUnavailable`."""
        ...

    def close(self) -> None: ...
