"""Every kernel in plain PyTorch: the oracle of the native code, and the fallback where none could be built.

Computes in fp32 and rounds where the interface says so. Knows the layouts of `interface`; tuned for being
read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import gelu, linear, silu

from perilune.kernels import packing, tier_attention, tier_reference
from perilune.kernels.interface import (
    BLOCK_TOKENS,
    Act,
    DecodeLayer,
    DecodeModel,
    DecodePlan,
    GgufKind,
    HeadShape,
    KVLayout,
    KVPool,
    PackedLinear,
    QKNorm,
    RaggedBatch,
    RopeTable,
    SegmentPool,
    chunk_positions,
)
from perilune.kernels.memory import zeroed_bytes
from perilune.kernels.tiers import SEGMENT_TOKENS, SINK_TOKENS, SegmentLayout

_QUERY_CHUNK = 512  # rows of scores held at once


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """`DecodePlan` of the reference: the model's weights in fp32, by the identity of what they were
    unpacked from."""

    model: DecodeModel
    pool: KVPool
    dense: dict[int, torch.Tensor]


class ReferenceKernels:
    """`Kernels` in PyTorch. `reason` says why native code doesn't run."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    @property
    def level_name(self) -> str:
        return "reference"

    def describe(self) -> str:
        return f"PyTorch reference ({self._reason})"

    def allocate_pool(self, layout: KVLayout, num_blocks: int) -> KVPool:
        return KVPool(layout, zeroed_bytes(num_blocks * layout.block_bytes))

    # ------------------------------------------------------------------------------------- row-wise pieces

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        offset: float = 0.0,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        return _rms_norm(x.float(), weight, eps, offset).to(out_dtype)

    def add_norm_(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        post_norm: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        _add(residual, delta.float(), post_norm, eps)
        return _rms_norm(residual, weight, eps, 0.0).to(out_dtype)

    def gated_act(self, gate_up: torch.Tensor, act: Act) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, -1)
        activated = silu(gate) if act == "silu" else gelu(gate, approximate="tanh")
        return (activated * up).to(gate_up.dtype)

    def rope_store(
        self,
        qkv: torch.Tensor,
        heads: HeadShape,
        rope: RopeTable,
        pool: KVPool,
        layer: int,
        batch: RaggedBatch,
        *,
        qk_norm: QKNorm | None = None,
    ) -> torch.Tensor:
        kv_heads = heads.num_kv_heads
        by_head = qkv.float().view(qkv.shape[0], -1, heads.head_dim)
        q, k, v = torch.split(by_head, [heads.num_q_heads, kv_heads, kv_heads], 1)
        if qk_norm is not None:
            q = _rms_norm(q, qk_norm.q_weight, qk_norm.eps, qk_norm.offset)
            k = _rms_norm(k, qk_norm.k_weight, qk_norm.eps, qk_norm.offset)
        positions = chunk_positions(batch)
        cos, sin = rope.cos[positions, None], rope.sin[positions, None]
        _store(pool, layer, batch, positions, _rotate(k, cos, sin), v)
        return _rotate(q, cos, sin).to(_kv_dtype(pool.layout))

    # ------------------------------------------------------------------------------------- attention

    def attention(
        self,
        q: torch.Tensor,
        pool: KVPool,
        layer: int,
        batch: RaggedBatch,
        heads: HeadShape,
        *,
        window: int | None = None,
        cancel_address: int = 0,
    ) -> torch.Tensor:
        out = torch.zeros_like(q)
        positions = chunk_positions(batch)
        bounds = batch.cu_q.tolist()
        for sequence, length in enumerate(batch.kv_lengths.tolist()):
            tiers = None if window is not None else _tiers(pool, layer, batch, sequence)
            k, v = gather_kv(pool, layer, batch.block_tables[sequence], 0 if tiers else length)
            for start in range(bounds[sequence], bounds[sequence + 1], _QUERY_CHUNK):
                if cancel_address and ctypes.c_int32.from_address(cancel_address).value:
                    return out
                rows = slice(start, min(start + _QUERY_CHUNK, bounds[sequence + 1]))
                if tiers is None:
                    attended = _attend(q[rows].float(), k, v, positions[rows], heads, window)
                else:
                    attended = tier_attention.dense(q[rows].float(), positions[rows], *tiers, heads)
                out[rows] = attended.to(q.dtype)
        return out

    def decode_attention(
        self,
        q: torch.Tensor,
        pool: KVPool,
        layer: int,
        batch: RaggedBatch,
        heads: HeadShape,
        *,
        window: int | None = None,
    ) -> torch.Tensor:
        segments = batch.segments
        if segments is None or window is not None:
            return self.attention(q, pool, layer, batch, heads, window=window)
        out = torch.empty_like(q)
        positions = batch.kv_lengths.long() - 1
        for sequence, policy in enumerate(segments.policies):
            row = slice(sequence, sequence + 1)
            near, far = _tiers(pool, layer, batch, sequence) or _untiered(pool, layer, batch, sequence)
            attended, stats = tier_attention.hybrid(
                q[row].float(), positions[row], near, far, heads, policy, layer, budgets=segments.budgets
            )
            out[row] = attended.to(q.dtype)
            if segments.stats is not None:
                segments.stats[sequence, layer] = stats[0]
        return out

    # ------------------------------------------------------------------------------------- closed segments

    def allocate_segments(self, layout: SegmentLayout, num_slots: int) -> SegmentPool:
        summaries = zeroed_bytes(num_slots * layout.segment_summary_bytes)
        return SegmentPool(layout, summaries, torch.zeros(num_slots, dtype=torch.int64))

    def close_records(
        self, source: KVPool, blocks: torch.Tensor, pool: SegmentPool, slot: int, first: int, count: int
    ) -> None:
        table = blocks[blocks >= 0]
        length = BLOCK_TOKENS * table.numel()
        heads = pool.layout.num_kv_heads
        for layer in range(first // heads, -(-(first + count) // heads)):
            wanted = range(max(first - layer * heads, 0), min(first + count - layer * heads, heads))
            k, v = (part[wanted.start : wanted.stop] for part in gather_kv(source, layer, table, length))
            records = tier_reference.close(k, v)
            tier_reference.write_records(records, pool, slot, layer * heads + wanted.start)

    # ------------------------------------------------------------------------------------- packed weights

    def pack_gguf(self, raw: torch.Tensor, rows: int, cols: int, kind: GgufKind) -> PackedLinear:
        return packing.pack_gguf(raw, rows, cols, kind)

    def pack_int8(self, weight: torch.Tensor) -> PackedLinear:
        return packing.pack_int8(weight)

    def pack_bf16(self, weight: torch.Tensor) -> PackedLinear:
        return packing.pack_bf16(weight)

    def dequantize(self, packed: PackedLinear) -> torch.Tensor:
        return packing.unpack(packed).to(torch.bfloat16)

    def gather_rows(self, packed: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
        return packing.unpack(packed)[ids]

    def linear(
        self, packed: Sequence[PackedLinear], x: torch.Tensor, *, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight = torch.cat([packing.unpack(part) for part in packed])
        return linear(x.float(), weight, bias)

    # ------------------------------------------------------------------------------------- the whole step

    def prepare_decode(self, model: DecodeModel, pool: KVPool) -> DecodePlan:
        parts = {id(part): part for layer in model.layers for part in _parts(layer)} | {id(model.head): model.head}
        return ReferencePlan(model, pool, {key: packing.unpack(part) for key, part in parts.items()})

    def decode_step(
        self, plan: DecodePlan, x: torch.Tensor, batch: RaggedBatch, *, cancel_address: int = 0
    ) -> torch.Tensor:
        if not isinstance(plan, ReferencePlan):
            raise TypeError("the plan comes from other kernels")
        model = plan.model
        for index, layer in enumerate(model.layers):
            if cancel_address and ctypes.c_int32.from_address(cancel_address).value:
                break
            self._decode_layer(plan, layer, index, x, batch)
        hidden = _rms_norm(x, model.final_norm, model.eps, 0.0)
        return linear(hidden, plan.dense[id(model.head)])

    def _decode_layer(
        self, plan: ReferencePlan, layer: DecodeLayer, index: int, x: torch.Tensor, batch: RaggedBatch
    ) -> None:
        model = plan.model

        def project(parts: Sequence[PackedLinear], rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            out = torch.cat([linear(rows, plan.dense[id(part)]) for part in parts], -1)
            return out if bias is None else out + bias

        qkv = project(layer.qkv, _rms_norm(x, layer.input_norm, model.eps, 0.0), layer.qkv_bias)
        q = self.rope_store(qkv, model.heads, layer.rope, plan.pool, index, batch, qk_norm=layer.qk_norm)
        attended = self.decode_attention(q, plan.pool, index, batch, model.heads, window=layer.window)
        branch = project([layer.o], attended.float().flatten(1), layer.o_bias)
        _add(x, branch, layer.post_attn_norm, model.eps)
        gate_up = project(layer.gate_up, _rms_norm(x, layer.ffn_norm, model.eps, 0.0), None)
        branch = project([layer.down], self.gated_act(gate_up, model.act), None)
        _add(x, branch, layer.post_ffn_norm, model.eps)


def _parts(layer: DecodeLayer) -> list[PackedLinear]:
    return [*layer.qkv, layer.o, *layer.gate_up, layer.down]


def _add(residual: torch.Tensor, branch: torch.Tensor, post_norm: torch.Tensor | None, eps: float) -> None:
    residual += branch if post_norm is None else _rms_norm(branch, post_norm, eps, 0.0)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + weight)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def _kv_dtype(layout: KVLayout) -> torch.dtype:
    return torch.bfloat16 if layout.dtype == "bf16" else torch.float32


def kv_views(pool: KVPool, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's K and V, writable, [num_blocks, Hkv, 32, D], whatever the layout in memory."""
    layout = pool.layout
    halves = pool.data.view(_kv_dtype(layout)).view(pool.num_blocks, layout.num_layers, 2, layout.num_kv_heads, -1)
    k, v = halves[:, layer, 0], halves[:, layer, 1]
    dim = layout.head_dim
    if layout.dtype == "fp32":
        shape = (pool.num_blocks, layout.num_kv_heads, BLOCK_TOKENS, dim)
        return k.view(shape), v.view(shape)
    # Strides rather than copies: [D/2][token][2] and [token/2][D][2] seen as [token, D] need a split axis,
    # kept as 5-D.
    k_pairs = k.view(*k.shape[:2], dim // 2, BLOCK_TOKENS, 2).permute(0, 1, 3, 2, 4)
    v_pairs = v.view(*v.shape[:2], BLOCK_TOKENS // 2, dim, 2).permute(0, 1, 2, 4, 3)
    return k_pairs, v_pairs


def gather_kv(pool: KVPool, layer: int, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one sequence, fp32 [Hkv, length, D] each; blocks that are no longer kept (-1) read as zero."""
    dim, heads = pool.layout.head_dim, pool.layout.num_kv_heads
    blocks = table[: -(-length // BLOCK_TOKENS)].long()
    absent = (blocks < 0)[:, None, None, None]

    def dense(view: torch.Tensor) -> torch.Tensor:
        picked = view[blocks].reshape(len(blocks), heads, BLOCK_TOKENS, dim).float().masked_fill(absent, 0)
        return picked.transpose(0, 1).flatten(1, 2)[:, :length]

    k, v = kv_views(pool, layer)
    return dense(k), dense(v)


def _tiers(
    pool: KVPool, layer: int, batch: RaggedBatch, sequence: int
) -> tuple[tier_attention.Near, tier_attention.Far] | None:
    """What a sequence with closed segments reads; None where it has none."""
    segments = batch.segments
    count = 0 if segments is None else int(segments.counts[sequence])
    if segments is None or count == 0:
        return None
    heads = segments.pool.layout.num_kv_heads
    slots = segments.tables[sequence, :count].tolist()
    records = [tier_reference.read_records(segments.pool, slot, layer * heads, heads) for slot in slots]
    far = tier_attention.far_of(
        [(part, (index + 1) * SEGMENT_TOKENS) for index, part in enumerate(records)], rounded=True
    )
    table, closed = batch.block_tables[sequence], count * SEGMENT_TOKENS
    length = int(batch.kv_lengths[sequence])
    sink_k, sink_v = gather_kv(pool, layer, table, SINK_TOKENS)
    tail_k, tail_v = gather_kv(pool, layer, table[closed // BLOCK_TOKENS :], length - closed)
    near = tier_attention.Near(
        k=torch.cat([sink_k, tail_k], 1),
        v=torch.cat([sink_v, tail_v], 1),
        positions=torch.cat([torch.arange(SINK_TOKENS), torch.arange(closed, length)]),
    )
    return near, far


def _untiered(
    pool: KVPool, layer: int, batch: RaggedBatch, sequence: int
) -> tuple[tier_attention.Near, tier_attention.Far]:
    """A sequence without closed segments, in the same form."""
    length = int(batch.kv_lengths[sequence])
    k, v = gather_kv(pool, layer, batch.block_tables[sequence], length)
    return tier_attention.Near(k, v, torch.arange(length)), tier_attention.no_far(*k.shape[::2])


def _store(
    pool: KVPool, layer: int, batch: RaggedBatch, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Write k and v [T, Hkv, D] to their slots."""
    counts = (batch.cu_q[1:] - batch.cu_q[:-1]).long()
    sequences = torch.repeat_interleave(torch.arange(len(counts)), counts)
    blocks = batch.block_tables[sequences, positions // BLOCK_TOKENS].long()
    slots = positions % BLOCK_TOKENS
    k_view, v_view = kv_views(pool, layer)
    if pool.layout.dtype == "fp32":
        k_view[blocks, :, slots], v_view[blocks, :, slots] = k, v
        return
    k_view[blocks, :, slots] = k.to(torch.bfloat16).reshape(*k.shape[:2], -1, 2)
    v_view[blocks, :, slots // 2, slots % 2] = v.to(torch.bfloat16)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, heads: HeadShape, window: int | None
) -> torch.Tensor:
    """q fp32 [n, Hq, D] at `positions` over k, v fp32 [Hkv, length, D] -> fp32 [n, Hq, D]."""
    rows, _, dim = q.shape
    folded = q.view(rows, heads.num_kv_heads, -1, dim).permute(1, 2, 0, 3)  # [Hkv, group, n, D]
    scores = folded @ k.transpose(1, 2)[:, None] * heads.scale
    keys = torch.arange(k.shape[1])
    hidden = keys > positions[:, None]
    if window is not None:
        hidden |= keys <= positions[:, None] - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ v[:, None]).permute(2, 0, 1, 3).reshape(rows, -1, dim)
