"""Whatever arrives, ends, fails or is cancelled, in whatever order: no block leaks, nobody starves, no answer
is wrong."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from perilune.core import FinishReason, ServiceClass
from perilune.engine.compare import POLICIES
from perilune.runtime.mri import StepPlan
from tests.engine.harness import Bench, Listener, spec, text
from tests.fakes import MemoryKVStore, expected_tokens

# Few documents and odd lengths, so that prompts share prefixes and end inside blocks.
LENGTHS = st.sampled_from([1, 2, 31, 33, 64, 65, 96, 130, 200, 257])
PATIENCE = 2000
"""Steps within which the oldest of the highest class must end, whatever is before it: 25 sequences at most."""


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(10, 40),
        batch=st.integers(1, 5),
        chunk=st.sampled_from([32, 64, 100, 1000]),
        disk=st.booleans(),
        policy=st.sampled_from(sorted(POLICIES)),
        idle_s=st.sampled_from([0.0, 0.01]),
    )
    def start(self, blocks: int, batch: int, chunk: int, disk: bool, policy: str, idle_s: float) -> None:
        self.failing = False
        self.store = MemoryKVStore() if disk else None
        self.bench = Bench(
            self.store,
            num_blocks=blocks,
            batch=batch,
            chunk_tokens=chunk,
            prefill_s=0.001,
            decode_s=0.01,
            fail=self.fails,
            policy=POLICIES[policy](),
            idle_s=idle_s,
        )
        self.listeners: dict[str, Listener] = {}
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.cancelled: set[str] = set()

    def fails(self, plan: StepPlan) -> bool:
        failing, self.failing = self.failing, False
        return failing

    @rule(
        document=st.integers(1, 3),
        length=LENGTHS,
        question=st.sampled_from([0, 5, 40]),
        new=st.integers(1, 60),
        service_class=st.sampled_from(ServiceClass),
        shared=st.booleans(),
        owner=st.sampled_from([None, "one", "two"]),
        only_prefill=st.booleans(),
        salt=st.sampled_from([b"a", b"b"]),
        tenant=st.sampled_from(["ann", "bob", "cy"]),
        deadline_s=st.sampled_from([None, 0.0, 0.05, 0.5, 3600.0]),
        ttl_s=st.sampled_from([None, None, 0.1, 5.0]),
    )
    def arrive(
        self,
        document: int,
        length: int,
        question: int,
        new: int,
        service_class: ServiceClass,
        shared: bool,
        owner: str | None,
        only_prefill: bool,
        salt: bytes,
        tenant: str,
        deadline_s: float | None,
        ttl_s: float | None,
    ) -> None:
        prompt = text(document, length) + text(10 + question, question)
        if len(prompt) + 1 > self.bench.stepper.capacity_tokens or len(self.prompts) > 25:
            return
        seq_id = f"s{len(self.prompts)}"
        self.prompts[seq_id] = (prompt, 0 if only_prefill else new)
        self.listeners[seq_id] = self.bench.add(
            spec(
                seq_id,
                prompt,
                new=new,
                shared=length if shared else 0,
                owner=owner,
                ingest=only_prefill,
                service_class=service_class,
                salt=salt,
                tenant=tenant,
                deadline_s=deadline_s,
                ttl_s=ttl_s,
            )
        )

    @rule(steps=st.integers(1, 12))
    def work(self, steps: int) -> None:
        for _ in range(steps):
            self.bench.step()

    @rule()
    def load(self) -> None:
        self.bench.loader.run()

    @rule()
    def save(self) -> None:
        self.bench.saver.run()

    @rule()
    def slow_disk(self) -> None:
        deadline = self.bench.stepper.next_deadline_s()
        if deadline is not None:
            self.bench.now = max(self.bench.now, deadline)

    @rule(number=st.integers(0, 25))
    def cancel(self, number: int) -> None:
        listener = self.listeners.get(f"s{number}")
        if listener is not None and listener.finish is None:
            self.bench.stepper.cancel(f"s{number}")
            assert listener.reason is FinishReason.CANCELLED

    @rule()
    def next_step_fails(self) -> None:
        self.failing = True

    @rule(owner=st.sampled_from(["one", "two"]))
    def forget(self, owner: str) -> None:
        self.bench.stepper.forget(owner)

    @precondition(lambda self: any(not w.finish for w in self.listeners.values()))
    @rule()
    def the_first_in_line_ends(self) -> None:
        """Nobody starves: however many wait, the oldest of the highest class ends soon."""
        waiting = [s for s in self.bench.stepper.sequences if not self.listeners[s.seq_id].finish]
        first = min(waiting, key=lambda s: (s.service_class, s.serial))
        for _ in range(PATIENCE):
            if self.listeners[first.seq_id].finish:
                return
            if self.bench.step() is None:
                self.bench.loader.run()
                self.bench.saver.run()
                self.slow_disk()  # or somebody expires
        raise AssertionError(f"{first.seq_id} starves")

    @invariant()
    def blocks_add_up(self) -> None:
        self.bench.stepper.check_integrity()
        assert not self.bench.runtime.faults, self.bench.runtime.faults[:3]

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.failing = False
        self.bench.run()
        for seq_id, listener in self.listeners.items():
            prompt, new = self.prompts[seq_id]
            assert listener.finish is not None
            if listener.reason in (FinishReason.STOP, FinishReason.LENGTH):
                room = self.capacity(seq_id) - len(prompt)
                assert len(listener.tokens) == min(new, room)
            assert listener.tokens == expected_tokens(prompt, len(listener.tokens))
        if self.store is not None:
            self.check_disk()

    def capacity(self, seq_id: str) -> int:
        return self.bench.stepper.capacity_tokens

    def check_disk(self) -> None:
        """What was saved is right in another engine, too."""
        fresh = Bench(self.store, num_blocks=64)
        for number in (1, 2, 3):
            prompt = text(number, 257)
            for salt in (b"a", b"b"):
                listener = fresh.answer(spec(f"{number}{salt!r}", prompt, new=2, salt=salt))
                assert listener.tokens == expected_tokens(prompt, 2)


EngineMachine.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestEngine = EngineMachine.TestCase
