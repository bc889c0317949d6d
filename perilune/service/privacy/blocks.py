"""Long texts in blocks, and what was found in blocks that were seen before.

A conversation is sent again with every turn; only what is new in it is read. A block is known by a keyed hash of
its text and of what stands around it; the key lives as long as the process. Knows text and offsets, no rules.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from perilune.service.privacy.known import Seen

BLOCK_CHARS = 8192
MARGIN_CHARS = 1024
"""Read on both sides of a block. What is wider than that has no blank in it, or is a private key."""
_PRIVATE_KEY = "-----BEGIN"
_BLOCKS_OF_TENANT = 1024
_TENANTS = 64
VARIANTS = 4
"""Sets of other values that a block is remembered with."""


@dataclass(frozen=True, slots=True)
class Block:
    """Characters `start`:`end` of a text, with what is read around it: `context` begins `lead` before."""

    start: int
    end: int
    lead: int
    context: str


def blocks(text: str) -> Iterator[Block]:
    """Cut where a line ends, else at a blank; a text without either, or with a private key, is one block. The cuts
    depend on what is before them, so that a text that grows keeps its blocks."""
    start = 0
    whole = len(text) <= BLOCK_CHARS + MARGIN_CHARS or _PRIVATE_KEY in text
    while not whole and len(text) - start > BLOCK_CHARS:
        end = _cut(text, start)
        if end < 0:
            break
        yield _block(text, start, end)
        start = end
    if start < len(text):
        yield _block(text, start, len(text))


def _cut(text: str, start: int) -> int:
    """Where the block that begins at `start` ends; -1: nowhere."""
    least, most = start + BLOCK_CHARS * 3 // 4, start + BLOCK_CHARS
    for mark in ("\n\n", "\n", " "):
        at = text.rfind(mark, least, most)
        if at >= 0:
            return at + len(mark)
    at = text.find(" ", most)
    return at + 1 if at >= 0 else -1


def _block(text: str, start: int, end: int) -> Block:
    low = max(0, start - MARGIN_CHARS)
    return Block(start, end, start - low, text[low : end + MARGIN_CHARS])


class Memo:
    """Blocks that were seen before, for each tenant by itself. Safe in threads. Keeps offsets and hashes."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._tenants: OrderedDict[str, OrderedDict[bytes, Seen]] = OrderedDict()

    def key(self, block: Block) -> bytes:
        """What a block is known by."""
        digest = hashlib.blake2b(digest_size=16, key=self._key)
        digest.update(f"{block.lead},{block.end - block.start};".encode())
        digest.update(block.context.encode("utf-8", "surrogatepass"))
        return digest.digest()

    def get(self, tenant: str, key: bytes) -> Seen | None:
        with self._lock:
            mine = self._tenants.get(tenant)
            if mine is None or key not in mine:
                return None
            mine.move_to_end(key)
            self._tenants.move_to_end(tenant)
            return mine[key]

    def put(self, tenant: str, key: bytes, seen: Seen) -> None:
        """Keep what a block holds; the tenant's oldest go, and the tenants that were idle longest."""
        with self._lock:
            mine = self._tenants.setdefault(tenant, OrderedDict())
            self._tenants.move_to_end(tenant)
            mine[key] = seen
            if len(mine) > _BLOCKS_OF_TENANT:
                mine.popitem(last=False)
            if len(self._tenants) > _TENANTS:
                self._tenants.popitem(last=False)
