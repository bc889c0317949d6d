"""Shares of the budget by KV head, from what each head's reading less costs: pure numbers.

Greedy over the lower convex hulls of the heads' cost curves, which is the best that can be had of hulls. Costs of
several heads add up: checked against sums over all heads in docs/log.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

_PRIOR = 0.05
"""Share of the average head's curve added to every head's: calibration doesn't see everything."""


@dataclass(frozen=True, slots=True)
class HeadCosts:
    """Mean squared change of an answer's margin when one head alone reads less, all others everything.

    sketched, means fp32 [C, layers, KV heads]: the head reads `counts[c]` units, ranked so. nothing fp32
    [layers, KV heads]: no unit, no summary.
    """

    counts: tuple[int, ...]
    sketched: torch.Tensor
    means: torch.Tensor
    nothing: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Point:
    price: float
    cost: float
    units: int
    sketched: bool


def allocate(costs: HeadCosts, mean_units: float, sketch_units: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Units int64 and sketched bool [layers, KV heads]: `mean_units` a head on average, least cost.

    `sketch_units`: the units' worth of having a head's sketches looked up.
    """
    layers, heads = costs.nothing.shape
    curves = {True: _falling(costs.sketched), False: _falling(costs.means)}
    nothing = costs.nothing + _PRIOR * costs.nothing.mean()
    steps: list[tuple[float, int, int, _Point, _Point]] = []
    for layer in range(layers):
        for head in range(heads):
            points = [_Point(0.0, float(nothing[layer, head]), 0, False)]
            for sketched, curve in curves.items():
                own = curve[:, layer, head].tolist()
                extra = sketch_units if sketched else 0.0
                points += [
                    _Point(units + extra, cost, units, sketched)
                    for units, cost in zip(costs.counts, own, strict=True)
                ]
            for before, after in pairwise(_hull(points)):
                gain = (before.cost - after.cost) / (after.price - before.price)
                steps.append((gain, layer, head, before, after))
    steps.sort(key=lambda step: -step[0])
    units = torch.zeros(layers, heads, dtype=torch.int64)
    ranked = torch.zeros(layers, heads, dtype=torch.bool)
    room = mean_units * layers * heads
    for _, layer, head, before, after in steps:
        more = after.units - before.units
        reached = int(units[layer, head]) == before.units and bool(ranked[layer, head]) == before.sketched
        if reached and more <= room:
            room -= more
            units[layer, head], ranked[layer, head] = after.units, after.sketched
    return units, ranked


def _falling(curve: torch.Tensor) -> torch.Tensor:
    """More units never cost more: noise is taken for the worse."""
    worst = curve.flip(0).cummax(0).values.flip(0)
    return worst + _PRIOR * worst.mean((1, 2), keepdim=True)


def _hull(points: Sequence[_Point]) -> list[_Point]:
    """Points of the lower convex hull, by rising price and falling cost."""
    hull: list[_Point] = []
    for point in sorted(points, key=lambda p: (p.price, p.cost)):
        if hull and point.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(a: _Point, b: _Point) -> float:
    return (b.cost - a.cost) / (b.price - a.price)
