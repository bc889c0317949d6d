"""Other ways to choose units, to compare the product's with: the ablations of `eval kv`.

A chooser sees what `tier_attention.Scores` holds and returns the units that a row reads exactly.
"""

from __future__ import annotations

import torch

from perilune.kernels.tier_attention import Chooser, Far, Scores, largest


def oracle(units: int) -> Chooser:
    """The units that really hold most mass, summed over the group's queries: what no index can beat by much."""

    def choose(scores: Scores) -> torch.Tensor:
        return largest(true_mass(scores).sum(1), torch.tensor(units))

    return choose


def random_units(units: int, seed: int) -> Chooser:
    """Any units."""
    generator = torch.Generator().manual_seed(seed)

    def choose(scores: Scores) -> torch.Tensor:
        heads, _, rows, count = scores.units.shape
        return largest(torch.rand(heads, rows, count, generator=generator), torch.tensor(units))

    return choose


def no_units() -> Chooser:
    def choose(scores: Scores) -> torch.Tensor:
        return torch.zeros_like(scores.units[:, 0], dtype=torch.bool)

    return choose


def quest(units: int, far: Far) -> Chooser:
    """By an upper bound of a page's scores from the least and largest key of each channel (arXiv 2406.10774).

    Quest ranks for each query head; here the softmax of the bounds is summed over the group, as the product does.
    """
    low, high = far.k.amin(2), far.k.amax(2)

    def choose(scores: Scores) -> torch.Tensor:
        q = scores.queries
        bound = q.clamp(min=0) @ high.transpose(1, 2)[:, None] + q.clamp(max=0) @ low.transpose(1, 2)[:, None]
        return largest(bound.softmax(-1).sum(1), torch.tensor(units))

    return choose


def true_mass(scores: Scores) -> torch.Tensor:
    """[Hkv, G, T, U]: the share of a query's attention over everything that falls on each unit."""
    of_units = scores.tokens.logsumexp(-1)
    total = torch.logaddexp(scores.near.logsumexp(-1), of_units.logsumexp(-1))
    return (of_units - total[..., None]).exp()
