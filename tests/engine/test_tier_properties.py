"""The engine's properties with tiers: no slot, frame or block leaks, every row reads what its position says, and
no answer is wrong, whatever arrives, ends, fails, moves or is lost on disk."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from perilune.core import KVPolicy, ServiceClass
from tests.engine.harness import Bench, Listener, spec, text
from tests.engine.test_engine_properties import EngineMachine
from tests.engine.tiered import FakeTiers
from tests.fakes import MemoryKVStore, expected_tokens

LENGTHS = st.sampled_from([1, 64, 127, 128, 129, 200, 256, 257, 384, 500, 641])


class TierMachine(EngineMachine):
    @initialize(
        blocks=st.integers(16, 48),
        batch=st.integers(1, 4),
        chunk=st.sampled_from([32, 100, 1000]),
        disk=st.sampled_from(["none", "blocks", "both"]),
        warm=st.integers(6, 9),
        cold=st.integers(0, 4),
        warm_tokens=st.sampled_from([0, 128, 1000]),
    )
    def start(self, blocks: int, batch: int, chunk: int, disk: str, warm: int, cold: int, warm_tokens: int) -> None:
        self.failing = False
        self.store = MemoryKVStore() if disk != "none" else None
        self.segment_store = MemoryKVStore() if disk == "both" else None
        self.tiers = FakeTiers(warm, cold)
        self.bench = Bench(
            self.store,
            num_blocks=blocks,
            batch=batch,
            chunk_tokens=chunk,
            prefill_s=0.001,
            decode_s=0.01,
            fail=self.fails,
            tiers=self.tiers,
            segment_store=self.segment_store,
            warm_tokens=warm_tokens,
        )
        self.listeners: dict[str, Listener] = {}
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.capacities: dict[str, int] = {}
        self.cancelled: set[str] = set()

    @rule(
        document=st.integers(1, 2),
        length=LENGTHS,
        question=st.sampled_from([0, 5, 40]),
        new=st.integers(1, 90),
        service_class=st.sampled_from(ServiceClass),
        shared=st.booleans(),
        owner=st.sampled_from([None, "one", "two"]),
        only_prefill=st.booleans(),
        salt=st.just(b"a"),
        policy=st.sampled_from([KVPolicy.TIERED, KVPolicy.TIERED, KVPolicy.FULL]),
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
        policy: KVPolicy,
    ) -> None:
        prompt = text(document, length) + text(10 + question, question)
        seq_id = f"s{len(self.prompts)}"
        wanted = spec(
            seq_id,
            prompt,
            new=new,
            shared=length if shared else 0,
            owner=owner,
            ingest=only_prefill,
            service_class=service_class,
            salt=salt + policy.encode(),
            kv_policy=policy,
        )
        capacity = self.bench.stepper.capacity(wanted)
        if len(prompt) + 1 > capacity or len(self.prompts) > 25:
            return
        self.prompts[seq_id] = (prompt, 0 if only_prefill else new)
        self.capacities[seq_id] = capacity
        self.listeners[seq_id] = self.bench.add(wanted)

    @rule(which=st.integers(0, 30))
    def lose_part_of_a_segment(self, which: int) -> None:
        if self.segment_store is not None and which < len(self.segment_store._blocks):
            del self.segment_store._blocks[list(self.segment_store._blocks)[which]]

    def capacity(self, seq_id: str) -> int:
        return self.capacities[seq_id]

    def check_disk(self) -> None:
        """What was saved is right in another engine, too."""
        fresh = Bench(self.store, num_blocks=64, tiers=FakeTiers(12, 0), segment_store=self.segment_store)
        for number in (1, 2):
            prompt = text(number, 641)
            for policy in KVPolicy:
                listener = fresh.answer(
                    spec(f"{number}{policy}", prompt, new=2, salt=b"a" + policy.encode(), kv_policy=policy)
                )
                assert listener.tokens == expected_tokens(prompt, 2)


TierMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestTieredEngine = TierMachine.TestCase
