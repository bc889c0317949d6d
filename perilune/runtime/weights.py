"""Weights in memory: the prefill copy (bf16, or fp32 as the reference) and the packed decode copy.

Decides which copies exist (the policy of spec R3 and design.md) and builds them from a checkpoint.
Knows the kernels' packed formats by name only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import embedding, linear

from perilune.errors import Overloaded, UnsupportedModel
from perilune.kernels.interface import (
    DecodeLayer,
    DecodeModel,
    GgufKind,
    HeadShape,
    Kernels,
    PackedLinear,
    QKNorm,
    RopeTable,
)
from perilune.runtime.checkpoint import Checkpoint, matrix_shape
from perilune.runtime.dense import DenseMatrix
from perilune.runtime.model_config import ModelConfig, Rope
from perilune.runtime.models.rope import rope_table
from perilune.runtime.stored import FLOAT_KINDS, StoredTensor

Precision = Literal["bf16", "fp32"]
DecodePrecision = Literal["auto", "stored", "int8", "bf16"]
DecodeWeights = DecodePrecision | Mapping[str, DecodePrecision]
"""One precision for all, or by module: `default`, the groups `attention` and `mlp`, `lm_head`, `embeddings`, and
single matrices (q k v o gate up down). The narrowest name that fits a matrix counts; `default` is auto."""

_GROUP_OF = {"embed": "embeddings", "head": "lm_head"} | dict.fromkeys("qkvo", "attention")
_GROUP_OF |= dict.fromkeys(("gate", "up", "down"), "mlp")
NATIVE_KINDS: tuple[GgufKind, ...] = ("Q4_0", "Q4_1", "Q5_0", "Q8_0")
PACK_COLUMNS = 32
_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer as the prefill multiplies by it: matrices in the precision, norms fp32."""

    input_norm: torch.Tensor
    qkv: DenseMatrix
    qkv_bias: torch.Tensor | None
    qk_norm: QKNorm | None
    rope: RopeTable
    window: int | None
    o: DenseMatrix
    o_bias: torch.Tensor | None
    post_attn_norm: torch.Tensor | None
    ffn_norm: torch.Tensor
    gate_up: DenseMatrix
    down: DenseMatrix
    post_ffn_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything a decoder multiplies by. `decode` is None where one copy serves both (see `resident`)."""

    config: ModelConfig
    heads: HeadShape
    precision: Precision
    embed: torch.Tensor | PackedLinear
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor | PackedLinear
    decode: DecodeModel | None
    resident: str
    policy: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def embeddings(self, kernels: Kernels, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> fp32 [T, hidden], scaled as the model wants: the residual stream's start."""
        if isinstance(self.embed, PackedLinear):
            rows = kernels.gather_rows(self.embed, token_ids)
        else:
            rows = embedding(token_ids, self.embed).float()
        return rows if self.config.embed_scale == 1.0 else rows * self.config.embed_scale

    def logits(self, kernels: Kernels, hidden: torch.Tensor) -> torch.Tensor:
        """Normed rows fp32 [S, hidden] -> fp32 [S, vocab]."""
        if isinstance(self.head, PackedLinear):
            return kernels.linear([self.head], hidden)
        return linear(hidden.to(self.head.dtype), self.head).float()


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a model's weights take once loaded, by copy, and what converting the largest matrix takes on the
    way."""

    prefill_bytes: int
    decode_bytes: int
    temporary_bytes: int

    @property
    def one_copy_bytes(self) -> int:
        """The peak of loading the prefill's copy alone."""
        return self.prefill_bytes + self.temporary_bytes

    @property
    def total_bytes(self) -> int:
        """The peak of loading both copies."""
        return self.one_copy_bytes + self.decode_bytes


def memory_need(checkpoint: Checkpoint, precision: Precision, policy: DecodeWeights) -> MemoryNeed:
    """What loading will take, from metadata alone."""
    config = checkpoint.config
    temporary = 4 * config.hidden_size * max(config.vocab_size, config.ffn_size, config.q_columns)  # fp32
    if precision == "fp32":
        return MemoryNeed(4 * config.parameters, 0, temporary)
    matrices = 2 * config.parameters
    if not packable(config):
        return MemoryNeed(matrices, 0, temporary)
    packed = sum(
        math.prod(matrix_shape(config, part))
        // PACK_COLUMNS
        * _packed_bytes(checkpoint.kind(part, layer), precision_of(policy, part, config.tied_head))
        for part, layer in checkpoint.matrices()
    )
    return MemoryNeed(matrices, packed, temporary)


def precision_of(policy: DecodeWeights, part: str, tied_head: bool) -> DecodePrecision:
    """What `policy` says of a matrix. Tied embeddings are the head, so `lm_head` decides on them."""
    if isinstance(policy, str):
        return policy
    if part == "embed" and tied_head:
        part = "head"
    default = policy.get("default", "auto")
    return policy.get(part, policy.get(_GROUP_OF[part], default))


def policy_text(policy: DecodeWeights) -> str:
    """A policy as settings write it: `int8`, or `default=auto,lm_head=bf16`."""
    if isinstance(policy, str):
        return policy
    return ",".join(f"{name}={precision}" for name, precision in sorted(policy.items()))


def keeps(kind: str, precision: DecodePrecision) -> bool:
    """Whether a matrix stored as `kind` is packed as it is, without changing a number of it."""
    return precision in ("auto", "stored") and kind in NATIVE_KINDS


def pack_matrix(
    kernels: Kernels, stored: StoredTensor, precision: DecodePrecision, exact: torch.Tensor | None = None
) -> PackedLinear:
    """The decode copy of a stored matrix. `exact` are its values, fp32 [rows, cols], where the caller has them."""
    if stored.kind in NATIVE_KINDS and precision in ("auto", "stored"):
        return kernels.pack_gguf(stored.raw_tensor(), stored.rows, stored.cols, stored.kind)
    values = stored.float32() if exact is None else exact
    plain = precision == "bf16" or (precision == "stored" and stored.kind in FLOAT_KINDS)
    return kernels.pack_bf16(values) if plain else kernels.pack_int8(values)


def _packed_bytes(kind: str, precision: DecodePrecision) -> int:
    """Bytes that 32 weights stored as `kind` take in the decode copy, as `pack_matrix` packs them."""
    if precision in ("auto", "stored") and kind in ("Q4_0", "Q4_1"):
        return 20
    plain = precision == "bf16" or (precision == "stored" and kind in FLOAT_KINDS)
    return 64 if plain else 34  # int8 with an fp16 scale


def packable(config: ModelConfig) -> bool:
    """Whether every matrix fits the packed formats (rows of whole 32-column blocks)."""
    return not any(
        size % PACK_COLUMNS for size in (config.hidden_size, config.ffn_size, config.q_columns, config.kv_columns)
    )


class WeightBuilder:
    """Reads a checkpoint once and makes both copies. `max_positions` sizes the rotary tables."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        kernels: Kernels,
        precision: Precision,
        policy: DecodeWeights,
        max_positions: int,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._kernels = kernels
        self._precision = precision
        self._policy = policy
        self._max_positions = max_positions
        self._ropes: dict[Rope, RopeTable] = {}
        self._kinds: set[str] = set()

    def build(self, free_bytes: int) -> ModelWeights:
        """Load. With too little memory for both copies there is one; with too little for that, `Overloaded`."""
        config = self._config
        need = memory_need(self._checkpoint, self._precision, self._policy)
        if need.one_copy_bytes > free_bytes:
            raise Overloaded(
                f"The model needs {need.one_copy_bytes // _MIB} MiB of memory; {free_bytes // _MIB} MiB are free.",
                hint="Free memory or choose a smaller model; `perilune doctor` predicts what fits.",
            )
        pack = self._precision == "bf16" and packable(config) and need.total_bytes <= free_bytes
        embed_dense, embed_packed = self._matrix("embed", None, pack)
        pairs = [self._layer(index, pack) for index in range(config.num_layers)]
        head_dense, head_packed = (
            (embed_dense, embed_packed) if config.tied_head else self._matrix("head", None, pack)
        )
        final_norm = self._norm("final_norm", None)
        heads = HeadShape(config.num_q_heads, config.num_kv_heads, config.head_dim, config.attention_scale)
        decode = None
        if pack and head_packed is not None:
            layers = tuple(packed for _, packed in pairs if packed is not None)
            decode = DecodeModel(
                config.hidden_size, heads, config.act, config.norm_eps, layers, final_norm, head_packed
            )
        return ModelWeights(
            config=config,
            heads=heads,
            precision=self._precision,
            embed=self._embedding(embed_dense, embed_packed),
            layers=tuple(dense for dense, _ in pairs),
            final_norm=final_norm,
            head=head_dense if head_packed is None else head_packed,
            decode=decode,
            resident=self._precision + ("+" + "+".join(sorted(self._kinds)) if pack else ""),
            policy=policy_text(self._policy),
        )

    # --------------------------------------------------------------------------------------------- one layer

    def _layer(self, index: int, pack: bool) -> tuple[LayerWeights, DecodeLayer | None]:
        qkv, qkv_packed = self._fused(("q", "k", "v"), index, pack)
        gate_up, gate_up_packed = self._fused(("gate", "up"), index, pack)
        o, o_packed = self._matrix("o", index, pack)
        down, down_packed = self._matrix("down", index, pack)
        config = self._config
        qkv_bias = self._fused_bias(index)
        o_bias = self._bias("o", index)
        dense = LayerWeights(
            input_norm=self._norm("input_norm", index),
            qkv=DenseMatrix(qkv),
            qkv_bias=None if qkv_bias is None else qkv_bias.to(qkv.dtype),
            qk_norm=self._qk_norm(index),
            rope=self._rope(config.rope_of(index)),
            window=config.windows[index],
            o=DenseMatrix(o),
            o_bias=None if o_bias is None else o_bias.to(o.dtype),
            post_attn_norm=self._norm("post_attn_norm", index) if config.post_norms else None,
            ffn_norm=self._norm("ffn_norm", index),
            gate_up=DenseMatrix(gate_up),
            down=DenseMatrix(down),
            post_ffn_norm=self._norm("post_ffn_norm", index) if config.post_norms else None,
        )
        if not pack or o_packed is None or down_packed is None:
            return dense, None
        return dense, DecodeLayer(
            input_norm=dense.input_norm,
            qkv=qkv_packed,
            qkv_bias=qkv_bias,
            qk_norm=dense.qk_norm,
            rope=dense.rope,
            window=dense.window,
            o=o_packed,
            o_bias=o_bias,
            post_attn_norm=dense.post_attn_norm,
            ffn_norm=dense.ffn_norm,
            gate_up=gate_up_packed,
            down=down_packed,
            post_ffn_norm=dense.post_ffn_norm,
        )

    def _fused(
        self, parts: tuple[str, ...], layer: int, pack: bool
    ) -> tuple[torch.Tensor, tuple[PackedLinear, ...]]:
        """Several matrices as one dense matrix, and as packed parts."""
        stored = [self._shaped(part, layer) for part in parts]
        rows = sum(tensor.rows for tensor in stored)
        dtype = torch.bfloat16 if self._precision == "bf16" else torch.float32
        fused = torch.empty(rows, stored[0].cols, dtype=dtype)
        packed, at = [], 0
        for part, tensor in zip(parts, stored, strict=True):
            rows_of_part, packed_part = self._convert(part, tensor, pack)
            fused[at : at + tensor.rows] = rows_of_part
            at += tensor.rows
            if packed_part is not None:
                packed.append(packed_part)
        return fused, tuple(packed)

    def _matrix(self, part: str, layer: int | None, pack: bool) -> tuple[torch.Tensor, PackedLinear | None]:
        return self._convert(part, self._shaped(part, layer), pack)

    def _convert(self, part: str, stored: StoredTensor, pack: bool) -> tuple[torch.Tensor, PackedLinear | None]:
        """The prefill's matrix and, with `pack`, the decode's."""
        if self._precision == "fp32":
            return stored.float32(), None
        precision = self._precision_of(part)
        if pack and keeps(stored.kind, precision):
            packed = pack_matrix(self._kernels, stored, precision)
            self._kinds.add(packed.kind)
            return self._kernels.dequantize(packed), packed
        exact = stored.float32()
        dense = exact.to(torch.bfloat16)
        if not pack:
            return dense, None
        packed = pack_matrix(self._kernels, stored, precision, exact)
        self._kinds.add(packed.kind)
        return dense, packed

    def _embedding(self, dense: torch.Tensor, packed: PackedLinear | None) -> torch.Tensor | PackedLinear:
        """The packed form where it holds exactly what the file does, else the prefill's."""
        if packed is not None and keeps(self._checkpoint.kind("embed"), self._precision_of("embed")):
            return packed
        return dense

    def _precision_of(self, part: str) -> DecodePrecision:
        return precision_of(self._policy, part, self._config.tied_head)

    # ---------------------------------------------------------------------------------------- small tensors

    def _shaped(self, part: str, layer: int | None) -> StoredTensor:
        """A matrix whose shape agrees with the config, else `UnsupportedModel` (R11: a mismatch stops start-up)."""
        stored, expected = self._checkpoint.tensor(part, layer), matrix_shape(self._config, part)
        if (stored.rows, stored.cols) != expected:
            raise UnsupportedModel(
                f"Weight {stored.name} is {stored.rows} × {stored.cols}, not {expected[0]} × {expected[1]}.",
                hint="The file is inconsistent; download it again.",
            )
        return stored

    def _vector(self, part: str, layer: int | None, size: int) -> torch.Tensor:
        stored = self._checkpoint.tensor(part, layer)
        if stored.elements != size:
            raise UnsupportedModel(
                f"Weight {stored.name} has {stored.elements} numbers; the config says {size}.",
                hint="The file is inconsistent; download it again.",
            )
        return stored.vector()

    def _norm(self, part: str, layer: int | None) -> torch.Tensor:
        return self._vector(part, layer, self._config.hidden_size) + self._config.norm_offset

    def _qk_norm(self, layer: int) -> QKNorm | None:
        config = self._config
        if not config.qk_norm:
            return None
        q, k = (self._vector(part, layer, config.head_dim) + config.norm_offset for part in ("q_norm", "k_norm"))
        return QKNorm(q, k, config.norm_eps)

    def _bias(self, part: str, layer: int) -> torch.Tensor | None:
        stored = self._checkpoint.optional(f"{part}_bias", layer)
        return None if stored is None else stored.vector()

    def _fused_bias(self, layer: int) -> torch.Tensor | None:
        biases = [self._bias(part, layer) for part in ("q", "k", "v")]
        present = [bias for bias in biases if bias is not None]
        if not present:
            return None
        if len(present) != len(biases):
            raise UnsupportedModel("Only some of q, k and v have biases.", hint="Download the model again.")
        return torch.cat(present)

    def _rope(self, rope: Rope) -> RopeTable:
        if rope not in self._ropes:
            self._ropes[rope] = rope_table(rope, self._config.head_dim, self._max_positions)
        return self._ropes[rope]
