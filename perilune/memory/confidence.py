"""How likely it is that the best hits hold what was asked: a number between 0 and 1, calibrated on answerable and
unanswerable questions in two languages (docs/log.md).

Knows scores, not text. A logistic model of four signs; the weights are fitted by bench.retrieval's sets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from perilune.memory.rank import Numbers

_BIAS = -1.0
_PEAK, _COSINE, _WORDS, _UNKNOWN = 0.6, 12.0, 0.08, -1.5
_USUAL_COSINE = 0.85  # E5's cosines lie between 0.75 and 0.95


def confidence(scores: Numbers, words: Numbers, dense: Numbers, order: Sequence[int], unknown: float) -> float:
    """Of a ranked pool: `order` is best first, `unknown` the share of the question's terms that occur nowhere.

    Signs: how far the best stands out of the pool, its cosine, its BM25, and `unknown`.
    """
    if not order:
        return 0.0
    best = order[:3]
    peak = float(scores[order[0]] - np.median(scores))
    cosine = float(np.nanmax(dense[best])) if np.isfinite(dense[best]).any() else _USUAL_COSINE
    z = (
        _BIAS
        + _PEAK * math.log1p(max(0.0, peak))
        + _COSINE * (cosine - _USUAL_COSINE)
        + _WORDS * float(words[best].max())
        + _UNKNOWN * unknown
    )
    return 1.0 / (1.0 + math.exp(-z))
