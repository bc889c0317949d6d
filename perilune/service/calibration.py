"""How far predictions are off, as quantiles that are corrected online (spec C2).

Knows ratios of measured to predicted seconds. A quantile of the newest ratios says by what factor a prediction has
to be stretched to hold in that share of cases. As load and machine change, the past misleads; so the level that is
read is itself moved: up a little after every prediction that did not hold, down a little after every one that did
(adaptive conformal inference, Gibbs and Candès 2021). In the long run the wanted share holds, whatever happens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

KEPT = 200
_PRIOR = 20  # readings that stand for what was known before
_GAIN = 0.05  # of the level: how quickly it follows


class Calibration:
    """One quantile, of share `share`; `start` is its factor before anything is measured."""

    def __init__(self, share: float, start: float) -> None:
        self._share = share
        self._level = share
        # Spread so that `start` is the quantile.
        values = [start * (0.75 + 0.25 * (place + 0.5) / (_PRIOR * share)) for place in range(_PRIOR)]
        self._newest: deque[float] = deque(values)
        self._sorted = sorted(values)

    @property
    def factor(self) -> float:
        """What a prediction is multiplied with."""
        most = len(self._sorted) - 1
        place = self._level * len(self._sorted)
        if place >= len(self._sorted):  # more often wrong than the worst that is remembered would be
            return self._sorted[most] * (1 + place - len(self._sorted))
        return self._sorted[min(most, max(0, int(place)))]

    def observe(self, ratio: float) -> bool:
        """A prediction came true `ratio` times as late as predicted. Returns whether this quantile held."""
        held = ratio <= self.factor
        self._level += _GAIN * (self._share - held)
        self._newest.append(ratio)
        insort(self._sorted, ratio)
        if len(self._newest) > KEPT:
            del self._sorted[bisect_left(self._sorted, self._newest.popleft())]
        return held
