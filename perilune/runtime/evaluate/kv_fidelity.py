"""Teacher-forced comparisons over real text: logits of tiers or of hybrid attention against full-precision KV, and
the attention output head by head.

Both sides run in fp32 over the same weights and tokens. The candidate's own rows enter its own context, so errors
carry on as they do in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from perilune.kernels.tier_attention import Chooser, Scores, by_mass, hybrid
from perilune.kernels.tiers import AttentionPolicy
from perilune.runtime.evaluate.kv_choosers import oracle, true_mass
from perilune.runtime.evaluate.kv_forward import Context, EvalModel, FullReader, Reader, forward, logits_of
from perilune.runtime.evaluate.kv_prefill import Fill
from perilune.runtime.evaluate.kv_tiers import HybridReader, Int8Reader, TieredContext
from perilune.runtime.evaluate.metrics import Comparison, compare, join

_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Stretch:
    """A piece of text and its exact context up to `start`; rows from there on are compared."""

    token_ids: torch.Tensor
    start: int
    context: Context


def open_stretch(fill: Fill, token_ids: torch.Tensor, start: int) -> Stretch:
    """int64 [N] with a context up to `start`, which both sides share."""
    return Stretch(token_ids, start, fill(token_ids[:start], len(token_ids)))


def int8_fidelity(model: EvalModel, stretch: Stretch, tiered: Callable[[Context], TieredContext]) -> Comparison:
    """The INT8 tier alone: rows read every token, closed segments as INT8, by the rule of prefill rows."""
    candidate = tiered(stretch.context.copy())
    reader = Int8Reader(candidate, keep=True)

    def close(position: int) -> None:
        candidate.close_to(candidate.scale.closed_for_prefill(position))

    return _compare(model, stretch, candidate, reader, close)


def hybrid_fidelity(
    model: EvalModel,
    stretch: Stretch,
    tiered: Callable[[Context], TieredContext],
    policy: AttentionPolicy,
) -> tuple[Comparison, float]:
    """Every row as a decode row of `policy`; also the mean budget (tokens read exactly over the context)."""
    candidate = tiered(stretch.context.copy())
    reader = HybridReader(candidate, policy, keep=True)

    def close(position: int) -> None:
        candidate.close_to(candidate.scale.closed_for_decode(position, policy.window_tokens))

    return _compare(model, stretch, candidate, reader, close), reader.budget


def _compare(
    model: EvalModel, stretch: Stretch, candidate: TieredContext, reader: Reader, close: Callable[[int], None]
) -> Comparison:
    """Run both sides chunk by chunk from the stretch's start; the last token has no successor and is left out."""
    reference = stretch.context.copy()
    full = FullReader(model, reference, keep=True)
    parts = []
    for first in range(stretch.start, len(stretch.token_ids) - 1, _CHUNK):
        ids = stretch.token_ids[first : first + _CHUNK]
        following = stretch.token_ids[first + 1 : first + _CHUNK + 1]
        close(first)
        rows = []
        for context, side in ((reference, full), (candidate.context, reader)):
            rows.append(forward(model, ids[None], first, side)[0, : len(following)])
            context.length = first + len(ids)
        at = 0
        for logits, others in zip(logits_of(model, rows[0]), logits_of(model, rows[1]), strict=True):
            parts.append(compare(logits, others, following[at : at + len(logits)], first + at))
            at += len(logits)
    return join(parts)


# ------------------------------------------------------------------------------------------- attention outputs


@dataclass(frozen=True, slots=True)
class HeadError:
    """One query head of one layer over the probed rows. Errors are relative to the exact output's norm.

    `recall`: share of the far attention mass on the units read exactly. `oracle_error`: with the same number of
    units chosen by their true mass.
    """

    layer: int
    head: int
    error: float
    recall: float
    oracle_error: float


class _Probe:
    """Reads exactly, and on the side measures what the policy would have given."""

    def __init__(self, tiered: TieredContext, policy: AttentionPolicy) -> None:
        self._tiered, self._policy = tiered, policy
        self._full = FullReader(tiered.model, tiered.context)
        self.found: list[HeadError] = []

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
        exact = self._full(layer, q, k, v, start)
        if layer in self._tiered.model.tiered_layers:
            self._measure(layer, q, k, v, start, exact)
        return exact

    def _measure(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, exact: torch.Tensor
    ) -> None:
        tiered, policy, heads = self._tiered, self._policy, self._tiered.model.heads
        near, far = tiered.near(layer, k, v, start), tiered.far(layer)
        positions = torch.arange(start, start + q.shape[0])
        recalls: list[torch.Tensor] = []

        def watched(choose: Chooser) -> Chooser:
            def chosen(scores: Scores) -> torch.Tensor:
                units = choose(scores)
                mass = true_mass(scores)
                recalls.append((mass * units[:, None]).sum(-1).mean(-1) / mass.sum(-1).mean(-1))
                return units

            return chosen

        budgets = tiered.budgets
        own = watched(by_mass(policy, layer, None if budgets is None else budgets.shares[layer]))
        out, _ = hybrid(q, positions, near, far, heads, policy, layer, budgets=budgets, choose=own)
        best, _ = hybrid(q, positions, near, far, heads, policy, layer, choose=oracle(policy.topk_units))
        recall = recalls[0].flatten()
        size = exact.norm(dim=(0, 2))
        for head in range(heads.num_q_heads):
            errors = [float((o - exact)[:, head].norm() / size[head]) for o in (out, best)]
            self.found.append(HeadError(layer, head, errors[0], float(recall[head]), errors[1]))


def attention_errors(
    model: EvalModel, token_ids: torch.Tensor, tiered: TieredContext, policy: AttentionPolicy
) -> list[HeadError]:
    """int64 [L] after the tiered context, read exactly: every head's error under `policy` (a fixed budget)."""
    probe = _Probe(tiered, policy)
    forward(model, token_ids[None], tiered.context.length, probe)
    return probe.found
