"""Our policy: who can be in time, who is given up, ageing, fair shares."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core import BLOCK_TOKENS, FinishReason, ServiceClass
from perilune.engine.compare import POLICIES, figures
from perilune.engine.deadlines import DeadlinePolicy, DeadlineSettings
from perilune.engine.fairness import INPUT_WEIGHT, OUTPUT_WEIGHT, TokenService
from perilune.engine.policy import EngineLimits
from perilune.engine.sequence import EngineSequence
from perilune.engine.simulator import Machine, Simulation
from perilune.engine.step_cost import LinearCost
from perilune.engine.traces import TraceRequest
from tests.engine.harness import Listener, spec, text

P0, P1, P2 = ServiceClass.P0_INTERACTIVE, ServiceClass.P1_DOCUMENT, ServiceClass.P2_BATCH
COST = LinearCost(0.002, 0.0001, 0.0, 0.001, 0.0)
"""10,000 prompt tokens a second."""
MACHINE = Machine("test", COST, 2000, 32_000, EngineLimits(batch=16, queue=10_000, guard_s=0.1, solo_s=0.2))


def waiting(
    policy: DeadlinePolicy,
    serial: int,
    work_s: float,
    deadline_s: float,
    *,
    arrival_s: float = 0.0,
    tenant: str = "ann",
    service_class: ServiceClass = P1,
) -> EngineSequence:
    wanted = spec(f"s{serial}", text(serial, 64), deadline_s=deadline_s, tenant=tenant, service_class=service_class)
    made = EngineSequence(wanted, Listener(), [], serial, arrival_s)
    made.expected_tokens, made.work_s = 64, work_s
    policy.queued(made)
    return made


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.5, 20)), min_size=1, max_size=6))
def test_as_many_are_in_time_as_can_be(jobs: list[tuple[float, float]]) -> None:
    policy = DeadlinePolicy(DeadlineSettings(margin=0.0))
    made = [waiting(policy, serial, *job) for serial, job in enumerate(jobs)]
    policy.ordered(made, 0.0)
    kept = [s for s in made if not s.late]
    assert feasible([(s.work_s, s.due_s) for s in kept])
    assert len(kept) == max(
        size for size in range(len(jobs) + 1) for some in combinations(jobs, size) if feasible(some)
    )


def feasible(jobs: object) -> bool:
    end_s = 0.0
    for work_s, due_s in sorted(jobs, key=lambda job: job[1]):  # type: ignore[call-overload]
        end_s += work_s
        if end_s > due_s - 1e-9:
            return False
    return True


def test_who_is_in_time_goes_before_who_is_late_and_classes_before_all() -> None:
    policy = DeadlinePolicy()
    lost = waiting(policy, 1, 50.0, 30.0)
    document = waiting(policy, 2, 5.0, 30.0, arrival_s=0.5)
    chat = waiting(policy, 3, 4.0, 3.0, arrival_s=0.9, service_class=P0)
    batch = waiting(policy, 4, 0.1, 30.0, service_class=P2)
    assert policy.ordered([batch, lost, document, chat], 1.0) == [chat, document, lost, batch]
    assert chat.late
    assert lost.late
    assert not document.late


def test_short_ones_go_first_until_somebody_would_be_late() -> None:
    policy = DeadlinePolicy()
    long, short = waiting(policy, 1, 10.0, 30.0), waiting(policy, 2, 1.0, 31.0, arrival_s=1.0)
    assert policy.ordered([long, short], 1.0) == [short, long]
    policy = DeadlinePolicy()
    long, short = waiting(policy, 1, 24.0, 30.0), waiting(policy, 2, 1.0, 31.0, arrival_s=1.0)
    assert policy.ordered([long, short], 1.0) == [long, short]


def test_a_long_prompt_does_not_hold_short_chats_up() -> None:
    """The fast lane: with and without prompts of 30,000 tokens of the same class beside them."""
    chance, now_s = random.Random(3), 0.0
    chats: list[TraceRequest] = []
    while (now_s := now_s + chance.expovariate(1.0)) < 120.0:
        chats.append(TraceRequest(now_s, chance.randrange(50, 2000), 4, P0, deadline_s=5.0))
    long = [TraceRequest(at, 30_000, 4, P0, deadline_s=5.0) for at in (10.0, 40.0, 41.0, 90.0)]

    def p95_s(requests: list[TraceRequest], lane_tokens: int) -> float:
        policy = DeadlinePolicy(DeadlineSettings(lane_tokens=lane_tokens))
        outcomes = Simulation(MACHINE, policy).run(sorted(requests, key=lambda each: each.arrival_s))
        found = sorted(o.ttft_s for o in outcomes if o.ttft_s is not None and o.request.prompt_tokens < 4096)
        assert len(found) == len(chats)
        return found[int(0.95 * len(found))]

    alone_s, beside_s, without_s = p95_s(chats, 4096), p95_s([*chats, *long], 4096), p95_s([*chats, *long], 0)
    assert beside_s <= alone_s + MACHINE.limits.solo_s
    assert beside_s < without_s


def test_what_is_given_up_does_not_look_like_slowness() -> None:
    """Else a burst that is refused would make everybody after it look late, too, for ever."""
    burst = [TraceRequest(0.001 * n, 20_000, 4, P1, deadline_s=10.0) for n in range(200)]
    after = [TraceRequest(30.0 + 2.5 * n, 20_000, 4, P1, deadline_s=10.0) for n in range(40)]
    policy = DeadlinePolicy(DeadlineSettings(late="refuse"))
    outcomes = Simulation(MACHINE, policy).run([*burst, *after])
    assert sum(o.within(10.0) for o in outcomes[: len(burst)]) >= 3
    assert sum(o.within(10.0) for o in outcomes[len(burst) :]) >= 38


@given(st.floats(0, 1e6), st.sampled_from([P1, P2]))
def test_ageing_never_inverts_classes(now: float, lower: ServiceClass) -> None:
    policy = DeadlinePolicy(DeadlineSettings(patience=1.0))
    old = waiting(policy, 1, 1.0, 1.0, service_class=lower)
    young = waiting(policy, 2, 100.0, 1.0, arrival_s=now, service_class=P0)
    assert policy.ordered([old, young], now)[0] is young


def overload(seconds: float, share_of_long: float = 0.2) -> list[TraceRequest]:
    """P1 of twice what the machine can do, one in five long."""
    chance, now_s, made = random.Random(7), 0.0, []
    while now_s < seconds:
        now_s += chance.expovariate(3.5)
        tokens = 20_000 if chance.random() < share_of_long else 2_000
        made.append(TraceRequest(now_s, tokens, 4, P1, f"t{chance.randrange(3)}", 10.0))
    return made


def test_nobody_starves_under_lasting_overload() -> None:
    """Who is late comes to an end as long as others keep coming, and most are in time all the same."""
    policy = DeadlinePolicy(DeadlineSettings(patience=2.0))
    outcomes = Simulation(MACHINE, policy).run(overload(120.0), 120.0)
    old = [o for o in outcomes if o.request.arrival_s < 7.0]
    assert all(o.done for o in old)
    fixed = Simulation(MACHINE, POLICIES["fcfs"]()).run(overload(120.0), 120.0)
    assert figures(outcomes, p1_s=10.0)["p1_in_time"] > 0.6 > 0.2 > figures(fixed, p1_s=10.0)["p1_in_time"]


def test_without_ageing_somebody_would_starve() -> None:
    policy = DeadlinePolicy(DeadlineSettings(patience=1e9))
    outcomes = Simulation(MACHINE, policy).run(overload(120.0), 120.0)
    assert not all(o.done for o in outcomes if o.request.arrival_s < 7.0)


def test_what_cannot_be_in_time_is_refused_before_it_costs_anything() -> None:
    policy = POLICIES["deadline-refuse"]()
    outcomes = Simulation(MACHINE, policy).run(overload(60.0))
    refused = [o for o in outcomes if o.reason is FinishReason.EXPIRED]
    assert refused
    assert sum(o.spent_tokens == 0 for o in refused) > 0.9 * len(refused)
    assert all(2 * o.spent_tokens < o.request.prompt_tokens for o in refused)  # begun, and overtaken by others
    assert all(o.end_s - o.request.arrival_s < 10.6 for o in refused if o.end_s is not None)
    found = figures(outcomes, p1_s=10.0)
    served = figures(Simulation(MACHINE, DeadlinePolicy()).run(overload(60.0)), p1_s=10.0)
    assert found["missed_tokens"] < 0.10 < served["missed_tokens"]


def test_a_lone_request_that_must_be_late_is_served_where_late_ones_are() -> None:
    request = TraceRequest(0.0, 20_000, 4, P0, "ann", 0.5)
    assert Simulation(MACHINE, DeadlinePolicy()).run([request])[0].done
    refused = Simulation(MACHINE, POLICIES["deadline-refuse"]()).run([request])[0]
    assert refused.reason is FinishReason.EXPIRED


@pytest.mark.parametrize(("done", "ends"), [(32, False), (31, True)])
def test_what_is_begun_is_refused_at_its_deadline_unless_half_of_it_is_done(done: int, ends: bool) -> None:
    policy = DeadlinePolicy(DeadlineSettings(late="refuse"))
    begun = waiting(policy, 1, 4.0, 10.0)
    begun.computed, begun.started = done, True
    policy.served(begun, done, 0)
    assert (begun.end_s == begun.due_s) == ends
    assert policy.ordered([begun], 9.9) == ([] if ends else [begun])


def test_what_is_parked_counts_as_computed() -> None:
    parked = waiting(DeadlinePolicy(), 1, 4.0, 10.0)
    parked.parked = [parked.own_name(0)]
    assert parked.remaining_s == 4.0 * (64 - BLOCK_TOKENS) / 64


# --------------------------------------------------------------------------------------------- fair shares


def test_nobody_waits_for_the_answers_of_a_tenant_that_was_served_more() -> None:
    """The flood's answers, still being written, hold the memory; the other's prompt is begun all the same."""
    flood = [TraceRequest(0.0, 960, 1200, P1, "flood", 30.0) for _ in range(3)]
    quiet = TraceRequest(1.0, 1500, 4, P1, "quiet", 3.0)
    full = Machine("full", COST, 110, 3_000, EngineLimits(batch=16, queue=100, guard_s=0.1, solo_s=0.2))
    outcomes = Simulation(full, DeadlinePolicy()).run([*flood, quiet])
    assert outcomes[-1].within(1.0)
    assert all(o.done for o in outcomes)
    same = replace(quiet, tenant="flood")
    assert not Simulation(full, DeadlinePolicy()).run([*flood, same])[-1].within(1.0)


def test_who_has_half_of_what_waits_goes_after_the_others_within_one_longest_prompt() -> None:
    service = TokenService()
    for tenant in ("flood", "flood", "flood", "quiet"):
        service.enter(1, tenant, 100)
    assert service.crowding(1) == {"flood"}
    service.leave(1, "flood")
    assert not service.crowding(1)  # two of three are no flood
    service.enter(1, "flood", 100)
    service.charge(1, "quiet", 99, 0)
    assert service.crowding(1) == {"flood"}
    service.charge(1, "quiet", 1, 0)
    assert not service.crowding(1)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1000),
    tenants=st.integers(2, 3),
    policy=st.sampled_from(["deadline", "deadline-refuse"]),
    deadline_s=st.sampled_from([5.0, 3600.0]),
)
def test_service_of_backlogged_tenants_stays_within_the_bound(
    seed: int, tenants: int, policy: str, deadline_s: float
) -> None:
    # What is late and refused isn't work that waits: then nobody may be late.
    gap, bound = backlog(seed, tenants, policy, 3600.0 if policy == "deadline-refuse" else deadline_s)
    assert gap <= bound


def test_fcfs_breaks_the_bound() -> None:
    gap, bound = backlog(1, 2, "fcfs", 3600.0)
    assert gap > bound


def backlog(seed: int, tenants: int, policy: str, deadline_s: float) -> tuple[float, float]:
    """Everybody always has requests waiting, the first tenant from the start and a hundred of them. Returns the
    greatest difference of service in the end, and VTC's bound."""
    chance = random.Random(seed)
    blocks, longest, seconds = 100, 1_500, 2.5 * tenants
    limits = EngineLimits(batch=4, queue=10_000, guard_s=0.1, solo_s=0.2)
    requests = []
    for tenant in range(tenants):
        for number in range(100):
            at_s = 0.0 if tenant == 0 else 0.01 + seconds * number / 100
            size, new = chance.randrange(50, longest), chance.randrange(1, 30)
            requests.append(TraceRequest(at_s, size, new, P1, f"t{tenant}", deadline_s))
    requests.sort(key=lambda r: r.arrival_s)
    outcomes = Simulation(Machine("fair", COST, blocks, 2_000, limits), POLICIES[policy]()).run(requests, seconds)
    served = dict.fromkeys((f"t{tenant}" for tenant in range(tenants)), 0.0)
    for outcome in outcomes:
        request, spent = outcome.request, outcome.spent_tokens
        new_tokens = max(0, spent - request.prompt_tokens)
        served[request.tenant] += INPUT_WEIGHT * (spent - new_tokens) + OUTPUT_WEIGHT * new_tokens
    return max(served.values()) - min(served.values()), 2 * max(
        INPUT_WEIGHT * longest, OUTPUT_WEIGHT * blocks * BLOCK_TOKENS
    )


def test_what_a_tenant_did_not_use_is_saved_up_only_so_far() -> None:
    service = TokenService()
    service.enter(1, "busy", 100)
    service.charge(1, "busy", 5_000, 0)
    service.enter(1, "back", 40)
    assert service.served(1, "back") == 4_900
    assert service.ahead(1, 0.5) == {"busy"}
    assert not service.ahead(1, 1.0)
    service.leave(1, "back")
    service.leave(1, "busy")
    service.enter(1, "new", 40)
    assert service.served(1, "new") == 4_900


@pytest.mark.parametrize("share", [0.4, 0.9])
def test_a_flood_costs_the_others_little(share: float) -> None:
    chance = random.Random(3)
    quiet = [TraceRequest(2.0 * n, 3_000, 4, P1, f"q{n % 3}", 10.0) for n in range(30)]
    more = round(len(quiet) * share / (1 - share))
    flood = [TraceRequest(chance.uniform(0, 60), 9_000, 4, P1, "flood", 10.0) for _ in range(more)]
    mixed = sorted([*quiet, *flood], key=lambda r: r.arrival_s)
    outcomes = Simulation(MACHINE, DeadlinePolicy()).run(mixed)
    theirs = [o for o in outcomes if o.request.tenant != "flood"]
    assert sum(o.within(10.0) for o in theirs) >= 0.99 * len(theirs)
