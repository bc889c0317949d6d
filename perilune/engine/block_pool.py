"""Ref-counted KV blocks and the order in which unreferenced ones are given up.

Knows block ids and counts. Knows nothing of tokens, hashes or bytes: whoever names blocks (`prefix_cache`)
marks them `cached` and is told when one is evicted. Touched by the engine thread only.

A block is in exactly one of three places:
    free    no reference, no content worth keeping
    cached  no reference, but named: kept until somebody needs the room, least recently used first
    used    referenced by sequences, loads or saves
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Blocks 0 … num_blocks-1. `evicted` is called with the ids whose content is given up, before their
    reuse."""

    def __init__(self, num_blocks: int, evicted: Callable[[Sequence[int]], None]) -> None:
        self._references = [0] * num_blocks
        self._named = [False] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._evicted = evicted

    @property
    def total(self) -> int:
        return len(self._references)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None (and no change) when there aren't that many."""
        if count > self.available:
            return None
        victims = [self._cached.popitem(last=False)[0] for _ in range(count - len(self._free))]
        for block in victims:
            self._named[block] = False
        if victims:
            self._evicted(victims)
        blocks = victims + [self._free.pop() for _ in range(count - len(victims))]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Add a reference to used or cached blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]  # KeyError: a free block has nothing to share
            self._references[block] += 1

    def idle(self) -> list[int]:
        """Cached blocks, the one that is given up first at the start."""
        return list(self._cached)

    def release(self, blocks: Sequence[int], *, oldest: bool = False) -> None:
        """Give one reference to each block back. `blocks` are in prompt order: the tail is given up first.

        `oldest`: ones that nobody else uses are given up before all others."""
        dropped: list[int] = []
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise ValueError(f"block {block} released more often than retained")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._named[block]:
                self._cached[block] = None
                if oldest:
                    self._cached.move_to_end(block, last=False)
            else:
                dropped.append(block)
        self._return(dropped)

    def name(self, block: int) -> None:
        """A used block's content is now shareable: keep it when the last reference goes."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is named without being used")
        self._named[block] = True

    def unname(self, block: int) -> None:
        """A block's content must not be shared any more; a cached one becomes free."""
        self._named[block] = False
        if block in self._cached:
            del self._cached[block]
            self._return([block])

    def _return(self, blocks: list[int]) -> None:
        if blocks:
            self._evicted(blocks)
            self._free.extend(blocks)

    def check_integrity(self) -> None:
        """Raises AssertionError when free + cached + used isn't the total, or a block is in two places."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block, count in enumerate(self._references) if count > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free | cached | used) == len(free) + len(cached) + len(used), "a block is in two places"
        assert len(free) + len(cached) + len(used) == self.total, "a block leaked"
        assert all(count >= 0 for count in self._references), "a negative reference count"
        assert all(self._named[block] for block in cached), "a cached block without a name"
        assert not any(self._named[block] for block in free), "a free block with a name"
