"""The tiered KV cache's contract: how a closed segment is laid out, and how a decode step reads it (spec R4, R5).

Plain data without torch; `interface` adds the tensors. Knows nothing of sequences, disks or schedulers.

A sequence's KV is a row of whole *segments* of 2,048 tokens at absolute multiples, and bf16 blocks after them. The
first 64 tokens (the sinks) stay bf16 blocks for good and are in no segment. When a segment closes, each (layer, KV
head) of it becomes one *record*:

    16 outlier tokens  bf16, exact: the keys worst described by their cluster's mean
    up to 127 units    16 tokens each, INT8, sorted so that a unit's keys are alike (clusters; order means nothing,
                       RoPE is in the keys)
    8 groups           of 16 neighbouring units: the index's upper level

A record has a summary part, always resident, and a payload that may lie on disk (COLD). Offsets are in
`SegmentLayout`; every array starts at a multiple of 64 bytes.

    summary  unit_k        s8  [8 groups][D/4][16 units][4]   mean key of a unit = unit_k_scale * value
             unit_k_scale  f16 [128]
             unit_v        s8  [128][D]                      mean value, rotated; times unit_v_scale
             unit_v_scale  f16 [128]
             unit_n        u8  [128]                         tokens of the unit; 0: there is no such unit
             group_k       f16 [8][D]                        mean over the group's tokens
             group_v       f16 [8][D]                        rotated
             group_n       u16 [8]
             outlier_k     bf16 [D/2][16][2]                 the order of a bf16 block, 16 tokens instead of 32
             outlier_v     bf16 [8][D][2]                    not rotated
             outlier_n     u16 [1]                           how many of the 16 exist
    payload  k             u8  [128 units][D/4][16][4]       key = k_scale * value + k_zero
             k_scale       f16 [64][D]                       per channel, for 32 tokens (two units)
             k_zero        f16 [64][D]
             v             s8  [128 units][4][D][4]          rotated value = v_scale * value
             v_scale       f16 [128 units][16]               per token

"Rotated" is the normalised Walsh-Hadamard transform of the head's dimensions, in runs of the largest power of two
that divides D: a sum of rotated values is rotated back once (the transform is its own inverse). Source of the codec
and of the measured alternatives: KIVI (arXiv 2402.02750) for the axes, QuaRot (arXiv 2404.00456) for the rotation.
"""

from __future__ import annotations

from dataclasses import dataclass

SEGMENT_TOKENS = 2048
UNIT_TOKENS = 16
SEGMENT_UNITS = SEGMENT_TOKENS // UNIT_TOKENS
GROUP_UNITS = 16
SEGMENT_GROUPS = SEGMENT_UNITS // GROUP_UNITS
OUTLIERS = 16
SINK_TOKENS = 64
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Byte offsets of one record (one layer and KV head of one segment). `head_dim` is a multiple of 16."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def summary_offsets(self) -> dict[str, int]:
        """Where each array of the summary part starts, and "end"."""
        dim = self.head_dim
        return _offsets(
            unit_k=SEGMENT_UNITS * dim,
            unit_k_scale=2 * SEGMENT_UNITS,
            unit_v=SEGMENT_UNITS * dim,
            unit_v_scale=2 * SEGMENT_UNITS,
            unit_n=SEGMENT_UNITS,
            group_k=2 * SEGMENT_GROUPS * dim,
            group_v=2 * SEGMENT_GROUPS * dim,
            group_n=2 * SEGMENT_GROUPS,
            outlier_k=2 * OUTLIERS * dim,
            outlier_v=2 * OUTLIERS * dim,
            outlier_n=2,
        )

    @property
    def payload_offsets(self) -> dict[str, int]:
        """Where each array of the payload starts, and "end"."""
        dim = self.head_dim
        return _offsets(
            k=SEGMENT_TOKENS * dim,
            k_scale=SEGMENT_UNITS * dim,  # f16, 64 of them
            k_zero=SEGMENT_UNITS * dim,
            v=SEGMENT_TOKENS * dim,
            v_scale=2 * SEGMENT_TOKENS,
        )

    @property
    def records(self) -> int:
        """Records of a segment; record `layer * num_kv_heads + head`."""
        return self.num_layers * self.num_kv_heads

    @property
    def summary_bytes(self) -> int:
        """Bytes of one record's summary part."""
        return self.summary_offsets["end"]

    @property
    def payload_bytes(self) -> int:
        """Bytes of one record's payload."""
        return self.payload_offsets["end"]

    @property
    def segment_summary_bytes(self) -> int:
        return self.records * self.summary_bytes

    @property
    def segment_payload_bytes(self) -> int:
        return self.records * self.payload_bytes


@dataclass(frozen=True, slots=True)
class AttentionPolicy:
    """How one sequence's decode rows read closed segments (spec R5, R8). Bytes of KV never depend on it.

    A row reads exactly: the sinks, every bf16 block, the outliers, and the selected units. `window_tokens` is the
    local window: a closed segment that reaches into it is read whole. The units not selected enter through their
    means with bias log n + log `summary_weight` (0: they are left out). `sparse` off reads every unit (the INT8
    dense form), as do contexts of at most `dense_tokens`, and the first `dense_layers` layers of contexts of at
    most `dense_layer_tokens`; beyond that those layers get four times the budget. With `top_p` 1.0 or more the
    budget is `topk_units` units; below, it is the smallest set of units that holds that share of the far mass,
    between `min_units` and `max_units`. Contexts from `two_level_tokens` on score groups first, and open those that
    hold `group_share` of the far mass.
    """

    sparse: bool = True
    window_tokens: int = 1024
    topk_units: int = 64
    top_p: float = 0.95
    min_units: int = 32
    max_units: int = 256
    summary_weight: float = 1.0
    dense_layers: int = 2
    dense_tokens: int = 4096
    dense_layer_tokens: int = 32768
    two_level_tokens: int = 65536
    group_share: float = 0.99


def _offsets(**sizes: int) -> dict[str, int]:
    starts: dict[str, int] = {}
    position = 0
    for name, size in sizes.items():
        starts[name] = position
        position += -(-size // _ALIGN) * _ALIGN
    starts["end"] = position
    return starts
