"""The decoder-only transformer that every architecture of R1 is a case of, over paged KV.

Knows the order of operations; what differs between architectures is in `ModelConfig` and in which weights
exist. Knows nothing of requests, sampling or schedulers. The residual stream is fp32. After every operation it
looks at the cancel flag, so the caller bounds the time between looks by bounding the rows of a pass.
"""

from __future__ import annotations

import torch

from perilune.kernels.interface import DecodePlan, Kernels, KVPool, RaggedBatch
from perilune.runtime.mri import CancelFlag, StepAbandoned
from perilune.runtime.weights import LayerWeights, ModelWeights


class Decoder:
    """One model over one block pool. Not thread-safe."""

    def __init__(self, weights: ModelWeights, kernels: Kernels, pool: KVPool) -> None:
        self._weights = weights
        self._kernels = kernels
        self._pool = pool
        self._plan: DecodePlan | None = None
        if weights.decode is not None:
            self._plan = kernels.prepare_decode(weights.decode, pool)

    @property
    def decodes_packed(self) -> bool:
        """Whether `decode` may be called; else decode rows go through `prefill`."""
        return self._plan is not None

    @torch.inference_mode()
    def decode(self, token_ids: torch.Tensor, batch: RaggedBatch, cancelled: CancelFlag) -> torch.Tensor:
        """One token for each sequence: int64 [S] -> logits fp32 [S, vocab]. Raises `StepAbandoned`."""
        assert self._plan is not None
        x = self._weights.embeddings(self._kernels, token_ids)
        logits = self._kernels.decode_step(self._plan, x, batch, cancel_address=cancelled.address)
        _look(cancelled)
        return logits

    @torch.inference_mode()
    def prefill(
        self, token_ids: torch.Tensor, batch: RaggedBatch, sampled: torch.Tensor, cancelled: CancelFlag
    ) -> torch.Tensor:
        """Rows of one or more sequences: int64 [T] -> logits fp32 of the `sampled` sequences' last rows.

        `sampled` holds indices into the batch's sequences, int64. Raises `StepAbandoned`.
        """
        x = self._weights.embeddings(self._kernels, token_ids)
        last = len(self._weights.layers) - 1
        for index, layer in enumerate(self._weights.layers):
            q = self._project(x, layer, index, batch, cancelled)
            if index == last:
                # The top layer's output is only read where a token is sampled; its KV is complete by now.
                if not len(sampled):
                    break
                rows = batch.cu_q[1:].long()[sampled] - 1
                x, q, batch = x[rows], q[rows], _last_rows(batch, sampled)
            self._attend(x, q, layer, index, batch, cancelled)
            self._feed_forward(x, layer, cancelled)
        if not len(sampled):
            return torch.empty(0, self._weights.config.vocab_size)
        hidden = self._kernels.rms_norm(
            x, self._weights.final_norm, self._weights.config.norm_eps, out_dtype=torch.float32
        )
        logits = self._weights.logits(self._kernels, hidden)
        _look(cancelled)
        return logits

    def _project(
        self, x: torch.Tensor, layer: LayerWeights, index: int, batch: RaggedBatch, cancelled: CancelFlag
    ) -> torch.Tensor:
        """Write the rows' KV; return their rotated queries [T, Hq, D]."""
        normed = self._norm(x, layer.input_norm)
        qkv = layer.qkv(normed, layer.qkv_bias)
        _look(cancelled)
        return self._kernels.rope_store(
            qkv, self._weights.heads, layer.rope, self._pool, index, batch, qk_norm=layer.qk_norm
        )

    def _attend(
        self,
        x: torch.Tensor,
        q: torch.Tensor,
        layer: LayerWeights,
        index: int,
        batch: RaggedBatch,
        cancelled: CancelFlag,
    ) -> None:
        attended = self._kernels.attention(
            q,
            self._pool,
            index,
            batch,
            self._weights.heads,
            window=layer.window,
            cancel_address=cancelled.address,
        )
        _look(cancelled)
        delta = layer.o(attended.flatten(1), layer.o_bias)
        self._kernels.add_(x, delta, post_norm=layer.post_attn_norm, eps=self._weights.config.norm_eps)
        _look(cancelled)

    def _feed_forward(self, x: torch.Tensor, layer: LayerWeights, cancelled: CancelFlag) -> None:
        gate_up = layer.gate_up(self._norm(x, layer.ffn_norm))
        _look(cancelled)
        delta = layer.down(self._kernels.gated_act(gate_up, self._weights.config.act))
        _look(cancelled)
        self._kernels.add_(x, delta, post_norm=layer.post_ffn_norm, eps=self._weights.config.norm_eps)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        config = self._weights.config
        return self._kernels.rms_norm(x, weight, config.norm_eps, out_dtype=self._weights.dtype)


def _look(cancelled: CancelFlag) -> None:
    if cancelled.is_set():
        raise StepAbandoned


def _last_rows(batch: RaggedBatch, sampled: torch.Tensor) -> RaggedBatch:
    """The last row of each sampled sequence, as a batch of its own."""
    return RaggedBatch(
        cu_q=torch.arange(len(sampled) + 1, dtype=torch.int32),
        kv_lengths=batch.kv_lengths[sampled].contiguous(),
        block_tables=batch.block_tables[sampled].contiguous(),
    )
