"""Drives an engine in a test: step by step without threads (`Bench`), or through its thread (`Listener`)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from perilune.core import (
    DEFAULT_TENANT,
    EngineEvent,
    EngineFinished,
    EngineProgress,
    EngineToken,
    FinishReason,
    KVPolicy,
    SamplingParams,
    SequenceSpec,
    ServiceClass,
)
from perilune.engine.observe import LoadObservation, StepObservation
from perilune.engine.policy import EngineLimits
from perilune.engine.scheduling import SchedulingPolicy
from perilune.engine.sequence import EngineSequence
from perilune.engine.stepper import Stepper, TierPolicy
from perilune.kernels.tiers import AttentionPolicy
from perilune.runtime.kv.spec import block_hashes
from perilune.runtime.kv.store import KVStore
from perilune.runtime.mri import CancelFlag, StepPlan
from perilune.telemetry import Telemetry
from tests.engine.tiered import FAKE_WINDOW, FakeTiers, TieredRuntime
from tests.fakes import FakeRuntime

SALT = b"tenant-salt"
T = TypeVar("T")


def text(name: int, tokens: int) -> list[int]:
    """A document: token ids that no other `name` has at any place."""
    return [name * 10_000 + position for position in range(tokens)]


def spec(
    seq_id: str,
    tokens: Sequence[int],
    *,
    new: int = 4,
    shared: int | None = None,
    owner: str | None = None,
    persist: int | None = None,
    ingest: bool = False,
    service_class: ServiceClass = ServiceClass.P0_INTERACTIVE,
    salt: bytes = SALT,
    stop: frozenset[int] = frozenset(),
    kv_policy: KVPolicy = KVPolicy.FULL,
    tenant: str = DEFAULT_TENANT,
    deadline_s: float | None = None,
    ttl_s: float | None = None,
) -> SequenceSpec:
    return SequenceSpec(
        seq_id,
        tokens,
        salt,
        SamplingParams(),
        0 if ingest else new,
        stop,
        service_class,
        len(tokens) if shared is None else shared,
        owner,
        persist,
        ingest,
        kv_policy,
        tenant=tenant,
        deadline_s=deadline_s,
        ttl_s=ttl_s,
    )


def ingest(seq_id: str, tokens: Sequence[int], owner: str | None = None) -> SequenceSpec:
    return spec(seq_id, tokens, owner=owner or seq_id, ingest=True, service_class=ServiceClass.P2_BATCH)


class Listener:
    """Collects a sequence's events with the time of each; `wait` blocks until the last one."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self.times: list[float] = []
        self._finished = threading.Event()
        self._first_token = threading.Event()

    def __call__(self, event: EngineEvent) -> None:
        assert self.finish is None, "an event after the last one"
        self.times.append(time.monotonic())
        self.events.append(event)
        if isinstance(event, EngineToken):
            self._first_token.set()
        if isinstance(event, EngineFinished):
            self._finished.set()

    def wait(self, timeout_s: float = 20.0) -> FinishReason:
        assert self._finished.wait(timeout_s), f"not finished: {self.events[-3:]}"
        assert self.finish is not None
        return self.finish.reason

    def wait_token(self, timeout_s: float = 20.0) -> None:
        assert self._first_token.wait(timeout_s)

    @property
    def finish(self) -> EngineFinished | None:
        last = self.events[-1] if self.events else None
        return last if isinstance(last, EngineFinished) else None

    @property
    def reason(self) -> FinishReason | None:
        return self.finish.reason if self.finish else None

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, EngineToken)]

    @property
    def progress(self) -> list[EngineProgress]:
        return [event for event in self.events if isinstance(event, EngineProgress)]

    @property
    def cached(self) -> tuple[int, int]:
        """Tokens found in RAM and on disk."""
        return self.progress[-1].cached_ram_tokens, self.progress[-1].cached_disk_tokens


class ManualWorker:
    """An executor whose calls run when the test says so, in order."""

    def __init__(self) -> None:
        self.calls: deque[Callable[[], None]] = deque()

    def submit(self, fn: Callable[[], T], /) -> Future[T]:
        future: Future[T] = Future()
        self.calls.append(lambda: future.set_result(fn()))
        return future

    def run(self) -> None:
        while self.calls:
            self.calls.popleft()()


class Watcher:
    """An `EngineObserver` that keeps everything."""

    def __init__(self) -> None:
        self.steps: list[StepObservation] = []
        self.loads: list[LoadObservation] = []

    def step(self, observation: StepObservation) -> None:
        self.steps.append(observation)

    def load(self, observation: LoadObservation) -> None:
        self.loads.append(observation)


class Bench:
    """A `Stepper` with a virtual clock that the runtime's work moves; I/O waits for `loader` and `saver`."""

    def __init__(
        self,
        store: KVStore | None = None,
        *,
        num_blocks: int = 64,
        window: int = 16_000,
        prefill_s: float = 0.0,
        decode_s: float = 0.0,
        fail: Callable[[StepPlan], bool] = lambda plan: False,
        tiers: FakeTiers | None = None,
        segment_store: KVStore | None = None,
        warm_tokens: int = 1 << 20,
        policy: SchedulingPolicy | None = None,
        **limits: float,
    ) -> None:
        self.now = 0.0
        make = FakeRuntime if tiers is None else TieredRuntime
        self.runtime = make(num_blocks, window, prefill_s=prefill_s, decode_s=decode_s, fail=fail, sleep=self.sleep)
        if tiers is not None:
            tiers.attach(self.runtime)
        self.loader, self.saver, self.watcher = ManualWorker(), ManualWorker(), Watcher()
        self.ended: list[str] = []
        self.flag = CancelFlag()
        self.limits = EngineLimits(**limits)  # type: ignore[arg-type]
        self.stepper = Stepper(
            self.runtime,
            store,
            self.limits,
            loader=self.loader,
            saver=self.saver,
            post=lambda call: call(),
            ended=lambda sequence: self.ended.append(sequence.seq_id),
            clock=lambda: self.now,
            telemetry=Telemetry(),
            observer=self.watcher,
            segment_store=segment_store,
            tier_policy=TierPolicy(warm_tokens, {"general": AttentionPolicy(window_tokens=FAKE_WINDOW)}),
            policy=policy,
        )
        self._serial = 0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def add(self, wanted: SequenceSpec) -> Listener:
        listener = Listener()
        self._serial += 1
        hashes = block_hashes(wanted.token_ids, wanted.salt)
        self.stepper.add(EngineSequence(wanted, listener, hashes, self._serial, self.now))
        return listener

    def step(self) -> StepPlan | None:
        """One step, with every invariant checked around it."""
        plan = self.stepper.plan(self.flag)
        self.stepper.check_integrity()
        if plan is not None:
            assert sum(len(p.token_ids) for p in plan.slices if len(p.token_ids) > 1) <= self.limits.chunk_tokens
            assert len(plan.slices) <= self.limits.batch
            self.stepper.execute(plan, self.flag)
            self.stepper.check_integrity()
        return plan

    def run(self, steps: int = 2000) -> None:
        """Until nothing is left to do, I/O included."""
        for _ in range(steps):
            if self.step() is None and not self.loader.calls and not self.saver.calls:
                due_s = self.stepper.next_deadline_s()
                if due_s is None:
                    break
                self.now = max(self.now, due_s)
            self.loader.run()
            self.saver.run()
        assert self.stepper.stats().running == self.stepper.stats().waiting == 0
        self.check_idle()

    def answer(self, wanted: SequenceSpec) -> Listener:
        listener = self.add(wanted)
        self.run()
        return listener

    def check_idle(self) -> None:
        """Nothing runs: no block is referenced, no context open, and the runtime never saw wrong KV."""
        pool = self.stepper.pool
        assert pool.available == pool.total
        segments = self.stepper.segments
        if segments is not None:
            assert segments.pool.available == segments.pool.total
            assert isinstance(self.runtime.tiers, FakeTiers)
            self.runtime.tiers.check_frames(segments.pool.cached)
        assert not self.runtime.open_contexts
        assert not self.runtime.faults, self.runtime.faults[:3]
