"""One step: schedule, run, account. The engine without its thread, so that tests and the simulator can step it.

Knows the scheduler, the runtime and what happens when either the runtime or a listener fails. Knows nothing of
threads or queues. Not thread-safe, but for `lookup`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from perilune.core import BLOCK_TOKENS, CachedTokens, EngineEvent, EngineStats, FinishReason
from perilune.engine.block_pool import BlockPool
from perilune.engine.observe import EngineObserver, StepObservation
from perilune.engine.policy import ChunkController, EngineLimits
from perilune.engine.prefix_cache import PrefixCache
from perilune.engine.residency import Post, Residency, Worker
from perilune.engine.scheduler import Scheduler
from perilune.engine.sequence import EngineSequence
from perilune.errors import PeriluneError
from perilune.runtime.kv.spec import BlockHash
from perilune.runtime.kv.store import KVStore
from perilune.runtime.mri import CancelFlag, ModelRuntime, StepAbandoned, StepPlan
from perilune.telemetry import Telemetry

_LOG = logging.getLogger(__name__)


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
    ) -> None:
        self._runtime = runtime
        self._clock = clock
        self._telemetry = telemetry
        self._observer = observer
        self._ended = ended
        self._deaf: list[str] = []  # sequences whose listener raised
        self.cache = PrefixCache()
        self.pool = BlockPool(runtime.num_blocks, self._evicted)
        self._controller = ChunkController(limits)
        self._residency = Residency(
            self.pool,
            self.cache,
            runtime.block_view,
            store if runtime.capabilities.kv_bytes else None,
            loader,
            saver,
            post,
            telemetry,
            observer,
        )
        self.capacity_tokens = min(runtime.max_context_tokens, runtime.num_blocks * BLOCK_TOKENS)
        self._scheduler = Scheduler(
            self.pool,
            self.cache,
            self._residency,
            self._controller,
            limits,
            self.capacity_tokens,
            self._send,
            self._close,
            telemetry,
        )

    # -------------------------------------------------------------------------- the three-part step

    def plan(self) -> StepPlan | None:
        """What runs next; None when nothing can before something arrives or completes."""
        while True:
            plan = self._scheduler.schedule(self._clock())
            ended = self._hang_up()
            opened = self._open(plan) if plan is not None else None
            if opened is not None or (plan is None and not ended):
                return opened
            # Sequences ended here and left the plan empty or gave back blocks: others may run now.

    def chunk_seconds(self, plan: StepPlan) -> dict[str, float]:
        """How long each prompt chunk of a plan that has not run yet should take. Decoding sequences are absent."""
        decoding = self._scheduler.decoding(plan)
        chunks = [piece for piece in plan.slices if piece.seq_id not in decoding]
        return {piece.seq_id: self._controller.predict_s(piece.start, len(piece.token_ids)) for piece in chunks}

    def execute(self, plan: StepPlan, cancelled: CancelFlag) -> None:
        """Run a plan. A failing runtime ends the plan's sequences with an error and nothing else."""
        decoding = self._scheduler.decoding(plan)
        start = self._clock()
        try:
            result = self._runtime.forward_step(plan, cancelled)
        except StepAbandoned:
            self._telemetry.count("engine_steps_abandoned_total")
            return
        except Exception as error:  # whatever a runtime raises, the engine lives on
            _LOG.exception("a step failed")
            self._telemetry.count("engine_steps_failed_total")
            self._scheduler.fail(plan, _safe_message(error))
            return
        self._observe(plan, decoding, self._clock() - start)
        self._scheduler.update(plan, result)
        self._hang_up()

    def _observe(self, plan: StepPlan, decoding: set[str], seconds: float) -> None:
        chunks = [(p.start, len(p.token_ids)) for p in plan.slices if p.seq_id not in decoding]
        tokens = sum(size for _, size in chunks)
        context = sum(start * size for start, size in chunks) // tokens if tokens else 0
        self._controller.observe(chunks, len(decoding), seconds)
        self._observer.step(StepObservation(tokens, context, len(decoding), seconds))
        self._telemetry.observe("engine_step_seconds", seconds, kind="prefill" if chunks else "decode")
        self._telemetry.count("engine_prefill_tokens_total", tokens)
        self._telemetry.count("engine_decode_tokens_total", len(decoding))

    # ---------------------------------------------------------------------------- between two steps

    def add(self, sequence: EngineSequence) -> None:
        self._scheduler.add(sequence)

    def cancel(self, seq_id: str) -> None:
        self._scheduler.cancel(seq_id)

    def forget(self, owner: str) -> Future[int]:
        """Drop an owner's KV. The future holds the disk bytes freed."""
        self._scheduler.forget(owner)
        return self._residency.forget(owner)

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
        in_ram, on_disk = self._residency.lookup(hashes)
        return CachedTokens(in_ram * BLOCK_TOKENS, on_disk * BLOCK_TOKENS)

    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    def next_deadline_s(self) -> float | None:
        return self._scheduler.next_deadline_s()

    def check_integrity(self) -> None:
        """Raises AssertionError when a block leaked or a name is wrong."""
        self.pool.check_integrity()
        self.cache.check_integrity(self.pool)

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
                    self._scheduler.finish(sequence, FinishReason.ERROR, _safe_message(error))
                    continue
                sequence.opened = True
            slices.append(piece)
        return StepPlan(tuple(slices)) if slices else None

    def _close(self, sequence: EngineSequence) -> None:
        if sequence.opened:
            self._runtime.release_context(sequence.seq_id)
        self._ended(sequence)

    def _send(self, sequence: EngineSequence, event: EngineEvent) -> None:
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


def _safe_message(error: Exception) -> str:
    if isinstance(error, PeriluneError):
        return str(error)
    return "The model runtime failed while computing this answer; the log has the details."
