"""Runs the engine's own scheduler, policies and bookkeeping in virtual time (spec E12). No torch, no sleeping.

Knows the stepper, a formula for what a step takes (`step_cost`) and a list of requests. What it says is always
simulated: the scheduler, its policy, block pool and prefix cache are the server's objects; the runtime, disks and
clients are not there. Randomness is the caller's: the same requests give the same outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from perilune.core import (
    BLOCK_TOKENS,
    EngineEvent,
    EngineFinished,
    EngineToken,
    FinishReason,
    SamplingParams,
    SequenceSpec,
)
from perilune.engine.observe import EngineObserver, NullObserver
from perilune.engine.policy import EngineLimits
from perilune.engine.scheduling import SchedulingPolicy
from perilune.engine.sequence import EngineSequence
from perilune.engine.step_cost import StepCost, shape_of
from perilune.engine.stepper import Stepper
from perilune.engine.traces import TraceRequest
from perilune.errors import InternalError
from perilune.runtime.kv.spec import KVSpec
from perilune.runtime.mri import (
    CancelFlag,
    Capabilities,
    EvictReply,
    KVSummary,
    KVTiers,
    StepPlan,
    StepResult,
)
from perilune.telemetry import Telemetry

WARM_UP_TOKENS, WARM_UP_S = 384, 3600.0
"""A prompt before the first request, and how long before it."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Machine:
    """What is simulated: speed, blocks of KV, window in tokens, and the engine's limits."""

    name: str
    cost: StepCost
    blocks: int
    window_tokens: int
    limits: EngineLimits


@dataclass(slots=True)
class Outcome:
    """What became of a request. `ttft_s` is None where no token came; `spent_tokens` is what was computed for it,
    all repetitions counted; `told_late`: that it would miss its deadline was known before anything was computed."""

    request: TraceRequest
    planned: TraceRequest  # as it was submitted
    ttft_s: float | None = None
    end_s: float | None = None
    reason: FinishReason | None = None  # None: still there when the simulation ended, or refused
    refused: bool = False
    spent_tokens: int = 0
    told_late: bool = False

    @property
    def done(self) -> bool:
        return self.reason in (FinishReason.STOP, FinishReason.LENGTH)

    def within(self, seconds: float) -> bool:
        return self.ttft_s is not None and self.ttft_s <= seconds


class SimulatedRuntime:
    """A `ModelRuntime` that only lets time pass."""

    capabilities = Capabilities(kv_bytes=False)
    kv_spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=2, dtype="bf16", fingerprint="simulated")
    tiers: KVTiers | None = None

    def __init__(self, machine: Machine, disturb: Callable[[float, float], float]) -> None:
        self._machine = machine
        self._disturb = disturb
        self.now = 0.0
        self.spent_tokens: dict[str, int] = {}

    @property
    def num_blocks(self) -> int:
        return self._machine.blocks

    @property
    def max_context_tokens(self) -> int:
        return self._machine.window_tokens

    def init_context(self, seq_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        self.spent_tokens[seq_id] = 0

    def release_context(self, seq_id: str) -> None:
        """Nothing was allocated."""

    def forward_step(self, plan: StepPlan, cancelled: CancelFlag) -> StepResult:
        self.now += self._disturb(self.now, self._machine.cost.seconds(shape_of(plan)))
        for piece in plan.slices:
            self.spent_tokens[piece.seq_id] += len(piece.token_ids)
        return StepResult({piece.seq_id: 0 for piece in plan.slices if piece.sample}, {})

    def evict_kv(self, block_ids: Sequence[int]) -> EvictReply:
        return EvictReply(len(block_ids))

    def get_kv_summary(self) -> KVSummary:
        return KVSummary(self.num_blocks, self.kv_spec.block_bytes, 0)

    def block_view(self, block_id: int) -> memoryview:
        return memoryview(b"")

    def close(self) -> None:
        """Nothing is held."""


class _Inline:
    """A worker that does things at once; without stores there is nothing slow to do."""

    def submit(self, fn: Callable[[], _T], /) -> Future[_T]:
        future: Future[_T] = Future()
        future.set_result(fn())
        return future


def undisturbed(now: float, seconds: float) -> float:
    return seconds


def unplanned(request: TraceRequest) -> TraceRequest:
    return request


def unwatched(outcome: Outcome) -> None:
    """Nobody wants to know."""


@dataclass(slots=True)
class Simulation:
    """One run. `observer` is told of steps, as the predictor is in the server. `disturb` turns (now, predicted
    seconds) of a step into what it takes, `judge` the work that the engine predicts of a request into what it
    believes: both for errors and drift. `plan` decides on arrival how a request is submitted, and `first_token` is
    told of the first token of each."""

    machine: Machine
    policy: SchedulingPolicy
    disturb: Callable[[float, float], float] = undisturbed
    judge: Callable[[float], float] = float
    plan: Callable[[TraceRequest], TraceRequest] = unplanned
    first_token: Callable[[Outcome], None] = unwatched
    observer: EngineObserver = field(default_factory=NullObserver)
    runtime: SimulatedRuntime = field(init=False)
    stepper: Stepper = field(init=False)
    _outcomes: dict[str, Outcome] = field(default_factory=dict)
    _sequences: dict[str, EngineSequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runtime = SimulatedRuntime(self.machine, self.disturb)
        self.stepper = Stepper(
            self.runtime,
            None,
            self.machine.limits,
            loader=_Inline(),
            saver=_Inline(),
            post=lambda call: call(),
            ended=lambda sequence: None,
            clock=lambda: self.runtime.now,
            telemetry=Telemetry(),
            observer=self.observer,
            free_bytes=lambda: 1 << 50,
            policy=self.policy,
        )
        self._warm_up()

    def _warm_up(self) -> None:
        """As the server does before its first request: so rates are measured ones from the beginning."""
        self.runtime.now = -WARM_UP_S
        spec = SequenceSpec("warm-up", range(WARM_UP_TOKENS), b"", SamplingParams(), 2)
        self.stepper.add(EngineSequence(spec, lambda event: None, [], 0, self.runtime.now))
        while (plan := self.stepper.plan(CancelFlag())) is not None:
            self.stepper.execute(plan, CancelFlag())
        self.runtime.now = 0.0

    def run(self, requests: Sequence[TraceRequest], end_s: float = float("inf")) -> list[Outcome]:
        """Play requests, in order of arrival, until all have ended or `end_s`. Raises `InternalError` when the
        engine stands still though somebody waits: a deadlock."""
        outcomes = [Outcome(request, request) for request in requests]
        flag, runtime, next_one = CancelFlag(), self.runtime, 0
        while runtime.now < end_s:
            while next_one < len(requests) and requests[next_one].arrival_s <= runtime.now:
                self._arrive(f"r{next_one}", outcomes[next_one])
                next_one += 1
            plan = self.stepper.plan(flag)
            if plan is not None:
                self._note(plan)
                self.stepper.execute(plan, flag)
            else:
                due = [self.stepper.next_deadline_s(), *(r.arrival_s for r in requests[next_one : next_one + 1])]
                times = [at for at in due if at is not None]
                if not times:
                    break
                runtime.now = max(runtime.now, min(times))
        if runtime.now < end_s and self.stepper.sequences:
            raise InternalError("The simulated engine stands still though requests wait.")
        for seq_id, outcome in self._outcomes.items():
            outcome.spent_tokens = runtime.spent_tokens.get(seq_id, 0)
        return outcomes

    def _arrive(self, seq_id: str, outcome: Outcome) -> None:
        request = outcome.planned = self.plan(outcome.request)
        waiting = sum(not s.admitted and s.service_class == request.service_class for s in self.stepper.sequences)
        room = self.machine.window_tokens - request.new_tokens
        if waiting >= self.machine.limits.queue or request.prompt_tokens > room:
            outcome.refused = True
            return
        names = request.block_names()
        spec = SequenceSpec(
            seq_id,
            range(request.prompt_tokens),
            b"",
            SamplingParams(),
            request.new_tokens,
            service_class=request.service_class,
            shared_tokens=len(names) * BLOCK_TOKENS,
            tenant=request.tenant,
            deadline_s=request.deadline_s,
            ttl_s=request.ttl_s,
        )
        self._outcomes[seq_id] = outcome
        sequence = EngineSequence(
            spec, partial(self._event, outcome), names, len(self._outcomes), request.arrival_s
        )
        self._sequences[seq_id] = sequence
        self.stepper.add(sequence)
        sequence.work_s = self.judge(sequence.work_s)

    def _note(self, plan: StepPlan) -> None:
        for piece in plan.slices:
            if not self.runtime.spent_tokens[piece.seq_id]:
                self._outcomes[piece.seq_id].told_late = self._sequences[piece.seq_id].late

    def _event(self, outcome: Outcome, event: EngineEvent) -> None:
        if isinstance(event, EngineToken) and outcome.ttft_s is None:
            outcome.ttft_s = self.runtime.now - outcome.request.arrival_s
            self.first_token(outcome)
        elif isinstance(event, EngineFinished):
            outcome.end_s, outcome.reason = self.runtime.now, event.reason
            self._sequences.pop(event.seq_id, None)
