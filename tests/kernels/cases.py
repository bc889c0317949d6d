"""Random inputs for the kernel tests: batches, pools with shuffled blocks, models."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from perilune.kernels.interface import (
    DecodeLayer,
    DecodeModel,
    HeadShape,
    Kernels,
    KVLayout,
    KVPool,
    PackedLinear,
    QKNorm,
    RaggedBatch,
    RopeTable,
)

NUM_LAYERS = 2


@dataclass(frozen=True)
class Case:
    """Sequences of `lengths` tokens whose last `counts` are the batch's rows."""

    heads: HeadShape
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    window: int | None = None
    seed: int = 0

    @property
    def layout(self) -> KVLayout:
        return KVLayout(NUM_LAYERS, self.heads.num_kv_heads, self.heads.head_dim, "bf16")


def head_shape(group: int, kv_heads: int, dim: int) -> HeadShape:
    return HeadShape(group * kv_heads, kv_heads, dim, dim**-0.5)


def rope_table(positions: int, dim: int) -> RopeTable:
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(dim // 2) / (dim // 2))
    return RopeTable(angles.cos(), angles.sin())


def block_tables(lengths: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """int32 [S, max_blocks], no block twice, in no order; unused entries are -1."""
    needed = [-(-length // 32) for length in lengths]
    order = torch.randperm(sum(needed) + 3, generator=generator).int()
    tables = torch.full((len(lengths), max(needed) + 1), -1, dtype=torch.int32)
    for row, count in enumerate(needed):
        tables[row, :count], order = order[:count], order[count:]
    return tables


def ragged(counts: tuple[int, ...], lengths: tuple[int, ...], tables: torch.Tensor) -> RaggedBatch:
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return RaggedBatch(starts, torch.tensor(lengths, dtype=torch.int32), tables)


def random_pool(kernels: Kernels, case: Case, generator: torch.Generator) -> KVPool:
    """A pool full of normal numbers, as if every token had been stored; every 7th stale slot would be NaN."""
    blocks = sum(-(-length // 32) for length in case.lengths) + 3
    pool = kernels.allocate_pool(case.layout, blocks)
    numbers = pool.data.view(torch.bfloat16)
    numbers.copy_(torch.randn(numbers.numel(), generator=generator))
    return pool


def random_rows(case: Case, generator: torch.Generator) -> torch.Tensor:
    """q [T, Hq, D] bf16."""
    heads = case.heads
    q = torch.randn(sum(case.counts), heads.num_q_heads, heads.head_dim, generator=generator)
    return (2 * q).to(torch.bfloat16)


def pack(kernels: Kernels, kind: str, weight: torch.Tensor) -> PackedLinear:
    if kind == "bf16":
        return kernels.pack_bf16(weight)
    if kind == "int8":
        return kernels.pack_int8(weight)
    rows, cols = weight.shape
    generator = torch.Generator().manual_seed(rows * cols)
    raw = torch.randint(0, 256, (rows, cols // 32, 20), generator=generator, dtype=torch.uint8)
    scales = torch.rand(rows, cols // 32, 2, generator=generator).half() * 0.01 + 0.002
    scales[..., 1] *= -7.5
    raw[..., :4] = scales.contiguous().view(torch.uint8)
    return kernels.pack_gguf(raw.flatten(), rows, cols, "Q4_1")


def random_model(
    kernels: Kernels, heads: HeadShape, hidden: int, ffn: int, *, gemma: bool, kinds: list[str]
) -> DecodeModel:
    """Two layers; `gemma`: post norms, q/k norms, gelu, a window; else biases."""
    generator = torch.Generator().manual_seed(hidden + ffn)
    turn = iter(kinds * 16)

    def weight(rows: int, cols: int) -> PackedLinear:
        return pack(kernels, next(turn), torch.randn(rows, cols, generator=generator) * cols**-0.5)

    def vector(size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    dim, kv_rows = heads.head_dim, heads.num_kv_heads * heads.head_dim
    q_rows = heads.num_q_heads * dim
    layers = [
        DecodeLayer(
            input_norm=vector(hidden),
            qkv=(weight(q_rows, hidden), weight(kv_rows, hidden), weight(kv_rows, hidden)),
            qkv_bias=None if gemma else 0.1 * vector(heads.qkv_columns),
            qk_norm=QKNorm(vector(dim), vector(dim), 1e-6, 0.0) if gemma else None,
            rope=rope_table(4096, dim),
            window=48 if gemma and index == 0 else None,
            o=weight(hidden, q_rows),
            o_bias=None,
            post_attn_norm=vector(hidden) if gemma else None,
            ffn_norm=vector(hidden),
            gate_up=(weight(ffn, hidden), weight(ffn, hidden)),
            down=weight(hidden, ffn),
            post_ffn_norm=vector(hidden) if gemma else None,
        )
        for index in range(NUM_LAYERS)
    ]
    act = "gelu_tanh" if gemma else "silu"
    return DecodeModel(hidden, heads, act, 1e-6, tuple(layers), vector(hidden), weight(203, hidden))
