"""Which block in RAM holds which part of which prompt: chained block hash -> block id, and who owns it.

Knows hashes, ids and owners. Knows nothing of bytes or sequences. Only exact-prefill blocks inside a prompt's
shared part are ever added (design: KV provenance). The engine thread alone changes it; `match_length` may be
called from any thread, because it only looks hashes up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from perilune.engine.block_pool import BlockPool
from perilune.runtime.kv.spec import BlockHash


class PrefixCache:
    """A view over a pool's named blocks. At most `branches` of them lie at the same place of their prompts, where a
    runtime needs that (`Capabilities.max_branches`); 0 is no bound."""

    def __init__(self, branches: int = 0) -> None:
        self._branches = branches
        self._place_of: dict[int, int] = {}
        self._at: dict[int, OrderedDict[int, None]] = {}  # place -> blocks, the one shared longest ago first
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._owners: dict[BlockHash, set[str]] = {}
        self._owned: dict[str, set[BlockHash]] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def match_length(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading hashes are held."""
        for index, name in enumerate(hashes):
            if name not in self._block_of:
                return index
        return len(hashes)

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the leading hashes that are held. Retain them before anything is allocated."""
        return [self._block_of[name] for name in hashes[: self.match_length(hashes)]]

    def get(self, name: BlockHash) -> int | None:
        return self._block_of.get(name)

    def name_of(self, block: int) -> BlockHash | None:
        return self._hash_of.get(block)

    def add(self, name: BlockHash, block: int, pool: BlockPool, place: int = 0) -> bool:
        """Share a used block, the one at `place` of its prompt, under its hash. False when another block already
        holds it, or all `branches` there are in use: this one stays private."""
        if name in self._block_of:
            return self._block_of[name] == block
        if block in self._hash_of:
            raise ValueError(f"block {block} already has another name")
        if self._branches:
            if not self._make_way(place, pool):
                return False
            self._place_of[block] = place
            self._at.setdefault(place, OrderedDict())[block] = None
        self._block_of[name] = block
        self._hash_of[block] = name
        pool.name(block)
        return True

    def _make_way(self, place: int, pool: BlockPool) -> bool:
        """Drop the unused block that was shared longest ago at a full place; False when all are in use."""
        there = self._at.get(place, OrderedDict())
        if len(there) < self._branches:
            return True
        for block in there:
            if pool.references(block) == 0:
                pool.unname(block)  # evicts it, and so discards its name here
                return True
        return False

    def _leave_place(self, block: int) -> None:
        place = self._place_of.pop(block, None)
        if place is None:  # no bound, so no count
            return
        del self._at[place][block]
        if not self._at[place]:
            del self._at[place]

    def own(self, hashes: Iterable[BlockHash], owner: str) -> None:
        """Note that `owner` uses these held blocks: `forget` of another owner then keeps them."""
        owned = self._owned.setdefault(owner, set())
        for name in hashes:
            if name in self._block_of:
                owned.add(name)
                self._owners.setdefault(name, set()).add(owner)

    def discard(self, blocks: Iterable[int]) -> None:
        """Forget the names of evicted blocks; ids without a name are ignored."""
        for block in blocks:
            name = self._hash_of.pop(block, None)
            if name is None:
                continue
            self._leave_place(block)
            del self._block_of[name]
            for owner in self._owners.pop(name, ()):
                self._drop_owned(owner, name)

    def forget(self, owner: str, pool: BlockPool) -> int:
        """Drop what only `owner` owns. Blocks in use turn private. Returns the number of blocks dropped."""
        dropped = 0
        for name in self._owned.pop(owner, set()):
            owners = self._owners[name]
            owners.discard(owner)
            if owners:
                continue
            block = self._block_of[name]
            del self._owners[name]
            del self._block_of[name]
            del self._hash_of[block]
            self._leave_place(block)
            pool.unname(block)
            dropped += 1
        return dropped

    def _drop_owned(self, owner: str, name: BlockHash) -> None:
        owned = self._owned[owner]
        owned.discard(name)
        if not owned:
            del self._owned[owner]

    def check_integrity(self, pool: BlockPool) -> None:
        """Raises AssertionError when names, blocks and owners disagree."""
        assert {block: name for name, block in self._block_of.items()} == self._hash_of
        assert {block: place for place, there in self._at.items() for block in there} == self._place_of
        assert self._place_of.keys() == (self._hash_of.keys() if self._branches else set())
        assert not self._branches or all(len(there) <= self._branches for there in self._at.values())
        assert set(self._owners) <= set(self._block_of), "an owner of a block that is gone"
        pairs = {(owner, name) for name, owners in self._owners.items() for owner in owners}
        assert pairs == {(owner, name) for owner, names in self._owned.items() for name in names}
        assert pool.cached <= len(self._block_of), "a cached block without a hash"
