"""The seam `VectorIndex`: proposes entries by words and by nearness. Two implementations, one contract suite.

An index is derived: SQL holds the text, the term counts and the vectors, and an index can be dropped and filled
again at any time. It only proposes ids; scores that count are computed from SQL (`scoring`), which is why every
index ranks alike and why an entry that SQL no longer has can't come back through one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from perilune.errors import Unreachable
from perilune.memory.scope import Scope


class IndexUnavailable(Unreachable):
    """The index can't be opened, read or written. Searches do without it and say so."""

    code = "index_unavailable"


Vector = npt.NDArray[np.float32]
"""One embedding (width,), or several (rows, width), of length 1 each."""


@dataclass(frozen=True, slots=True)
class Row:
    """What filters see of an entry. `at` is seconds since the epoch."""

    id: int
    tenant: str
    source_id: str
    number: int
    page: int | None = None
    at: float | None = None
    speaker: str | None = None
    entities: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Terms:
    """A question for the word arm: weights of terms (hashes of `postings.term_hash`), and how long entries are."""

    weights: Mapping[int, float]
    mean_length: float


@dataclass(frozen=True, slots=True)
class Size:
    """Rows that each arm holds."""

    texts: int
    vectors: int


class VectorIndex(Protocol):
    """Thread-safe. Every method raises `IndexUnavailable` when the store can't be used; a rebuild then helps."""

    def put_texts(self, rows: Sequence[Row], terms: Sequence[Mapping[int, int]]) -> None:
        """Add entries with their terms and frequencies; findable on return. Known ids are left as they are."""
        ...

    def put_vectors(self, rows: Sequence[Row], vectors: Vector) -> None:
        """Add the vectors (rows, width) of entries; findable on return. Known ids are left as they are."""
        ...

    def words(self, terms: Terms, limit: int, scope: Scope) -> list[int]:
        """Ids of entries that hold a term, best first as far as the store can tell."""
        ...

    def nearest(self, vector: Vector, limit: int, scope: Scope) -> list[int]:
        """Ids of entries whose vectors are nearest by cosine, nearest first."""
        ...

    def remove(self, ids: Sequence[int]) -> None:
        """Forget entries in both arms; unknown ids are ignored."""
        ...

    def clear(self) -> None:
        """Forget everything, and make a damaged store usable again."""
        ...

    def size(self) -> Size: ...

    def maintain(self, purge: bool = False) -> None:
        """Build and refresh the structures that make searching fast; slow, and searching goes on meanwhile.

        With `purge` nothing stays of what was removed, in no file and no older version."""
        ...

    def close(self) -> None: ...
