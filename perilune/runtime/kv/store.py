"""The `KVStore` seam: blocks that outlive a process. Bytes in, bytes out; policy lives in engine.residency.

Implementations: `runtime.kv.disk.DiskKVStore`; later a store shared between replicas. One contract suite
(tests/contracts/kv_store.py) runs against each. A damaged, missing or slow block is a shorter prefix, never
a wrong one and never an exception to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from perilune.runtime.kv.spec import BlockHash


@dataclass(frozen=True, slots=True)
class KVEntry:
    """What `perilune kv ls` shows: one owner's blocks."""

    owner: str
    blocks: int
    size_bytes: int
    last_used_at: float  # seconds since the epoch


class KVStore(Protocol):
    """Content-addressed block storage. Every method may be called from any thread."""

    def prefix_length(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading hashes are stored. Cheap: no data is read."""
        ...

    def load(self, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> int:
        """Fill `into[i]` with block `hashes[i]`; stop at the first missing or damaged block.

        Returns how many leading blocks were filled and verified. Bytes of later views are undefined.
        """
        ...

    def save(self, hashes: Sequence[BlockHash], blocks: Sequence[memoryview], owner: str) -> None:
        """Store blocks durably and add `owner` to each. Blocks that are stored already cost nothing.

        Durable when it returns. Over quota, the least recently used blocks make room; when nothing can, the
        save is skipped (KV is a cache) and counted.
        """
        ...

    def forget(self, owner: str) -> int:
        """Drop an owner; blocks nobody else owns are deleted. Returns the bytes freed."""
        ...

    def entries(self) -> list[KVEntry]: ...

    def close(self) -> None: ...
