"""Which tokens of which sequences run in the next step, and in which blocks (spec E1, E2).

Knows sequences, blocks, classes and the step budget. Knows nothing of tensors, bytes or threads; one thread
calls it. A step gives every decoding sequence its token first, then prompt chunks in `policy.rank` order.
Blocks are allocated as chunks need them; when they run out, the lowest class and the youngest gives its own
back and waits (its whole prefill blocks stay cached). Only an older or higher sequence ever takes blocks from
another, so the oldest always gets on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from perilune.core import (
    BLOCK_TOKENS,
    EngineEvent,
    EngineFinished,
    EngineProgress,
    EngineStats,
    EngineToken,
    FinishReason,
    SequenceSpec,
    ServiceClass,
    TokenLogprob,
)
from perilune.engine.block_pool import BlockPool
from perilune.engine.policy import ChunkController, EngineLimits, is_batch, rank, sacrifice
from perilune.engine.prefix_cache import PrefixCache
from perilune.engine.residency import LoadJob, Residency
from perilune.engine.segments import NOWHERE, Held, Segments
from perilune.engine.sequence import EngineSequence, SequenceState
from perilune.runtime.mri import SequenceSlice, StepPlan, StepResult
from perilune.telemetry import Telemetry

MAX_JUMPS = 3
"""Failed starts from segments on disk, after which a sequence is loaded in order: each drops what is damaged."""

SAVE_BLOCKS = 64
"""Blocks saved together, at absolute multiples: one segment file. A killed ingest loses at most 2,048
tokens."""


class Scheduler:
    """`send` delivers events; `ended` is told of every sequence that leaves, before its last event."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        residency: Residency,
        segments: Segments | None,
        controller: ChunkController,
        limits: EngineLimits,
        capacity: Callable[[SequenceSpec], int],
        send: Callable[[EngineSequence, EngineEvent], None],
        ended: Callable[[EngineSequence], None],
        telemetry: Telemetry,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._residency = residency
        self._segments = segments
        self._controller = controller
        self._limits = limits
        self._capacity = capacity
        self._send = send
        self._ended = ended
        self._telemetry = telemetry
        self._sequences: dict[str, EngineSequence] = {}
        self._waiting: list[EngineSequence] = []
        self._running: list[EngineSequence] = []  # admitted: RUNNING or LOADING
        self._loads: dict[str, LoadJob] = {}
        self._now = 0.0

    # ---------------------------------------------------------------------------------------- queries

    def get(self, seq_id: str) -> EngineSequence | None:
        return self._sequences.get(seq_id)

    def decoding(self, plan: StepPlan) -> set[str]:
        """The sequences of a plan that have not run yet and decode."""
        return {p.seq_id for p in plan.slices if self._sequences[p.seq_id].decodes}

    @property
    def sequences(self) -> list[EngineSequence]:
        return list(self._sequences.values())

    @property
    def running(self) -> list[EngineSequence]:
        """Sequences that steps may take from, not those whose KV is still coming."""
        return [s for s in self._running if s.state is SequenceState.RUNNING]

    def stats(self) -> EngineStats:
        first = ServiceClass.P0_INTERACTIVE
        queued = sum(s.expected_tokens for s in self._waiting if s.service_class == first)
        queued += sum(s.remaining for s in self._running if s.service_class == first and not s.decodes)
        return EngineStats(len(self._running), len(self._waiting), queued, self._pool.available, self._pool.total)

    def next_deadline_s(self) -> float | None:
        """When the next load is given up."""
        return min((job.deadline_s for job in self._loads.values()), default=None)

    # ------------------------------------------------------------------------------- arrivals and ends

    def add(self, sequence: EngineSequence) -> None:
        """Queue a new sequence."""
        places = self._tiers if sequence.tiered else self._residency
        cached = BLOCK_TOKENS * sum(places.lookup(self._reusable(sequence)))
        sequence.expected_tokens = sequence.target - cached
        work_s = self._controller.predict_s(cached, sequence.expected_tokens)
        sequence.priority_s = sequence.arrival_s + work_s
        self._sequences[sequence.seq_id] = sequence
        self._waiting.append(sequence)

    def cancel(self, seq_id: str) -> None:
        """End a sequence in any state. What it computed stays cached and is saved."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            self.finish(sequence, FinishReason.CANCELLED)

    def finish(self, sequence: EngineSequence, reason: FinishReason, error: str | None = None) -> None:
        """End a sequence and give its blocks back."""
        self._abandon_load(sequence)
        self._save(sequence, last=True)
        self._release(sequence)
        (self._waiting if sequence.state is SequenceState.WAITING else self._running).remove(sequence)
        sequence.state = SequenceState.FINISHED
        del self._sequences[sequence.seq_id]
        self._ended(sequence)
        self._send(sequence, EngineFinished(sequence.seq_id, reason, error))

    def _release(self, sequence: EngineSequence) -> None:
        """Take everything back that a sequence holds."""
        if sequence.tiered:
            self._tiers.release(sequence)
            return
        self._pool.release(sequence.block_table)
        sequence.block_table, sequence.computed, sequence.named_blocks = [], 0, 0

    @property
    def _tiers(self) -> Segments:
        assert self._segments is not None, "a tiered sequence without tiers"
        return self._segments

    def forget(self, owner: str) -> None:
        """What running sequences compute for `owner` from now on is neither shared nor saved."""
        for sequence in self._sequences.values():
            if sequence.owner == owner:
                sequence.owner, sequence.forgotten = None, True

    # ------------------------------------------------------------------------------------ the next step

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run before something arrives or completes."""
        self._now = now
        self._expire_loads()
        self._admit()
        active = [s for s in self._running if s.state is SequenceState.RUNNING]
        if any(not is_batch(s) for s in self._sequences.values()):
            active = [s for s in active if not is_batch(s)]
        slices: dict[str, SequenceSlice] = {}
        for sequence in sorted(active, key=sacrifice):
            if sequence.decodes and sequence.state is SequenceState.RUNNING:
                self._plan_slice(sequence, 1, slices)
        self._plan_chunks([s for s in active if not s.decodes], slices)
        return StepPlan(tuple(slices.values())) if slices else None

    def _plan_chunks(self, sequences: list[EngineSequence], slices: dict[str, SequenceSlice]) -> None:
        if self._residency.saving_share > self._limits.save_share:  # an ingest waits for its disk
            sequences = [s for s in sequences if not (is_batch(s) and s.owner)]
        decoding = len(slices)
        budget = self._controller.budget(decoding, sequences)
        for sequence in sorted(sequences, key=rank):
            if sequence.state is not SequenceState.RUNNING:  # gave its blocks to an earlier one
                continue
            self._adopt(sequence)
            if sequence.remaining == 0:
                self._finish_prompt(sequence)
                continue
            tokens = self._limits.chunk_tokens + decoding - sum(len(s.token_ids) for s in slices.values())
            if len(slices) > decoding and budget.seconds < BLOCK_TOKENS * self._controller.prefill_s(
                sequence.computed
            ):
                return
            chunk = self._controller.chunk(sequence.computed, budget, sequence.remaining)
            border = self._tiers.rules.to_border(sequence.computed) if sequence.tiered else None
            size = sequence.next_chunk(min(tokens, chunk), border)
            if size > 0 and self._plan_slice(sequence, size, slices):
                spent_s = self._controller.predict_s(sequence.computed, size)
                budget = replace(budget, seconds=budget.seconds - spent_s)

    def _plan_slice(self, sequence: EngineSequence, size: int, slices: dict[str, SequenceSlice]) -> bool:
        start, end = sequence.computed, sequence.computed + size
        if not self._cover(sequence, end, slices):
            return False
        samples = sequence.samples and end == sequence.target
        slices[sequence.seq_id] = SequenceSlice(
            sequence.seq_id,
            sequence.tokens[start:end],
            start,
            tuple(sequence.block_table),
            samples,
            self._tiers.visible(sequence, start, size, samples) if sequence.tiered else (),
            sequence.attention,
            sequence.zone is not None,
        )
        return True

    def _cover(self, sequence: EngineSequence, tokens: int, slices: dict[str, SequenceSlice]) -> bool:
        """Give a sequence blocks up to `tokens`, preempting lower and younger ones outside the plan."""
        if sequence.tiered:  # a full disk queue may have held blocks back that nothing reads any more
            self._save(sequence)
            self._tiers.advance(sequence)
        while not self._extend(sequence, tokens):
            victims = [
                s
                for s in self._running
                if s.state is SequenceState.RUNNING  # a load gives its blocks back later
                and s.block_table
                and s.seq_id not in slices
                and sacrifice(s) > sacrifice(sequence)
            ]
            if not victims:
                return False
            self._preempt(max(victims, key=sacrifice))
        return True

    def _extend(self, sequence: EngineSequence, tokens: int) -> bool:
        missing = _blocks_for(tokens) - len(sequence.block_table)
        if missing > 0:
            blocks = self._pool.allocate(missing)
            if blocks is None:
                return False
            sequence.block_table += blocks
        return not sequence.tiered or self._tiers.reserve(sequence, tokens)

    def _preempt(self, sequence: EngineSequence) -> None:
        self._abandon_load(sequence)
        self._release(sequence)
        sequence.state, sequence.preempted = SequenceState.WAITING, True
        self._running.remove(sequence)
        self._waiting.append(sequence)
        self._telemetry.count("engine_preemptions_total", service_class=sequence.service_class.name)

    def _adopt(self, sequence: EngineSequence) -> None:
        """Take over blocks that somebody else computed since this sequence was admitted."""
        if sequence.tiered:
            held = self._tiers.match(sequence)
            if held.tokens > sequence.computed:
                sequence.cached_ram_tokens += 0 if sequence.preempted else held.tokens - sequence.computed
                self._tiers.take(sequence, held)
                self._share(sequence)
            return
        while sequence.computed % BLOCK_TOKENS == 0:
            index = sequence.computed // BLOCK_TOKENS
            if index >= sequence.reusable_blocks:
                return
            block = self._cache.get(sequence.hashes[index])
            if block is None:
                return
            self._pool.retain([block])
            self._pool.release(sequence.block_table[index : index + 1])
            sequence.block_table[index : index + 1] = [block]
            sequence.computed += BLOCK_TOKENS
            sequence.cached_ram_tokens += 0 if sequence.preempted else BLOCK_TOKENS
            self._share(sequence)

    # -------------------------------------------------------------------------------------- admission

    def _admit(self) -> None:
        """Take waiting sequences in, in order. One that has to wait for room holds all behind it back."""
        for sequence in sorted(self._waiting, key=rank):
            if is_batch(sequence) and not self._batch_may_start(sequence):
                continue
            if self._follows(sequence):
                continue
            held = self._match(sequence)
            if not self._make_room(sequence, held):
                return
            self._start(sequence, held)

    def _match(self, sequence: EngineSequence) -> Held:
        if sequence.tiered:
            return self._tiers.match(sequence)
        blocks = self._cache.match(self._reusable(sequence))
        return Held(len(blocks) * BLOCK_TOKENS, blocks, [])

    def _batch_may_start(self, sequence: EngineSequence) -> bool:
        """Only when nothing interactive is there, and one ingest at a time: two would only evict each other."""
        if any(not is_batch(s) for s in self._sequences.values()):
            return False
        return not (sequence.spec.prefill_only and any(s.spec.prefill_only for s in self._running))

    def _follows(self, sequence: EngineSequence) -> bool:
        """A running sequence, not of a lower class, is about to compute (or load) the next block it needs."""
        hashes = self._reusable(sequence)
        tiered = sequence.tiered
        index = self._match(sequence).tokens // BLOCK_TOKENS if tiered else self._cache.match_length(hashes)
        return index < len(hashes) and any(
            leader.service_class <= sequence.service_class
            and not leader.forgotten
            and leader.computed // BLOCK_TOKENS <= index < leader.shared_blocks
            and leader.hashes[index] == hashes[index]
            for leader in self._running
        )

    def _make_room(self, sequence: EngineSequence, held: Held) -> bool:
        """A place in the batch, and blocks for the whole prompt beside what the running ones still need."""
        lower = [s for s in self._running if s.service_class > sequence.service_class]
        blocks, slots = self._shortage(sequence, held), self._slot_shortage(sequence, held)
        if blocks > sum(s.held_blocks for s in lower) or slots > sum(len(s.segments) for s in lower):
            return False
        lower.sort(key=sacrifice)
        while (
            self._shortage(sequence, held) > 0
            or self._slot_shortage(sequence, held) > 0
            or len(self._running) >= self._limits.batch
        ):
            if not lower:
                return False
            self._preempt(lower.pop())
        return True

    def _shortage(self, sequence: EngineSequence, held: Held) -> int:
        """Blocks that are missing for the whole prompt; zero or less when there are enough."""
        blocks = held.blocks
        missing = self._need(sequence, sequence.target + sequence.samples) - len(blocks)
        idle = sum(self._pool.references(block) == 0 for block in blocks)
        promised = sum(
            max(0, self._need(s, s.target) - s.held_blocks)
            for s in self._running
            if s.service_class <= sequence.service_class
        )
        return missing + idle + promised - self._pool.available

    def _slot_shortage(self, sequence: EngineSequence, held: Held) -> int:
        if not sequence.tiered:
            return 0
        ahead = [s for s in self._running if s.service_class <= sequence.service_class]
        return self._tiers.shortage(sequence, held, ahead)

    def _need(self, sequence: EngineSequence, tokens: int) -> int:
        """Most blocks that a sequence holds at once on its way to `tokens`."""
        return self._tiers.rules.blocks_needed(tokens) if sequence.tiered else _blocks_for(tokens)

    def _start(self, sequence: EngineSequence, held: Held) -> None:
        self._waiting.remove(sequence)
        self._running.append(sequence)
        sequence.state, sequence.admitted = SequenceState.RUNNING, True
        self._take(sequence, held)
        if not sequence.preempted:
            sequence.cached_ram_tokens = sequence.computed
        self._share(sequence)
        self._load(sequence)
        self._progress(sequence)
        if sequence.remaining == 0:
            self._finish_prompt(sequence)

    def _take(self, sequence: EngineSequence, held: Held) -> None:
        if sequence.tiered:
            self._tiers.take(sequence, held)
            return
        self._pool.retain(held.table)
        sequence.block_table, sequence.computed = held.table, held.tokens

    # -------------------------------------------------------------------------------------- disk tier

    def _load(self, sequence: EngineSequence) -> None:
        if sequence.disk_failed or (sequence.tiered and self._jump(sequence)):
            return
        first = len(sequence.block_table)
        hashes = self._reusable(sequence)
        count = self._residency.on_disk(hashes, first)
        if sequence.tiered:  # segment by segment: each one closes before the next is read
            count = min(count, self._tiers.rules.to_border(first * BLOCK_TOKENS) // BLOCK_TOKENS)
        blocks = self._pool.allocate(count)
        if not count or blocks is None:
            return
        sequence.block_table += blocks
        sequence.state = SequenceState.LOADING
        deadline_s = self._load_deadline_s(sequence.computed, count * BLOCK_TOKENS)
        job = LoadJob(sequence.seq_id, first, hashes[first : first + count], blocks, deadline_s)
        self._loads[sequence.seq_id] = job
        self._residency.load(job, self._loaded)

    def _load_deadline_s(self, start: int, tokens: int) -> float:
        """When computing would have been faster."""
        return self._now + max(self._limits.load_floor_s, self._controller.predict_s(start, tokens))

    def _jump(self, sequence: EngineSequence) -> bool:
        """Load closed segments and only the last blocks, where that leads further than RAM does."""
        job = None
        if sequence.failed_jumps < MAX_JUMPS:
            job = self._tiers.jump(sequence, self._load_deadline_s)
        if job is None:
            return False
        sequence.state = SequenceState.LOADING
        self._loads[sequence.seq_id] = job
        self._residency.load(job, self._loaded)
        return True

    def _loaded(self, job: LoadJob) -> None:
        if job.is_jump:
            self._tiers.jump_over(job)
        if not job.abandoned:
            del self._loads[job.seq_id]
            self._take_loaded(self._sequences[job.seq_id], job, job.good)

    def _expire_loads(self) -> None:
        """A disk slower than computing: keep what came, compute the rest in other blocks."""
        for job in [job for job in self._loads.values() if self._now >= job.deadline_s]:
            sequence = self._sequences[job.seq_id]
            self._abandon_load(sequence)
            sequence.disk_failed = True
            good = job.good  # the I/O thread may raise it meanwhile
            if not job.is_jump:
                self._pool.release(sequence.block_table[job.first + good :])
                del sequence.block_table[job.first + good :]
            self._take_loaded(sequence, job, good)
            self._telemetry.count("kv_load_timeouts_total")

    def _take_loaded(self, sequence: EngineSequence, job: LoadJob, good: int) -> None:
        """Go on with the `good` leading blocks of a load."""
        if job.is_jump:
            self._take_jump(sequence, job)
            return
        for place, (name, block) in enumerate(zip(job.hashes[:good], job.blocks[:good], strict=True), job.first):
            self._cache.add(name, block, self._pool, place)
        sequence.state = SequenceState.RUNNING
        sequence.computed = (job.first + good) * BLOCK_TOKENS
        sequence.cached_disk_tokens += 0 if sequence.preempted else good * BLOCK_TOKENS
        sequence.disk_failed = good < len(job.blocks)
        self._share(sequence)
        if sequence.tiered:
            self._tiers.settle(sequence)
            self._load(sequence)
        self._progress(sequence)
        if sequence.remaining == 0:
            self._finish_prompt(sequence)

    def _take_jump(self, sequence: EngineSequence, job: LoadJob) -> None:
        """A jump has ended: go on where it leads; where bytes were lost, from RAM and by another jump."""
        sequence.state = SequenceState.RUNNING
        if self._tiers.landed(sequence, job):
            sequence.cached_disk_tokens += 0 if sequence.preempted else job.tokens - job.start
        else:
            sequence.failed_jumps += 1
            self._tiers.take(sequence, self._tiers.match(sequence))
        self._share(sequence)
        self._load(sequence)
        self._progress(sequence)
        if sequence.remaining == 0:
            self._finish_prompt(sequence)

    def _abandon_load(self, sequence: EngineSequence) -> None:
        job = self._loads.pop(sequence.seq_id, None)
        if job is not None:
            job.abandoned = True

    def _save(self, sequence: EngineSequence, last: bool = False) -> None:
        """Hand whole segments to the saver as they fill, and the ragged end when the shared part is
        complete."""
        ready = min(sequence.whole_blocks, sequence.persisted_blocks, len(sequence.block_table))
        if sequence.owner is None or not self._residency.keeps or sequence.saved_blocks >= ready:
            return
        flush = last or ready == sequence.persisted_blocks
        if self._residency.saving_share > self._limits.save_share * (2 if last else 1):
            if last:
                self._residency.skip(ready - sequence.saved_blocks)
            return
        while sequence.saved_blocks < ready:
            start = sequence.saved_blocks
            end = min(ready, (start // SAVE_BLOCKS + 1) * SAVE_BLOCKS)
            if end % SAVE_BLOCKS and not flush:
                return
            blocks = sequence.block_table[start:end]
            if NOWHERE not in blocks[-1:]:  # else it was found as a closed segment, not computed here
                self._residency.save(sequence.owner, sequence.hashes[start:end], blocks)
            sequence.saved_blocks = end

    # --------------------------------------------------------------------------------- after the step

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Account for a finished step. Sequences that left meanwhile are ignored."""
        for piece in plan.slices:
            sequence = self._sequences.get(piece.seq_id)
            if sequence is None:
                continue
            if sequence.zone is not None and sequence.attention is not None and piece.seq_id in result.attention:
                window = sequence.zone.observe(result.attention[piece.seq_id])
                sequence.attention = replace(sequence.attention, window_tokens=window)
            decoded = sequence.decodes
            sequence.computed = piece.end
            self._share(sequence)
            if sequence.tiered:
                self._tiers.advance(sequence)
            if not decoded:
                self._progress(sequence)
            if piece.sample:
                self._accept(sequence, result.tokens[piece.seq_id], result.logprobs.get(piece.seq_id))
            elif sequence.remaining == 0:
                self._finish_prompt(sequence)

    def fail(self, plan: StepPlan, message: str) -> None:
        """A step failed: its sequences end with an error, the others go on."""
        for piece in plan.slices:
            sequence = self._sequences.get(piece.seq_id)
            if sequence is not None:
                self.finish(sequence, FinishReason.ERROR, message)

    def _accept(self, sequence: EngineSequence, token: int, logprob: TokenLogprob | None) -> None:
        spec = sequence.spec
        self._send(sequence, EngineToken(sequence.seq_id, token, logprob))  # an end marker too: it was generated
        if token in spec.stop_token_ids and not spec.sampling.ignore_eos:
            self.finish(sequence, FinishReason.STOP)
            return
        sequence.tokens.append(token)
        full = len(sequence.tokens) >= self._capacity(spec)
        if full or sequence.generated_tokens >= spec.max_new_tokens:
            self.finish(sequence, FinishReason.LENGTH)

    def _finish_prompt(self, sequence: EngineSequence) -> None:
        """A sequence that samples nothing has its whole prompt."""
        self.finish(sequence, FinishReason.STOP if sequence.spec.prefill_only else FinishReason.LENGTH)

    def _share(self, sequence: EngineSequence) -> None:
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
        self._save(sequence)

    def _progress(self, sequence: EngineSequence) -> None:
        if sequence.generated_tokens == 0:
            self._send(
                sequence,
                EngineProgress(
                    sequence.seq_id,
                    sequence.computed,
                    sequence.target,
                    sequence.cached_ram_tokens,
                    sequence.cached_disk_tokens,
                ),
            )

    def _reusable(self, sequence: EngineSequence) -> list[bytes]:
        return sequence.hashes[: sequence.reusable_blocks]


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
