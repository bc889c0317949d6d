"""The C library as `Kernels`: checks tensors, makes structs, calls. The arithmetic is in the .c files."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from perilune.kernels import abi, openmp
from perilune.kernels.interface import (
    BLOCK_TOKENS,
    MAX_DECODE_ROWS,
    ROW_TILE,
    Act,
    DecodeModel,
    DecodePlan,
    GgufKind,
    HeadShape,
    KVLayout,
    KVPool,
    PackedKind,
    PackedLinear,
    QKNorm,
    RaggedBatch,
    RopeTable,
    SegmentPool,
)
from perilune.kernels.memory import Arena, zeroed_bytes
from perilune.kernels.packing import TILE_BLOCK_BYTES, check_gguf, check_matrix
from perilune.kernels.tiers import SEGMENT_TOKENS, SegmentLayout

Level = Literal["portable", "avx2", "avx512"]
_LEVELS: dict[Level, int] = {"portable": 0, "avx2": 1, "avx512": 2}


@dataclass(frozen=True, slots=True)
class NativePlan:
    """`DecodePlan`: the model's structs; keeps the tensors that they point into alive."""

    model: DecodeModel
    pool: KVPool
    structs: abi.Model


class NativeKernels:
    """`Kernels` in C. Raises OSError if the library or an OpenMP runtime can't be loaded."""

    def __init__(self, library: Path, threads: int, level: Level = "avx512") -> None:
        self._runtime = openmp.expose()
        self._c: Any = ctypes.CDLL(str(library))
        for name, (result, arguments) in abi.FUNCTIONS.items():
            function = getattr(self._c, name)
            function.restype, function.argtypes = result, arguments
        self._struct = abi.Context()
        self._context = ctypes.addressof(self._struct)
        self._threads = threads
        self._arena = Arena()
        self._c.pk_init(self._context, threads, _LEVELS[level])

    @property
    def level_name(self) -> str:
        """The CPU level that runs: what was asked for, or less."""
        name: bytes = self._c.pk_level(self._context)
        return name.decode()

    def describe(self) -> str:
        return f"native {self.level_name}, {self._threads} threads on {Path(self._runtime).name}"

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
        rows, n = x.shape
        source, is_bf16 = abi.number_address(x, rows, n)
        out = torch.empty(rows, n, dtype=out_dtype)
        target, out_bf16 = abi.number_address(out, rows, n)
        scale = abi.address(weight, torch.float32, n)
        self._c.pk_rms_norm(self._context, source, is_bf16, scale, rows, n, eps, offset, target, out_bf16)
        return out

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
        rows, n = residual.shape
        target = abi.address(residual, torch.float32, rows, n)
        source, is_bf16 = abi.number_address(delta, rows, n)
        first, second = abi.optional(post_norm, n), abi.address(weight, torch.float32, n)
        out = torch.empty(rows, n, dtype=out_dtype)
        normed, out_bf16 = abi.number_address(out, rows, n)
        self._c.pk_add_norm(self._context, target, source, is_bf16, first, second, rows, n, eps, normed, out_bf16)
        return out

    def gated_act(self, gate_up: torch.Tensor, act: Act) -> torch.Tensor:
        rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        source, is_bf16 = abi.number_address(gate_up, rows, 2 * n)
        out = torch.empty(rows, n, dtype=gate_up.dtype)
        self._c.pk_gated_act(self._context, source, is_bf16, rows, n, abi.ACTS[act], out.data_ptr())
        return out

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
        rows = int(batch.cu_q[-1])
        source, is_bf16 = abi.number_address(qkv, rows, heads.qkv_columns)
        q = torch.empty(rows, heads.num_q_heads, heads.head_dim, dtype=torch.bfloat16)
        norm = abi.qk_norm(qk_norm, heads.head_dim)
        status = self._c.pk_rope_store(
            self._context,
            source,
            is_bf16,
            byref(abi.heads(heads, pool, layer)),
            byref(abi.rope(rope, heads.head_dim)),
            byref(norm) if norm else None,
            byref(abi.pool(pool)),
            layer,
            byref(abi.batch(batch)),
            q.data_ptr(),
        )
        _check(status)
        return q

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
        rows = int(batch.cu_q[-1])
        source = abi.address(q, torch.bfloat16, rows, heads.num_q_heads, heads.head_dim)
        out = torch.empty_like(q)
        status = self._c.pk_attention(
            self._context,
            byref(abi.pool(pool)),
            layer,
            byref(abi.batch(batch)),
            byref(abi.heads(heads, pool, layer)),
            window or 0,
            source,
            out.data_ptr(),
            cancel_address or None,
        )
        _check(status)
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
        source = abi.address(q, torch.bfloat16, batch.num_sequences, heads.num_q_heads, heads.head_dim)
        out = torch.empty_like(q)
        status = self._c.pk_decode_attention(
            self._context,
            byref(abi.pool(pool)),
            layer,
            byref(abi.batch(batch)),
            byref(abi.heads(heads, pool, layer)),
            window or 0,
            source,
            out.data_ptr(),
        )
        _check(status)
        return out

    # ------------------------------------------------------------------------------------- closed segments

    def allocate_segments(self, layout: SegmentLayout, num_slots: int) -> SegmentPool:
        summaries = zeroed_bytes(num_slots * layout.segment_summary_bytes)
        return SegmentPool(layout, summaries, torch.zeros(num_slots, dtype=torch.int64))

    def close_records(
        self, source: KVPool, blocks: torch.Tensor, pool: SegmentPool, slot: int, first: int, count: int
    ) -> None:
        layout, kv = pool.layout, source.layout
        if (layout.num_layers, layout.num_kv_heads, layout.head_dim) != (
            kv.num_layers,
            kv.num_kv_heads,
            kv.head_dim,
        ):
            raise ValueError(f"{layout} doesn't fit {kv}")
        table = abi.address(blocks, torch.int32, SEGMENT_TOKENS // BLOCK_TOKENS)
        slots = abi.segment_pool(pool)
        status = self._c.pk_close_records(
            self._context, byref(abi.pool(source)), table, byref(slots), slot, first, count
        )
        if status == abi.BAD_BATCH:
            raise ValueError(
                f"slot {slot} is empty, or records {first} … {first + count - 1} or blocks don't exist"
            )
        _check(status)

    # ------------------------------------------------------------------------------------- packed weights

    def pack_gguf(self, raw: torch.Tensor, rows: int, cols: int, kind: GgufKind) -> PackedLinear:
        blocks = check_gguf(raw, rows, cols, kind)
        out = self._empty_packed("int8" if kind in ("Q5_0", "Q8_0") else "q4", rows, cols)
        number = abi.GGUF_KINDS[kind]
        self._c.pk_pack_gguf(self._context, blocks.data_ptr(), rows, cols, number, out.data.data_ptr())
        return out

    def pack_int8(self, weight: torch.Tensor) -> PackedLinear:
        rows, cols = check_matrix(weight, 32)
        source, is_bf16 = abi.number_address(weight.contiguous(), rows, cols)
        out = self._empty_packed("int8", rows, cols)
        self._c.pk_pack_int8(self._context, source, is_bf16, rows, cols, out.data.data_ptr())
        return out

    def pack_bf16(self, weight: torch.Tensor) -> PackedLinear:
        rows, cols = check_matrix(weight, 2)
        source = weight.to(torch.bfloat16).contiguous()
        out = self._empty_packed("bf16", rows, cols)
        self._c.pk_pack_bf16(self._context, source.data_ptr(), rows, cols, out.data.data_ptr())
        return out

    def dequantize(self, packed: PackedLinear) -> torch.Tensor:
        out = torch.empty(packed.rows, packed.cols, dtype=torch.bfloat16)
        self._c.pk_dequantize(self._context, byref(abi.packed(packed)), out.data_ptr())
        return out

    def gather_rows(self, packed: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
        source = abi.address(ids, torch.int64, -1)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < packed.rows:
            raise IndexError(f"row outside 0 … {packed.rows - 1}")
        out = torch.empty(ids.numel(), packed.cols)
        self._c.pk_gather_rows(byref(abi.packed(packed)), source, ids.numel(), out.data_ptr())
        return out

    def linear(
        self, packed: Sequence[PackedLinear], x: torch.Tensor, *, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, columns = x.shape[0], sum(part.rows for part in packed)
        source, is_bf16 = abi.number_address(x, rows, packed[0].cols)
        out = torch.empty(rows, columns)
        status = self._c.pk_linear(
            self._context,
            abi.parts(tuple(packed)),
            len(packed),
            source,
            is_bf16,
            rows,
            abi.optional(bias, columns),
            out.data_ptr(),
        )
        _check(status)
        return out

    def _empty_packed(self, kind: PackedKind, rows: int, cols: int) -> PackedLinear:
        """Zeroed tiles: rows that only fill the last tile up stay zero."""
        tiles = -(-rows // ROW_TILE)
        tile_bytes = cols * 2 * ROW_TILE if kind == "bf16" else cols // 32 * TILE_BLOCK_BYTES[kind]
        return PackedLinear(kind, rows, cols, self._arena.take(tiles * tile_bytes))

    # ------------------------------------------------------------------------------------- the whole step

    def prepare_decode(self, model: DecodeModel, pool: KVPool) -> DecodePlan:
        if len(model.layers) != pool.layout.num_layers:
            raise ValueError(f"a model of {len(model.layers)} layers doesn't fit {pool.layout}")
        abi.heads(model.heads, pool, 0)
        return NativePlan(model, pool, abi.model(model))

    def decode_step(
        self, plan: DecodePlan, x: torch.Tensor, batch: RaggedBatch, *, cancel_address: int = 0
    ) -> torch.Tensor:
        if not isinstance(plan, NativePlan):
            raise TypeError("the plan comes from other kernels")
        sequences = batch.num_sequences
        if not 1 <= sequences <= MAX_DECODE_ROWS:
            raise ValueError(f"a decode step takes 1 to {MAX_DECODE_ROWS} sequences, not {sequences}")
        source = abi.address(x, torch.float32, sequences, plan.model.hidden)
        logits = torch.empty(sequences, plan.model.head.rows)
        status = self._c.pk_decode_step(
            self._context,
            byref(plan.structs),
            byref(abi.pool(plan.pool)),
            byref(abi.batch(batch)),
            source,
            logits.data_ptr(),
            cancel_address or None,
        )
        _check(status)
        return logits


def _check(status: int) -> None:
    """A cancelled call isn't an error here: the caller looks at its flag."""
    if status == abi.BAD_BATCH:
        raise ValueError("the batch names blocks or positions that don't exist")
    if status == abi.NO_MEMORY:
        raise MemoryError("no memory for the kernels' scratch space")
