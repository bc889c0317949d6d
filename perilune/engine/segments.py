"""Closed segments of tiered sequences: who holds which, when they are made, and when blocks may go (spec R4).

Knows slots, names and the rules of position (`tier_rules`); a slot is to a segment what a block is to 32 tokens, so
the same pool and prefix cache hold them: counted, shared by hash, given up least recently used first. Knows nothing
of bytes. A segment is made of its blocks when it is complete: at once while prefilling, a few records a step while
decoding, and in any case before the first row that reads it closed. Touched by the engine thread only, but for
`lookup`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from perilune.core import BLOCK_TOKENS
from perilune.engine.block_pool import BlockPool
from perilune.engine.prefix_cache import PrefixCache
from perilune.engine.residency import LoadJob, Residency, SegmentLoad
from perilune.engine.sequence import EngineSequence, SequenceState
from perilune.engine.tier_rules import TierRules
from perilune.errors import Overloaded
from perilune.runtime.kv.spec import BlockHash, segment_names
from perilune.runtime.mri import CancelFlag, KVTiers, SequenceSlice, StepAbandoned
from perilune.telemetry import Telemetry

CLOSE_BATCH = 4
"""Records made between two looks at the cancel flag."""

DECODE_STEPS = 256
"""Steps over which decode spreads the making of a segment; windows are larger."""

NOWHERE = -1
"""In a block table: the block was given up, its segment is read instead."""


@dataclass(frozen=True, slots=True)
class Held:
    """A prefix that RAM holds: its `tokens`, block table and slots."""

    tokens: int
    table: list[int]
    segments: list[int]

    @property
    def blocks(self) -> list[int]:
        return [block for block in self.table if block != NOWHERE]


class Segments:
    """`blocks` and `block_cache` are the engine's own; `residency` reaches the disk."""

    def __init__(
        self,
        tiers: KVTiers,
        rules: TierRules,
        blocks: BlockPool,
        block_cache: PrefixCache,
        residency: Residency,
        telemetry: Telemetry,
    ) -> None:
        self._tiers = tiers
        self.rules = rules
        self._blocks = blocks
        self._block_cache = block_cache
        self._residency = residency
        self._telemetry = telemetry
        self._per_step = -(-tiers.spec.records // DECODE_STEPS)
        self._busy: dict[int, int] = {}  # slots whose bytes somebody else is using
        self.pool = BlockPool(tiers.spec.slots, self._evicted)
        self.cache = PrefixCache()
        tiers.drop(range(tiers.spec.slots))  # another engine may have used the runtime before

    # --------------------------------------------------------------------------------------- look-ups

    def lookup(self, hashes: Sequence[BlockHash]) -> tuple[int, int]:
        """Leading blocks' worth of KV in RAM, and what the disk adds. From any thread."""
        _, in_ram = self._best(hashes, self.cache.match_length(self._ends(hashes)), self._ram_run)
        _, either = self._best(hashes, self._stored(hashes), self._any_run)
        return in_ram, max(0, either - in_ram)

    def match(self, sequence: EngineSequence) -> Held:
        """The longest prefix that RAM holds. Retain it (`take`) before anything is allocated."""
        hashes = sequence.reusable
        slots = self.cache.match(self._ends(hashes))
        count, end = self._best(hashes, len(slots), self._ram_run)
        return Held(end * BLOCK_TOKENS, self._table(hashes, count, end), slots[:count])

    def _table(self, hashes: Sequence[BlockHash], count: int, end: int) -> list[int]:
        """Blocks in RAM up to block `end`, without those of the `count` leading segments but for the sinks."""
        spec = self._tiers.spec
        first, sinks = count * spec.segment_blocks, spec.sink_blocks if count else 0
        held = [self._block_cache.get(name) for name in (*hashes[:sinks], *hashes[first:end])]
        blocks = [NOWHERE if block is None else block for block in held]
        return blocks[:sinks] + [NOWHERE] * (first - sinks) + blocks[sinks:]

    def _best(
        self, hashes: Sequence[BlockHash], segments: int, run: Callable[[Sequence[BlockHash], int, int], int]
    ) -> tuple[int, int]:
        """How many leading segments to read closed, and up to which block the prefix then reaches.

        `segments` are at hand; `run(hashes, first, end)` counts the blocks at hand from `first` on. A row that
        follows reads the last hot tokens as blocks, so those must be there."""
        spec, end = self._tiers.spec, len(hashes)
        hot = spec.hot_tokens // spec.segment_tokens
        most = min(segments, self.rules.prefill_reads(end * BLOCK_TOKENS))
        if most and run(hashes, 0, spec.sink_blocks) == spec.sink_blocks:
            for count in range(most, 0, -1):
                first = count * spec.segment_blocks
                reached = first + run(hashes, first, end)
                if reached >= (count + hot) * spec.segment_blocks:
                    return count, reached
        return 0, run(hashes, 0, end)

    def _ram_run(self, hashes: Sequence[BlockHash], first: int, end: int) -> int:
        return self._block_cache.match_length(hashes[first:end])

    def _any_run(self, hashes: Sequence[BlockHash], first: int, end: int) -> int:
        index = first
        while index < end:
            found = self._ram_run(hashes, index, end) or self._residency.stored(hashes[index:end])
            if not found:
                break
            index += found
        return index - first

    def _stored(self, hashes: Sequence[BlockHash]) -> int:
        """Leading segments in RAM or on disk."""
        ends = self._ends(hashes)
        for index, end in enumerate(ends):
            if self.cache.get(end) is None and not self._residency.has_segment(self._parts(end)):
                return index
        return len(ends)

    def _parts(self, end_hash: BlockHash) -> list[BlockHash]:
        return segment_names(end_hash, self._tiers.spec.parts)

    def _ends(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """The names of the whole segments of a chain: their last blocks'."""
        size = self._tiers.spec.segment_blocks
        return hashes[size - 1 :: size]

    # ---------------------------------------------------------------------------------- holding, letting go

    def take(self, sequence: EngineSequence, held: Held) -> None:
        """Give a sequence what RAM holds of its prefix, instead of what it held so far."""
        self._blocks.retain(held.blocks)
        self.pool.retain(held.segments)
        self.release(sequence)
        self._hold(sequence, held.table, held.segments)
        sequence.computed = held.tokens

    def _hold(self, sequence: EngineSequence, table: list[int], segments: list[int]) -> None:
        sequence.block_table, sequence.segments = table, list(segments)
        sequence.released_segments = len(segments)
        sequence.released_blocks = sum(block == NOWHERE for block in table)

    def release(self, sequence: EngineSequence) -> None:
        """Give everything back that a sequence holds. What is named stays cached."""
        self._blocks.release([block for block in sequence.block_table if block != NOWHERE])
        self.pool.release(sequence.segments)
        sequence.block_table, sequence.segments, sequence.closing = [], [], {}
        sequence.computed = sequence.named_blocks = 0
        sequence.released_segments = sequence.released_blocks = 0

    def park(self, sequence: EngineSequence, names: list[BlockHash]) -> None:
        """Keep a preempted sequence's own closed segments; `names` are those of its leading blocks."""
        for index, slot in enumerate(sequence.segments):
            last = (index + 1) * self._tiers.spec.segment_blocks - 1
            if index in sequence.closing or last >= len(names):
                continue
            shared = self.cache.name_of(slot)
            if shared is not None and sequence.block_table[last] == NOWHERE:
                names[last] = shared
            elif shared is None and names[last] == sequence.own_name(last):
                self.cache.add(names[last], slot, self.pool)
                self.cache.own([names[last]], sequence.own_owner)

    def shortage(self, sequence: EngineSequence, held: Held, running: Sequence[EngineSequence]) -> int:
        """Slots that are missing for the whole prompt beside what `running` still need; zero or less: none."""
        missing = self.rules.complete(sequence.target + sequence.samples) - len(held.segments)
        idle = sum(self.pool.references(slot) == 0 for slot in held.segments)
        promised = sum(max(0, self.rules.complete(s.target) - len(s.segments)) for s in running if s.tiered)
        return missing + idle + promised - self.pool.available

    def reserve(self, sequence: EngineSequence, tokens: int) -> bool:
        """Have a slot for every segment that is complete at `tokens`. False: there is no room."""
        while len(sequence.segments) < self.rules.complete(tokens):
            index = len(sequence.segments)
            name = self._name(sequence, index)
            known = self.cache.get(name) if name is not None else None
            if known is not None:
                self.pool.retain([known])
                sequence.segments.append(known)
                self._keep(sequence, index)
                continue
            slot = self._open()
            if slot is None:
                return False
            sequence.segments.append(slot)
            sequence.closing[index] = 0
        return True

    def _open(self, *, cold: bool = False) -> int | None:
        taken = self.pool.allocate(1)
        if taken is None:
            return None
        try:
            self._tiers.open(taken[0], cold=cold)
        except Overloaded:  # moves under way hold frames for a moment
            self.pool.release(taken)
            return None
        except Exception:
            self.pool.release(taken)
            raise
        return taken[0]

    def advance(self, sequence: EngineSequence) -> None:
        """Give blocks back that nothing reads any more, once they are named and handed to the saver."""
        spec = self._tiers.spec
        due = min(self.rules.released(sequence.computed), *sequence.closing, len(sequence.segments))
        while sequence.released_segments < due:
            index = sequence.released_segments
            first, end = index * spec.segment_blocks, (index + 1) * spec.segment_blocks
            if self._residency.keeps and sequence.unsaved_blocks(end):
                return
            first += spec.sink_blocks if index == 0 else 0
            self._blocks.release(sequence.block_table[first:end])
            sequence.block_table[first:end] = [NOWHERE] * (end - first)
            sequence.released_blocks += end - first
            sequence.released_segments += 1

    def settle(self, sequence: EngineSequence, cancelled: CancelFlag, late: Callable[[], bool]) -> bool:
        """Close what is complete, as after blocks were loaded, until it is `late`. True when nothing is left to
        close, or can't be for want of slots: then it closes in the step that reads it."""
        if not self.reserve(sequence, sequence.computed):
            return True
        for index in list(sequence.closing):
            while not self._close(sequence, index, CLOSE_BATCH, cancelled):
                if late() or cancelled.is_set() or sequence.state is SequenceState.FINISHED:
                    return False
        self.advance(sequence)
        return True

    def forget(self, owner: str) -> None:
        """Drop an owner's segments from RAM."""
        self.cache.forget(owner, self.pool)

    def _evicted(self, slots: Sequence[int]) -> None:
        self.cache.discard(slots)
        self._tiers.drop(slots)

    # ---------------------------------------------------------------------------------------- closing

    def visible(self, sequence: EngineSequence, start: int, size: int, samples: bool) -> tuple[int, ...]:
        """The slots that a slice reads instead of blocks."""
        if size == 1 and samples and start > 0:
            window = sequence.attention.window_tokens if sequence.attention is not None else 1
            count = self.rules.decode_reads(start, window)
        else:
            count = self.rules.prefill_reads(start)
        return tuple(sequence.segments[:count])

    def prepare(self, sequence: EngineSequence, piece: SequenceSlice, cancelled: CancelFlag) -> None:
        """Close what a slice is about to read. Raises `StepAbandoned`; what was closed until then stays closed."""
        for index in [i for i in sequence.closing if i < len(piece.segments)]:
            if not self._close(sequence, index, self._tiers.spec.records, cancelled):
                if cancelled.is_set():
                    raise StepAbandoned
                return  # it left

    def close(self, sequence: EngineSequence, piece: SequenceSlice, cancelled: CancelFlag) -> None:
        """After a step: close the segments that are complete now, all of it or, while decoding, a few records."""
        records = self._per_step if sequence.decodes else self._tiers.spec.records
        complete = self.rules.complete(piece.end)
        for index in [i for i in sequence.closing if i < complete]:
            if not self._close(sequence, index, records, cancelled) or sequence.decodes:
                return

    def _close(self, sequence: EngineSequence, index: int, records: int, cancelled: CancelFlag) -> bool:
        """Make up to `records` more records of a segment. True when it is closed; False also when the sequence has
        left, and holds nothing any more."""
        spec = self._tiers.spec
        first = index * spec.segment_blocks
        blocks = sequence.block_table[first : first + spec.segment_blocks]
        if index == 0:
            blocks[: spec.sink_blocks] = [NOWHERE] * spec.sink_blocks
        done = sequence.closing[index]
        end = min(spec.records, done + records)
        while done < end:
            cancelled.left()  # ends whoever is cancelled
            if cancelled.is_set() or sequence.state is SequenceState.FINISHED:
                return False
            count = min(CLOSE_BATCH, end - done)
            self._tiers.close_records(sequence.segments[index], blocks, done, count)
            done += count
            sequence.closing[index] = done
        if done < spec.records:
            return False
        del sequence.closing[index]
        self._keep(sequence, index)
        self._telemetry.count("kv_segments_closed_total")
        return True

    def _name(self, sequence: EngineSequence, index: int) -> BlockHash | None:
        """A segment's name if it may be shared: every token of it is in the prompt's shared part."""
        end = (index + 1) * self._tiers.spec.segment_blocks
        return sequence.hashes[end - 1] if end <= sequence.shared_blocks and not sequence.forgotten else None

    def _keep(self, sequence: EngineSequence, index: int) -> None:
        """Share a closed segment, and write it to disk for its owner."""
        name, slot = self._name(sequence, index), sequence.segments[index]
        if name is None:
            return
        self.cache.add(name, slot, self.pool)
        if sequence.owner is None:
            return
        self.cache.own([name], sequence.owner)
        if (index + 1) * self._tiers.spec.segment_blocks <= sequence.persisted_blocks:
            views = self._tiers.views(slot)
            self.borrow([slot])
            self._residency.save_segment(sequence.owner, self._parts(name), views, lambda: self.give_back([slot]))

    # ---------------------------------------------------------------------------------- bytes in use

    def borrow(self, slots: Sequence[int]) -> None:
        """Somebody uses the bytes of slots: they stay where they are until `give_back`."""
        self.pool.retain(slots)
        for slot in slots:
            self._busy[slot] = self._busy.get(slot, 0) + 1

    def give_back(self, slots: Sequence[int], *, oldest: bool = False) -> None:
        """`oldest`: the use was no sign that anybody wants them, so they stay first in line to be given up."""
        for slot in slots:
            self._busy[slot] -= 1
            if not self._busy[slot]:
                del self._busy[slot]
        self.pool.release(slots, oldest=oldest)

    def busy(self, slot: int) -> bool:
        return slot in self._busy

    # ------------------------------------------------------------------------------------- from disk

    def jump(self, sequence: EngineSequence, deadline_s: Callable[[int, int], float]) -> LoadJob | None:
        """Start a sequence further on than RAM allows, from segments and blocks on disk. None: nothing is gained,
        or there is no room. The sequence holds everything that the job fills; `landed` ends it.

        `deadline_s(start, tokens)` says when computing would have been faster."""
        hashes = sequence.reusable
        spec = self._tiers.spec
        reach = spec.segment_blocks + spec.hot_tokens // BLOCK_TOKENS  # further on, segments close as they load

        def run(names: Sequence[BlockHash], first: int, end: int) -> int:
            return self._any_run(names, first, min(end, first + reach))

        count, end = self._best(hashes, self._stored(hashes), run)
        if end * BLOCK_TOKENS <= sequence.computed:
            return None
        before, computed = (sequence.block_table, sequence.segments), sequence.computed
        job = self._fill(sequence, hashes, count, end)
        if job is None:
            return None
        self._blocks.release([block for block in before[0] if block != NOWHERE])
        self.pool.release(before[1])
        sequence.closing, sequence.named_blocks = {}, 0
        job.start, job.deadline_s = computed, deadline_s(computed, job.tokens - computed)
        self.borrow([part.slot for part in job.segments])
        return job

    def _fill(self, sequence: EngineSequence, hashes: Sequence[BlockHash], count: int, end: int) -> LoadJob | None:
        """Retain what RAM holds, allocate the rest."""
        table = self._table(hashes, count, end)
        spec = self._tiers.spec
        sinks = range(spec.sink_blocks if count else 0)
        wanted = [i for i in (*sinks, *range(count * spec.segment_blocks, end)) if table[i] == NOWHERE]
        ends = self._ends(hashes)[:count]
        slots = [self.cache.get(name) for name in ends]
        held = [block for block in table if block != NOWHERE]
        kept = [slot for slot in slots if slot is not None]
        with ExitStack() as undo:
            self._blocks.retain(held)
            undo.callback(self._blocks.release, held)
            self.pool.retain(kept)
            undo.callback(self.pool.release, kept)
            blocks = self._blocks.allocate(len(wanted))
            if blocks is None:
                return None
            undo.callback(self._blocks.release, blocks)
            parts: dict[int, SegmentLoad] = {}
            for index in (i for i, slot in enumerate(slots) if slot is None):
                slot = self._open(cold=index < self.rules.cold(end * BLOCK_TOKENS))
                if slot is None:
                    return None
                undo.callback(self.pool.release, [slot])
                parts[index] = SegmentLoad(slot, ends[index], self._parts(ends[index]), self._tiers.views(slot))
            undo.pop_all()
        for index, block in zip(wanted, blocks, strict=True):
            table[index] = block
        self._hold(sequence, table, [parts[i].slot if slot is None else slot for i, slot in enumerate(slots)])
        names = [hashes[index] for index in wanted]
        return LoadJob(sequence.seq_id, 0, names, blocks, 0.0, tuple(parts.values()), end * BLOCK_TOKENS)

    def landed(self, sequence: EngineSequence, job: LoadJob) -> bool:
        """A jump's bytes are there: name them. False, and the sequence holds nothing, when some are not."""
        if not job.complete:
            self.release(sequence)
            return False
        for name, block in zip(job.hashes, job.blocks, strict=True):
            self._block_cache.add(name, block, self._blocks)
        for part in job.segments:
            self.cache.add(part.end_hash, part.slot, self.pool)
        sequence.computed = job.tokens
        return True

    def jump_over(self, job: LoadJob) -> None:
        """The I/O of a jump has ended, whatever became of its sequence."""
        self.give_back([part.slot for part in job.segments])

    def distrust(self, slot: int) -> None:
        """The bytes of a slot are in doubt: nobody finds it any more."""
        self.cache.discard([slot])
        self.pool.unname(slot)

    def check_integrity(self) -> None:
        """Raises AssertionError when a slot leaked, a name is wrong, or a frame belongs to nobody."""
        self.pool.check_integrity()
        self.cache.check_integrity(self.pool)
