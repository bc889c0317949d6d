"""The shape of KV: how one block is laid out in memory and on disk, and how blocks are named.

Plain data without torch. A block holds `BLOCK_TOKENS` tokens of *all* layers in one contiguous run of bytes,
so that a tier move or a disk read is one copy:

    block = layer 0 K | layer 0 V | layer 1 K | layer 1 V | …      each `layer_half_bytes` long

Within a layer's half, per KV head, bf16 (the layout the bf16 dot-product instructions want):

    K: [head][head_dim / 2][token 0..31][2]     pairs along head_dim, so a query pair is broadcast over tokens
    V: [head][token / 2 0..15][head_dim][2]     pairs along tokens, so a probability pair is broadcast over dims

fp32 KV (the exactness reference) is plain `[head][token][head_dim]` for both halves.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from perilune.core import BLOCK_TOKENS
from perilune.kernels.tiers import SEGMENT_TOKENS, SINK_TOKENS

KV_FORMAT_VERSION = 2
"""Raise when the bytes of a block change meaning; old blocks then never match."""

BlockHash = bytes
"""32 bytes naming a block by all tokens up to its end, and by everything its bytes depend on."""

KVDtype = Literal["bf16", "fp32", "f16"]  # f16: llama.cpp's cache, whose bytes are its own

TIER_FORMAT_VERSION = 2
"""Raise when the bytes of a closed segment change meaning; old segments then never match."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of one model's KV. `fingerprint` names weights, precision and KV policy (spec D5)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: KVDtype
    fingerprint: str

    @property
    def element_bytes(self) -> int:
        return 4 if self.dtype == "fp32" else 2

    @property
    def layer_half_bytes(self) -> int:
        """Bytes of one layer's keys (or values) in one block."""
        return self.num_kv_heads * self.head_dim * BLOCK_TOKENS * self.element_bytes

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_layers * self.layer_half_bytes

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // BLOCK_TOKENS

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class TierSpec:
    """Shape of a runtime's KV tiers (spec R4). Bytes are those of one closed segment.

    A closed segment has a *slot* (its resident summaries) and its payload lies in a *frame*: WARM in RAM, COLD in a
    mapped file. `records` is how many pieces a segment is closed in, `parts` how many runs of bytes it is kept in.
    bf16 blocks of a segment are needed until the position is `hot_tokens`, a whole number of segments, past its
    end; the first `sink_tokens` for good.
    """

    records: int
    summary_bytes: int
    payload_bytes: int
    slots: int
    warm_frames: int
    cold_frames: int
    parts: int = 2
    hot_tokens: int = SEGMENT_TOKENS
    segment_tokens: int = SEGMENT_TOKENS
    sink_tokens: int = SINK_TOKENS

    @property
    def segment_blocks(self) -> int:
        return self.segment_tokens // BLOCK_TOKENS

    @property
    def sink_blocks(self) -> int:
        return self.sink_tokens // BLOCK_TOKENS

    @property
    def policy(self) -> str:
        """What KV bytes of tiered sequences depend on, beside the model."""
        shape = f"{self.segment_tokens}/{self.sink_tokens}/{self.hot_tokens}"
        return f"tiered|{shape}|v{TIER_FORMAT_VERSION}"


def tenant_salt(tenant_secret: bytes, spec: KVSpec, tiers: TierSpec | None = None) -> bytes:
    """The seed of a tenant's hash chain: tenants with different secrets never share a block (spec X2), nor do
    sequences whose KV is tiered (`tiers`) and those whose KV is not."""
    policy = f"{spec.fingerprint}|{spec.dtype}|v{KV_FORMAT_VERSION}"
    if tiers is not None:
        policy += f"|{tiers.policy}"
    return hmac.new(tenant_secret, policy.encode(), hashlib.sha256).digest()


def block_hashes(token_ids: Sequence[int], salt: bytes) -> list[BlockHash]:
    """Chained hashes of the whole blocks of a token stream; the ragged tail has none."""
    return list(_chain(token_ids, salt))


def segment_names(end_hash: BlockHash, parts: int) -> list[BlockHash]:
    """Names of a closed segment's `parts` on disk; `end_hash` is the chained hash of its last block."""
    return [hashlib.blake2b(bytes([part]), key=end_hash, digest_size=32).digest() for part in range(parts)]


def _chain(token_ids: Sequence[int], salt: bytes) -> Iterator[BlockHash]:
    parent = salt
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = token_ids[start : start + BLOCK_TOKENS]
        payload = b"".join(int(token).to_bytes(4, "little") for token in block)
        parent = hashlib.blake2b(payload, key=parent, digest_size=32).digest()
        yield parent
