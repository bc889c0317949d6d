"""Chooses how a request is answered (spec C2): a pure function from facts to a plan.

Knows token counts, measured rates and deadlines; does no I/O, reads no clock, needs no torch. The simulator calls
the same function.

Fidelity of a plan, in [0, 1]: the share of the offered context that is attended exactly, plus, for the rest,
`RETRIEVED_WORTH` where a search over all of it chose the passages and 0 where it was dropped. (The worth is a
constant until retrieval confidence is calibrated, spec M10.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from perilune.core import BLOCK_TOKENS, CachedTokens, ContextPolicy, Degradation, Plan, PlanKind
from perilune.errors import ContextTooLong
from perilune.service.rates import Rates

RETRIEVED_WORTH = 0.5
MIN_PASSAGE_TOKENS = 256
"""A refined context holds at least this much material, even when that makes it late."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known before a request runs. All counts are tokens.

    `prompt` is the prompt with everything offered in it; `stable` is its part that later questions share (all but
    the question); `required` is the prompt with no optional context: instructions, question, template.
    `complete` is false while a document is still being read. `refinable` says that something may be left out
    (documents or older turns); `searched` that what is left out was at least searched. A deadline is met where the
    prediction holds in `quantile` of cases. Of what a refined context could hold it gets `budget_share`.
    """

    policy: ContextPolicy
    deadline_s: float
    elapsed_s: float
    window: int
    answer: int
    prompt: int
    stable: int
    required: int
    cached: CachedTokens
    complete: bool
    refinable: bool
    searched: bool
    queued: int
    rates: Rates
    reserve_s: float
    quantile: float = 0.9
    budget_share: float = 1.0

    @property
    def fits(self) -> bool:
        return self.complete and self.prompt + self.answer <= self.window


def choose(facts: Facts) -> Plan:
    """The plan of highest fidelity whose predicted TTFT meets the deadline; else the best that comes soonest.

    Raises `ContextTooLong` when the offered context can't be served under the policy.
    """
    plan = _late_if_late(facts, _chosen(facts))
    return replace(plan, bound_ttft_s=stretched_s(facts, plan.predicted_ttft_s))


def _chosen(facts: Facts) -> Plan:
    if facts.policy is ContextPolicy.FULL or not facts.refinable:
        _require_fit(facts)
        return _whole(facts)
    if facts.required + facts.answer > facts.window:
        raise too_long(facts.required, facts)
    if facts.fits and (facts.policy is ContextPolicy.AUTO or not facts.searched):
        # (Pinned 'refined' without documents has nothing to retrieve from: all of it is the best selection.)
        whole, refined = _whole(facts), _refined(facts)
        saves = refined.context_tokens < facts.prompt  # else passages would be as long as the whole
        if meets(facts, whole) or whole.predicted_ttft_s <= refined.predicted_ttft_s or not saves:
            return whole
        return refined
    return _refined(facts)


def meets(facts: Facts, plan: Plan) -> bool:
    """Whether a plan's first token is in time in as many cases as are asked for."""
    return stretched_s(facts, plan.predicted_ttft_s) <= facts.deadline_s


def stretched_s(facts: Facts, ttft_s: float) -> float:
    """A predicted TTFT at the quantile that is asked for; what has passed already is certain."""
    return facts.elapsed_s + (ttft_s - facts.elapsed_s) * facts.rates.factor(facts.quantile)


def refined_budget(facts: Facts) -> int:
    """Tokens that a refined prompt may hold: what prefills within the deadline less the reserve, in the window."""
    queue_s = facts.queued * facts.rates.prefill_s_per_token
    seconds = facts.deadline_s - facts.reserve_s - facts.elapsed_s - queue_s
    timely = facts.rates.tokens_within(seconds)
    floor = facts.required + MIN_PASSAGE_TOKENS
    most = min(timely, facts.window - facts.answer, max(facts.prompt, floor))
    return min(max(int(most * facts.budget_share), floor), facts.window - facts.answer)


def too_long(needed: int, facts: Facts) -> ContextTooLong:
    return ContextTooLong(
        f"The prompt needs {needed:,} tokens and {facts.answer:,} for the answer; the model's window is "
        f"{facts.window:,} tokens.",
        hint=_hint(facts),
        param="messages",
    )


def _hint(facts: Facts) -> str:
    if facts.policy is ContextPolicy.FULL and facts.refinable:
        return (
            "Send less, choose a model with a longer window, or allow context_policy 'auto' or 'refined', "
            "which answer from the best passages."
        )
    return "Send less, or choose a model with a longer window."


def _require_fit(facts: Facts) -> None:
    if not facts.fits:
        raise too_long(facts.prompt, facts)


def _whole(facts: Facts) -> Plan:
    cached = min(facts.cached.total, facts.prompt)
    uncached = facts.prompt - cached
    stable_blocks = facts.stable // BLOCK_TOKENS * BLOCK_TOKENS
    if cached == 0:
        kind = PlanKind.FULL
    elif cached >= stable_blocks:
        kind = PlanKind.WARM
    else:
        kind = PlanKind.RESUME
    ttft = facts.rates.ttft_s(uncached, cached, facts.cached.disk, facts.queued)
    return Plan(
        kind=kind,
        deadline_s=facts.deadline_s,
        predicted_ttft_s=facts.elapsed_s + ttft,
        fidelity=1.0,
        context_tokens=facts.prompt,
        uncached_tokens=uncached,
    )


def _refined(facts: Facts) -> Plan:
    budget = refined_budget(facts)
    ttft = facts.rates.ttft_s(budget, 0, 0, facts.queued)
    exact = min(1.0, budget / max(facts.prompt, 1)) if facts.complete else 0.0
    worth = RETRIEVED_WORTH if facts.searched else 0.0
    return Plan(
        kind=PlanKind.REFINED,
        deadline_s=facts.deadline_s,
        predicted_ttft_s=facts.elapsed_s + ttft,
        fidelity=exact + (1 - exact) * worth,
        context_tokens=budget,
        uncached_tokens=budget,
        degradations=(_why_refined(facts, budget),),
    )


def _why_refined(facts: Facts, budget: int) -> Degradation:
    what = (
        f"the best passages ({budget:,} tokens at most)"
        if facts.searched
        else f"the newest turns ({budget:,} tokens at most)"
    )
    if facts.policy is ContextPolicy.REFINED:
        return Degradation("refined", f"context_policy 'refined' was asked for: answered from {what}.")
    if not facts.complete:
        return Degradation("refined", f"The document is still being read: answered from {what}.")
    if facts.prompt + facts.answer > facts.window:
        return Degradation(
            "over_window",
            f"{facts.prompt:,} tokens were offered and the model's window is {facts.window:,}: "
            f"answered from {what}.",
        )
    return Degradation(
        "deadline",
        f"Reading all {facts.prompt:,} tokens would miss the deadline of {facts.deadline_s:g} s: "
        f"answered from {what}.",
    )


def _late_if_late(facts: Facts, plan: Plan) -> Plan:
    if plan.predicted_ttft_s <= facts.deadline_s:
        return plan
    late = Degradation(
        "late",
        f"The answer is expected after {plan.predicted_ttft_s:.1f} s; the deadline is {facts.deadline_s:g} s.",
    )
    return replace(plan, degradations=(*plan.degradations, late))
