"""A model's forward pass with the attention passed in: what the KV evaluation runs on both sides.

Knows weights and the order of operations; a `Reader` decides which keys and values a row reads. Rows of several
questions over the same context run together (their products share the weights). Comparisons run in fp32; a context
that both sides share may be prefilled with bf16 weights, which is several times as fast.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from perilune.kernels.interface import BLOCK_TOKENS, HeadShape, KVLayout, KVPool, RaggedBatch
from perilune.kernels.reference import ReferenceKernels, kv_views
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.memory import free_memory_bytes
from perilune.runtime.model_config import ModelConfig
from perilune.runtime.weights import LayerWeights, ModelWeights, Precision, WeightBuilder, memory_need

LOGIT_ROWS = 128
"""Rows whose logits are held at once: with a vocabulary of 262,144, 128 rows are 134 MB."""


@dataclass(frozen=True, slots=True)
class EvalModel:
    """A model in one precision."""

    weights: ModelWeights
    kernels: ReferenceKernels

    @property
    def heads(self) -> HeadShape:
        return self.weights.heads

    @property
    def tiered_layers(self) -> tuple[int, ...]:
        """Layers without a sliding window of their own."""
        return tuple(index for index, window in enumerate(self.weights.config.windows) if window is None)


class Reader(Protocol):
    """Attention of one sequence's new rows."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
        """q [L, Hq, D], k and v [Hkv, L, D] of rows at `start` …, all fp32 -> [L, Hq, D]."""
        ...


class Context:
    """KV of a sequence so far, fp32, by layer: `keys(layer)` and `values(layer)` are [Hkv, length, D]."""

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        shape = (config.num_layers, config.num_kv_heads, capacity, config.head_dim)
        self._k, self._v = torch.empty(shape), torch.empty(shape)
        self.length = 0

    def copy(self) -> Context:
        """An independent context with the same content."""
        twin = copy.copy(self)
        twin._k, twin._v = self._k.clone(), self._v.clone()
        return twin

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        """Rows at `start` … of a layer; `length` is the caller's to set when every layer is written."""
        self._k[layer, :, start : start + k.shape[1]] = k
        self._v[layer, :, start : start + k.shape[1]] = v

    def keys(self, layer: int, first: int = 0, end: int | None = None) -> torch.Tensor:
        return self._k[layer, :, first : self.length if end is None else end]

    def values(self, layer: int, first: int = 0, end: int | None = None) -> torch.Tensor:
        return self._v[layer, :, first : self.length if end is None else end]


def load_eval_model(path: Path, max_positions: int, precision: Precision = "fp32") -> EvalModel:
    """Raises `UnsupportedModel`, or `Overloaded` where the weights don't fit."""
    checkpoint = open_checkpoint(path)
    try:
        kernels = ReferenceKernels("evaluation in fp32")
        positions = min(max_positions, checkpoint.config.max_context_tokens)
        builder = WeightBuilder(checkpoint, kernels, precision, "stored", positions)
        # No room for a packed copy beside it: nothing here decodes.
        room = min(free_memory_bytes(), memory_need(checkpoint, precision, "stored").one_copy_bytes)
        return EvalModel(builder.build(room), kernels)
    finally:
        checkpoint.close()


@torch.inference_mode()
def forward(model: EvalModel, token_ids: torch.Tensor, start: int, read: Reader) -> torch.Tensor:
    """int64 [B, L], B continuations of one context at `start` -> normed hidden rows fp32 [B, L, H]."""
    weights, kernels = model.weights, model.kernels
    sequences, length = token_ids.shape
    eps, dtype = weights.config.norm_eps, weights.dtype
    x = weights.embeddings(kernels, token_ids.flatten())
    scratch = _Scratch(model, sequences, length, start)
    last = len(weights.layers) - 1
    normed = kernels.rms_norm(x, weights.layers[0].input_norm, eps, out_dtype=dtype)
    for index, layer in enumerate(weights.layers):
        q, k, v = scratch.project(layer, normed)
        attended = torch.stack([read(index, q[row], k[row], v[row], start) for row in range(sequences)])
        delta = layer.o(attended.flatten(0, 1).flatten(1).to(dtype), layer.o_bias)
        normed = kernels.add_norm_(x, delta, layer.ffn_norm, eps, post_norm=layer.post_attn_norm, out_dtype=dtype)
        delta = layer.down(kernels.gated_act(layer.gate_up(normed), weights.config.act))
        norm = weights.final_norm if index == last else weights.layers[index + 1].input_norm
        out_dtype = torch.float32 if index == last else dtype
        normed = kernels.add_norm_(x, delta, norm, eps, post_norm=layer.post_ffn_norm, out_dtype=out_dtype)
    return normed.view(sequences, length, -1)


@torch.inference_mode()
def logits_of(model: EvalModel, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
    """Normed rows fp32 [T, H] -> logits fp32, at most `LOGIT_ROWS` rows at a time."""
    for rows in torch.split(hidden, LOGIT_ROWS):
        yield model.weights.logits(model.kernels, rows)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: HeadShape, *, window: int | None = None
) -> torch.Tensor:
    """Causal attention of the last L positions: q [L, Hq, D], k and v [Hkv, N, D] -> [L, Hq, D].

    Keys may be fewer than the context where `window` hides the rest.
    """
    rows, keys = q.shape[0], k.shape[1]
    folded = q.view(rows, heads.num_kv_heads, -1, heads.head_dim).permute(1, 2, 0, 3)
    group = folded.shape[1]
    places = torch.arange(keys) - torch.arange(keys - rows, keys)[:, None]  # key minus row
    seen = places <= 0 if window is None else (places <= 0) & (places > -window)
    out = scaled_dot_product_attention(
        folded,
        k[:, None].expand(-1, group, -1, -1),
        v[:, None].expand(-1, group, -1, -1),
        attn_mask=seen,
        scale=heads.scale,
    )
    return out.permute(2, 0, 1, 3).flatten(1, 2)


class FullReader:
    """Reads everything in full precision, a layer's own sliding window kept: the reference of every comparison.

    With `keep`, the rows become part of the context (prefill); without, the context stays as it is.
    """

    def __init__(self, model: EvalModel, context: Context, *, keep: bool = False) -> None:
        self._model = model
        self._context = context
        self._keep = keep

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
        context, window = self._context, self._model.weights.config.windows[layer]
        first = 0 if window is None else max(0, start - window)
        if self._keep:
            context.write(layer, k, v, start)
            end = start + k.shape[1]
            keys, values = context.keys(layer, first, end), context.values(layer, first, end)
        else:
            keys = torch.cat([context.keys(layer, first, start), k], 1)
            values = torch.cat([context.values(layer, first, start), v], 1)
        return attend(q, keys, values, self._model.heads, window=window)


def prefill(
    model: EvalModel, token_ids: torch.Tensor, context: Context, *, chunk: int = 1024
) -> Iterator[torch.Tensor]:
    """Run int64 [T] after what `context` holds, exactly; yields each chunk's hidden rows [1, L, H]."""
    reader = FullReader(model, context, keep=True)
    for part in torch.split(token_ids, chunk):
        hidden = forward(model, part[None], context.length, reader)
        context.length += len(part)
        yield hidden


class _Scratch:
    """Where `rope_store` puts the rows' keys and values, read back as plain tensors."""

    def __init__(self, model: EvalModel, sequences: int, length: int, start: int) -> None:
        config = model.weights.config
        self._model = model
        self._offset, self._length = start % BLOCK_TOKENS, length
        first, blocks = start // BLOCK_TOKENS, -(-(self._offset + length) // BLOCK_TOKENS)
        tables = torch.full((sequences, first + blocks), -1, dtype=torch.int32)
        tables[:, first:] = torch.arange(sequences * blocks).view(sequences, blocks)
        layout = KVLayout(1, config.num_kv_heads, config.head_dim, "fp32")
        self._pool: KVPool = model.kernels.allocate_pool(layout, sequences * blocks)
        self._batch = RaggedBatch(
            cu_q=torch.arange(0, (sequences + 1) * length, length, dtype=torch.int32),
            kv_lengths=torch.full((sequences,), start + length, dtype=torch.int32),
            block_tables=tables,
        )

    def project(self, layer: LayerWeights, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [B, L, Hq, D], k and v [B, Hkv, L, D], rotated."""
        model, sequences = self._model, self._batch.num_sequences
        qkv = layer.qkv(normed, layer.qkv_bias)
        q = model.kernels.rope_store(
            qkv, model.heads, layer.rope, self._pool, 0, self._batch, qk_norm=layer.qk_norm
        )
        rows = slice(self._offset, self._offset + self._length)
        k, v = (
            view.reshape(sequences, -1, model.heads.num_kv_heads, BLOCK_TOKENS, model.heads.head_dim)
            .transpose(1, 2)
            .flatten(2, 3)[:, :, rows]
            for view in kv_views(self._pool, 0)
        )
        return q.view(sequences, self._length, *q.shape[1:]), k, v
