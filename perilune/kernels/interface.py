"""The kernels' contract: what the runtime may ask of the arithmetic, in shapes and dtypes.

Knows tensors, packed weights and the KV block layout (the one that `runtime.kv.spec` fixes); knows nothing
of models, requests or schedulers. Two implementations: `native` (C11, chosen by CPU) and `reference`
(PyTorch, the oracle).

Letters: T rows of a call, S sequences, Hq query heads, Hkv KV heads, D head_dim, H hidden size, F
feed-forward size.
Every tensor is contiguous and on the CPU. `cancel_address` is the address of an int32 (0: never
cancelled); once it is non-zero an op returns early and its output is undefined, so callers look at their
flag before using it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from perilune.kernels.tiers import AttentionPolicy, SegmentLayout

BLOCK_TOKENS = 32
"""Tokens of a KV block, and columns that share one quantisation scale."""

ROW_TILE = 16
"""Output rows that a packed weight interleaves."""

Act = Literal["silu", "gelu_tanh"]
PackedKind = Literal["q4", "int8", "bf16"]
GgufKind = Literal["Q4_0", "Q4_1", "Q5_0", "Q8_0"]
KVDtype = Literal["bf16", "fp32"]

MAX_DECODE_ROWS = 16
"""Rows that `decode_step`, `linear` and `decode_attention` are made for. More rows are correct in `linear`
only."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Where a token's K and V lie in a block; see `runtime.kv.spec` for the picture."""

    num_layers: int
    num_kv_heads: int
    head_dim: int  # a multiple of 16, at most tiers.MAX_HEAD_DIM
    dtype: KVDtype

    @property
    def layer_half_bytes(self) -> int:
        return self.num_kv_heads * self.head_dim * BLOCK_TOKENS * (2 if self.dtype == "bf16" else 4)

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_layers * self.layer_half_bytes


@dataclass(frozen=True, slots=True)
class KVPool:
    """The block pool: `data` is uint8 [num_blocks * layout.block_bytes], from `Kernels.allocate_pool`."""

    layout: KVLayout
    data: torch.Tensor

    @property
    def num_blocks(self) -> int:
        return self.data.numel() // self.layout.block_bytes


@dataclass(frozen=True, slots=True)
class SegmentPool:
    """Slots for closed segments (see `tiers`). `summaries`: uint8 [slots * layout.segment_summary_bytes], always
    resident.

    `payloads`: int64 [slots], the address of each slot's payload (layout.segment_payload_bytes long, aligned to
    64), in RAM or in a mapped file; 0: the slot is empty. Whoever writes an address keeps its memory alive.
    """

    layout: SegmentLayout
    summaries: torch.Tensor
    payloads: torch.Tensor

    @property
    def num_slots(self) -> int:
        return self.payloads.numel()


ATTENTION_STATS = ("exact_mass", "selected_mass", "summary_mass", "border_mass", "entropy", "exact_tokens")
"""What a decode row reports of one layer: means over query heads of the share of (estimated) attention mass that
fell on sinks and bf16 blocks; on selected units; on summaries; on summaries of the segments that reach
within twice the exact zone; the entropy of the row's weights over log of its tokens (0 … 1); and tokens read
exactly, by one KV head."""

ATTENTION_PARTS = ("index", "exact", "selected", "summary", "merge")
"""What decode attention spends its time on: scoring and selection; sinks, bf16 blocks and segments read
whole; selected units; means; putting the parts together."""


@dataclass(frozen=True, slots=True)
class HeadBudgets:
    """What each KV head gets of the policies' units, and how it ranks units. One for a model.

    shares: fp32 [layers, KV heads], factors >= 0; 0: the head reads its exact zone only.
    sketched: uint8 [layers, KV heads], 1: units are ranked by their keys' sketches, 0: by their mean keys alone.
    """

    shares: torch.Tensor
    sketched: torch.Tensor


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """The closed segments of a batch's sequences. `tables`: int32 [S, max_segments], slots; `counts`: int32 [S].

    Sequence s has `counts[s]` closed segments, all before the first of its rows here. Of their bf16 blocks only the
    sinks' are read; the others' entries in the block table may be -1. Layers with a sliding window of their own
    read bf16 blocks only: the caller keeps those that the window reaches. `policies` steer decode rows, one a
    sequence; prefill rows read every unit. `stats`: fp32 [S, layers, len(ATTENTION_STATS)], written by decode, or
    None. `part_ns`: int64 [layers, len(ATTENTION_PARTS)], to which native decode adds the threads' nanoseconds, or
    None: nothing is timed. `budgets`: how heads differ in what they read (see `tiers`), or None: all alike.
    """

    pool: SegmentPool
    tables: torch.Tensor
    counts: torch.Tensor
    policies: tuple[AttentionPolicy, ...]
    stats: torch.Tensor | None = None
    part_ns: torch.Tensor | None = None
    budgets: HeadBudgets | None = None


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The sequences of one call, made once a step and used by every layer.

    cu_q: int32 [S+1], rows cu_q[s]:cu_q[s+1] belong to sequence s. kv_lengths: int32 [S], tokens of each
    sequence up to and including its last row here; row i of n stands at position kv_lengths[s] - n + i.
    block_tables: int32 [S, max_blocks], entry b names the block of tokens 32b … 32b+31 (entries past the
    sequence's end are not read).
    """

    cu_q: torch.Tensor
    kv_lengths: torch.Tensor
    block_tables: torch.Tensor
    segments: SegmentBatch | None = None

    @property
    def num_sequences(self) -> int:
        return self.kv_lengths.numel()


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary angles by absolute position: cos and sin, fp32 [max_positions, D/2]. Halves are rotated
    ("neox")."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of one attention layer and the scale of its scores."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float

    @property
    def qkv_columns(self) -> int:
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMS norm of every query and key head before the rotation (qwen3, gemma3). Weights fp32 [D].

    `offset` is added to the weights (gemma: 1.0; fold it into the weights and pass 0.0 if you like).
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight [rows, cols] in the decode layout; y = x @ W.T.

    Rows are padded to `ROW_TILE`. `data` is uint8; tiles of 16 rows follow one another, and in a tile:

        q4    per 32 columns: 16 fp16 scales d | 16 fp16 minima m | 4 x 64 bytes; byte [c][row][j] holds
        column 8c+j in
              its low and 8c+4+j in its high nibble. w = d * q + m
        int8  per 32 columns: 16 fp16 scales d | 8 x 64 bytes; byte [c][row][j] is column 4c+j plus 128. w
        = d * (u - 128) bf16  per 2 columns: [row][2]
    """

    kind: PackedKind
    rows: int
    cols: int  # q4, int8: a multiple of 32; bf16: even
    data: torch.Tensor

    @property
    def padded_rows(self) -> int:
        return -(-self.rows // ROW_TILE) * ROW_TILE


@dataclass(frozen=True, slots=True)
class DecodeLayer:
    """One transformer layer for `decode_step`. Norm weights are fp32 [H] with any offset (gemma's +1)
    folded in.

    `qkv` and `gate_up` are one or more packed weights whose outputs stand side by side (q, k, v; gate,
    up), so that parts stored in different precisions need no repacking; every part but the last has rows %
    16 == 0.
    Biases are fp32 over the whole output, or None. `post_attn_norm` and `post_ffn_norm` are applied to the
    branch's output before it is added (gemma). `window` is the sliding window in tokens (a query sees
    itself and window-1 before it), or None.
    """

    input_norm: torch.Tensor
    qkv: tuple[PackedLinear, ...]
    qkv_bias: torch.Tensor | None
    qk_norm: QKNorm | None
    rope: RopeTable
    window: int | None
    o: PackedLinear
    o_bias: torch.Tensor | None
    post_attn_norm: torch.Tensor | None
    ffn_norm: torch.Tensor
    gate_up: tuple[PackedLinear, ...]
    down: PackedLinear
    post_ffn_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """A whole model for `decode_step`, built once at load. `final_norm` as the layers' norms; `head`
    [vocab, H]."""

    hidden: int
    heads: HeadShape
    act: Act
    eps: float
    layers: tuple[DecodeLayer, ...]
    final_norm: torch.Tensor
    head: PackedLinear


class DecodePlan(Protocol):
    """A `DecodeModel` made ready by `Kernels.prepare_decode`; opaque, holds its tensors alive."""

    @property
    def model(self) -> DecodeModel: ...


class Kernels(Protocol):
    """All arithmetic of a forward step that PyTorch's own GEMM doesn't do. One instance per process."""

    @property
    def level_name(self) -> str:
        """The code path that runs ("avx512", "reference", …). Paths round differently: their KV isn't exchanged."""
        ...

    def describe(self) -> str:
        """Which code path runs and why, for people (`doctor`)."""
        ...

    def allocate_pool(self, layout: KVLayout, num_blocks: int) -> KVPool:
        """A pool in anonymous memory, huge pages where the kernel grants them. Pages cost RAM when first
        written."""
        ...

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
        """x [T, H] fp32 or bf16, weight fp32 [H] -> x / rms(x) * (offset + weight), [T, H] in `out_dtype`."""
        ...

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
        """residual fp32 [T, H] += delta (fp32 or bf16 [T, H]), rms-normed by `post_norm` (fp32 [H]) first if given.

        Returns the new residual rms-normed by `weight` (fp32 [H]), [T, H] in `out_dtype`.
        """
        ...

    def gated_act(self, gate_up: torch.Tensor, act: Act) -> torch.Tensor:
        """gate_up [T, 2F] (fp32 or bf16; gate left, up right) -> act(gate) * up, [T, F] in the same dtype."""
        ...

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
        """Split qkv [T, heads.qkv_columns] (fp32 or bf16; q heads, k heads, v heads; biases already
        added), norm q and k, rotate them by their positions, write K and V of every row into `pool`.

        Returns q [T, Hq, D] in the pool's dtype (bf16 or fp32). Only the rows' own slots of the pool change.
        """
        ...

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
        """Causal attention of prefill rows: q [T, Hq, D] as `rope_store` returns it -> [T, Hq, D], same
        dtype.

        Chunk-invariant: a row's result is bitwise the same whatever rows share the call (FlashAttention-2
        over a KV grid fixed to absolute positions, fp32 accumulation, probabilities rounded to bf16 for
        the product with V).
        """
        ...

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
        """The same for one row a sequence: q [S, Hq, D] -> [S, Hq, D], same dtype. KV is split into parts at fixed
        positions and merged by log-sum-exp (Flash-Decoding): a row's result is bitwise the same with any number of
        threads and whatever sequences share the call."""
        ...

    # ------------------------------------------------------------------------------------- closed segments

    def allocate_segments(self, layout: SegmentLayout, num_slots: int) -> SegmentPool:
        """A pool of empty slots. Pages cost RAM when first written."""
        ...

    def close_records(
        self, source: KVPool, blocks: torch.Tensor, pool: SegmentPool, slot: int, first: int, count: int
    ) -> None:
        """Make records `first` … `first + count - 1` of a slot out of 64 bf16 blocks of KV, in prompt order.

        blocks: int32 [64]; entries 0 and 1 are -1 for a sequence's first segment (the sinks stay out). The slot has
        a payload address. Deterministic: the bytes depend on the KV alone, not on threads or on how records are
        split over calls.
        """
        ...

    # ------------------------------------------------------------------------------------- packed weights

    def pack_gguf(self, raw: torch.Tensor, rows: int, cols: int, kind: GgufKind) -> PackedLinear:
        """Repack GGUF blocks (uint8, rows * cols / 32 blocks) exactly: Q4_0 and Q4_1 to q4, Q5_0 and Q8_0
        to int8."""
        ...

    def pack_int8(self, weight: torch.Tensor) -> PackedLinear:
        """Quantise [rows, cols] (fp32 or bf16) to int8: per 32 columns, scale = fp16(max|w| / 127)."""
        ...

    def pack_bf16(self, weight: torch.Tensor) -> PackedLinear:
        """Interleave [rows, cols] (fp32, rounded, or bf16)."""
        ...

    def dequantize(self, packed: PackedLinear) -> torch.Tensor:
        """-> bf16 [rows, cols], rounded to nearest: the weight that prefill multiplies by."""
        ...

    def gather_rows(self, packed: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [T] -> fp32 [T, cols]: rows of the weight (token embeddings)."""
        ...

    def linear(
        self, packed: Sequence[PackedLinear], x: torch.Tensor, *, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, cols] (fp32 or bf16) times packed weights standing side by side, plus bias fp32 -> fp32
        [T, sum of rows].

        Activations keep at least 15 bits per block of 32 (no 8-bit rounding): relative error about 1e-4 of
        |x||w|.
        """
        ...

    # ------------------------------------------------------------------------------------- the whole step

    def prepare_decode(self, model: DecodeModel, pool: KVPool) -> DecodePlan:
        """Check shapes and build the pointers that `decode_step` walks. The pool's dtype must be bf16 for
        native."""
        ...

    def decode_step(
        self, plan: DecodePlan, x: torch.Tensor, batch: RaggedBatch, *, cancel_address: int = 0
    ) -> torch.Tensor:
        """One token for each of S <= MAX_DECODE_ROWS sequences: x fp32 [S, H] are the (scaled) embeddings,
        overwritten.

        Runs every layer (KV of the new tokens is stored at position kv_lengths[s] - 1), the final norm and
        the head in one native call; polls the flag between layers. -> logits fp32 [S, vocab].
        """
        ...


def stable_rows(rows: int) -> int:
    """Rows to pad a chunk to so that a row of torch's bf16 linear doesn't depend on how many rows share the call.

    Measured (docs/log.md): for 2 rows and more every row is bitwise the same; one row takes another path (GEMV).
    """
    return max(rows, 2)


def chunk_positions(batch: RaggedBatch) -> torch.Tensor:
    """int64 [T]: the absolute position of every row of a batch."""
    starts = batch.cu_q[:-1].long()
    lengths = batch.cu_q[1:].long() - starts
    first = batch.kv_lengths.long() - lengths - starts
    return torch.arange(int(batch.cu_q[-1])) + torch.repeat_interleave(first, lengths)
