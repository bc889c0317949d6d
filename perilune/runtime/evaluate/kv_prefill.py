"""Fills a context as serving does: bf16 arithmetic, native kernels where they are built, bf16 KV.

Both sides of a comparison share what it fills, so its rounding cancels out; it is many times as fast as fp32. Knows
weights and the block pool; nothing of readers, tiers or questions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from perilune.kernels.interface import BLOCK_TOKENS, Kernels, KVLayout, RaggedBatch
from perilune.kernels.reference import gather_kv
from perilune.kernels.select import load
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.evaluate.kv_forward import Context
from perilune.runtime.memory import free_memory_bytes
from perilune.runtime.models.decoder import Decoder
from perilune.runtime.mri import CancelFlag
from perilune.runtime.weights import ModelWeights, Precision, WeightBuilder, memory_need

Fill = Callable[[torch.Tensor, int], Context]
"""Token ids int64 [T] and a capacity of at least T -> a context of T tokens."""

_CHUNK_TOKENS = 1024


class ServingPrefill:
    """A `Fill` by the serving decoder, one sequence at a time in a pool of its own."""

    def __init__(self, weights: ModelWeights, kernels: Kernels, max_tokens: int) -> None:
        config = weights.config
        blocks = -(-max_tokens // BLOCK_TOKENS)
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, _pool_dtype(weights))
        self._pool = kernels.allocate_pool(layout, blocks)
        self._config, self._decoder = config, Decoder(weights, kernels, self._pool)
        self._table = torch.arange(blocks, dtype=torch.int32)

    def __call__(self, token_ids: torch.Tensor, capacity: int) -> Context:
        """Raises ValueError for more tokens than the pool holds."""
        length = len(token_ids)
        if length > len(self._table) * BLOCK_TOKENS:
            raise ValueError(f"{length} tokens, the pool holds {len(self._table) * BLOCK_TOKENS}")
        nowhere = torch.empty(0, dtype=torch.int64)
        for first in range(0, length, _CHUNK_TOKENS):
            part = token_ids[first : first + _CHUNK_TOKENS]
            batch = RaggedBatch(
                cu_q=torch.tensor([0, len(part)], dtype=torch.int32),
                kv_lengths=torch.tensor([first + len(part)], dtype=torch.int32),
                block_tables=self._table[None],
            )
            self._decoder.prefill(part, batch, nowhere, CancelFlag())
        context = Context(self._config, capacity)
        for layer in range(self._config.num_layers):
            context.write(layer, *gather_kv(self._pool, layer, self._table, length), 0)
        context.length = length
        return context


def _pool_dtype(weights: ModelWeights) -> Precision:
    return "bf16" if weights.dtype == torch.bfloat16 else "fp32"


def open_prefill(path: Path, max_tokens: int) -> ServingPrefill:
    """Load a model's bf16 weights. Raises `UnsupportedModel`, or `Overloaded` where they don't fit."""
    checkpoint = open_checkpoint(path)
    try:
        kernels = load(torch.get_num_threads())
        builder = WeightBuilder(checkpoint, kernels, "bf16", "stored", max_tokens)
        # No room for a packed copy beside it: nothing here decodes.
        room = min(free_memory_bytes(), memory_need(checkpoint, "bf16", "stored").one_copy_bytes)
        return ServingPrefill(builder.build(room), kernels, max_tokens)
    finally:
        checkpoint.close()
