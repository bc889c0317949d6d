"""What each sequence holds: its blocks and, where it is tiered, its closed segments.

Knows the block pool, the prefix cache, closed segments and the saver: what of a prompt is there already, what it
still lacks, what is shared under its name, saved, or parked while it waits. Knows nothing of order, classes or
time: who may hold what is the scheduler's decision. Touched by the engine thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from perilune.core import BLOCK_TOKENS
from perilune.engine.block_pool import BlockPool
from perilune.engine.prefix_cache import PrefixCache
from perilune.engine.residency import Residency
from perilune.engine.segments import NOWHERE, Held, Segments
from perilune.engine.sequence import EngineSequence, SequenceState
from perilune.runtime.kv.spec import BlockHash
from perilune.telemetry import Telemetry

_LOG = logging.getLogger(__name__)

SAVE_BLOCKS = 64
"""Blocks of a full sequence that are saved together, at absolute multiples: a killed ingest loses at most 2,048
tokens."""


class Holdings:
    """`segments` is None where no sequence is tiered. Of the pool, at most `save_share` is left to saves that are
    under way, twice that to what a sequence leaves behind."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        residency: Residency,
        segments: Segments | None,
        save_share: float,
        telemetry: Telemetry,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._residency = residency
        self._segments = segments
        self._save_share = save_share
        self._telemetry = telemetry

    @property
    def tiers(self) -> Segments:
        """For tiered sequences only."""
        assert self._segments is not None, "a tiered sequence without tiers"
        return self._segments

    # ---------------------------------------------------------------------------------- what is there

    def cached_tokens(self, sequence: EngineSequence) -> int:
        """Leading tokens whose KV is in RAM or on disk."""
        places = self.tiers if sequence.tiered else self._residency
        return BLOCK_TOKENS * sum(places.lookup(sequence.reusable))

    def match(self, sequence: EngineSequence) -> Held:
        """The longest prefix that RAM holds. Retain it (`take`) before anything is allocated."""
        if sequence.tiered:
            return self.tiers.match(sequence)
        blocks = self._cache.match(sequence.reusable)
        return Held(len(blocks) * BLOCK_TOKENS, blocks, [])

    def matched_blocks(self, sequence: EngineSequence) -> int:
        """How long that prefix is."""
        if sequence.tiered:
            return self.tiers.match(sequence).tokens // BLOCK_TOKENS
        return self._cache.match_length(sequence.reusable)

    # ----------------------------------------------------------------------------------- what it lacks

    def block_shortage(self, sequence: EngineSequence, held: Held, ahead: Sequence[EngineSequence]) -> int:
        """Blocks that are missing for the whole prompt beside what those `ahead` still need; zero or less when
        there are enough."""
        missing = self.needed_blocks(sequence) - len(held.blocks)
        idle = sum(self._pool.references(block) == 0 for block in held.blocks)
        promised = sum(max(0, self._need(s, s.target) - s.held_blocks) for s in ahead)
        return missing + idle + promised - self._pool.available

    def needed_blocks(self, sequence: EngineSequence) -> int:
        """Most blocks that it holds at once on its way to its first token."""
        return self._need(sequence, sequence.target + sequence.samples)

    def slot_shortage(self, sequence: EngineSequence, held: Held, ahead: Sequence[EngineSequence]) -> int:
        """The same of slots for closed segments."""
        return self.tiers.shortage(sequence, held, ahead) if sequence.tiered else 0

    def _need(self, sequence: EngineSequence, tokens: int) -> int:
        """Most blocks that a sequence holds at once on its way to `tokens`."""
        return self.tiers.rules.blocks_needed(tokens) if sequence.tiered else _blocks_for(tokens)

    # ------------------------------------------------------------------------------ taking, letting go

    def take(self, sequence: EngineSequence, held: Held) -> None:
        """Give a sequence what RAM holds of its prefix."""
        if sequence.tiered:
            self.tiers.take(sequence, held)
            return
        self._pool.retain(held.table)
        sequence.block_table, sequence.computed = held.table, held.tokens

    def adopt(self, sequence: EngineSequence) -> int:
        """Take over what somebody else computed since the sequence was admitted. Returns the tokens won."""
        before = sequence.computed
        if sequence.tiered:
            held = self.tiers.match(sequence)
            if held.tokens > before:
                self.tiers.take(sequence, held)
        else:
            names = sequence.reusable
            while sequence.computed % BLOCK_TOKENS == 0 and self._adopt_block(sequence, names):
                pass
        if sequence.computed > before:
            self.share(sequence)
        return sequence.computed - before

    def _adopt_block(self, sequence: EngineSequence, names: Sequence[BlockHash]) -> bool:
        index = sequence.computed // BLOCK_TOKENS
        block = self._cache.get(names[index]) if index < len(names) else None
        if block is None:
            return False
        self._pool.retain([block])
        self._pool.release(sequence.block_table[index : index + 1])
        sequence.block_table[index : index + 1] = [block]
        sequence.computed += BLOCK_TOKENS
        return True

    def extend(self, sequence: EngineSequence, tokens: int) -> bool:
        """Have blocks, and slots, up to `tokens`. False: there is no room."""
        missing = _blocks_for(tokens) - len(sequence.block_table)
        if missing > 0:
            blocks = self._pool.allocate(missing)
            if blocks is None:
                return False
            sequence.block_table += blocks
        return not sequence.tiered or self.tiers.reserve(sequence, tokens)

    def release(self, sequence: EngineSequence) -> None:
        """Take everything back that a sequence holds."""
        if sequence.tiered:
            self.tiers.release(sequence)
            return
        self._pool.release(sequence.block_table)
        sequence.block_table, sequence.computed, sequence.named_blocks = [], 0, 0

    def leave(self, sequence: EngineSequence) -> None:
        """A sequence ends: save what it has to leave behind, and take everything back."""
        try:
            self.save(sequence, last=True)
        except Exception:  # KV is a cache: a lost save costs a prefill
            _LOG.exception("the KV of a sequence that ended couldn't be handed to the saver")
            self._telemetry.count("kv_save_failures_total")
        self.unpark(sequence)
        self.release(sequence)

    # ------------------------------------------------------------------------------------- parking

    def park(self, sequence: EngineSequence) -> None:
        """Take everything back from a sequence that is preempted, and keep it in RAM until somebody needs the room.

        What nobody may share (a question, decoded tokens) gets names that only this sequence knows: so it goes on
        with the very KV that it would have used, and only the ragged last block is computed again.
        """
        if sequence.state is SequenceState.RUNNING:  # blocks that are still being loaded hold nothing yet
            names, own = sequence.hashes[: sequence.named_blocks], []
            for index in range(len(names), sequence.computed // BLOCK_TOKENS):
                block = sequence.block_table[index]
                shared = self._cache.name_of(block)
                name = shared or sequence.own_name(index)
                if block != NOWHERE and not self._cache.add(name, block, self._pool, index):
                    break
                names.append(name)
                own += [] if shared else [name]
            self._cache.own(own, sequence.own_owner)
            if sequence.tiered:
                self.tiers.park(sequence, names)
            sequence.parked = names
        self.release(sequence)

    def unpark(self, sequence: EngineSequence) -> None:
        """It goes on, or ends: names of its own name nothing any more."""
        if sequence.parked:
            sequence.parked = []
            self._cache.forget(sequence.own_owner, self._pool)
            if sequence.tiered:
                self.tiers.forget(sequence.own_owner)

    # -------------------------------------------------------------------------------- sharing and saving

    def share(self, sequence: EngineSequence) -> None:
        """Name, own and save the shared blocks that are complete now."""
        whole = sequence.whole_blocks
        if not sequence.forgotten and sequence.named_blocks < whole:
            names = sequence.hashes[sequence.named_blocks : whole]
            blocks = sequence.block_table[sequence.named_blocks : whole]
            for place, (name, block) in enumerate(zip(names, blocks, strict=True), sequence.named_blocks):
                if block != NOWHERE:
                    self._cache.add(name, block, self._pool, place)
            if sequence.owner is not None:
                self._cache.own(names, sequence.owner)
            sequence.named_blocks = whole
        self.save(sequence)

    def save(self, sequence: EngineSequence, last: bool = False) -> None:
        """Hand whole groups of blocks to the saver as they fill, and the ragged end when the shared part is
        complete.

        A tiered sequence's group is a segment: its blocks are given up together, so it is either there or gone.
        """
        ready = min(sequence.whole_blocks, sequence.persisted_blocks, len(sequence.block_table))
        if sequence.owner is None or not self._residency.keeps or sequence.saved_blocks >= ready:
            return
        flush = last or ready == sequence.persisted_blocks
        if self._residency.saving_share > self._save_share * (2 if last else 1):
            if last:
                self._residency.skip(ready - sequence.saved_blocks)
            return
        group = self.tiers.rules.spec.segment_blocks if sequence.tiered else SAVE_BLOCKS
        while sequence.saved_blocks < ready:
            start = sequence.saved_blocks
            end = min(ready, (start // group + 1) * group)
            if end % group and not flush:
                return
            blocks = sequence.block_table[start:end]
            if NOWHERE not in blocks:  # else it was found as a closed segment, not computed here
                self._residency.save(sequence.owner, sequence.hashes[start:end], blocks)
            sequence.saved_blocks = end


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
