"""How likely it is that the best hits hold what was asked: a number between 0 and 1.

Knows scores, not text. A logistic model of three signs that don't depend on the embedder. Its weights are set by
hand: good enough to decide whether to look again, not calibrated, so nothing abstains by it yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from perilune.memory.rank import Numbers

_BIAS = -1.0
_PEAK, _WORDS, _UNKNOWN = 0.6, 0.08, -1.5


def confidence(scores: Numbers, words: Numbers, order: Sequence[int], unknown: float) -> float:
    """Of a ranked pool: `order` is best first, `unknown` the share of the question's terms that occur nowhere.

    Signs: how far the best stands out of the pool, its BM25, and `unknown`.
    """
    if not order:
        return 0.0
    best = order[:3]
    peak = float(scores[order[0]] - np.median(scores))
    z = _BIAS + _PEAK * math.log1p(max(0.0, peak)) + _WORDS * float(words[best].max()) + _UNKNOWN * unknown
    return 1.0 / (1.0 + math.exp(-z))
