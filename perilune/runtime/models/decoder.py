"""The decoder-only transformer that every architecture of R1 is a case of, over paged KV.

Knows the order of operations; what differs between architectures is in `ModelConfig` and in which weights
exist. Knows nothing of requests, sampling or schedulers. The residual stream is fp32. After every operation it
looks at the cancel flag, so the caller bounds the time between looks by bounding the rows of a pass.
"""

from __future__ import annotations

from dataclasses import replace

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
        """One token for each sequence: int64 [S] -> logits fp32 [S, vocab]. Raises `StepAbandoned`.

        After `CancelFlag.wake` the call may have been cut short: the caller asks `take_change`.
        """
        assert self._plan is not None
        x = self._weights.embeddings(self._kernels, token_ids)
        logits = self._kernels.decode_step(self._plan, x, batch, cancel_address=cancelled.change_address)
        _look(cancelled)
        return logits

    @torch.inference_mode()
    def prefill(
        self,
        token_ids: torch.Tensor,
        batch: RaggedBatch,
        sampled: torch.Tensor,
        cancelled: CancelFlag,
        names: list[str] | None = None,
    ) -> torch.Tensor:
        """Rows of one or more sequences: int64 [T] -> logits fp32 of the `sampled` sequences' last rows.

        `sampled` holds indices into the batch's sequences, int64. `names` are the batch's sequences; before each
        layer the rows of those that left (`CancelFlag.left`) are dropped, and their names from the list.
        Raises `StepAbandoned`.
        """
        weights = self._weights
        x = weights.embeddings(self._kernels, token_ids)
        normed = self._kernels.rms_norm(
            x, weights.layers[0].input_norm, weights.config.norm_eps, out_dtype=weights.dtype
        )
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            kept = _kept(names, cancelled)
            if kept is not None:
                rows, batch, sampled = _without(batch, sampled, kept)
                x, normed = x[rows], normed[rows]
            if not len(x):
                return torch.empty(0, weights.config.vocab_size)
            q = self._project(normed, layer, index, batch, cancelled)
            if index == last:
                # The top layer's output is only read where a token is sampled; its KV is complete by now.
                if not len(sampled):
                    return torch.empty(0, weights.config.vocab_size)
                rows = batch.cu_q[1:].long()[sampled] - 1
                x, q, batch = x[rows], q[rows], _last_rows(batch, sampled)
            normed = self._attend(x, q, layer, index, batch, cancelled)
            normed = self._feed_forward(x, normed, index, cancelled)
        logits = weights.logits(self._kernels, normed)
        _look(cancelled)
        return logits

    def _project(
        self, normed: torch.Tensor, layer: LayerWeights, index: int, batch: RaggedBatch, cancelled: CancelFlag
    ) -> torch.Tensor:
        """Write the rows' KV; return their rotated queries [T, Hq, D]."""
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
    ) -> torch.Tensor:
        """Add the attention to the residual stream; return the rows normed for the feed-forward part."""
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
        _look(cancelled)
        return self._add(x, delta, layer.post_attn_norm, layer.ffn_norm, self._weights.dtype)

    def _feed_forward(
        self, x: torch.Tensor, normed: torch.Tensor, index: int, cancelled: CancelFlag
    ) -> torch.Tensor:
        """Add the feed-forward part; return the rows normed for the next layer, or for the head in fp32."""
        layers = self._weights.layers
        gate_up = layers[index].gate_up(normed)
        _look(cancelled)
        delta = layers[index].down(self._kernels.gated_act(gate_up, self._weights.config.act))
        _look(cancelled)
        post_norm = layers[index].post_ffn_norm
        if index + 1 == len(layers):
            return self._add(x, delta, post_norm, self._weights.final_norm, torch.float32)
        return self._add(x, delta, post_norm, layers[index + 1].input_norm, self._weights.dtype)

    def _add(
        self,
        x: torch.Tensor,
        delta: torch.Tensor,
        post_norm: torch.Tensor | None,
        norm: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        eps = self._weights.config.norm_eps
        return self._kernels.add_norm_(x, delta, norm, eps, post_norm=post_norm, out_dtype=dtype)


def _look(cancelled: CancelFlag) -> None:
    if cancelled.is_set():
        raise StepAbandoned


def _kept(names: list[str] | None, cancelled: CancelFlag) -> list[int] | None:
    """Indices of the sequences that stay, when some have left: their names are removed. None when all stay."""
    left = cancelled.left() if names else frozenset()
    if not names or left.isdisjoint(names):
        return None
    kept = [index for index, name in enumerate(names) if name not in left]
    names[:] = [names[index] for index in kept]
    return kept


def _without(
    batch: RaggedBatch, sampled: torch.Tensor, kept: list[int]
) -> tuple[torch.Tensor, RaggedBatch, torch.Tensor]:
    """The rows, the batch and the `sampled` that remain of a pass when only the `kept` sequences stay."""
    counts = batch.cu_q.diff()
    stays = torch.zeros(len(counts), dtype=torch.bool)
    stays[kept] = True
    rows = torch.repeat_interleave(stays, counts.long())
    places = stays.cumsum(0) - 1
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), counts[stays].cumsum(0, dtype=torch.int32)])
    return rows, _narrowed(batch, torch.tensor(kept, dtype=torch.int64), bounds), places[sampled[stays[sampled]]]


def _last_rows(batch: RaggedBatch, sampled: torch.Tensor) -> RaggedBatch:
    """The last row of each sampled sequence, as a batch of its own."""
    return _narrowed(batch, sampled, torch.arange(len(sampled) + 1, dtype=torch.int32))


def _narrowed(batch: RaggedBatch, chosen: torch.Tensor, bounds: torch.Tensor) -> RaggedBatch:
    """Some of a batch's sequences, with rows of theirs that lie at `bounds`."""
    segments = batch.segments
    if segments is not None:
        segments = replace(
            segments,
            tables=segments.tables[chosen].contiguous(),
            counts=segments.counts[chosen].contiguous(),
            policies=tuple(segments.policies[index] for index in chosen.tolist()),
        )
    return RaggedBatch(
        cu_q=bounds,
        kv_lengths=batch.kv_lengths[chosen].contiguous(),
        block_tables=batch.block_tables[chosen].contiguous(),
        segments=segments,
    )
