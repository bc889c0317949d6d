"""Attention over closed segments in plain PyTorch: prefill rows read every unit, decode rows select (see `tiers`).

The oracle of the native code. Computes in fp32 over dequantised arrays, every score included, and masks what a row
does not read; a chooser of units may be passed in, which is how the evaluation compares indexes. Knows nothing of
slots, blocks or bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from perilune.kernels.interface import HeadBudgets, HeadShape
from perilune.kernels.tier_reference import Records, rotate
from perilune.kernels.tiers import UNIT_TOKENS, AttentionPolicy

_HIDDEN = -math.inf
_MAX_SKETCH = 100.0
_LEAST_MASS = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Near:
    """What every row reads exactly: sinks and bf16 blocks. k, v fp32 [Hkv, E, D]; positions int64 [E]."""

    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class Far:
    """The units of a sequence's closed segments, dequantised. Values and the index's keys are rotated.

    k, v, rest_k [Hkv, U, 16, D], the last what the index knows beside mean_k [Hkv, U, D]; unit_v [Hkv, U, D]: mean
    values; all fp32. unit_end int64 [U]: the position after the unit's segment. sign_codes int64 [Hkv, U, 16, D/4]
    and spread fp32 [Hkv, U, 16], rest_k's parts, are there where queries are rounded as `tiers` says; None: an
    evaluation does without, which is quicker and differs by a few hundredths of a score.
    """

    k: torch.Tensor
    v: torch.Tensor
    mean_k: torch.Tensor
    rest_k: torch.Tensor
    unit_v: torch.Tensor
    unit_end: torch.Tensor
    sign_codes: torch.Tensor | None = None
    spread: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """What a chooser of units sees. G queries of a KV head, T rows.

    queries [Hkv, G, T, D], scaled.
    near [Hkv, G, T, E] and tokens [Hkv, G, T, U, 16]: scaled scores, -inf where a row does not see the token.
    units [Hkv, G, T, U]: log of the index's estimate of the sum of exp(scores), -inf where a unit is forced.
    exact [Hkv, G, T]: log-sum-exp of the exact zone.
    contexts int64 [T]: tokens up to and including the row.
    """

    queries: torch.Tensor
    near: torch.Tensor
    tokens: torch.Tensor
    units: torch.Tensor
    exact: torch.Tensor
    contexts: torch.Tensor


Chooser = Callable[[Scores], torch.Tensor]
"""Scores -> bool [Hkv, T, U]: units to read exactly. May name units that are masked; they stay as they are."""


def far_of(segments: Sequence[tuple[Records, int]], *, rounded: bool = False) -> Far:
    """Closed segments (one layer's records, and the position after each) as one. At least one.

    `rounded`: the index's queries are rounded, as the native code does.
    """
    counts = torch.tensor([records.k.shape[1] for records, _ in segments])

    def joined(arrays: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(arrays, 1).float()

    parts = [records for records, _ in segments]
    return Far(
        k=joined([part.keys() for part in parts]),
        v=joined([part.rotated_values() for part in parts]),
        mean_k=joined([part.mean_keys() for part in parts]),
        rest_k=joined([part.sketched_rests() for part in parts]),
        unit_v=joined([part.unit_values() for part in parts]),
        unit_end=torch.tensor([end for _, end in segments]).repeat_interleave(counts),
        sign_codes=joined([part.sign_codes() for part in parts]).long() if rounded else None,
        spread=joined([part.spreads() for part in parts]) if rounded else None,
    )


def no_far(kv_heads: int, head_dim: int) -> Far:
    """No closed segment at all."""
    none, tokens = torch.empty(kv_heads, 0, head_dim), torch.empty(kv_heads, 0, UNIT_TOKENS, head_dim)
    return Far(tokens, tokens, none, tokens, none, torch.empty(0, dtype=torch.int64))


def dense(q: torch.Tensor, positions: torch.Tensor, near: Near, far: Far, heads: HeadShape) -> torch.Tensor:
    """Rows that read everything: q fp32 [T, Hq, D] at `positions` -> fp32 [T, Hq, D]."""
    folded = _fold(q, heads)
    near_scores = _near_scores(folded, near, positions)
    far_scores = _product(folded, far.k.flatten(1, 2).transpose(1, 2))
    weights = torch.cat([near_scores, far_scores], -1).softmax(-1)
    split = near.k.shape[1]
    near_part = _product(weights[..., :split], near.v)
    far_part = _product(weights[..., split:], far.v.flatten(1, 2))
    return _unfold(near_part + rotate(far_part))


def hybrid(
    q: torch.Tensor,
    positions: torch.Tensor,
    near: Near,
    far: Far,
    heads: HeadShape,
    policy: AttentionPolicy,
    layer: int,
    *,
    budgets: HeadBudgets | None = None,
    choose: Chooser | None = None,
    only_count: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode rows: q fp32 [T, Hq, D] at `positions` -> fp32 [T, Hq, D], and stats fp32 [T, 6] (ATTENTION_STATS).

    `choose` takes the place of the policy's choice for rows that are not dense. With `only_count`, the stats hold
    exact_tokens and nan for the rest, which costs as much again as the attention.
    """
    folded = _fold(q, heads)
    contexts = positions + 1
    shares = None if budgets is None else budgets.shares[layer]
    everything = _dense_rows(contexts, policy, first=shares is None and layer < policy.dense_layers)
    forced = everything[:, None] | (far.unit_end > contexts[:, None] - policy.window_tokens)  # [T, U]
    sketched = None if budgets is None else budgets.sketched[layer].bool()
    scores = _scores(folded, positions, near, far, forced, sketched)
    if shares is not None:
        scores = replace(scores, units=scores.units.masked_fill((shares == 0)[:, None, None, None], _HIDDEN))
    chosen = (choose or by_mass(policy, layer, shares))(scores) & (scores.units > _HIDDEN).all(1)
    exact_units = chosen | forced
    tokens = scores.tokens.masked_fill(~exact_units[:, None, :, :, None], _HIDDEN)
    summaries = scores.units.masked_fill(chosen[:, None], _HIDDEN)
    weighted = summaries + (math.log(policy.summary_weight) if policy.summary_weight > 0 else _HIDDEN)
    sizes = [scores.near.shape[-1], tokens[0, 0, 0].numel(), summaries.shape[-1]]
    weights = torch.cat([scores.near, tokens.flatten(-2), weighted], -1).softmax(-1)
    near_weights, token_weights, summary_weights = torch.split(weights, sizes, -1)
    rotated = _product(token_weights, far.v.flatten(1, 2)) + _product(summary_weights, far.unit_v)
    out = _unfold(_product(near_weights, near.v) + rotate(rotated))
    if only_count:
        counts = _exact_tokens(near, positions, exact_units)
        return out, torch.cat([torch.full((len(counts), 5), math.nan), counts[:, None]], -1)
    return out, _stats(scores, far, tokens, summaries, forced, exact_units, near, positions)


def by_mass(policy: AttentionPolicy, layer: int, shares: torch.Tensor | None = None) -> Chooser:
    """The choice of `tiers`: by estimated mass, summed over the group's queries."""
    times = torch.tensor([4.0 if layer < policy.dense_layers else 1.0]) if shares is None else shares

    def choose(scores: Scores) -> torch.Tensor:
        mass = estimated_mass(scores)
        if policy.top_p >= 1:
            counts = _shared(times, policy.topk_units, mass.shape[-1])
        else:
            wanted = share_count(mass, policy.top_p * mass.sum(-1))
            least, most = (_shared(times, n, mass.shape[-1]) for n in (policy.min_units, policy.max_units))
            counts = wanted.clamp(least, most)
        return largest(mass, counts) & (mass >= _LEAST_MASS)

    return choose


def _shared(times: torch.Tensor, units: int, all_units: int) -> torch.Tensor:
    """Heads' parts of a number of units: int64 [heads, 1], one at least."""
    part = (times * float(units) + 0.5).floor().clamp(min(units, 1), all_units)
    return part.long()[:, None]


def estimated_mass(scores: Scores) -> torch.Tensor:
    """[Hkv, T, U]: softmax mass of each unit, summed over the group's queries."""
    total = torch.logaddexp(scores.exact, scores.units.logsumexp(-1))
    return (scores.units - total[..., None]).exp().sum(1)


def share_count(mass: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """How many of the last axis's entries, largest first, it takes to hold `wanted`; at least one."""
    ranked = mass.sort(dim=-1, descending=True).values
    return (ranked.cumsum(-1) < wanted[..., None]).sum(-1) + 1


def largest(mass: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """bool: the `counts` largest entries of the last axis, ties to the lowest index."""
    order = mass.sort(dim=-1, descending=True, stable=True).indices
    taken = torch.arange(mass.shape[-1]) < counts[..., None]
    return torch.zeros_like(mass, dtype=torch.bool).scatter(-1, order, taken.expand_as(mass))


def _dense_rows(contexts: torch.Tensor, policy: AttentionPolicy, *, first: bool) -> torch.Tensor:
    """bool [T]: rows that read every unit, in one of the first layers or in another."""
    limit = policy.dense_tokens
    if first:
        limit = max(limit, policy.dense_layer_tokens)
    return contexts <= limit if policy.sparse else torch.ones_like(contexts, dtype=torch.bool)


def _fold(q: torch.Tensor, heads: HeadShape) -> torch.Tensor:
    """Scaled, [Hkv, G, T, D]."""
    return q.view(q.shape[0], heads.num_kv_heads, -1, heads.head_dim).permute(1, 2, 0, 3) * heads.scale


def _product(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """[Hkv, G, T, X] times [Hkv, X, Y]; the group's queries as rows of one matrix, which copies no columns."""
    product: torch.Tensor = rows.flatten(1, 2) @ columns
    return product.view(*rows.shape[:3], columns.shape[-1])


def _unfold(out: torch.Tensor) -> torch.Tensor:
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _near_scores(folded: torch.Tensor, near: Near, positions: torch.Tensor) -> torch.Tensor:
    scores = _product(folded, near.k.transpose(1, 2))
    return scores.masked_fill(near.positions > positions[:, None], _HIDDEN)


def _scores(
    folded: torch.Tensor,
    positions: torch.Tensor,
    near: Near,
    far: Far,
    forced: torch.Tensor,
    sketched: torch.Tensor | None = None,
) -> Scores:
    """All scores of the rows; `sketched` [Hkv]: which heads' units are ranked by sketches (None: all)."""
    near_scores = _near_scores(folded, near, positions)
    tokens = _token_scores(folded, far.k)
    exact = near_scores.logsumexp(-1)
    if forced.any():
        inside = tokens.masked_fill(~forced[:, :, None], _HIDDEN).flatten(-2).logsumexp(-1)
        exact = torch.logaddexp(exact, inside)
    estimated = estimate(rotate(folded), far, sketched)
    return Scores(
        queries=folded,
        near=near_scores,
        tokens=tokens,
        units=estimated.masked_fill(forced, _HIDDEN),
        exact=exact,
        contexts=positions + 1,
    )


def _token_scores(folded: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Queries [Hkv, G, T, D] and keys [Hkv, U, 16, D] -> [Hkv, G, T, U, 16]."""
    flat = _product(folded, k.flatten(1, 2).transpose(1, 2))
    return flat.view(*flat.shape[:3], -1, UNIT_TOKENS)


def estimate(rotated: torch.Tensor, far: Far, sketched: torch.Tensor | None = None) -> torch.Tensor:
    """Log of each unit's sum of exp(scores) by the index: queries [Hkv, G, T, D], scaled and rotated -> [.., T, U].

    `sketched` bool [Hkv]: heads that know units by their keys' sketches, the others by their means. None: all.
    """
    if far.sign_codes is None or far.spread is None:
        rest, of_mean = _token_scores(rotated, far.rest_k), rotated
    else:
        rest, of_mean = _rounded_rest(rotated, far.sign_codes, far.spread), _rounded(rotated)
    powers = (rest * math.log2(math.e)).clamp(-_MAX_SKETCH, _MAX_SKETCH)
    # Read as a float, these bits are 2^floor(x) * (1 + what is left of x).
    chords = (powers * 2**23 + 127 * 2**23).to(torch.int32).view(torch.float32)
    sizes = chords.sum(-1).log()
    if sketched is not None:
        sizes = sizes.masked_fill(~sketched[:, None, None, None], math.log(UNIT_TOKENS))
    return _product(of_mean, far.mean_k.transpose(1, 2)) + sizes


def _rounded(q: torch.Tensor) -> torch.Tensor:
    """Each query in whole steps of a 127th of its largest value."""
    peak = q.abs().amax(-1, keepdim=True)
    return (q * _over(127, peak)).round() * (peak / 127)


def _over(steps: float, peak: torch.Tensor) -> torch.Tensor:
    """steps / peak; 0 where that isn't finite: such a query scores nothing apart."""
    inverse = steps / peak
    return torch.where(inverse.isfinite(), inverse, torch.zeros_like(peak))


def _rounded_rest(q: torch.Tensor, codes: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """q [Hkv, G, T, D] times spread and signs, by tables of rounded sums of four channels -> [Hkv, G, T, U, 16]."""
    words = q.view(*q.shape[:3], -1, 4)
    sizes = words.abs().sum(-1)
    widest = sizes.amax(-1, keepdim=True)
    inverse = _over(7.5, widest)
    signs = 2.0 * (torch.arange(16) >> torch.arange(4)[:, None] & 1) - 1  # [4, 16]
    tables = ((sizes[..., None] + words @ signs) * inverse[..., None]).round()
    total = torch.zeros(*q.shape[:3], codes.shape[1] * UNIT_TOKENS)
    for word, table in enumerate(tables.unbind(-2)):
        at = codes[..., word].flatten(1)[:, None, None].expand_as(total)
        total += table.gather(-1, at)
    products: torch.Tensor = total * (widest / 7.5) - sizes.sum(-1, keepdim=True)
    return products.view(*q.shape[:3], -1, UNIT_TOKENS) * spread[:, None, None]


def _stats(
    scores: Scores,
    far: Far,
    tokens: torch.Tensor,
    summaries: torch.Tensor,
    forced: torch.Tensor,
    exact_units: torch.Tensor,
    near: Near,
    positions: torch.Tensor,
) -> torch.Tensor:
    """fp32 [T, 6], from weights with every summary at its full estimate (summary_weight 1)."""
    joined = torch.cat([scores.near, tokens.flatten(-2), summaries], -1)
    log_weights = joined.log_softmax(-1)
    weights = log_weights.exp()
    sizes = [scores.near.shape[-1], tokens[0, 0, 0].numel(), summaries.shape[-1]]
    near_part, token_part, summary_part = torch.split(weights, sizes, -1)
    forced_tokens = forced.repeat_interleave(UNIT_TOKENS, -1)
    inside = (token_part * forced_tokens).sum(-1)
    starts = _exact_start(far, forced)
    contexts = positions + 1
    border = far.unit_end > (contexts - 2 * (contexts - starts))[:, None]
    # A summary of 16 tokens and mass m counts as 16 tokens of weight m / 16.
    tokens_of = torch.cat([torch.ones(sum(sizes[:2])), torch.full((sizes[2],), float(UNIT_TOKENS))])
    surprise = (tokens_of.log() - log_weights).masked_fill(weights == 0, 0)
    entropy = (weights * surprise).sum(-1) / contexts.clamp(min=2).log()
    columns = [
        near_part.sum(-1) + inside,
        token_part.sum(-1) - inside,
        summary_part.sum(-1),
        (summary_part * border).sum(-1),
        entropy,
    ]
    means = [column.mean((0, 1)) for column in columns]
    return torch.stack([*means, _exact_tokens(near, positions, exact_units)], -1)


def _exact_tokens(near: Near, positions: torch.Tensor, exact_units: torch.Tensor) -> torch.Tensor:
    """fp32 [T]: tokens read exactly, mean over KV heads."""
    seen = (near.positions <= positions[:, None]).sum(-1)
    return (seen + UNIT_TOKENS * exact_units.sum(-1)).float().mean(0)


def _exact_start(far: Far, forced: torch.Tensor) -> torch.Tensor:
    """int64 [T]: where the run of exactly read tokens that ends at the row begins."""
    ends = far.unit_end.expand_as(forced).masked_fill(forced, 0)
    return torch.cat([ends, ends.new_zeros(len(ends), 1)], -1).amax(-1)
