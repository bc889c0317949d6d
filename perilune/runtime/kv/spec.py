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

KV_FORMAT_VERSION = 1
"""Raise when the bytes of a block change meaning; old blocks then never match."""

BlockHash = bytes
"""32 bytes naming a block by all tokens up to its end, and by everything its bytes depend on."""

KVDtype = Literal["bf16", "fp32"]


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
        return 2 if self.dtype == "bf16" else 4

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


def tenant_salt(tenant_secret: bytes, spec: KVSpec) -> bytes:
    """The seed of a tenant's hash chain: tenants with different secrets never share a block (spec X2)."""
    policy = f"{spec.fingerprint}|{spec.dtype}|v{KV_FORMAT_VERSION}".encode()
    return hmac.new(tenant_secret, policy, hashlib.sha256).digest()


def block_hashes(token_ids: Sequence[int], salt: bytes) -> list[BlockHash]:
    """Chained hashes of the whole blocks of a token stream; the ragged tail has none."""
    return list(_chain(token_ids, salt))


def _chain(token_ids: Sequence[int], salt: bytes) -> Iterator[BlockHash]:
    parent = salt
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = token_ids[start : start + BLOCK_TOKENS]
        payload = b"".join(int(token).to_bytes(4, "little") for token in block)
        parent = hashlib.blake2b(payload, key=parent, digest_size=32).digest()
        yield parent
