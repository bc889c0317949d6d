"""Which tokens of which sequences run in the next step, and in which blocks (spec E1, E2).

Knows sequences, blocks, classes and the step budget. Knows nothing of tensors, bytes or threads; one thread
calls it. A step gives every decoding sequence its token first, then prompt chunks in `policy.rank` order.
Blocks are allocated as chunks need them; when they run out, the lowest class and the youngest gives its own
back and waits; they stay in RAM, for it alone where nobody may share them, until somebody needs the room. Only an
older or higher sequence ever takes blocks from another, so the oldest always gets on; but a prompt may take them
from answers that the policy has make way. A fault that concerns one sequence ends it, and no other (`blame`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf

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
from perilune.engine.holdings import Holdings
from perilune.engine.policy import ChunkBudget, ChunkController, EngineLimits
from perilune.engine.prefix_cache import PrefixCache
from perilune.engine.residency import LoadJob, Residency
from perilune.engine.scheduling import SchedulingPolicy
from perilune.engine.segments import Held
from perilune.engine.sequence import EngineSequence, SequenceState
from perilune.errors import InvalidRequest, PeriluneError
from perilune.runtime.mri import CancelFlag, SequenceSlice, StepAbandoned, StepPlan, StepResult
from perilune.telemetry import Telemetry

_LOG = logging.getLogger(__name__)

MEASURE_STEPS = 16
"""Decode steps of a tiered sequence of which one, the first, is measured: what it read exactly is reported."""

MAX_JUMPS = 3
"""Failed starts from segments on disk, after which a sequence is loaded in order: each drops what is damaged."""


class Scheduler:
    """`send` delivers events; `ended` is told of every sequence that leaves, before its last event."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        residency: Residency,
        holdings: Holdings,
        controller: ChunkController,
        policy: SchedulingPolicy,
        limits: EngineLimits,
        capacity: Callable[[SequenceSpec], int],
        send: Callable[[EngineSequence, EngineEvent], None],
        ended: Callable[[EngineSequence], None],
        telemetry: Telemetry,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._residency = residency
        self._holdings = holdings
        self._controller = controller
        self._policy = policy
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
        queued = dict.fromkeys(ServiceClass, 0)
        for sequence in self._sequences.values():
            if sequence.state is SequenceState.WAITING:
                queued[sequence.service_class] += sequence.expected_tokens
            elif not sequence.decodes:
                queued[sequence.service_class] += sequence.remaining
        return EngineStats(
            len(self._running),
            len(self._waiting),
            queued[ServiceClass.P0_INTERACTIVE],
            self._pool.available,
            self._pool.total,
            queued[ServiceClass.P1_DOCUMENT],
        )

    def next_deadline_s(self) -> float | None:
        """When to ask for a step again, though nothing arrived: records are to be made, a load is given up, or
        somebody expires."""
        if self._next_to_close() is not None:
            return self._now
        due = [job.deadline_s for job in self._loads.values()]
        due += [s.end_s for s in self._waiting if s.end_s < inf]
        return min(due, default=None)

    # ------------------------------------------------------------------------------- arrivals and ends

    def add(self, sequence: EngineSequence) -> None:
        """Queue a new sequence."""
        self._sequences[sequence.seq_id] = sequence
        self._waiting.append(sequence)
        self._policy.queued(sequence)
        with self.blame(sequence):
            cached = self._holdings.cached_tokens(sequence)
            sequence.expected_tokens = sequence.target - cached
            sequence.work_s = self._controller.predict_s(cached, sequence.expected_tokens)

    def cancel(self, seq_id: str) -> None:
        """End a sequence in any state. What it computed stays cached and is saved."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            self.finish(sequence, FinishReason.CANCELLED)

    @contextmanager
    def blame(self, sequence: EngineSequence) -> Iterator[None]:
        """A fault in what is done for one sequence ends it with an error; the others go on."""
        try:
            yield
        except StepAbandoned:
            raise
        except Exception as error:  # whatever another room raises, the engine lives on
            _LOG.exception("the bookkeeping of a sequence failed")
            self._telemetry.count("engine_bookkeeping_failures_total")
            if sequence.state is not SequenceState.FINISHED:
                self.break_off(sequence, error)

    def blame_readers(self, slot: int, error: Exception) -> None:
        """The bytes of a closed segment can't be trusted: end every sequence that reads it."""
        for sequence in [s for s in self._sequences.values() if slot in s.segments]:
            self.finish(sequence, FinishReason.ERROR, safe_message(error))

    def break_off(self, sequence: EngineSequence, error: Exception) -> None:
        """End a sequence for a fault that is its own."""
        self.finish(sequence, FinishReason.ERROR, safe_message(error), isinstance(error, InvalidRequest))

    def finish(
        self, sequence: EngineSequence, reason: FinishReason, error: str | None = None, invalid: bool = False
    ) -> None:
        """End a sequence and give its blocks back."""
        self._abandon_load(sequence)
        self._holdings.leave(sequence)
        (self._waiting if sequence.state is SequenceState.WAITING else self._running).remove(sequence)
        sequence.state = SequenceState.FINISHED
        del self._sequences[sequence.seq_id]
        self._policy.left(sequence)
        self._ended(sequence)
        self._send(sequence, EngineFinished(sequence.seq_id, reason, error, invalid))

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
        self._expire()
        self._admit()
        active = [s for s in self._running if s.state is SequenceState.RUNNING]
        if self._limits.idle_s <= 0 and self._busy():
            active = [s for s in active if not self._policy.idle_only(s)]
        slices: dict[str, SequenceSlice] = {}
        for sequence in sorted(active, key=self._policy.sacrifice):
            if sequence.decodes and sequence.state is SequenceState.RUNNING:
                self._plan_slice(sequence, 1, slices)
        prompts = [s for s in active if not s.decodes]
        urgent = [s for s in prompts if not self._policy.idle_only(s)]
        budget = self._controller.budget(len(slices), len(urgent))
        if not urgent and prompts and slices and self._busy():
            budget = replace(budget, seconds=min(budget.seconds, self._limits.idle_s))
        self._plan_chunks(urgent or prompts, budget, slices)
        return StepPlan(tuple(slices.values())) if slices else None

    def _busy(self) -> bool:
        """Somebody is here whom idle-only work must not keep waiting."""
        return any(not self._policy.idle_only(s) for s in self._sequences.values())

    def _expire(self) -> None:
        """End whose time passed before its first token."""
        for sequence in [s for s in self._sequences.values() if s.end_s <= self._now and not s.generated_tokens]:
            self._telemetry.count("engine_expired_total", service_class=sequence.service_class.name)
            self.finish(sequence, FinishReason.EXPIRED)

    def _plan_chunks(
        self, sequences: list[EngineSequence], budget: ChunkBudget, slices: dict[str, SequenceSlice]
    ) -> None:
        if self._residency.saving_share > self._limits.save_share:  # an ingest waits for its disk
            sequences = [s for s in sequences if not (self._policy.idle_only(s) and s.owner)]
        decoding = len(slices)
        for sequence in self._policy.ordered(sequences, self._now):
            if not self._catch_up(sequence):
                continue
            tokens = self._limits.chunk_tokens + decoding - sum(len(s.token_ids) for s in slices.values())
            if len(slices) > decoding and budget.seconds < BLOCK_TOKENS * self._controller.prefill_s(
                sequence.computed
            ):
                return
            chunk = self._controller.chunk(sequence.computed, budget, sequence.remaining)
            border = self._holdings.tiers.rules.to_border(sequence.computed) if sequence.tiered else None
            size = sequence.next_chunk(min(tokens, chunk), border)
            if size > 0 and self._plan_slice(sequence, size, slices):
                spent_s = self._controller.predict_s(sequence.computed, size)
                budget = replace(budget, seconds=budget.seconds - spent_s)

    def _catch_up(self, sequence: EngineSequence) -> bool:
        """Take over what others computed meanwhile. False when it has no chunk to run now."""
        if sequence.state is not SequenceState.RUNNING:  # gave its blocks to an earlier one
            return False
        with self.blame(sequence):
            won = self._holdings.adopt(sequence)
            sequence.cached_ram_tokens += 0 if sequence.preempted else won
            self._holdings.unpark(sequence)
            if sequence.remaining == 0:
                self._finish_prompt(sequence)
        return sequence.state is SequenceState.RUNNING

    def _plan_slice(self, sequence: EngineSequence, size: int, slices: dict[str, SequenceSlice]) -> bool:
        start, end = sequence.computed, sequence.computed + size
        covered = False
        with self.blame(sequence):
            covered = self._cover(sequence, end, slices)
        if not covered:
            return False
        samples = sequence.samples and end == sequence.target
        slices[sequence.seq_id] = SequenceSlice(
            sequence.seq_id,
            sequence.tokens[start:end],
            start,
            tuple(sequence.block_table),
            samples,
            self._holdings.tiers.visible(sequence, start, size, samples) if sequence.tiered else (),
            sequence.attention,
            sequence.zone is not None or (sequence.tiered and sequence.generated_tokens % MEASURE_STEPS == 1),
        )
        return True

    def _cover(self, sequence: EngineSequence, tokens: int, slices: dict[str, SequenceSlice]) -> bool:
        """Give a sequence blocks up to `tokens`, preempting lower and younger ones outside the plan."""
        if sequence.tiered:  # a full disk queue may have held blocks back that nothing reads any more
            self._holdings.save(sequence)
            self._holdings.tiers.advance(sequence)
        while not self._holdings.extend(sequence, tokens):
            victims = [
                s
                for s in self._running
                if s.state is SequenceState.RUNNING  # a load gives its blocks back later
                and s.block_table
                and s.seq_id not in slices
                and self._gives_up(s, sequence)
            ]
            if not victims:
                return False
            self._preempt(max(victims, key=self._policy.sacrifice))
        return True

    def _gives_up(self, holder: EngineSequence, sequence: EngineSequence) -> bool:
        """Whether one gives its blocks to another: never both to each other."""
        policy = self._policy
        if policy.makes_way(holder, sequence):
            return True
        return policy.sacrifice(holder) > policy.sacrifice(sequence) and not policy.makes_way(sequence, holder)

    def _preempt(self, sequence: EngineSequence) -> None:
        self._abandon_load(sequence)
        self._holdings.park(sequence)
        sequence.state, sequence.preempted = SequenceState.WAITING, True
        self._running.remove(sequence)
        self._waiting.append(sequence)
        self._telemetry.count("engine_preemptions_total", service_class=sequence.service_class.name)

    # -------------------------------------------------------------------------------------- admission

    def _admit(self) -> None:
        """Take waiting sequences in, in order. One that has to wait for room holds all behind it back; one that
        waits for its own quota doesn't."""
        if not self._waiting:
            return
        for sequence in self._policy.ordered(self._waiting, self._now):
            if self._policy.idle_only(sequence) and not self._batch_may_start(sequence):
                continue
            if self._follows(sequence) or not self._in_quota(sequence):
                continue
            started = True
            with self.blame(sequence):
                held = self._holdings.match(sequence)
                started = self._make_room(sequence, held)
                if started:
                    self._start(sequence, held)
            if not started:
                return

    def _batch_may_start(self, sequence: EngineSequence) -> bool:
        """Only when nobody else is there or (`EngineLimits.idle_s`) waits for a prompt, and one ingest at a time:
        two would only evict each other."""
        others = (s for s in self._sequences.values() if not self._policy.idle_only(s))
        if any(self._limits.idle_s <= 0 or not s.decodes for s in others):
            return False
        return not (sequence.spec.prefill_only and any(s.spec.prefill_only for s in self._running))

    def _follows(self, sequence: EngineSequence) -> bool:
        """A running sequence, not of a lower class, is about to compute (or load) the next block it needs."""
        hashes = sequence.reusable
        index = self._holdings.matched_blocks(sequence)
        return index < len(hashes) and any(
            self._policy.band(leader) <= self._policy.band(sequence)
            and not leader.forgotten
            and leader.computed // BLOCK_TOKENS <= index < leader.shared_blocks
            and leader.hashes[index] == hashes[index]
            for leader in self._running
        )

    def _in_quota(self, sequence: EngineSequence) -> bool:
        """What it will hold is what its policy leaves it. An empty engine takes anybody, so nothing waits for
        ever."""
        if not self._running:
            return True
        running = [s for s in self._running if not self._policy.makes_way(s, sequence)]
        quota = self._policy.quota(sequence, running, self._pool.total)
        return self._holdings.needed_blocks(sequence) <= quota

    def _make_room(self, sequence: EngineSequence, held: Held) -> bool:
        """A place in the batch, and blocks for the whole prompt beside what the running ones still need."""
        band = self._policy.band
        lower = [s for s in self._running if band(s) > band(sequence)]
        blocks, slots = self._shortages(sequence, held)
        if blocks > sum(s.held_blocks for s in lower) or slots > sum(len(s.segments) for s in lower):
            return False
        lower.sort(key=self._policy.sacrifice)
        while blocks > 0 or slots > 0 or len(self._running) >= self._limits.batch:
            if not lower:
                return False
            self._preempt(lower.pop())
            blocks, slots = self._shortages(sequence, held)
        return True

    def _shortages(self, sequence: EngineSequence, held: Held) -> tuple[int, int]:
        """Blocks and slots that are missing for its whole prompt."""
        band = self._policy.band
        ahead = [s for s in self._running if band(s) <= band(sequence)]
        holdings = self._holdings
        blocks = holdings.block_shortage(sequence, held, ahead)
        blocks -= sum(s.held_blocks for s in ahead if self._policy.makes_way(s, sequence))
        return blocks, holdings.slot_shortage(sequence, held, ahead)

    def _start(self, sequence: EngineSequence, held: Held) -> None:
        self._waiting.remove(sequence)
        self._running.append(sequence)
        sequence.state, sequence.admitted = SequenceState.RUNNING, True
        self._holdings.take(sequence, held)
        if not sequence.preempted:
            sequence.cached_ram_tokens = sequence.computed
        self._holdings.share(sequence)
        self._load(sequence)
        self._progress_or_end(sequence)

    # -------------------------------------------------------------------------------------- disk tier

    def _load(self, sequence: EngineSequence) -> None:
        if sequence.disk_failed or (sequence.tiered and self._jump(sequence)):
            return
        first = len(sequence.block_table)
        hashes = sequence.reusable
        count = self._residency.on_disk(hashes, first)
        if sequence.tiered:  # segment by segment: each one closes before the next is read
            count = min(count, self._holdings.tiers.rules.to_border(first * BLOCK_TOKENS) // BLOCK_TOKENS)
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
            job = self._holdings.tiers.jump(sequence, self._load_deadline_s)
        if job is None:
            return False
        sequence.state = SequenceState.LOADING
        self._loads[sequence.seq_id] = job
        self._residency.load(job, self._loaded)
        return True

    def _loaded(self, job: LoadJob) -> None:
        if job.is_jump:
            self._holdings.tiers.jump_over(job)
        if not job.abandoned:
            del self._loads[job.seq_id]
            sequence = self._sequences[job.seq_id]
            with self.blame(sequence):
                self._take_loaded(sequence, job, job.good)

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
            with self.blame(sequence):
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
        self._holdings.share(sequence)
        if sequence.tiered:  # what is complete is closed before more blocks come
            sequence.state = SequenceState.CLOSING
        else:
            self._progress_or_end(sequence)

    def settle(self, cancelled: CancelFlag, late: Callable[[], bool]) -> None:
        """Close the segment whose blocks came from disk, for the first in line, and load on; stop when it is
        `late`. Whoever is cancelled meanwhile ends at once."""
        sequence = self._next_to_close()
        if sequence is None:
            return
        with self.blame(sequence):
            if self._holdings.tiers.settle(sequence, cancelled, late):
                sequence.state = SequenceState.RUNNING
                self._load(sequence)
                self._progress_or_end(sequence)

    def _next_to_close(self) -> EngineSequence | None:
        closing = [s for s in self._running if s.state is SequenceState.CLOSING]
        if self._limits.idle_s <= 0 and self._busy():
            closing = [s for s in closing if not self._policy.idle_only(s)]
        return next(iter(self._policy.ordered(closing, self._now)), None) if closing else None

    def _take_jump(self, sequence: EngineSequence, job: LoadJob) -> None:
        """A jump has ended: go on where it leads; where bytes were lost, from RAM and by another jump."""
        sequence.state = SequenceState.RUNNING
        if self._holdings.tiers.landed(sequence, job):
            sequence.cached_disk_tokens += 0 if sequence.preempted else job.tokens - job.start
        else:
            sequence.failed_jumps += 1
            self._holdings.tiers.take(sequence, self._holdings.tiers.match(sequence))
        self._holdings.share(sequence)
        self._load(sequence)
        self._progress_or_end(sequence)

    def _progress_or_end(self, sequence: EngineSequence) -> None:
        self._progress(sequence)
        if sequence.remaining == 0:
            self._finish_prompt(sequence)

    def _abandon_load(self, sequence: EngineSequence) -> None:
        job = self._loads.pop(sequence.seq_id, None)
        if job is not None:
            job.abandoned = True

    # --------------------------------------------------------------------------------- after the step

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Account for a finished step. Sequences that left meanwhile are ignored."""
        for piece in plan.slices:
            sequence = self._sequences.get(piece.seq_id)
            if sequence is not None:
                with self.blame(sequence):
                    self._account(sequence, piece, result)

    def _account(self, sequence: EngineSequence, piece: SequenceSlice, result: StepResult) -> None:
        fault = result.faults.get(piece.seq_id)
        if fault is not None:
            _LOG.error("no token could be chosen", exc_info=fault)
            self.break_off(sequence, fault)
            return
        measured = result.attention.get(piece.seq_id)
        if measured is not None:
            sequence.exact_share = _exact_share(measured, piece.end)
            if sequence.zone is not None and sequence.attention is not None:
                window = sequence.zone.observe(measured)
                sequence.attention = replace(sequence.attention, window_tokens=window)
        decoded = sequence.decodes
        sequence.computed = piece.end
        sequence.started = True
        self._policy.served(sequence, 0 if decoded else len(piece.token_ids), int(piece.sample))
        self._holdings.share(sequence)
        if sequence.tiered:
            self._holdings.tiers.advance(sequence)
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
        # An end marker too: it was generated.
        self._send(sequence, EngineToken(sequence.seq_id, token, logprob, sequence.exact_share))
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


def _exact_share(layers: Sequence[Sequence[float]], context_tokens: int) -> float:
    """Of a context, what a decode step read exactly: the mean over the layers that may read summaries. `layers` are
    rows of `kernels.interface.ATTENTION_STATS`, zeros for the others."""
    exact = [min(1.0, row[-1] / context_tokens) for row in layers if any(row)]
    return sum(exact) / len(exact) if exact else 1.0


def safe_message(error: Exception) -> str:
    """What a caller may be told of a fault."""
    if isinstance(error, PeriluneError):
        return str(error)
    return "The model runtime failed while computing this answer; the log has the details."
