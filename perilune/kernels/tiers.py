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

How a record is made, so that every implementation gets the same bytes. fp32 and fp64 are IEEE with one rounding
per operation (no fused multiply-add), `round` is half to even, conversions to f16 round to nearest.

    1. mean[d] = fp32(sum of the n keys in fp64 / n); x = k - mean; w = fp32(1 / sqrt(sum of x^2 in fp64)), 0 for a
       zero key; y = x * w; peak = max |y| of the record; point = round(y * (127 / peak)), all in fp32: whole
       numbers -127 … 127 (0 where peak is 0).
    2. n / 16 clusters; cluster c starts as point 16 c. A token belongs to the cluster of the largest product
       point . centroid (exact in int32, and in fp32), ties to the lowest cluster. Then `CLUSTER_ROUNDS` times: sums
       of each cluster's points (exact); y = sum * (1 / sqrt(sum of squares)) in fp64; peak = max |y| over the
       record's clusters; centroid = round(y * (127 / peak)); a cluster whose sum is zero keeps its centroid; assign
       again. (An assignment that did not change may end the rounds: the rest would not change it.)
    3. Outliers: the 16 tokens of the lowest product with their own centroid, ties to the lowest token; stored in
       prompt order.
    4. Chain: from the lowest cluster that holds a token (outliers count) always to the one, not empty and not yet
       visited, of the largest centroid . centroid, ties to the lowest. Tokens other than outliers are sorted by
       (place of their cluster in the chain, prompt order) and cut into units of 16: 127 units, or 123 in a
       sequence's first segment. Units stand at 0, 1, …; the last group holds what is left. Bytes of absent units
       and all padding are zero.
    5. Means of keys and values: fp32(fp64 sum / count). Values are rotated after averaging. s8 with a scale:
       scale = f16(max|x| / 127), value = clamp(round(x * (1 / scale)), -127, 127), reciprocal and product in fp32;
       0 where scale is 0. Groups: f16(mean).
    6. Keys of 32 tokens (the last unit may stand alone): zero = f16(min), scale = f16((max - min) / 255),
       value = clamp(round((k - zero) * (1 / scale)), 0, 255), with zero and scale as stored.
    7. Values: rotated in fp32 (butterflies (a + b, a - b) with strides 1, 2, 4, …, then times
       fp32(1 / sqrt(run))), then s8 as in 5, per token.

How a decode row of context n = position + 1 reads them (`SegmentBatch.counts` closed segments, bf16 after them).

    exact zone  sinks, bf16 blocks, outliers of every closed segment, and *forced* units: those of a closed segment
                that ends after n - window_tokens; all units of a dense row. A row is dense if `sparse` is off, or
                n <= dense_tokens, or layer < dense_layers and n <= dense_layer_tokens. In other rows of layers
                < dense_layers, topk_units, min_units and max_units count four times. `layer` is the model's, so a
                sliding layer counts, too.
    groups      from n >= two_level_tokens on. z = scale * q . group_k + log group_n for groups that are not forced;
                mass = softmax over (exact zone, groups), summed over the queries of the KV head; opened are the
                fewest groups, largest first, that hold group_share of the groups' mass. Below, all are open.
    units       z = scale * q . unit_k + log unit_n for units of opened groups; mass r = softmax over (exact zone,
                units, groups not opened), summed over the queries. Far mass F = the sum of r over units and groups
                not opened. Selected: the fewest units, largest first, with sum r >= top_p * F, at least min_units
                and at most max_units; with top_p >= 1 simply topk_units. Ties: the lowest index, in the order of
                segments and units.
    output      one softmax over exact tokens, tokens of selected units, and (z + log summary_weight) of every unit
                not selected and group not opened, whose values are their mean values.
    stats       as `interface.ATTENTION_STATS`, from the same softmax with summary_weight taken as 1. Forced units
                count as exact. Entropy takes a summary of n tokens and mass m for n tokens of m / n, and is divided
                by log of the context (of 2 at least). The exact zone's length Z runs from the end of the last
                segment that is not forced to the row; border: summaries of segments that end after
                context - 2 Z. exact_tokens: exact zone and selected, mean over KV heads. Written for layers without
                a window of their own; rows of other layers are left alone. A sequence without closed segments gets
                1, 0, 0, 0, its entropy, its context.

A prefill row reads every unit and outlier of the closed segments, the sinks and the bf16 blocks, in one softmax.

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
CLUSTER_ROUNDS = 4
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
