"""One step: schedule, run, account. The engine without its thread, so that tests and the simulator can step it.

Knows the scheduler, the runtime and what happens when either the runtime or a listener fails. Knows nothing of
threads or queues. Not thread-safe, but for `lookup`.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from perilune.core import (
    BLOCK_TOKENS,
    CachedTokens,
    EngineEvent,
    EngineFinished,
    EngineStats,
    FinishReason,
    KVPolicy,
    SequenceSpec,
)
from perilune.engine.answer_lengths import AnswerLengths
from perilune.engine.attention_debug import AttentionDebug
from perilune.engine.block_pool import BlockPool
from perilune.engine.deadlines import DeadlinePolicy
from perilune.engine.health import EngineHealth
from perilune.engine.holdings import Holdings
from perilune.engine.hot_zone import HotZone
from perilune.engine.kv_tally import TallySink
from perilune.engine.observe import EngineObserver, StepObservation
from perilune.engine.policy import ChunkController, EngineLimits
from perilune.engine.prefix_cache import PrefixCache
from perilune.engine.pressure import EVERY_S, Counts, KVUse, Pressure, PressureGauge
from perilune.engine.residency import Post, Residency, Worker
from perilune.engine.scheduler import Scheduler, safe_message
from perilune.engine.scheduling import SchedulingPolicy
from perilune.engine.segments import Segments
from perilune.engine.sequence import EngineSequence
from perilune.engine.tier_moves import TierMoves
from perilune.engine.tier_rules import TierRules
from perilune.errors import ConfigError, InvalidRequest
from perilune.kernels.tiers import AttentionPolicy
from perilune.runtime.kv.spec import BlockHash
from perilune.runtime.kv.store import KVStore
from perilune.runtime.memory import free_memory_bytes
from perilune.runtime.mri import CancelFlag, ModelRuntime, StepAbandoned, StepPlan, StepResult
from perilune.telemetry import Telemetry

SETTLE_S = 0.03
"""How long segments are closed between two steps at least: what a stream may stutter by."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """How tiered sequences are served: WARM tokens of each (spec R4), attention presets by name (spec R8), whether
    windows adapt (spec R7), and whether decode steps are measured from the start (spec R11)."""

    warm_tokens: int = 65536
    presets: Mapping[str, AttentionPolicy] = field(default_factory=lambda: {"general": AttentionPolicy()})
    adaptive: bool = False
    debug: bool = False


class Stepper:
    """`ended` is told of every sequence that leaves. `post` runs a call between two steps, from any thread."""

    def __init__(
        self,
        runtime: ModelRuntime,
        store: KVStore | None,
        limits: EngineLimits,
        *,
        loader: Worker,
        saver: Worker,
        post: Post,
        ended: Callable[[EngineSequence], None],
        clock: Callable[[], float],
        telemetry: Telemetry,
        observer: EngineObserver,
        segment_store: KVStore | None = None,
        tier_policy: TierPolicy | None = None,
        free_bytes: Callable[[], int] = free_memory_bytes,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        self._runtime = runtime
        self._clock = clock
        self._tally = TallySink(telemetry)
        self._telemetry = telemetry = Telemetry(self._tally)
        self._observer = observer
        self._ended = ended
        self._deaf: list[str] = []  # sequences whose listener raised
        self.cache = PrefixCache(_branches(runtime, limits))
        self.pool = BlockPool(runtime.num_blocks, self._evicted)
        self._controller = ChunkController(limits)
        self._residency = Residency(
            self.pool,
            self.cache,
            runtime.block_view,
            store if runtime.capabilities.kv_bytes else None,
            segment_store,
            loader,
            saver,
            post,
            telemetry,
            observer,
        )
        self.capacity_tokens = min(runtime.max_context_tokens, runtime.num_blocks * BLOCK_TOKENS)
        self._tier_policy = tier_policy or TierPolicy()
        self.debug = AttentionDebug(self._tier_policy.debug)
        self.answers = AnswerLengths()
        self.segments, self._moves = self._make_segments(loader, post)
        holdings = Holdings(self.pool, self.cache, self._residency, self.segments, limits.save_share, telemetry)
        tiers = runtime.tiers
        self._step_s = self._relief_s = 0.0  # what the last step took, and the last look at tiers
        self._relieved_s = self._relief_pause_s = float("-inf")
        self._gauge = PressureGauge(runtime.kv_spec, tiers.spec if tiers else None, free_bytes, clock)
        self._scheduler = Scheduler(
            self.pool,
            self.cache,
            self._residency,
            holdings,
            self._controller,
            policy or DeadlinePolicy(),
            limits,
            self.capacity,
            self._send,
            self._close,
            telemetry,
        )

    def _make_segments(self, worker: Worker, post: Post) -> tuple[Segments | None, TierMoves | None]:
        tiers = self._runtime.tiers
        if tiers is None:
            return None, None
        rules = TierRules(tiers.spec, self._tier_policy.warm_tokens)
        segments = Segments(tiers, rules, self.pool, self.cache, self._residency, self._telemetry)
        return segments, TierMoves(segments, tiers, worker, post, self._lost, self._telemetry)

    def capacity(self, spec: SequenceSpec) -> int:
        """Most tokens of such a sequence. Raises `InvalidRequest` for a policy or preset that isn't served."""
        if spec.kv_policy is KVPolicy.FULL:
            return self.capacity_tokens
        if self.segments is None:
            raise InvalidRequest(
                "This runtime keeps no tiers of KV.",
                hint="Set kv_cache.policy to full, or load the model with tiers.",
            )
        if spec.preset not in self._tier_policy.presets:
            raise InvalidRequest(
                f"There is no attention preset {spec.preset!r}.",
                hint=f"Use one of {', '.join(sorted(self._tier_policy.presets))}.",
                param="preset",
            )
        shape = self.segments.rules.spec
        return min(self._runtime.max_context_tokens, shape.slots * shape.segment_tokens)

    # -------------------------------------------------------------------------- the three-part step

    def plan(self, cancelled: CancelFlag) -> StepPlan | None:
        """What runs next; None when nothing can before something arrives, completes or is due (`next_deadline_s`).

        Loaded segments are closed here, as long as a step takes: so neither waits long for the other. Sequences may
        be ended by `cancelled.left` meanwhile."""
        end_s = self._clock() + max(SETTLE_S, self._step_s)
        self._scheduler.settle(cancelled, lambda: self._clock() >= end_s)
        while True:
            plan = self._scheduler.schedule(self._clock())
            ended = self._hang_up()
            opened = self._open(plan) if plan is not None else None
            if opened is not None or (plan is None and not ended):
                return opened
            # Sequences ended here and left the plan empty or gave back blocks: others may run now.

    def execute(self, plan: StepPlan, cancelled: CancelFlag) -> None:
        """Run a plan. A failing runtime ends the plan's sequences with an error and nothing else. Sequences may be
        ended by `cancelled.left` meanwhile."""
        try:
            self._step(plan, cancelled)
        except StepAbandoned:
            self._telemetry.count("engine_steps_abandoned_total")
        except Exception as error:  # whatever a runtime raises, the engine lives on
            _LOG.exception("a step failed")
            self._telemetry.count("engine_steps_failed_total")
            self._scheduler.fail(plan, safe_message(error))
        self._hang_up()
        self.relieve()

    def _step(self, plan: StepPlan, cancelled: CancelFlag) -> None:
        began = self._clock()
        plan = self._prepare(plan, cancelled)
        decoding = self._scheduler.decoding(plan)
        measured = self.debug.on and len(decoding) == len(plan.slices)
        if measured:
            plan = self.debug.mark(plan)
        start = self._clock()
        result, stall_s = self._forward(plan, bool(decoding), cancelled)
        seconds = self._step_s = self._clock() - start
        self._close_segments(plan, cancelled)
        upkeep_s = self._clock() - began - seconds + self._relief_s
        if cancelled.left().isdisjoint(piece.seq_id for piece in plan.slices):
            self._observe(plan, decoding, seconds)  # else it would say little about rates
        self._scheduler.update(plan, result)
        if measured:
            self._debug(plan, result, seconds, upkeep_s, stall_s)

    def _debug(self, plan: StepPlan, result: StepResult, forward_s: float, upkeep_s: float, stall_s: float) -> None:
        try:
            self.debug.record(plan, result, forward_s, upkeep_s, stall_s)
        except Exception:  # what is only looked at must not end anybody's answer
            _LOG.exception("attention debug failed; it is switched off")
            self._telemetry.count("engine_bookkeeping_failures_total")
            self.debug.switch(False)

    def _forward(self, plan: StepPlan, decodes: bool, cancelled: CancelFlag) -> tuple[StepResult, float]:
        """Run a plan in the runtime. Also returns how long this thread waited for COLD meanwhile: the time in which
        it didn't run, where pages came from the disk."""
        # Asked before: a sequence that leaves in the middle of the step gives its slots back there.
        if not decodes or self._moves is None or not self._moves.reads_cold(plan):
            return self._runtime.forward_step(plan, cancelled), 0.0
        faults, start, ran = _disk_reads(), time.perf_counter(), time.thread_time()
        result = self._runtime.forward_step(plan, cancelled)
        if _disk_reads() == faults:
            self._telemetry.count("kv_cold_steps_total", outcome="hit")
            return result, 0.0
        stall_s = max(0.0, (time.perf_counter() - start) - (time.thread_time() - ran))
        self._telemetry.count("kv_cold_steps_total", outcome="miss")
        self._telemetry.observe("kv_cold_stall_seconds", stall_s)
        return result, stall_s

    def _prepare(self, plan: StepPlan, cancelled: CancelFlag) -> StepPlan:
        """Have what tiered sequences are about to read. Raises `StepAbandoned`. Who ended meanwhile is left out."""
        if self.segments is None or self._moves is None:
            return plan
        for piece in plan.slices:
            sequence = self._scheduler.get(piece.seq_id)
            if piece.segments and sequence is not None:
                with self._scheduler.blame(sequence):
                    self.segments.prepare(sequence, piece, cancelled)
                    if not sequence.decodes and sequence.segments:  # none: it left while one was closed
                        self._moves.fetch(piece.segments)
        slices = tuple(piece for piece in plan.slices if self._scheduler.get(piece.seq_id) is not None)
        if not slices:
            raise StepAbandoned
        return StepPlan(slices)

    def _close_segments(self, plan: StepPlan, cancelled: CancelFlag) -> None:
        """Close segments that this step completed. A set flag only delays it."""
        if self.segments is None:
            return
        for piece in plan.slices:
            sequence = self._scheduler.get(piece.seq_id)
            if sequence is not None and sequence.closing:
                with self._scheduler.blame(sequence):
                    self.segments.close(sequence, piece, cancelled)

    def _observe(self, plan: StepPlan, decoding: set[str], seconds: float) -> None:
        chunks = [(p.start, len(p.token_ids)) for p in plan.slices if p.seq_id not in decoding]
        tokens = sum(size for _, size in chunks)
        context = sum(start * size for start, size in chunks) // tokens if tokens else 0
        self._controller.observe(chunks, len(decoding), seconds)
        try:
            self._observer.step(StepObservation(tokens, context, len(decoding), seconds))
        except Exception:  # a watcher's fault must not stop the work
            _LOG.exception("an observer of engine steps failed")
            self._telemetry.count("engine_bookkeeping_failures_total")
        self._telemetry.observe("engine_step_seconds", seconds, kind="prefill" if chunks else "decode")
        self._telemetry.count("engine_prefill_tokens_total", tokens)
        self._telemetry.count("engine_decode_tokens_total", len(decoding))

    def kv_use(self) -> KVUse:
        """Bytes by tier and the level of pressure, at most half a second old. From any thread."""
        return self._gauge.measure(self._counts()) if self._gauge.due() else self._gauge.use

    def relieve(self) -> None:
        """After every step, whatever became of it, and while none runs: move payloads as tiers and memory ask."""
        self._relieved_s = self._clock()
        if self._relieved_s < self._relief_pause_s:
            return
        try:
            self._balance()
            self._relief_s = self._clock() - self._relieved_s
        except Exception:  # it concerns nobody's answer
            _LOG.exception("KV couldn't be moved between tiers")
            self._telemetry.count("kv_relief_failures_total")
            self._relief_pause_s = self._relieved_s + EVERY_S

    def _balance(self) -> None:
        use = self.kv_use()
        if self._moves is None:
            return
        self._moves.pressed = use.level is Pressure.RED
        if use.level >= Pressure.ORANGE:
            for sequence in self.sequences:
                if sequence.zone is not None:
                    sequence.zone.shrink()
        self._moves.balance(self._scheduler.running)

    def next_relief_s(self) -> float | None:
        """When `relieve` wants to be called though no step runs; None where nothing could be moved out of RAM."""
        tiers = self._runtime.tiers
        if tiers is None or not tiers.cold_free or tiers.warm_free == tiers.spec.warm_frames:
            return None
        return self._relieved_s + EVERY_S

    def _counts(self) -> Counts:
        tiers, pool = self._runtime.tiers, self.pool
        used = pool.total - pool.available
        tokens = sum(min(s.computed, s.held_blocks * BLOCK_TOKENS) for s in self.sequences)
        if tiers is None:
            return Counts(used, pool.cached, used_tokens=tokens)
        warm, cold = tiers.spec.warm_frames - tiers.warm_free, tiers.spec.cold_frames - tiers.cold_free
        return Counts(used, pool.cached, warm, cold, tokens)

    # ---------------------------------------------------------------------------- between two steps

    def add(self, sequence: EngineSequence) -> None:
        if sequence.tiered:
            sequence.attention = self._tier_policy.presets[sequence.spec.preset]
            if self._tier_policy.adaptive:
                sequence.zone = HotZone(sequence.attention.window_tokens)
        self._scheduler.add(sequence)

    def cancel(self, seq_id: str) -> None:
        self._scheduler.cancel(seq_id)

    def forget(self, owner: str) -> Future[int]:
        """Drop an owner's KV. The future holds the disk bytes freed."""
        self._scheduler.forget(owner)
        if self.segments is not None:
            self.segments.forget(owner)
        return self._residency.forget(owner)

    def health(self) -> EngineHealth:
        """What the health view is made of. From any thread."""
        tiers = self._runtime.tiers
        return EngineHealth(
            use=self.kv_use(),
            tally=self._tally.tally(),
            tiers=tiers.spec if tiers is not None else None,
            answers=self.answers.newest(),
            debug_on=self.debug.on,
            attention=self.debug.summary(),
        )

    @property
    def sequences(self) -> list[EngineSequence]:
        """Everything that waits or runs."""
        return self._scheduler.sequences

    def stop(self, reason: FinishReason, error: str | None = None) -> None:
        """End every sequence."""
        for sequence in self.sequences:
            self._scheduler.finish(sequence, reason, error)

    def lookup(self, hashes: Sequence[BlockHash]) -> CachedTokens:
        """Leading tokens whose KV exists, by tier. From any thread."""
        places = self._residency if self.segments is None else self.segments
        in_ram, on_disk = places.lookup(hashes)
        return CachedTokens(in_ram * BLOCK_TOKENS, on_disk * BLOCK_TOKENS)

    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    def next_deadline_s(self) -> float | None:
        return self._scheduler.next_deadline_s()

    def check_integrity(self) -> None:
        """Raises AssertionError when a block leaked or a name is wrong."""
        self.pool.check_integrity()
        self.cache.check_integrity(self.pool)
        if self.segments is not None:
            self.segments.check_integrity()

    # ------------------------------------------------------------------------------------- call-backs

    def _open(self, plan: StepPlan) -> StepPlan | None:
        """Give new sequences their context; one that the runtime refuses ends alone."""
        slices = []
        for piece in plan.slices:
            sequence = self._scheduler.get(piece.seq_id)
            if sequence is None:
                continue
            if not sequence.opened:
                try:
                    self._runtime.init_context(sequence.seq_id, sequence.spec.token_ids, sequence.spec.sampling)
                except Exception as error:  # as in `execute`
                    _LOG.exception("a sequence can't be opened")
                    self._scheduler.break_off(sequence, error)
                    continue
                sequence.opened = True
            slices.append(piece)
        return StepPlan(tuple(slices)) if slices else None

    def _close(self, sequence: EngineSequence) -> None:
        try:
            if sequence.opened:
                self._runtime.release_context(sequence.seq_id)
        except Exception:  # its answer is complete, and the others' work goes on
            _LOG.exception("the context of a sequence that ended couldn't be released")
            self._telemetry.count("engine_bookkeeping_failures_total")
        self._telemetry.count("kv_reused_tokens_total", sequence.cached_ram_tokens, tier="ram")
        self._telemetry.count("kv_reused_tokens_total", sequence.cached_disk_tokens, tier="disk")
        self._ended(sequence)

    def _lost(self, slot: int, error: Exception) -> None:
        self._scheduler.blame_readers(slot, error)

    def _send(self, sequence: EngineSequence, event: EngineEvent) -> None:
        if isinstance(event, EngineFinished):
            self.answers.add(sequence, event.reason)
        try:
            sequence.emit(event)
        except Exception:  # a listener's fault must not stop the others' work
            _LOG.exception("a listener of engine events failed; its sequence is cancelled")
            self._telemetry.count("engine_listener_failures_total")
            self._deaf.append(sequence.seq_id)

    def _hang_up(self) -> bool:
        """Cancel sequences whose listener failed: not inside `_send`, which runs in the middle of an update.

        Returns whether there were any."""
        deaf, self._deaf = self._deaf, []
        for seq_id in deaf:
            self._scheduler.cancel(seq_id)
        return bool(deaf)

    def _evicted(self, blocks: Sequence[int]) -> None:
        self.cache.discard(blocks)
        self._runtime.evict_kv(blocks)


def _disk_reads() -> int:
    """Pages that this process has had to wait for a disk for."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _branches(runtime: ModelRuntime, limits: EngineLimits) -> int:
    """Shared blocks that may lie at the same place: what the runtime bears, less one private block a sequence.

    Raises `ConfigError` if that leaves none.
    """
    most = runtime.capabilities.max_branches
    if most and most <= limits.batch:
        raise ConfigError(
            f"The model runtime takes {most} sequences; runtime.max_batch_size is {limits.batch}.",
            hint=f"Set it to less than {most}.",
            param="runtime.max_batch_size",
        )
    return most - limits.batch if most else 0
