"""The planner's promises, as properties over all facts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from perilune.core import CachedTokens, ContextPolicy, Plan, PlanKind
from perilune.errors import ContextTooLong
from perilune.service.planner import MIN_PASSAGE_TOKENS, Facts, choose, meets, refined_budget
from perilune.service.rates import Rates

RATES = Rates(1.4e-3, 1e-7, 3e-5, 0.02, 0.03, 0.1)


def facts(**changes: object) -> Facts:
    base = Facts(
        policy=ContextPolicy.AUTO,
        deadline_s=5.0,
        elapsed_s=0.0,
        window=8192,
        answer=256,
        prompt=4000,
        stable=3900,
        required=80,
        cached=CachedTokens(),
        complete=True,
        refinable=True,
        searched=True,
        queued=0,
        rates=RATES,
        reserve_s=1.0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


rates = st.builds(
    Rates,
    st.floats(1e-5, 1e-2),
    st.floats(0, 1e-6),
    st.floats(0, 1e-3),
    st.floats(0, 0.2),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
)


@st.composite
def any_facts(draw: st.DrawFn) -> Facts:
    prompt = draw(st.integers(20, 2_000_000))
    required = draw(st.integers(10, min(prompt, 6000)))
    ram = draw(st.integers(0, prompt // 32)) * 32
    disk = draw(st.integers(0, (prompt - ram) // 32)) * 32
    return Facts(
        policy=draw(st.sampled_from(ContextPolicy)),
        deadline_s=draw(st.floats(0.1, 600)),
        elapsed_s=draw(st.floats(0, 10)),
        window=draw(st.sampled_from([2048, 8192, 131072])),
        answer=256,
        prompt=prompt,
        stable=prompt - draw(st.integers(0, min(prompt, 64))),
        required=required,
        cached=CachedTokens(ram, disk),
        complete=draw(st.booleans()),
        refinable=draw(st.booleans()),
        searched=draw(st.booleans()),
        queued=draw(st.integers(0, 20_000)),
        rates=draw(rates),
        reserve_s=1.0,
    )


def attempt(f: Facts) -> Plan | ContextTooLong:
    try:
        return choose(f)
    except ContextTooLong as error:
        return error


@given(any_facts())
def test_a_plan_is_within_the_window_or_refused(f: Facts) -> None:
    outcome = attempt(f)
    if isinstance(outcome, ContextTooLong):
        assert f"{f.window:,}" in outcome.message
        assert outcome.hint
        return
    plan = outcome
    assert plan.context_tokens + f.answer <= f.window
    assert 0 <= plan.fidelity <= 1
    assert plan.uncached_tokens <= plan.context_tokens
    assert plan.predicted_ttft_s >= f.elapsed_s


@given(any_facts())
def test_pinned_full_never_leaves_anything_out(f: Facts) -> None:
    f = replace(f, policy=ContextPolicy.FULL)
    if not f.fits:
        with pytest.raises(ContextTooLong):
            choose(f)
        return
    plan = choose(f)
    assert plan.kind in (PlanKind.FULL, PlanKind.WARM, PlanKind.RESUME)
    assert plan.context_tokens == f.prompt
    assert plan.fidelity == 1.0
    assert {item.code for item in plan.degradations} <= {"late"}


@given(any_facts())
def test_pinned_refined_always_retrieves(f: Facts) -> None:
    f = replace(f, policy=ContextPolicy.REFINED, refinable=True, searched=True)
    assume(f.required + f.answer <= f.window)
    assert choose(f).kind is PlanKind.REFINED


@given(any_facts(), st.floats(1, 100))
def test_more_time_never_makes_an_answer_worse(f: Facts, more_s: float) -> None:
    try:
        soon = choose(f)
    except ContextTooLong:
        with pytest.raises(ContextTooLong):
            choose(replace(f, deadline_s=f.deadline_s + more_s))
        return
    later = choose(replace(f, deadline_s=f.deadline_s + more_s))
    assert later.fidelity >= soon.fidelity - 1e-9
    assert later.context_tokens >= soon.context_tokens


@given(any_facts())
def test_passages_are_never_chosen_where_they_are_as_long_as_the_whole(f: Facts) -> None:
    f = replace(f, policy=ContextPolicy.AUTO, complete=True)
    assume(f.fits)
    plan = choose(f)
    assert plan.kind is not PlanKind.REFINED or plan.context_tokens < f.prompt


@given(any_facts())
def test_a_timely_refined_plan_keeps_the_reserve(f: Facts) -> None:
    f = replace(f, policy=ContextPolicy.REFINED, refinable=True, searched=True)
    budget = refined_budget(f)
    assert budget <= f.window - f.answer
    if budget > f.required + MIN_PASSAGE_TOKENS:
        spent = f.elapsed_s + f.queued * f.rates.prefill_s_per_token + f.rates.prefill_s(budget)
        assert spent <= f.deadline_s - f.reserve_s + 1e-6


@given(any_facts())
def test_auto_reads_everything_exactly_when_that_is_in_time(f: Facts) -> None:
    f = replace(f, policy=ContextPolicy.AUTO, refinable=True)
    try:
        plan = choose(f)
    except ContextTooLong:
        return
    if plan.kind is not PlanKind.REFINED:
        assert f.fits
        if not meets(f, plan):
            refined = choose(replace(f, policy=ContextPolicy.REFINED, searched=True))
            assert plan.predicted_ttft_s <= refined.predicted_ttft_s, "less of the context, and no sooner"
    else:
        assert plan.degradations, "a refined answer says why"


@given(any_facts())
def test_a_late_plan_says_so(f: Facts) -> None:
    try:
        plan = choose(f)
    except ContextTooLong:
        return
    late = any(item.code == "late" for item in plan.degradations)
    assert late == (plan.predicted_ttft_s > f.deadline_s)


@given(any_facts())
def test_a_stricter_share_never_calls_more_plans_timely(f: Facts) -> None:
    try:
        plan = choose(replace(f, quantile=0.99))
    except ContextTooLong:
        return
    assert plan.bound_ttft_s >= plan.predicted_ttft_s - 1e-9
    assert meets(replace(f, quantile=0.99), plan) <= meets(replace(f, quantile=0.9), plan)
    assert meets(replace(f, quantile=0.99), plan) == (plan.bound_ttft_s <= f.deadline_s)


@given(rates, st.floats(0, 100))
def test_tokens_within_is_the_inverse_of_prefill(r: Rates, seconds: float) -> None:
    tokens = r.tokens_within(seconds)
    assert r.prefill_s(tokens) <= seconds * (1 + 1e-6) + 1e-9
    assert r.prefill_s(tokens + 2) >= seconds * (1 - 1e-6)


@pytest.mark.parametrize(
    ("cached", "kind"),
    [
        (CachedTokens(), PlanKind.FULL),
        (CachedTokens(320, 0), PlanKind.RESUME),
        (CachedTokens(0, 3872), PlanKind.WARM),
        (CachedTokens(3872, 96), PlanKind.WARM),
    ],
)
def test_the_kind_names_what_is_cached(cached: CachedTokens, kind: PlanKind) -> None:
    assert choose(facts(cached=cached, deadline_s=60)).kind is kind


def test_eight_thousand_cold_tokens_are_refined_to_about_what_four_seconds_prefill() -> None:
    plan = choose(facts(prompt=7680, stable=7600))
    assert plan.kind is PlanKind.REFINED
    assert 2000 < plan.context_tokens < 2857  # 4 s at 714 tokens/s and the square term
    assert [item.code for item in plan.degradations] == ["deadline"]
    assert choose(facts(prompt=7680, stable=7600, cached=CachedTokens(0, 7584))).kind is PlanKind.WARM


def test_over_the_window_is_refined_and_says_the_limit() -> None:
    plan = choose(facts(prompt=700_000, stable=0))
    assert plan.kind is PlanKind.REFINED
    assert plan.degradations[0].code == "over_window"
    assert "8,192" in plan.degradations[0].reason
    with pytest.raises(ContextTooLong, match="8,192") as caught:
        choose(facts(prompt=700_000, policy=ContextPolicy.FULL))
    assert "refined" in caught.value.hint


def test_a_queue_shrinks_the_context() -> None:
    assert choose(facts(prompt=7680, queued=1500)).context_tokens < choose(facts(prompt=7680)).context_tokens
