"""The tiered KV cache's contract: how a closed segment is laid out, and how a decode step reads it (spec R4, R5).

Plain data without torch; `interface` adds the tensors. Knows nothing of sequences, disks or schedulers.

A sequence's KV is a row of whole *segments* of 2,048 tokens at absolute multiples, and bf16 blocks after them. The
first 64 tokens (the sinks) stay bf16 blocks for good and are in no segment. When a segment closes, each (layer, KV
head) of it becomes one *record*: 128 *units* of 16 tokens (124 in a sequence's first segment), sorted so that a
unit's keys are alike (order means nothing, RoPE is in the keys). A record has a summary part, always resident, and
a payload that may lie on disk (COLD). Offsets are in `SegmentLayout`; every array starts at a multiple of 64 bytes.

The summary holds the index: every key as its unit's mean in 4 bits a channel, and one bit a channel and 4 bits of
magnitude for what it differs by (a sketch: `key ~ mean + spread * sign`). Means alone don't show the single keys
that hold a fact. And it holds the mean value of every 64 tokens, for what isn't read exactly. Keys and values of
the summary are rotated (see below).

    summary  mean       u4  [8 groups][D/8][16 units][4]  unit's mean key = mean_scale * (code - 7.5); the low half
                            of a byte [g][w][u][j] is channel 4 w + j, the high half channel 4 (w + D/8) + j
             mean_scale f16 [128]
             signs      u4  [8 groups][4][D/8][4 tokens][16 units]  of four keys of each unit: bit j of the low half
                            is channel 4 w + j, of the high half channel 4 (w + D/8) + j; 1: not below the mean's
             spread     u4  [8 groups][4][2 tokens][16 units]  size of that difference = spread_scale * (code + 1);
                            low halves: the first two of the four keys
             spread_scale f16 [128]
             quad_v     s8  [32 quads][D]                 mean value of four units = quad_v_scale * value
             quad_v_scale f16 [32]
             units      u16 [1]                           how many of the 128 exist: the first ones, a multiple of 4
    payload  k          u8  [128 units][D/4][16][4]       key = k_scale * value + k_zero, not rotated
             k_scale    f16 [64][D]                       per channel, for 32 tokens (two units)
             k_zero     f16 [64][D]
             v          s8  [128 units][4][D][4]          value = v_scale * value, rotated
             v_scale    f16 [128 units][16]               per token

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
    3. Chain: from the lowest cluster that holds a token always to the one, not empty and not yet visited, of the
       largest centroid . centroid, ties to the lowest. Tokens are sorted by (place of their cluster in the chain,
       prompt order) and cut into units of 16. Bytes of absent units and all padding are zero.
    4. Keys of 32 tokens: zero = f16(min), scale = f16((max - min) / 255),
       value = clamp(round((k - zero) * (1 / scale)), 0, 255), with zero and scale as stored. Reciprocals in fp32;
       the value is 0 (here and below: as if the reciprocal were 0) where scale is 0.
    5. Values: rotated in fp32 (butterflies (a + b, a - b) with strides 1, 2, 4, …, then times fp32(1 / sqrt(run))),
       then per token scale = f16(max|x| / 127), value = clamp(round(x * (1 / scale)), -127, 127). The same for
       quads: mean = fp32(fp64 sum / 64), then rotated.
    6. A unit's mean key: fp32(fp64 sum / 16), rotated; scale = f16(max|x| / 7.5),
       code = clamp(round(x * (1 / scale) + 7.5), 0, 15).
    7. Signs and spread: r = rotated key - mean as stored, in fp32; bit = r >= 0; a = fp32(sum |r| in fp64 / D);
       spread_scale = f16(max a of the unit / 16), code = clamp(round(a * (1 / scale)) - 1, 0, 15).

How a decode row of context n = position + 1 reads them (`SegmentBatch.counts` closed segments, bf16 after them).

    exact zone  sinks, bf16 blocks, and *forced* units: those of a closed segment that ends after n - window_tokens;
                all units of a dense row. A row is dense if `sparse` is off, or n <= dense_tokens, or
                layer < dense_layers and n <= dense_layer_tokens. In other rows of layers < dense_layers,
                topk_units, min_units and max_units count four times. `layer` is the model's, so a sliding layer
                counts, too. Where heads have shares, no layer is special: each head's topk_units, min_units and
                max_units are times its share, rounded half up, one at least. A head of share 0 reads the exact zone
                only, in rows that aren't dense. A head that isn't sketched takes all keys of a unit for their mean:
                z = q . mean + log 16.
    index       z of a unit = q . mean + log of the sum over its tokens of chord(q . (key - mean)), by the sketch, q
                scaled and rotated. chord(x) = 2^floor(y) * (1 + y - floor(y)) with y = x / log 2, nearly e^x; y is
                cut to -100 … 100.
                For q . mean, q is rounded to whole multiples of max|q| / 127. For the other product, each word's
                sums of four channels of q with signs, plus the sum of their sizes, are rounded to whole multiples
                of 2/15 of the largest sum of sizes of a word: a table of 16 numbers 0 … 15 a word.
                Mass r = softmax over (exact zone, units), summed over the queries of the KV head. Far mass
                F = the sum of r. Selected: the fewest units, largest first, with sum r >= top_p * F, at least
                min_units and at most max_units; with top_p >= 1 simply topk_units. Ties: the lowest index, in the
                order of segments and units. A unit whose mass fp32 can't hold as a normal number is not selected.
    output      one softmax over exact tokens, tokens of selected units, and (z + log summary_weight) of every unit
                not selected, whose value is its quad's mean.
    stats       as `interface.ATTENTION_STATS`, from the same softmax with summary_weight taken as 1. Forced units
                count as exact. Entropy takes a summary of 16 tokens and mass m for 16 tokens of m / 16, and is
                divided by log of the context (of 2 at least). The exact zone's length Z runs from the end of the
                last segment that is not forced to the row; border: summaries of segments that end after
                context - 2 Z. exact_tokens: exact zone and selected, mean over KV heads. Written for layers without
                a window of their own; rows of other layers are left alone. A sequence without closed segments gets
                1, 0, 0, 0, its entropy, its context.

A prefill row reads every unit of the closed segments, the sinks and the bf16 blocks, in one softmax.

"Rotated" is the normalised Walsh-Hadamard transform of the head's dimensions, in runs of the largest power of two
that divides D: a sum of rotated values is rotated back once (the transform is its own inverse). Source of the codec
and of the measured alternatives: KIVI (arXiv 2402.02750) for the axes, QuaRot (arXiv 2404.00456) for the rotation,
RaBitQ (arXiv 2405.12497) for one bit a channel.
"""

from __future__ import annotations

from dataclasses import dataclass

SEGMENT_TOKENS = 2048
UNIT_TOKENS = 16
SEGMENT_UNITS = SEGMENT_TOKENS // UNIT_TOKENS
GROUP_UNITS = 16
SEGMENT_GROUPS = SEGMENT_UNITS // GROUP_UNITS
QUAD_UNITS = 4
SEGMENT_QUADS = SEGMENT_UNITS // QUAD_UNITS
SINK_TOKENS = 64
CLUSTER_ROUNDS = 4
MAX_HEAD_DIM = 512
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Byte offsets of one record (one layer and KV head of one segment). `head_dim`: 16, 32, … MAX_HEAD_DIM."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def summary_offsets(self) -> dict[str, int]:
        """Where each array of the summary part starts, and "end"."""
        dim = self.head_dim
        return _offsets(
            mean=SEGMENT_UNITS * dim // 2,
            mean_scale=2 * SEGMENT_UNITS,
            signs=SEGMENT_TOKENS * dim // 8,
            spread=SEGMENT_TOKENS // 2,
            spread_scale=2 * SEGMENT_UNITS,
            quad_v=SEGMENT_QUADS * dim,
            quad_v_scale=2 * SEGMENT_QUADS,
            units=2,
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

    A row reads exactly: the sinks, every bf16 block, and the selected units. `window_tokens` is the local window: a
    closed segment that reaches into it is read whole. The units not selected enter through their sketched mass and
    their quad's mean value, with bias log `summary_weight` (0: they are left out). `sparse` off reads every unit
    (the INT8 dense form), as do contexts of at most `dense_tokens`, and the first `dense_layers` layers of
    contexts of at most `dense_layer_tokens`; beyond that those layers get four times the budget. With `top_p` 1.0
    or more the budget is `topk_units` units; below, it is the smallest set of units that holds that share of the
    far mass, between `min_units` and `max_units`.
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


def _offsets(**sizes: int) -> dict[str, int]:
    starts: dict[str, int] = {}
    position = 0
    for name, size in sizes.items():
        starts[name] = position
        position += -(-size // _ALIGN) * _ALIGN
    starts["end"] = position
    return starts
