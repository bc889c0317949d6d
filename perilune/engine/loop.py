"""The engine thread: `service.ports.Engine` over a `Stepper`.

Knows threads, the inbox and the cancel flag. Knows nothing of blocks or order. One thread, the engine thread,
runs every step and is the only one that touches runtime and engine state; all others put calls into its inbox,
which it empties between steps. Cancels don't wait for that: the runtime asks every few milliseconds of a step who
has left (`CancelFlag.left`), and whatever was cancelled ends there, in this step, in another or in none. So a
cancel takes effect within 50 ms in every phase, and the others' work goes on. A step in which nobody is interested
any more is abandoned through the flag.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from perilune.core import (
    CachedTokens,
    EngineFinished,
    EngineStats,
    FinishReason,
    SequenceSpec,
    ServiceClass,
)
from perilune.engine.attention_debug import StepFigures
from perilune.engine.health import EngineHealth
from perilune.engine.observe import EngineObserver, NullObserver
from perilune.engine.policy import EngineLimits
from perilune.engine.pressure import KVUse, Pressure
from perilune.engine.scheduling import SchedulingPolicy
from perilune.engine.sequence import Emit, EngineSequence
from perilune.engine.stepper import Stepper, TierPolicy
from perilune.errors import ContextTooLong, InternalError, InvalidRequest, InvalidStateError, Overloaded
from perilune.runtime.kv.spec import block_hashes
from perilune.runtime.kv.store import KVStore
from perilune.runtime.mri import CancelFlag, ModelRuntime, StepPlan
from perilune.telemetry import Telemetry

_LOG = logging.getLogger(__name__)
_CLOSED = "The engine is shutting down."
_BROKEN = "The engine stopped after an internal fault."


class EngineLoop:
    """Owns neither `runtime` nor `store`: whoever made them closes them, after `close`."""

    def __init__(
        self,
        runtime: ModelRuntime,
        store: KVStore | None,
        limits: EngineLimits,
        telemetry: Telemetry | None = None,
        observer: EngineObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
        segment_store: KVStore | None = None,
        tier_policy: TierPolicy | None = None,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        self._clock = clock
        self._limits = limits
        self._telemetry = telemetry or Telemetry()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loader = ThreadPoolExecutor(2, "kv-load")
        self._saver = ThreadPoolExecutor(1, "kv-save")  # one: saves and forgets keep their order
        self._stepper = Stepper(
            runtime,
            store,
            limits,
            loader=self._loader,
            saver=self._saver,
            post=self._inbox.put,
            ended=self._ended,
            clock=clock,
            telemetry=self._telemetry,
            observer=observer or NullObserver(),
            segment_store=segment_store,
            tier_policy=tier_policy,
            policy=policy,
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._flag = CancelFlag(self._left)
        self._lock = threading.Lock()
        # under the lock:
        self._live: dict[str, EngineSequence] = {}
        self._arriving: dict[str, EngineSequence] = {}  # submitted, not yet taken from the inbox
        self._cancelled: dict[str, float] = {}  # since when
        self._answers: set[Future[int]] = set()  # what callers of `forget` wait for
        self._step: set[str] = set()  # the sequences of the running step
        self._gone: set[str] = set()  # and those that left it
        self._published = self._stepper.stats()
        self._refusal: str | None = "The engine isn't started."
        self._stopping = False  # engine thread only
        self._serial = 0

    # ----------------------------------------------------------------------------- start and close

    def start(self) -> None:
        self._refusal = None
        self._thread.start()

    def close(self) -> None:
        """Cancel what runs, finish the saves that are under way, end the thread. Idempotent."""
        with self._lock:
            first, self._refusal = self._refusal is None, self._refusal or _CLOSED
            self._cancelled |= dict.fromkeys(self._live.keys() - self._cancelled.keys(), self._clock())
            self._flag.set()
            if first:
                self._inbox.put(self._stop)
        if self._thread.ident is not None:
            self._thread.join()

    def check_integrity(self) -> None:
        """Raises AssertionError when a block leaked. Only between runs: nothing live, or the loop closed."""
        self._stepper.check_integrity()

    # -------------------------------------------------------------------------- service.ports.Engine

    def submit(self, spec: SequenceSpec, emit: Emit) -> None:
        """See `service.ports.Engine`. Raises `InvalidRequest` for an empty prompt, `InvalidStateError` for an
        id in use."""
        self._check_size(spec)
        self._check_memory()
        hashes = block_hashes(spec.token_ids, spec.salt)
        with self._lock:
            self._check_open()
            if spec.seq_id in self._live:
                raise InvalidStateError(f"A sequence with the id {spec.seq_id} is running.")
            waiting = sum(not s.admitted and s.service_class == spec.service_class for s in self._live.values())
            if waiting >= self._limits.queue:
                raise Overloaded(
                    f"{waiting} requests of this class are waiting already.", hint="Try again in a moment."
                )
            self._serial += 1
            sequence = EngineSequence(spec, emit, hashes, self._serial, self._clock())
            self._live[spec.seq_id] = sequence
            self._arriving[spec.seq_id] = sequence
            self._inbox.put(partial(self._arrive, sequence))

    def cancel(self, seq_id: str) -> None:
        """See `service.ports.Engine`."""
        with self._lock:
            if seq_id not in self._live:
                return
            if seq_id not in self._cancelled:
                self._cancelled[seq_id] = self._clock()
            if self._step_is_moot():
                self._flag.set()
            elif seq_id in self._step:
                self._flag.wake()
            self._inbox.put(self._end_cancelled)

    def cached(self, token_ids: Sequence[int], salt: bytes) -> CachedTokens:
        """See `service.ports.Engine`. Whole blocks only."""
        return self._stepper.lookup(block_hashes(token_ids, salt))

    def forget(self, owner: str) -> int:
        """See `service.ports.Engine`. Waits for the step and the saves under way; not from an `emit`."""
        answer: Future[int] = Future()
        with self._lock:
            self._check_open()
            self._answers.add(answer)
            self._inbox.put(partial(self._forget, owner, answer))
        try:
            return answer.result()
        finally:
            with self._lock:
                self._answers.discard(answer)

    def stats(self) -> EngineStats:
        """See `service.ports.Engine`. As of the last step or cancel, and what arrived since. A cancelled sequence
        counts until it has left and given its blocks back."""
        with self._lock:
            arriving = list(self._arriving.values())
            queued = sum(s.target for s in arriving if s.service_class == ServiceClass.P0_INTERACTIVE)
            documents = sum(s.target for s in arriving if s.service_class == ServiceClass.P1_DOCUMENT)
            now = self._published
            return EngineStats(
                now.running,
                now.waiting + len(arriving),
                now.queued_prefill_tokens + queued,
                now.free_blocks,
                now.total_blocks,
                now.queued_document_tokens + documents,
            )

    @property
    def alive(self) -> bool:
        """See `service.ports.Engine`. Started, not closed, and not stopped by a fault of its own."""
        return self._refusal is None

    def _check_open(self) -> None:
        """Raises `InternalError` for a broken engine: unlike a closing one it won't come back by waiting."""
        if self._refusal == _BROKEN:
            raise InternalError(_BROKEN, hint="Restart the server; its log says what happened.")
        if self._refusal is not None:
            raise Overloaded(self._refusal, hint="Try again in a moment.")

    def kv_use(self) -> KVUse:
        """Bytes of KV by tier, and how pressed for memory it is. From any thread."""
        return self._stepper.kv_use()

    def health(self) -> EngineHealth:
        """What the health view is made of. From any thread."""
        return self._stepper.health()

    def attention_steps(self, count: int) -> list[StepFigures]:
        """The newest decode steps that attention debug measured, oldest first. From any thread."""
        return self._stepper.debug.steps(count)

    def debug_attention(self, on: bool) -> None:
        """Switch attention debug on or off, from the next step on. From any thread."""
        self._stepper.debug.switch(on)

    def _check_memory(self) -> None:
        """Refuse beside running work only: on an idle engine a new sequence takes the place of what is cached."""
        use = self.kv_use()
        if use.level is Pressure.RED and self._live:
            raise Overloaded(
                f"KV takes {use.share:.0%} of the memory that it may have, so no new work is taken.",
                hint="Try again in a moment; if it stays so, lower kv_cache.ram or give the machine more memory.",
            )

    def _check_size(self, spec: SequenceSpec) -> None:
        tokens, capacity = len(spec.token_ids), self._stepper.capacity(spec)
        if not tokens:
            raise InvalidRequest("The prompt is empty.", hint="Send at least one token.")
        if tokens + (not spec.prefill_only) > capacity:
            raise ContextTooLong(
                f"The prompt has {tokens:,} tokens and must leave room for an answer; the limit is {capacity:,}.",
                hint="Shorten it, raise `kv_cache.ram` if that is smaller than the model's window, "
                "or let `context_policy: auto` choose passages.",
            )

    # --------------------------------------------------------------------------- the engine thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            self._finish_moves()
            self._drain()  # the last saves give their blocks back
            self._publish()
        except Exception:  # a fault of the engine itself: nothing it says can be trusted any more
            _LOG.exception("the engine stopped")
            self._break()

    def _finish_moves(self) -> None:
        self._loader.shutdown()
        self._saver.shutdown()

    def _turn(self) -> None:
        self._drain()
        self._flag.clear()  # of the last step; a cancel that comes now is found by asking
        plan = None if self._stopping else self._stepper.plan(self._flag)
        self._publish()
        if plan is None:
            self._stepper.relieve()
            self._wait()
            return
        self._begin(plan)
        self._stepper.execute(plan, self._flag)
        with self._lock:
            self._step, self._gone = set(), set()
        self._publish()

    def _wait(self) -> None:
        """Sleep until a message, or until a load is late or idle KV wants a look."""
        due = [s for s in (self._stepper.next_deadline_s(), self._stepper.next_relief_s()) if s is not None]
        timeout = max(0.0, min(due) - self._clock()) if due else None
        if self._stopping:
            return
        try:
            message = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return
        message()

    def _drain(self) -> None:
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            message()

    def _begin(self, plan: StepPlan) -> None:
        with self._lock:
            self._step = {piece.seq_id for piece in plan.slices}
            self._flag.clear()
            if self._step_is_moot():
                self._flag.set()

    def _step_is_moot(self) -> bool:
        """Nobody waits for anything in the running step."""
        return bool(self._step) and self._step <= self._gone | self._cancelled.keys()

    def _left(self) -> Set[str]:
        """Called by the runtime, inside a step: end what was cancelled, and say which of the step's sequences have
        left it."""
        if self._cancelled:
            self._end_cancelled()
        return self._gone

    def _end_cancelled(self) -> None:
        """End every cancelled sequence, wherever it is; inside a step too: their blocks come back now."""
        with self._lock:
            since = dict(self._cancelled)
            if not since:
                return
            arriving = [self._arriving[seq_id] for seq_id in since if seq_id in self._arriving]
            self._gone |= self._step & since.keys()
        for sequence in arriving:
            self._arrive(sequence)
        for seq_id, cancelled_s in since.items():
            self._stepper.cancel(seq_id)
            self._telemetry.observe("engine_cancel_seconds", self._clock() - cancelled_s)
        self._telemetry.gauge("engine_last_cancel_timestamp_seconds", time.time())
        self._publish()

    def _publish(self) -> None:
        stats = self._stepper.stats()
        with self._lock:
            self._published = stats

    def _arrive(self, sequence: EngineSequence) -> None:
        if self._arriving.get(sequence.seq_id) is not sequence:  # cancelled before it was taken in
            return
        self._stepper.add(sequence)
        stats = self._stepper.stats()
        with self._lock:
            del self._arriving[sequence.seq_id]
            self._published = stats

    def _ended(self, sequence: EngineSequence) -> None:
        with self._lock:
            del self._live[sequence.seq_id]
            self._cancelled.pop(sequence.seq_id, None)

    def _forget(self, owner: str, answer: Future[int]) -> None:
        done = self._stepper.forget(owner)
        done.add_done_callback(partial(_pass_on, answer))

    def _stop(self) -> None:
        self._stepper.stop(FinishReason.CANCELLED)
        self._stopping = True

    def _break(self) -> None:
        with self._lock:
            self._refusal = _BROKEN
            live, self._live = list(self._live.values()), {}
            self._arriving.clear()
        self._finish_moves()
        with self._lock:
            answers = list(self._answers)
        for answer in answers:
            if not answer.done():
                answer.set_exception(InternalError(_BROKEN, hint="Restart the server; its log says what happened."))
        for sequence in live:
            try:
                sequence.emit(EngineFinished(sequence.seq_id, FinishReason.ERROR, _BROKEN))
            except Exception:  # the next listener still has to hear of it
                _LOG.exception("a listener of engine events failed")


def _pass_on(answer: Future[int], done: Future[int]) -> None:
    error = done.exception()
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(done.result())
