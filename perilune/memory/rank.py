"""From candidates to an order: fuses the arms' scores, lets neighbours speak, and weighs simple signs.

Pure arithmetic over a pool of candidates; doesn't know where they come from. Why so (docs/log.md has the numbers):
arms are brought to z-scores within the pool and added, because reciprocal ranks (RRF) were measured to fall below
BM25 alone; a neighbour's score counts, because an answer often stands beside the words that were asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perilune.memory.entries import Entry

Numbers = npt.NDArray[np.float32]
_TINY = 1e-6


@dataclass(frozen=True, slots=True)
class Weights:
    """What counts how much. `near` and `next_near` weigh neighbours one and two places away; the rest are
    added where they hold: an entry of the time that the question names, one by the speaker that it names."""

    dense: float = 1.0
    words: float = 1.0
    near: float = 0.3
    next_near: float = 0.1
    time: float = 4.0
    speaker: float = 0.5


WEIGHTS = Weights()


@dataclass(frozen=True, slots=True)
class Signs:
    """What else is known of each candidate, as 0 or 1."""

    in_time: Numbers
    by_named: Numbers


def order_of(entries: Sequence[Entry]) -> list[int]:
    """Positions of entries by source and number: neighbours come to stand beside one another."""
    return sorted(range(len(entries)), key=lambda at: (entries[at].source_id, entries[at].number))


def fuse(entries: Sequence[Entry], words: Numbers, dense: Numbers, signs: Signs, weights: Weights) -> Numbers:
    """Scores of candidates that stand in `order_of`; `dense` is NaN where an entry has no vector yet."""
    own = weights.words * standard(words) + weights.dense * standard(dense)
    scores = own.copy()
    for distance, weight in ((1, weights.near), (2, weights.next_near)):
        if weight:
            beside = _beside(entries, distance)
            scores[distance:] += weight * own[:-distance] * beside
            scores[:-distance] += weight * own[distance:] * beside
    found: Numbers = scores + weights.time * signs.in_time + weights.speaker * signs.by_named
    return found


def standard(values: Numbers) -> Numbers:
    """z-scores; unknown ones (NaN) are 0, and so are all where nothing differs.

    In float64: the mean of nearly equal float32 values is off by a share of their spread.
    """
    exact = values.astype(np.float64)
    known = ~np.isnan(exact)
    if not known.any():
        return np.zeros_like(values)
    spread = float(exact[known].std())
    if spread <= _TINY:
        return np.zeros_like(values)
    centred = np.where(known, exact - exact[known].mean(), 0.0)
    found: Numbers = (centred / spread).astype(np.float32)
    return found


def _beside(entries: Sequence[Entry], distance: int) -> Numbers:
    """1 where the entry `distance` further on is that far away in the same source."""
    return np.array(
        [
            first.source_id == second.source_id and second.number - first.number == distance
            for first, second in zip(entries, entries[distance:], strict=False)
        ],
        np.float32,
    )
