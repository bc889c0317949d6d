"""`eval heads`: how much each KV head's far reading matters to answers, from one backward pass a question.

A question's margin is its right token's logit less the best other's (the least over its answer). With g the
margin's gradient at a head's outputs, a head that reads less changes the margin by g . (its output then - its
output now), to first order. That gives every budget of every head at once, where leaving heads out one by one
would take a pass each. Everything else is read in full, fp32. Knows the forward pass and tiers; nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import gelu, silu

from perilune.errors import InvalidRequest
from perilune.kernels.tier_attention import Far, Near, estimate
from perilune.kernels.tier_reference import rotate
from perilune.kernels.tiers import UNIT_TOKENS
from perilune.runtime.evaluate.heads_share import HeadCosts
from perilune.runtime.evaluate.kv_forward import EvalModel
from perilune.runtime.evaluate.kv_tasks import Question
from perilune.runtime.evaluate.kv_tiers import TieredContext
from perilune.runtime.weights import LayerWeights

COUNTS = (1, 2, 5, 10, 20, 30, 45, 60, 90, 120, 180)
_LARGEST_CHANGE = 8.0  # of a margin; what is beyond is lost anyhow
_TOGETHER = 12
_FORMS = 2 * len(COUNTS) + 1


@dataclass(frozen=True, slots=True)
class _Rows:
    """A layer's rows of B questions: q [B, L, Hq, D], scaled, k and v [B, L, Hkv, D], rotated."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def head_costs(model: EvalModel, contexts: Iterable[tuple[TieredContext, Sequence[Question]]]) -> HeadCosts:
    """Costs over every question that the model answers right with full KV.

    Raises `InvalidRequest` where it answers none.
    """
    changes = [part for context, questions in contexts for part in _changes(model, context, questions)]
    if not changes:
        raise InvalidRequest(
            "The model answers none of the calibration's questions with full KV.",
            hint="Heads can't be told apart on it; use it without a profile.",
        )
    squares = torch.cat(changes).clamp(-_LARGEST_CHANGE, _LARGEST_CHANGE).square().mean(0)
    sketched, means, nothing = torch.split(squares, [len(COUNTS), len(COUNTS), 1])
    return HeadCosts(COUNTS, sketched, means, nothing[0])


def _changes(model: EvalModel, context: TieredContext, questions: Sequence[Question]) -> Iterator[torch.Tensor]:
    """Changes of the margins of a context's right answers: [questions, forms, layers, KV heads] a group."""
    order = sorted(questions, key=_rows)
    for first in range(0, len(order), _TOGETHER):
        some = order[first : first + _TOGETHER]
        rows: list[_Rows] = []
        outputs: list[torch.Tensor] = []
        margins = _margins(model, some, _forward(model, _padded(some), context, rows, outputs))
        gradients = torch.autograd.grad(margins.sum(), outputs)
        right = margins > 0
        if not right.any():
            continue
        with torch.inference_mode():
            found = torch.zeros(len(some), _FORMS, len(rows), model.heads.num_kv_heads)
            for layer in model.tiered_layers:
                found[:, :, layer] = _layer_changes(context, layer, rows[layer], gradients[layer])
            yield found[right]


def _rows(question: Question) -> int:
    return len(question.prompt) + len(question.answer) - 1


def _padded(questions: Sequence[Question]) -> torch.Tensor:
    token_ids = torch.zeros(len(questions), max(map(_rows, questions)), dtype=torch.int64)
    for row, question in zip(token_ids, questions, strict=True):
        row[: _rows(question)] = torch.tensor(question.prompt + question.answer[:-1])
    return token_ids


def _margins(model: EvalModel, questions: Sequence[Question], hidden: torch.Tensor) -> torch.Tensor:
    """[B]: the least margin of each answer's tokens."""
    found = []
    for question, rows in zip(questions, hidden, strict=True):
        logits = model.weights.logits(model.kernels, rows[len(question.prompt) - 1 : _rows(question)])
        answer = torch.tensor(question.answer)[:, None]
        others = logits.scatter(1, answer, float("-inf")).amax(1)
        found.append((logits.gather(1, answer)[:, 0] - others).min())
    return torch.stack(found)


# --------------------------------------------------------------------------------------- the forward pass


def _forward(
    model: EvalModel,
    token_ids: torch.Tensor,
    context: TieredContext,
    kept: list[_Rows],
    outputs: list[torch.Tensor],
) -> torch.Tensor:
    """As `kv_forward.forward`, differentiable; keeps each layer's rows and attention outputs [B, L, Hq, D]."""
    weights, batch, length = model.weights, *token_ids.shape
    start = context.context.length
    x = weights.embeddings(model.kernels, token_ids.flatten())
    for index, layer in enumerate(weights.layers):
        rows = _project(model, layer, x, batch, torch.arange(start, start + length))
        attended = _attend(model, context, index, rows)
        if not outputs:
            attended = attended.detach().requires_grad_()
        kept.append(_Rows(rows.q.detach(), rows.k.detach(), rows.v.detach()))
        outputs.append(attended)
        delta = layer.o(attended.flatten(0, 1).flatten(1), layer.o_bias)
        x = x + _normed(model, delta, layer.post_attn_norm)
        gate, up = layer.gate_up(_normed(model, x, layer.ffn_norm)).chunk(2, -1)
        act = silu(gate) if weights.config.act == "silu" else gelu(gate, approximate="tanh")
        x = x + _normed(model, layer.down(act * up), layer.post_ffn_norm)
    return _normed(model, x, weights.final_norm).view(batch, length, -1)


def _normed(model: EvalModel, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    if weight is None:
        return x
    return model.kernels.rms_norm(x, weight, model.weights.config.norm_eps, out_dtype=torch.float32)


def _project(model: EvalModel, layer: LayerWeights, x: torch.Tensor, batch: int, positions: torch.Tensor) -> _Rows:
    heads = model.heads
    by_head = layer.qkv(_normed(model, x, layer.input_norm), layer.qkv_bias)
    q, k, v = torch.split(
        by_head.view(batch, len(positions), -1, heads.head_dim),
        [heads.num_q_heads, heads.num_kv_heads, heads.num_kv_heads],
        2,
    )
    if (norm := layer.qk_norm) is not None:
        q, k = (
            model.kernels.rms_norm(x, weight, norm.eps, offset=norm.offset, out_dtype=torch.float32)
            for x, weight in ((q, norm.q_weight), (k, norm.k_weight))
        )
    cos, sin = layer.rope.cos[positions][:, None], layer.rope.sin[positions][:, None]
    return _Rows(_turned(q, cos, sin) * heads.scale, _turned(k, cos, sin), v)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def _attend(model: EvalModel, tiered: TieredContext, layer: int, rows: _Rows) -> torch.Tensor:
    """Everything is read, a layer's own window kept -> [B, L, Hq, D]."""
    window = model.weights.config.windows[layer]
    if window is None:
        near, far = _near(tiered, layer), tiered.far(layer)
        keys = torch.cat([near.k, far.k.flatten(1, 2)], 1)
        values = torch.cat([near.v, rotate(far.v).flatten(1, 2)], 1)
        seen = None
    else:
        start, length = tiered.context.length, rows.q.shape[1]
        first = max(0, start - window)
        keys, values = tiered.context.keys(layer, first), tiered.context.values(layer, first)
        seen = torch.arange(first, start) > torch.arange(start, start + length)[:, None] - window
    return torch.cat(
        [
            _attend_head(*_of_head(rows, head, model), keys[head], values[head], seen)
            for head in range(keys.shape[0])
        ],
        2,
    )


def _attend_head(
    q: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None,
) -> torch.Tensor:
    scores = q @ keys.T
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
    weights = torch.cat([scores, _own_scores(q, own_k)], -1).softmax(-1)
    before, own = torch.split(weights, [keys.shape[0], own_k.shape[1]], -1)
    return before @ values + torch.einsum("blgm,bmd->blgd", own, own_v)


def _own_scores(q: torch.Tensor, own_k: torch.Tensor) -> torch.Tensor:
    """[B, L, G, L], causal."""
    hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)[:, None]
    return torch.einsum("blgd,bmd->blgm", q, own_k).masked_fill(hidden, float("-inf"))


def _near(tiered: TieredContext, layer: int) -> Near:
    """Sinks and tail, without rows of its own."""
    none = tiered.context.keys(layer, 0, 0)
    return tiered.near(layer, none, none, tiered.context.length)


def _of_head(rows: _Rows, head: int, model: EvalModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [B, L, G, D], k and v [B, L, D]."""
    group = model.heads.num_q_heads // model.heads.num_kv_heads
    return rows.q[:, :, head * group : (head + 1) * group], rows.k[:, :, head], rows.v[:, :, head]


# ---------------------------------------------------------------------------------------- what less would change


def _layer_changes(tiered: TieredContext, layer: int, rows: _Rows, gradient: torch.Tensor) -> torch.Tensor:
    """[B, forms, KV heads]: to first order, by gradients [B, L, Hq, D] of the outputs."""
    near, far, model = _near(tiered, layer), tiered.far(layer), tiered.model
    kv_heads, size = model.heads.num_kv_heads, rows.q.shape[:2]
    folded = rotate(rows.q).view(-1, kv_heads, rows.q.shape[2] // kv_heads, rows.q.shape[3]).permute(1, 2, 0, 3)
    by_means = torch.zeros(kv_heads, dtype=torch.bool)
    logs = torch.stack([estimate(folded, far), estimate(folded, far, by_means)], 1)  # [Hkv, 2, G, B L, U]
    by_row = logs.transpose(2, 3).reshape(kv_heads, 2, *size, -1, logs.shape[-1])
    found = []
    for head in range(kv_heads):
        group = gradient.shape[2] // kv_heads
        own = gradient[:, :, head * group : (head + 1) * group]
        found.append(_head_changes(near, far, head, *_of_head(rows, head, model), by_row[head], own))
    return torch.stack(found, -1)


def _head_changes(
    near: Near,
    far: Far,
    head: int,
    q: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    logs: torch.Tensor,
    gradient: torch.Tensor,
) -> torch.Tensor:
    """[B, forms], with logs [2, B, L, G, U] of the units' estimates. Only products with the gradient are needed of
    any output: a number for each unit."""
    scores = torch.cat([q @ near.k[head].T, _own_scores(q, own_k)], -1)
    tokens = q @ far.k[head].flatten(0, 1).T
    top = torch.maximum(scores.amax(-1), tokens.amax(-1))[..., None]
    scores, tokens = (scores - top).exp(), (tokens - top).exp()
    before, own = torch.split(scores, [near.k.shape[1], own_k.shape[1]], -1)
    near_value = ((before @ near.v[head] + torch.einsum("blgm,bmd->blgd", own, own_v)) * gradient).sum(-1)
    near_mass = scores.sum(-1)
    turned = rotate(gradient)
    masses, values = _by_unit(tokens), _by_unit(tokens * (turned @ far.v[head].flatten(0, 1).T))
    outline = turned @ far.unit_v[head].T
    whole = (near_value + values.sum(-1)) / (near_mass + masses.sum(-1))
    forms = [
        form
        for estimated in (logs - top).exp()
        for form in _by_count(near_value, near_mass, masses, values, estimated, outline)
    ]
    changes = torch.stack([*forms, near_value / near_mass], -1) - whole[..., None]
    return changes.sum((1, 2))


def _by_unit(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:-1], -1, UNIT_TOKENS).sum(-1)


def _by_count(
    near_value: torch.Tensor,
    near_mass: torch.Tensor,
    masses: torch.Tensor,
    values: torch.Tensor,
    estimated: torch.Tensor,
    outline: torch.Tensor,
) -> Iterator[torch.Tensor]:
    """What a head gives when it reads the units of the largest estimates, and the others in outline."""
    share = estimated / (near_mass + estimated.sum(-1))[..., None]
    order = share.sum(2, keepdim=True).argsort(-1, descending=True).expand_as(estimated)
    mass = torch.stack([masses, estimated]).gather(-1, order.expand(2, *order.shape)).cumsum(-1)
    value = torch.stack([values, estimated * outline]).gather(-1, order.expand(2, *order.shape)).cumsum(-1)
    for count in COUNTS:
        last = min(count, estimated.shape[-1]) - 1
        read, left = value[0, ..., last], value[1, ..., -1] - value[1, ..., last]
        read_mass, left_mass = mass[0, ..., last], mass[1, ..., -1] - mass[1, ..., last]
        yield (near_value + read + left) / (near_mass + read_mass + left_mass)
