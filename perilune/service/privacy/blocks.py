"""Long texts in blocks, and what was found in blocks and in conversations that were seen before.

A conversation is sent again with every turn; only what is new in it is read. A block is known by a keyed hash of
its text and of what stands around it, a conversation by Python's own (keyed, too) of its texts in order; the keys
live as long as the process. Knows text and offsets, no rules.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from perilune.service.privacy.kinds import Found
from perilune.service.privacy.known import Seen

BLOCK_CHARS = 8192
MARGIN_CHARS = 1024
"""Read on both sides of a block. What is wider than that has no blank in it, or is a private key."""
_PRIVATE_KEY = "-----BEGIN"
_BLOCKS_OF_TENANT = 1024
_TENANTS = 64
_FINDINGS_OF_TENANT = 50_000
"""In conversations that are remembered; each counts as some more."""
_LEAST_SIZE = 16
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


@dataclass(frozen=True, slots=True)
class Begun:
    """What the first `size` texts of a conversation hold: all findings of each; where each value that a rule found
    stands first (text, finding); and the places of a block's filter (`Seen`) that tell which of them it may hold
    (place, number of the value)."""

    size: int = 0
    found: tuple[tuple[Found, ...], ...] = ()
    values: tuple[tuple[int, Found], ...] = ()
    places: tuple[tuple[int, int], ...] = ()

    @property
    def weight(self) -> int:
        return _LEAST_SIZE + sum(map(len, self.found))


@dataclass(slots=True)
class _OfTenant:
    """The oldest of both come first."""

    blocks: OrderedDict[bytes, Seen] = field(default_factory=OrderedDict)
    conversations: OrderedDict[int, Begun] = field(default_factory=OrderedDict)
    weight: int = 0  # of the conversations


class Memo:
    """Blocks and conversations that were seen before, for each tenant by itself. Safe in threads. Keeps offsets and
    hashes."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._tenants: OrderedDict[str, _OfTenant] = OrderedDict()

    def key(self, block: Block) -> bytes:
        """What a block is known by."""
        digest = hashlib.blake2b(digest_size=16, key=self._key)
        digest.update(f"{block.lead},{block.end - block.start};".encode())
        digest.update(block.context.encode("utf-8", "surrogatepass"))
        return digest.digest()

    def get(self, tenant: str, key: bytes) -> Seen | None:
        with self._lock:
            mine = self._tenants.get(tenant)
            if mine is None or key not in mine.blocks:
                return None
            mine.blocks.move_to_end(key)
            self._tenants.move_to_end(tenant)
            return mine.blocks[key]

    def put(self, tenant: str, key: bytes, seen: Seen) -> None:
        """Keep what a block holds; the tenant's oldest go, and the tenants that were idle longest."""
        with self._lock:
            mine = self._mine(tenant)
            mine.blocks[key] = seen
            if len(mine.blocks) > _BLOCKS_OF_TENANT:
                mine.blocks.popitem(last=False)

    def begun(self, tenant: str, texts: Sequence[str]) -> Begun:
        """What is known of the longest beginning of a conversation."""
        keys = _keys(texts)
        with self._lock:
            mine = self._tenants.get(tenant)
            if mine is not None:
                for key in reversed(keys):
                    if key in mine.conversations:
                        mine.conversations.move_to_end(key)
                        return mine.conversations[key]
        return Begun()

    def remember(self, tenant: str, texts: Sequence[str], begun: Begun) -> None:
        """Keep what the beginning of a conversation holds; the oldest go."""
        key = _keys(texts[: begun.size])[-1]
        with self._lock:
            mine = self._mine(tenant)
            if key in mine.conversations:
                mine.weight -= mine.conversations.pop(key).weight
            mine.conversations[key] = begun
            mine.weight += begun.weight
            while mine.weight > _FINDINGS_OF_TENANT:
                mine.weight -= mine.conversations.popitem(last=False)[1].weight

    def _mine(self, tenant: str) -> _OfTenant:
        """With the lock held."""
        mine = self._tenants.setdefault(tenant, _OfTenant())
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > _TENANTS:
            self._tenants.popitem(last=False)
        return mine


def _keys(texts: Sequence[str]) -> list[int]:
    """What the first text, the first two, … are known by."""
    keys, key = [], 0
    for text in texts:
        key = hash((key, text))
        keys.append(key)
    return keys
