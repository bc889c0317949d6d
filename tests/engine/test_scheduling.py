"""The plain policies: order, who gives way, what of the blocks a class may hold."""

from __future__ import annotations

import pytest

from perilune.core import FinishReason, ServiceClass
from perilune.engine.compare import POLICIES
from perilune.engine.scheduling import EarliestDeadlineFirst, FirstComeFirstServed, StaticPriority
from perilune.engine.sequence import EngineSequence
from tests.engine.harness import Bench, Listener, spec, text

P0, P1, P2 = ServiceClass.P0_INTERACTIVE, ServiceClass.P1_DOCUMENT, ServiceClass.P2_BATCH


def sequence(
    serial: int,
    service_class: ServiceClass = P0,
    *,
    arrival_s: float = 0.0,
    deadline_s: float | None = None,
    blocks: int = 0,
    tenant: str = "ann",
) -> EngineSequence:
    wanted = spec(f"s{serial}", text(serial, 64), service_class=service_class, deadline_s=deadline_s, tenant=tenant)
    made = EngineSequence(wanted, Listener(), [], serial, arrival_s)
    made.block_table = list(range(blocks))
    return made


def test_orders() -> None:
    batch, late, soon = sequence(1, P2), sequence(2, P0, arrival_s=5.0), sequence(3, P1, deadline_s=1.0)
    for policy in (FirstComeFirstServed(), EarliestDeadlineFirst(), StaticPriority()):
        for each in (batch, late, soon):
            policy.queued(each)
    everybody = [soon, late, batch]
    assert FirstComeFirstServed().ordered(everybody, 0.0) == [batch, late, soon]
    assert EarliestDeadlineFirst().ordered(everybody, 0.0) == [soon, late, batch]
    assert StaticPriority().ordered(everybody, 0.0) == [late, soon, batch]


def test_the_youngest_of_the_lowest_class_gives_way_first() -> None:
    old, young, batch = sequence(1), sequence(3), sequence(2, P2)
    assert max([old, batch, young], key=StaticPriority().sacrifice) is batch
    assert max([old, young], key=StaticPriority().sacrifice) is young
    assert max([old, batch, young], key=FirstComeFirstServed().sacrifice) is young


def test_a_part_of_the_blocks_is_kept_for_p0() -> None:
    policy = StaticPriority(reserve=0.25)
    chat, document, other = sequence(1, P0, blocks=10), sequence(2, P1, blocks=30), sequence(3, P1)
    assert policy.quota(other, [chat, document], 100) == 75 - 30
    assert policy.quota(chat, [chat, document], 100) == 100
    assert policy.quota(other, [chat], 100) == 100, "the only one of the lower classes may have all there is"


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_prompt_larger_than_its_quota_is_served(name: str) -> None:
    bench = Bench(num_blocks=20, policy=POLICIES[name]())
    listener = bench.answer(spec("big", text(1, 19 * 32), new=2, service_class=P1))
    assert listener.reason is FinishReason.LENGTH


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_request_ends_with_its_time_to_live(name: str) -> None:
    bench = Bench(prefill_s=0.01, policy=POLICIES[name]())
    first = bench.add(spec("first", text(1, 640)))
    second = bench.add(spec("second", text(2, 640), service_class=P2, ttl_s=1.0))
    bench.run()
    assert first.reason is FinishReason.LENGTH
    assert second.reason is FinishReason.EXPIRED
    assert not second.tokens


def test_an_idle_engine_is_told_when_somebody_expires() -> None:
    """Else nobody would look: the thread sleeps until something is due."""
    bench = Bench(batch=1, num_blocks=16)
    bench.add(spec("first", text(1, 64), new=50))
    bench.add(spec("second", text(2, 64), ttl_s=3.0))
    bench.step()
    assert bench.stepper.next_deadline_s() == 3.0
    bench.now = 3.0
    bench.step()
    assert [s.seq_id for s in bench.stepper.sequences] == ["first"]
    bench.run()


def test_batch_work_may_use_steps_in_which_others_only_decode() -> None:
    for idle_s, beside in ((0.0, False), (0.05, True)):
        bench = Bench(prefill_s=0.001, decode_s=0.01, idle_s=idle_s)
        bench.add(spec("chat", text(1, 64), new=20))
        bench.step()
        bench.add(spec("batch", text(2, 320), service_class=P2, new=2))
        bench.run()
        mixed = [{p.seq_id for p in plan.slices} for plan in bench.runtime.plans]
        assert ({"chat", "batch"} in mixed) is beside
