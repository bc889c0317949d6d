"""A context's tiered form at any scale, and the readers that the KV evaluation compares.

The scale of `tiers` is too large for a context of 8K to have every tier, so sizes are explicit here; codec,
clustering and selection are the product's own reference. Knows nothing of tasks or metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from perilune.kernels.interface import HeadBudgets
from perilune.kernels.tier_attention import Chooser, Far, Near, far_of, hybrid, no_far
from perilune.kernels.tier_reference import Records, close, encode, rotate
from perilune.kernels.tiers import SEGMENT_TOKENS, SINK_TOKENS, UNIT_TOKENS, AttentionPolicy
from perilune.runtime.evaluate.kv_forward import Context, EvalModel, attend

Arrange = Callable[[torch.Tensor, torch.Tensor], Records]
"""Keys and values [Hkv, n, D] -> a segment's records of one layer."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of tiers in tokens, multiples of 16."""

    segment_tokens: int = SEGMENT_TOKENS
    sink_tokens: int = SINK_TOKENS
    hot_tokens: int = 2048

    def closed_for_prefill(self, position: int) -> int:
        """Segments that a prefill row at `position` reads as INT8."""
        return max(0, (position - self.hot_tokens) // self.segment_tokens)

    def closed_for_decode(self, position: int, window_tokens: int) -> int:
        """Segments that a decode row at `position` reads as closed."""
        return max(0, (position + 1 - window_tokens) // self.segment_tokens)


def contiguous(k: torch.Tensor, v: torch.Tensor) -> Records:
    """Pages of 16 neighbours, as Quest has them (arXiv 2406.10774)."""
    return encode(k.float(), v.float())


class TieredContext:
    """The closed segments of a context, quantised once, by layer without a window.

    `budgets`: how decode's heads differ in what they read of it; None: all alike.
    """

    def __init__(
        self,
        model: EvalModel,
        context: Context,
        scale: Scale,
        arrange: Arrange = close,
        budgets: HeadBudgets | None = None,
    ) -> None:
        self.model, self.context, self.scale, self.budgets = model, context, scale, budgets
        self._arrange = arrange
        self._records: dict[int, list[Records]] = {layer: [] for layer in model.tiered_layers}
        self._far: dict[int, Far] = {}
        self.closed = 0

    def close_to(self, count: int) -> None:
        """Have the first `count` segments closed. Their tokens must be in the context."""
        size, sinks = self.scale.segment_tokens, self.scale.sink_tokens
        for segment in range(self.closed, count):
            first, end = max(segment * size, sinks), (segment + 1) * size
            for layer, records in self._records.items():
                k, v = (
                    part(layer, first, end).to(torch.bfloat16) for part in (self.context.keys, self.context.values)
                )
                records.append(self._arrange(k, v))
        if count > self.closed:
            self.closed = count
            self._far.clear()

    def far(self, layer: int) -> Far:
        """Every closed segment of a layer, dequantised; kept until more are closed."""
        if layer not in self._far:
            heads = self.model.heads
            size = self.scale.segment_tokens
            parts = [(records, (index + 1) * size) for index, records in enumerate(self._records[layer])]
            self._far[layer] = far_of(parts) if parts else no_far(heads.num_kv_heads, heads.head_dim)
        return self._far[layer]

    def near(self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int) -> Near:
        """What rows at `start` … (their own k, v [Hkv, L, D]) read exactly."""
        tail = self.closed * self.scale.segment_tokens
        sinks = min(self.scale.sink_tokens, tail)

        def joined(stored: Callable[[int, int, int], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
            return torch.cat([stored(layer, 0, sinks), stored(layer, tail, start), rows], 1)

        positions = torch.cat([torch.arange(sinks), torch.arange(tail, start + k.shape[1])])
        return Near(joined(self.context.keys, k), joined(self.context.values, v), positions)


class Int8Reader:
    """Reads every token, closed segments from their INT8 form: the tier alone."""

    def __init__(self, tiered: TieredContext, *, keep: bool = False) -> None:
        self._tiered, self._keep = tiered, keep
        self._flat: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
        tiered = self._tiered
        window = tiered.model.weights.config.windows[layer]
        if self._keep:
            tiered.context.write(layer, k, v, start)
        if window is not None:
            return windowed(tiered, layer, q, k, v, start, window)
        near = tiered.near(layer, k, v, start)
        far_k, far_v = self._far(layer)
        keys, values = torch.cat([far_k, near.k], 1), torch.cat([far_v, near.v], 1)
        return attend(q, keys, values, tiered.model.heads)

    def _far(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat keys, and values rotated back, of the closed segments."""
        kept = self._flat.get(layer)
        if kept is None or kept[0] != self._tiered.closed:
            far = self._tiered.far(layer)
            kept = (self._tiered.closed, far.k.flatten(1, 2), rotate(far.v.flatten(1, 2)))
            self._flat[layer] = kept
        return kept[1:]


class HybridReader:
    """Reads as decode rows do, each row with a selection of its own. Collects the stats of tiered layers.

    `choose(layer)` takes the place of the policy's selection, and of the context's budgets by head.
    """

    def __init__(
        self,
        tiered: TieredContext,
        policy: AttentionPolicy,
        *,
        choose: Callable[[int], Chooser] | None = None,
        keep: bool = False,
    ) -> None:
        self._tiered, self._policy, self._choose, self._keep = tiered, policy, choose, keep
        self._exact_shares: list[torch.Tensor] = []

    @property
    def budget(self) -> float:
        """Tokens read exactly over the context, mean over rows, tiered layers and KV heads so far."""
        return float(torch.cat(self._exact_shares).mean()) if self._exact_shares else 1.0

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
        tiered = self._tiered
        window = tiered.model.weights.config.windows[layer]
        if self._keep:
            tiered.context.write(layer, k, v, start)
        if window is not None:
            return windowed(tiered, layer, q, k, v, start, window)
        positions = torch.arange(start, start + q.shape[0])
        near, far = tiered.near(layer, k, v, start), tiered.far(layer)
        choose = None if self._choose is None else self._choose(layer)
        out, stats = hybrid(
            q,
            positions,
            near,
            far,
            tiered.model.heads,
            self._policy,
            layer,
            budgets=tiered.budgets if choose is None else None,
            choose=choose,
            only_count=True,
        )
        self._exact_shares.append(stats[:, 5] / (positions + 1))
        return out


def windowed(
    tiered: TieredContext, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int
) -> torch.Tensor:
    """A layer with a sliding window of its own: plain attention over what the window reaches."""
    first, context = max(0, start - window), tiered.context
    keys = torch.cat([context.keys(layer, first, start), k], 1)
    values = torch.cat([context.values(layer, first, start), v], 1)
    return attend(q, keys, values, tiered.model.heads, window=window)


def units_of_budget(scale: Scale, share: float, context: int, tail_tokens: int) -> int:
    """Units a row may select so that what it reads exactly is `share` of the context; at least 1."""
    return max(1, round((share * context - scale.sink_tokens - tail_tokens) / UNIT_TOKENS))


def policy_of_units(units: int, *, summary_weight: float = 1.0, window_tokens: int = 128) -> AttentionPolicy:
    """A fixed number of units in every layer: no dense layer, no dense context, one level."""
    return AttentionPolicy(
        window_tokens=window_tokens,
        topk_units=units,
        top_p=1.0,
        summary_weight=summary_weight,
        dense_layers=0,
        dense_tokens=0,
    )
