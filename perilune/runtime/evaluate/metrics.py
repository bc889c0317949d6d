"""How far one model's next-token distributions are from another's, position by position, and how sure that is.

Plain functions over logits of the same tokens under two settings (weights, KV, attention). Definitions are those of
llama.cpp's `llama-perplexity --kl-divergence`: KLD(reference || candidate) in nats, top-1 agreement, Δp of the true
token, perplexity. Intervals are percentile bootstraps over runs of neighbouring tokens, because neighbours err
together. Knows nothing of models, files or printing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ROWS_AT_ONCE = 128
"""Rows of logits that are held as fp32 probabilities at a time: about 4 × 4 bytes × vocabulary each."""

RUN_TOKENS = 64
"""Neighbouring tokens that a bootstrap draws together."""

DRAWS = 1000
"""Bootstrap draws of an interval."""

CONFIDENCE = 0.95
_Z = 1.959963984540054
"""The normal quantile of a two-sided 95 % interval."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both settings at each position [T], in text order. `nll` is in nats, of the token that really came next."""

    kld: Floats
    same_top: NDArray[np.bool_]
    reference_nll: Floats
    candidate_nll: Floats
    positions: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.kld)

    def where(self, chosen: NDArray[np.bool_]) -> Comparison:
        """The positions that `chosen` [T] marks, in order."""
        return Comparison(*(getattr(self, field.name)[chosen] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Fidelity:
    """A candidate against its reference over some positions. `ppl_change` is relative: 0.01 is 1 % more."""

    tokens: int
    kld_mean: Interval
    kld_median: float
    kld_p99: float
    kld_max: float
    top1_agreement: Interval
    delta_p_rms: float
    reference_ppl: float
    candidate_ppl: float
    ppl_change: Interval


def compare(
    reference: torch.Tensor, candidate: torch.Tensor, next_tokens: torch.Tensor, first_position: int = 0
) -> Comparison:
    """Logits [T, V] of the same rows under both settings, and the tokens int64 [T] that came next.

    `first_position` is the text position of row 0. Memory beyond the arguments is bounded by `ROWS_AT_ONCE` rows.
    Raises ValueError when shapes differ.
    """
    if reference.shape != candidate.shape or reference.shape[:1] != next_tokens.shape:
        raise ValueError(f"logits {reference.shape} and {candidate.shape}, {next_tokens.shape} tokens don't match")
    parts = [
        _compare_rows(*(tensor[at : at + ROWS_AT_ONCE] for tensor in (reference, candidate, next_tokens)))
        for at in range(0, len(next_tokens), ROWS_AT_ONCE)
    ]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] or [np.empty(0)] * 4
    kld, same, reference_nll, candidate_nll = columns
    positions = np.arange(first_position, first_position + len(kld), dtype=np.int64)
    return Comparison(kld, same.astype(np.bool_), reference_nll, candidate_nll, positions)


def _compare_rows(
    reference: torch.Tensor, candidate: torch.Tensor, next_tokens: torch.Tensor
) -> tuple[Floats, Floats, Floats, Floats]:
    log_p, log_q = (torch.log_softmax(logits.float(), dim=-1) for logits in (reference, candidate))
    # Rounding can take a sum of tiny terms below zero, which a divergence never is.
    kld = (log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64).clamp_min_(0)
    same = log_p.argmax(-1) == log_q.argmax(-1)
    rows = torch.arange(len(next_tokens))
    columns = (kld, same, -log_p[rows, next_tokens], -log_q[rows, next_tokens])
    p, s, r, c = (column.double().numpy() for column in columns)
    return p, s, r, c


def to_lists(comparison: Comparison) -> dict[str, list[float]]:
    """As JSON holds it, exact."""
    return {field.name: getattr(comparison, field.name).tolist() for field in fields(Comparison)}


def from_lists(lists: Mapping[str, Sequence[float]]) -> Comparison:
    """The comparison that `to_lists` took apart."""
    kld, same_top, reference, candidate, positions = (lists[field.name] for field in fields(Comparison))
    return Comparison(
        np.array(kld, np.float64),
        np.array(same_top, np.bool_),
        np.array(reference, np.float64),
        np.array(candidate, np.float64),
        np.array(positions, np.int64),
    )


def join(comparisons: Iterable[Comparison]) -> Comparison:
    """Several stretches as one, in the order given."""
    parts = list(comparisons)
    if not parts:
        raise ValueError("there is nothing to join")
    return Comparison(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Comparison)))


def summarise(comparison: Comparison, seed: int = 0) -> Fidelity:
    """The figures of one comparison. Raises ValueError for an empty one."""
    if not len(comparison):
        raise ValueError("there is nothing to summarise")
    kld, reference, candidate = comparison.kld, comparison.reference_nll, comparison.candidate_nll
    top = comparison.same_top.astype(np.float64)
    return Fidelity(
        tokens=len(comparison),
        kld_mean=bootstrap([kld], lambda means: means[0], seed=seed),
        kld_median=float(np.median(kld)),
        kld_p99=float(np.quantile(kld, 0.99)),
        kld_max=float(kld.max()),
        top1_agreement=bootstrap([top], lambda means: means[0], seed=seed),
        delta_p_rms=float(np.sqrt(np.mean((np.exp(-candidate) - np.exp(-reference)) ** 2))),
        reference_ppl=math.exp(reference.mean()),
        candidate_ppl=math.exp(candidate.mean()),
        ppl_change=bootstrap([candidate - reference], lambda means: np.expm1(means[0]), seed=seed),
    )


def bucket_edges(length: int, first: int = 512) -> tuple[int, ...]:
    """Edges of position buckets that double: 0, 512, 1024, 2048 … up to `length`."""
    edges = [0]
    while edges[-1] < length:
        edges.append(min(length, max(first, 2 * edges[-1])))
    return tuple(edges)


def by_position(
    comparison: Comparison, edges: Sequence[int], seed: int = 0
) -> tuple[tuple[tuple[int, int], Fidelity], ...]:
    """Figures of each bucket [edges[i], edges[i+1]) that holds a position, with the bucket."""
    found = []
    for low, high in pairwise(edges):
        inside = (comparison.positions >= low) & (comparison.positions < high)
        if inside.any():
            found.append(((low, high), summarise(comparison.where(inside), seed)))
    return tuple(found)


def bootstrap(
    columns: Sequence[Floats],
    statistic: Callable[[Floats], float | Floats],
    *,
    run: int = RUN_TOKENS,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """A statistic of the columns' means, with its percentile interval.

    `columns` are per-position values [T]; `statistic` takes their means, float64 [columns] or [columns, draws], and
    returns one number, or one for each draw. Runs of `run` neighbours are drawn together with replacement
    (Künsch 1989); a text of fewer than 20 runs is cut into shorter ones.
    """
    values = np.stack([np.asarray(column, np.float64) for column in columns])
    count = values.shape[1]
    if not count:
        raise ValueError("there is nothing to draw from")
    size = max(1, min(run, count // 20))
    starts = np.arange(0, count, size)
    sums = np.add.reduceat(values, starts, axis=1)
    lengths = np.diff(np.append(starts, count)).astype(np.float64)
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(starts), (draws, len(starts)))
    means = np.stack([row[picks].sum(1) for row in sums]) / lengths[picks].sum(1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.asarray(statistic(means)), (tail, 1 - tail))
    return Interval(float(statistic(values.mean(1))), float(low), float(high))


def share_interval(successes: int, trials: int) -> Interval:
    """A share of independent yes-or-no trials with Wilson's 95 % interval; for none, 0 … 1 around nan."""
    if not trials:
        return Interval(math.nan, 0.0, 1.0)
    share, weight = successes / trials, _Z * _Z / trials
    centre = (share + weight / 2) / (1 + weight)
    half = _Z / (1 + weight) * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))
