"""The C structs of kernels.h in ctypes, and how tensors become pointers. A struct must not outlive its tensors."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p

import torch

from perilune.kernels.interface import (
    ATTENTION_PARTS,
    ATTENTION_STATS,
    ROW_TILE,
    Act,
    DecodeLayer,
    DecodeModel,
    GgufKind,
    HeadShape,
    KVPool,
    PackedKind,
    PackedLinear,
    QKNorm,
    RaggedBatch,
    RopeTable,
    SegmentBatch,
    SegmentPool,
)
from perilune.kernels.tiers import MAX_HEAD_DIM, AttentionPolicy

KINDS: dict[PackedKind, int] = {"q4": 0, "int8": 1, "bf16": 2}
GGUF_KINDS: dict[GgufKind, int] = {"Q4_0": 0, "Q4_1": 1, "Q5_0": 2, "Q8_0": 3}
ACTS: dict[Act, int] = {"silu": 0, "gelu_tanh": 1}
MAX_PARTS = 3
SUMMARY_ARRAYS = (
    *("mean", "mean_scale", "signs", "spread", "spread_scale"),
    *("quad_v", "quad_v_scale", "units"),
)
POLICY_NUMBERS = (
    *("sparse", "window_tokens", "topk_units", "min_units", "max_units"),
    *("dense_layers", "dense_tokens", "dense_layer_tokens"),
)
POLICY_SHARES = ("top_p", "summary_weight")
PAYLOAD_ARRAYS = ("k", "k_scale", "k_zero", "v", "v_scale")

OK, CANCELLED, BAD_BATCH, NO_MEMORY = range(4)


class Context(Structure):
    _fields_ = [("ops", c_void_p), ("threads", c_int32)]


class Packed(Structure):
    _fields_ = [("data", c_void_p), ("kind", c_int32), ("rows", c_int32), ("cols", c_int32), ("tiles", c_int32)]


class Pool(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("num_blocks", c_int64),
        ("block_bytes", c_int64),
        ("half_bytes", c_int64),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
    ]


class RecordLayout(Structure):
    _fields_ = [(name, c_int32) for name in (*SUMMARY_ARRAYS, "summary_bytes", *PAYLOAD_ARRAYS, "payload_bytes")]


class SegmentSlots(Structure):
    """`segment_pool` of kernels.h."""

    _fields_ = [
        ("summaries", c_void_p),
        ("payloads", c_void_p),
        ("at", RecordLayout),
        ("num_slots", c_int32),
        ("num_layers", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
    ]


class Policy(Structure):
    """`attention_policy` of kernels.h."""

    _fields_ = [
        *((name, c_int32) for name in POLICY_NUMBERS),
        *((name, c_float) for name in POLICY_SHARES),
    ]


class Segments(Structure):
    _fields_ = [
        ("pool", SegmentSlots),
        ("tables", c_void_p),
        ("counts", c_void_p),
        ("policies", POINTER(Policy)),
        ("stats", c_void_p),
        ("part_ns", c_void_p),
        ("head_shares", c_void_p),
        ("head_sketched", c_void_p),
        ("max_segments", c_int32),
    ]


class Batch(Structure):
    _fields_ = [
        ("cu_q", c_void_p),
        ("kv_lengths", c_void_p),
        ("block_tables", c_void_p),
        ("num_sequences", c_int32),
        ("max_blocks", c_int32),
        ("closed", POINTER(Segments)),
    ]


class Heads(Structure):
    _fields_ = [("num_q_heads", c_int32), ("num_kv_heads", c_int32), ("head_dim", c_int32), ("scale", c_float)]


class Norm(Structure):
    _fields_ = [("q_weight", c_void_p), ("k_weight", c_void_p), ("eps", c_float), ("offset", c_float)]


class Rope(Structure):
    _fields_ = [("cos", c_void_p), ("sin", c_void_p), ("max_positions", c_int64)]


class Layer(Structure):
    _fields_ = [
        ("input_norm", c_void_p),
        ("qkv_bias", c_void_p),
        ("o_bias", c_void_p),
        ("post_attn_norm", c_void_p),
        ("ffn_norm", c_void_p),
        ("post_ffn_norm", c_void_p),
        ("qkv", Packed * MAX_PARTS),
        ("o", Packed),
        ("gate_up", Packed * MAX_PARTS),
        ("down", Packed),
        ("norm", Norm),
        ("rope", Rope),
        ("qkv_parts", c_int32),
        ("gate_up_parts", c_int32),
        ("window", c_int32),
        ("has_qk_norm", c_int32),
    ]


class Model(Structure):
    _fields_ = [
        ("layers", POINTER(Layer)),
        ("final_norm", c_void_p),
        ("head", Packed),
        ("heads", Heads),
        ("eps", c_float),
        ("num_layers", c_int32),
        ("hidden", c_int32),
        ("ffn", c_int32),
        ("act", c_int32),
    ]


# ------------------------------------------------------------------------------------------------ checks


def address(tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> int:
    """The tensor's address, once dtype, contiguity and shape fit (-1: any size). Raises ValueError."""
    fits = tensor.dim() == len(shape) and all(n in (-1, have) for n, have in zip(shape, tensor.shape, strict=True))
    if tensor.dtype != dtype or not fits or not tensor.is_contiguous() or tensor.device.type != "cpu":
        layout = "" if tensor.is_contiguous() else " (not contiguous)"
        raise ValueError(f"need {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}{layout}")
    return tensor.data_ptr()


def number_address(tensor: torch.Tensor, *shape: int) -> tuple[int, int]:
    """Address of an fp32 or bf16 tensor, and 1 if it is bf16."""
    is_bf16 = tensor.dtype == torch.bfloat16
    return address(tensor, torch.bfloat16 if is_bf16 else torch.float32, *shape), int(is_bf16)


def optional(tensor: torch.Tensor | None, *shape: int) -> int | None:
    return None if tensor is None else address(tensor, torch.float32, *shape)


# ----------------------------------------------------------------------------------------------- structs


def packed(weight: PackedLinear) -> Packed:
    data = address(weight.data, torch.uint8, -1)
    tiles = weight.padded_rows // ROW_TILE
    return Packed(data, KINDS[weight.kind], weight.rows, weight.cols, tiles)


def parts(weights: tuple[PackedLinear, ...]) -> ctypes.Array[Packed]:
    """Weights standing side by side. Raises ValueError if they can't."""
    if not 1 <= len(weights) <= MAX_PARTS:
        raise ValueError(f"1 to {MAX_PARTS} weights may stand side by side, not {len(weights)}")
    if len({weight.cols for weight in weights}) > 1 or any(weight.rows % ROW_TILE for weight in weights[:-1]):
        raise ValueError(f"weights side by side need equal columns and, but for the last, rows % {ROW_TILE} == 0")
    return (Packed * MAX_PARTS)(*[packed(weight) for weight in weights])


def pool(kv: KVPool) -> Pool:
    layout = kv.layout
    if layout.dtype != "bf16" or layout.head_dim % 16 or not 0 < layout.head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"native kernels need bf16 KV and head_dim 16, 32, … {MAX_HEAD_DIM}, not {layout}")
    return Pool(
        address(kv.data, torch.uint8, -1),
        kv.num_blocks,
        layout.block_bytes,
        layout.layer_half_bytes,
        layout.num_kv_heads,
        layout.head_dim,
    )


def batch(rows: RaggedBatch) -> Batch:
    sequences = rows.num_sequences
    return Batch(
        address(rows.cu_q, torch.int32, sequences + 1),
        address(rows.kv_lengths, torch.int32, sequences),
        address(rows.block_tables, torch.int32, sequences, -1),
        sequences,
        rows.block_tables.shape[1],
        None if rows.segments is None else ctypes.pointer(segments(rows.segments, sequences)),
    )


def segment_pool(source: SegmentPool) -> SegmentSlots:
    layout = source.layout
    summary, payload = layout.summary_offsets, layout.payload_offsets
    offsets = [*(summary[name] for name in SUMMARY_ARRAYS), summary["end"]]
    offsets += [*(payload[name] for name in PAYLOAD_ARRAYS), payload["end"]]
    return SegmentSlots(
        address(source.summaries, torch.uint8, source.num_slots * layout.segment_summary_bytes),
        address(source.payloads, torch.int64, source.num_slots),
        RecordLayout(*offsets),
        source.num_slots,
        layout.num_layers,
        layout.num_kv_heads,
        layout.head_dim,
    )


def segments(source: SegmentBatch, sequences: int) -> Segments:
    tables = address(source.tables, torch.int32, sequences, -1)
    counts = address(source.counts, torch.int32, sequences)
    if len(source.policies) != sequences:
        raise ValueError(f"{sequences} sequences need as many policies, not {len(source.policies)}")
    layers = source.pool.layout.num_layers
    shape = (sequences, layers, len(ATTENTION_STATS))
    stats = None if source.stats is None else address(source.stats, torch.float32, *shape)
    part_ns, budgets, by_head = source.part_ns, source.budgets, (layers, source.pool.layout.num_kv_heads)
    return Segments(
        segment_pool(source.pool),
        tables,
        counts,
        (Policy * sequences)(*[policy(item) for item in source.policies]),
        stats,
        None if part_ns is None else address(part_ns, torch.int64, layers, len(ATTENTION_PARTS)),
        None if budgets is None else address(budgets.shares, torch.float32, *by_head),
        None if budgets is None else address(budgets.sketched, torch.uint8, *by_head),
        source.tables.shape[1],
    )


def policy(source: AttentionPolicy) -> Policy:
    """Numbers past 32 bits mean all there is, as 2^31 - 1 does."""
    numbers = [min(int(getattr(source, name)), 2**31 - 1) for name in POLICY_NUMBERS]
    return Policy(*numbers, *(getattr(source, name) for name in POLICY_SHARES))


def heads(shape: HeadShape, kv: KVPool, layer: int) -> Heads:
    """Raises ValueError if the heads aren't the pool's or the layer isn't in it."""
    layout = kv.layout
    matches = (shape.num_kv_heads, shape.head_dim) == (layout.num_kv_heads, layout.head_dim)
    if not matches or shape.num_q_heads % shape.num_kv_heads or not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} with {shape} doesn't fit {layout}")
    return Heads(shape.num_q_heads, shape.num_kv_heads, shape.head_dim, shape.scale)


def qk_norm(norm: QKNorm | None, head_dim: int) -> Norm | None:
    if norm is None:
        return None
    q, k = optional(norm.q_weight, head_dim), optional(norm.k_weight, head_dim)
    return Norm(q, k, norm.eps, norm.offset)


def rope(table: RopeTable, head_dim: int) -> Rope:
    positions = table.cos.shape[0]
    cos = address(table.cos, torch.float32, positions, head_dim // 2)
    return Rope(cos, address(table.sin, torch.float32, positions, head_dim // 2), positions)


def layer(source: DecodeLayer, model: DecodeModel) -> Layer:
    hidden, shape = model.hidden, model.heads
    norm = qk_norm(source.qk_norm, shape.head_dim)
    expect(source.qkv, shape.qkv_columns, hidden)
    expect((source.o,), hidden, shape.num_q_heads * shape.head_dim)
    expect(source.gate_up, 2 * model.layers[0].down.cols, hidden)
    expect((source.down,), hidden, model.layers[0].down.cols)
    return Layer(
        address(source.input_norm, torch.float32, hidden),
        optional(source.qkv_bias, shape.qkv_columns),
        optional(source.o_bias, hidden),
        optional(source.post_attn_norm, hidden),
        address(source.ffn_norm, torch.float32, hidden),
        optional(source.post_ffn_norm, hidden),
        parts(source.qkv),
        packed(source.o),
        parts(source.gate_up),
        packed(source.down),
        norm or Norm(),
        rope(source.rope, shape.head_dim),
        len(source.qkv),
        len(source.gate_up),
        source.window or 0,
        int(norm is not None),
    )


def expect(weights: tuple[PackedLinear, ...], rows: int, cols: int) -> None:
    """Raises ValueError unless the weights are [rows, cols] together."""
    if sum(weight.rows for weight in weights) != rows or any(weight.cols != cols for weight in weights):
        shapes = [(weight.rows, weight.cols) for weight in weights]
        raise ValueError(f"need a weight [{rows}, {cols}], not {shapes}")


def model(source: DecodeModel) -> Model:
    """The whole model; holds its layers, not its tensors."""
    layers = (Layer * len(source.layers))(*[layer(item, source) for item in source.layers])
    expect((source.head,), source.head.rows, source.hidden)
    shape = source.heads
    return Model(
        layers,
        address(source.final_norm, torch.float32, source.hidden),
        packed(source.head),
        Heads(shape.num_q_heads, shape.num_kv_heads, shape.head_dim, shape.scale),
        source.eps,
        len(source.layers),
        source.hidden,
        source.layers[0].down.cols,
        ACTS[source.act],
    )


FUNCTIONS: dict[str, tuple[type[c_int] | type[ctypes.c_char_p] | None, list[type]]] = {
    "pk_init": (None, [c_void_p, c_int, c_int]),
    "pk_level": (ctypes.c_char_p, [c_void_p]),
    "pk_rms_norm": (
        None,
        [c_void_p, c_void_p, c_int, c_void_p, c_int64, c_int, c_float, c_float, c_void_p, c_int],
    ),
    "pk_add_norm": (
        None,
        [
            c_void_p,
            c_void_p,
            c_void_p,
            c_int,
            c_void_p,
            c_void_p,
            c_int64,
            c_int,
            c_float,
            c_void_p,
            c_int,
        ],
    ),
    "pk_gated_act": (None, [c_void_p, c_void_p, c_int, c_int64, c_int, c_int, c_void_p]),
    "pk_rope_store": (
        c_int,
        [c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_void_p],
    ),
    "pk_attention": (
        c_int,
        [c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_void_p],
    ),
    "pk_decode_attention": (
        c_int,
        [c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int, c_void_p, c_void_p],
    ),
    "pk_close_records": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_int]),
    "pk_pack_gguf": (None, [c_void_p, c_void_p, c_int, c_int, c_int, c_void_p]),
    "pk_pack_int8": (None, [c_void_p, c_void_p, c_int, c_int, c_int, c_void_p]),
    "pk_pack_bf16": (None, [c_void_p, c_void_p, c_int, c_int, c_void_p]),
    "pk_dequantize": (None, [c_void_p, c_void_p, c_void_p]),
    "pk_gather_rows": (None, [c_void_p, c_void_p, c_int64, c_void_p]),
    "pk_linear": (c_int, [c_void_p, c_void_p, c_int, c_void_p, c_int, c_int, c_void_p, c_void_p]),
    "pk_decode_step": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]),
}
"""Result and argument types of the C ABI."""
