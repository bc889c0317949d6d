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
    ServiceClass,
    TokenLogprob,
)
from perilune.engine.block_pool import BlockPool
from perilune.engine.policy import ChunkController, EngineLimits, is_batch, rank, sacrifice
from perilune.engine.prefix_cache import PrefixCache
from perilune.engine.residency import LoadJob, Residency
from perilune.engine.sequence import EngineSequence, SequenceState
from perilune.runtime.mri import SequenceSlice, StepPlan, StepResult
from perilune.telemetry import Telemetry

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
        controller: ChunkController,
        limits: EngineLimits,
        capacity_tokens: int,
        send: Callable[[EngineSequence, EngineEvent], None],
        ended: Callable[[EngineSequence], None],
        telemetry: Telemetry,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._residency = residency
        self._controller = controller
        self._limits = limits
        self._capacity_tokens = capacity_tokens
        self._send = send
        self._ended = ended
        self._telemetry = telemetry
        self._sequences: dict[str, EngineSequence] = {}
        self._waiting: list[EngineSequence] = []
        self._running: list[EngineSequence] = []  # admitted: RUNNING or LOADING
        self._loads: dict[str, LoadJob] = {}

    # ---------------------------------------------------------------------------------------- queries

    def get(self, seq_id: str) -> EngineSequence | None:
        return self._sequences.get(seq_id)

    def decoding(self, plan: StepPlan) -> set[str]:
        """The sequences of a plan that have not run yet and decode."""
        return {p.seq_id for p in plan.slices if self._sequences[p.seq_id].decodes}

    @property
    def sequences(self) -> list[EngineSequence]:
        return list(self._sequences.values())

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
        cached = BLOCK_TOKENS * sum(self._residency.lookup(self._reusable(sequence)))
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
        self._pool.release(sequence.block_table)
        sequence.block_table = []
        (self._waiting if sequence.state is SequenceState.WAITING else self._running).remove(sequence)
        sequence.state = SequenceState.FINISHED
        del self._sequences[sequence.seq_id]
        self._ended(sequence)
        self._send(sequence, EngineFinished(sequence.seq_id, reason, error))

    def forget(self, owner: str) -> None:
        """What running sequences compute for `owner` from now on is neither shared nor saved."""
        for sequence in self._sequences.values():
            if sequence.owner == owner:
                sequence.owner, sequence.forgotten = None, True

    # ------------------------------------------------------------------------------------ the next step

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run before something arrives or completes."""
        self._expire_loads(now)
        self._admit(now)
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
            size = sequence.next_chunk(min(tokens, chunk))
            if size > 0 and self._plan_slice(sequence, size, slices):
                spent_s = self._controller.predict_s(sequence.computed, size)
                budget = replace(budget, seconds=budget.seconds - spent_s)

    def _plan_slice(self, sequence: EngineSequence, size: int, slices: dict[str, SequenceSlice]) -> bool:
        start, end = sequence.computed, sequence.computed + size
        if not self._cover(sequence, end, slices):
            return False
        slices[sequence.seq_id] = SequenceSlice(
            sequence.seq_id,
            sequence.tokens[start:end],
            start,
            tuple(sequence.block_table),
            sequence.samples and end == sequence.target,
        )
        return True

    def _cover(self, sequence: EngineSequence, tokens: int, slices: dict[str, SequenceSlice]) -> bool:
        """Give a sequence blocks up to `tokens`, preempting lower and younger ones outside the plan."""
        missing = _blocks_for(tokens) - len(sequence.block_table)
        if missing <= 0:
            return True
        while (blocks := self._pool.allocate(missing)) is None:
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
        sequence.block_table += blocks
        return True

    def _preempt(self, sequence: EngineSequence) -> None:
        self._abandon_load(sequence)
        self._pool.release(sequence.block_table)
        sequence.block_table, sequence.computed, sequence.named_blocks = [], 0, 0
        sequence.state, sequence.preempted = SequenceState.WAITING, True
        self._running.remove(sequence)
        self._waiting.append(sequence)
        self._telemetry.count("engine_preemptions_total", service_class=sequence.service_class.name)

    def _adopt(self, sequence: EngineSequence) -> None:
        """Take over blocks that somebody else computed since this sequence was admitted."""
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

    def _admit(self, now: float) -> None:
        """Take waiting sequences in, in order. One that has to wait for room holds all behind it back."""
        for sequence in sorted(self._waiting, key=rank):
            if is_batch(sequence) and not self._batch_may_start(sequence):
                continue
            if self._follows(sequence):
                continue
            held = self._cache.match(self._reusable(sequence))
            if not self._make_room(sequence, held):
                return
            self._start(sequence, held, now)

    def _batch_may_start(self, sequence: EngineSequence) -> bool:
        """Only when nothing interactive is there, and one ingest at a time: two would only evict each other."""
        if any(not is_batch(s) for s in self._sequences.values()):
            return False
        return not (sequence.spec.prefill_only and any(s.spec.prefill_only for s in self._running))

    def _follows(self, sequence: EngineSequence) -> bool:
        """A running sequence, not of a lower class, is about to compute (or load) the next block it needs."""
        hashes = self._reusable(sequence)
        index = self._cache.match_length(hashes)
        return index < len(hashes) and any(
            leader.service_class <= sequence.service_class
            and not leader.forgotten
            and leader.computed // BLOCK_TOKENS <= index < leader.shared_blocks
            and leader.hashes[index] == hashes[index]
            for leader in self._running
        )

    def _make_room(self, sequence: EngineSequence, held: list[int]) -> bool:
        """A place in the batch, and blocks for the whole prompt beside what the running ones still need."""
        lower = [s for s in self._running if s.service_class > sequence.service_class]
        if self._shortage(sequence, held) > sum(len(s.block_table) for s in lower):
            return False
        lower.sort(key=sacrifice)
        while self._shortage(sequence, held) > 0 or len(self._running) >= self._limits.batch:
            if not lower:
                return False
            self._preempt(lower.pop())
        return True

    def _shortage(self, sequence: EngineSequence, held: list[int]) -> int:
        """Blocks that are missing for the whole prompt; zero or less when there are enough."""
        missing = _blocks_for(sequence.target + sequence.samples) - len(held)
        idle = sum(self._pool.references(block) == 0 for block in held)
        promised = sum(
            max(0, _blocks_for(s.target) - len(s.block_table))
            for s in self._running
            if s.service_class <= sequence.service_class
        )
        return missing + idle + promised - self._pool.available

    def _start(self, sequence: EngineSequence, held: list[int], now: float) -> None:
        self._pool.retain(held)
        self._waiting.remove(sequence)
        self._running.append(sequence)
        sequence.state, sequence.admitted = SequenceState.RUNNING, True
        sequence.block_table = held
        sequence.computed = len(held) * BLOCK_TOKENS
        if not sequence.preempted:
            sequence.cached_ram_tokens = sequence.computed
        self._share(sequence)
        self._load(sequence, now)
        self._progress(sequence)
        if sequence.remaining == 0:
            self._finish_prompt(sequence)

    # -------------------------------------------------------------------------------------- disk tier

    def _load(self, sequence: EngineSequence, now: float) -> None:
        first = len(sequence.block_table)
        hashes = self._reusable(sequence)
        count = 0 if sequence.disk_failed else self._residency.on_disk(hashes, first)
        blocks = self._pool.allocate(count)
        if not count or blocks is None:
            return
        sequence.block_table += blocks
        sequence.state = SequenceState.LOADING
        compute_s = self._controller.predict_s(sequence.computed, count * BLOCK_TOKENS)
        deadline_s = now + max(self._limits.load_floor_s, compute_s)
        job = LoadJob(sequence.seq_id, first, hashes[first : first + count], blocks, deadline_s)
        self._loads[sequence.seq_id] = job
        self._residency.load(job, self._loaded)

    def _loaded(self, job: LoadJob) -> None:
        if not job.abandoned:
            del self._loads[job.seq_id]
            self._take_loaded(self._sequences[job.seq_id], job)

    def _expire_loads(self, now: float) -> None:
        """A disk slower than computing: keep what came, compute the rest in other blocks."""
        for job in [job for job in self._loads.values() if now >= job.deadline_s]:
            sequence = self._sequences[job.seq_id]
            self._abandon_load(sequence)
            good = self._take_loaded(sequence, job)
            self._pool.release(sequence.block_table[job.first + good :])
            del sequence.block_table[job.first + good :]
            self._telemetry.count("kv_load_timeouts_total")

    def _take_loaded(self, sequence: EngineSequence, job: LoadJob) -> int:
        good = job.good  # the I/O thread may raise it meanwhile
        for name, block in zip(job.hashes[:good], job.blocks[:good], strict=True):
            self._cache.add(name, block, self._pool)
        sequence.state = SequenceState.RUNNING
        sequence.computed = (job.first + good) * BLOCK_TOKENS
        sequence.cached_disk_tokens += 0 if sequence.preempted else good * BLOCK_TOKENS
        sequence.disk_failed = good < len(job.blocks)
        self._share(sequence)
        self._progress(sequence)
        if sequence.remaining == 0:
            self._finish_prompt(sequence)
        return good

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
            self._residency.save(sequence.owner, sequence.hashes[start:end], sequence.block_table[start:end])
            sequence.saved_blocks = end

    # --------------------------------------------------------------------------------- after the step

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Account for a finished step. Sequences that left meanwhile are ignored."""
        for piece in plan.slices:
            sequence = self._sequences.get(piece.seq_id)
            if sequence is None:
                continue
            decoded = sequence.decodes
            sequence.computed = piece.end
            self._share(sequence)
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
        full = len(sequence.tokens) >= self._capacity_tokens
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
            for name, block in zip(names, blocks, strict=True):
                self._cache.add(name, block, self._pool)
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
