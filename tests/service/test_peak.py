"""Less work at the peak: hysteresis, whose it is, smaller contexts, and that answers say so."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from perilune.core import ContextPolicy, Planned, ServiceClass
from perilune.service import presets
from perilune.service.peak import Peak
from perilune.service.rates import Rates
from perilune.telemetry import Telemetry
from tests.service.harness import Bench, request, running
from tests.service.test_service import BOOK, codes

P0, P1 = ServiceClass.P0_INTERACTIVE, ServiceClass.P1_DOCUMENT
RATES = Rates(1e-3, 0.0, 0.0, 0.01, 0.01, 0.0)


def test_a_peak_ends_later_than_it_begins() -> None:
    peak = Peak(10.0, [P0], Telemetry())
    assert [peak.cuts(P0, queued_s) for queued_s in (9.0, 10.0, 6.0, 4.9, 9.0)] == [False, True, True, False, False]
    assert not peak.cuts(P1, 20.0)
    assert peak.cuts(P0, 6.0)


@given(st.floats(0, 1e6))
def test_nobody_is_cut_where_nobody_is_named(queued_s: float) -> None:
    assert not Peak(10.0, [], Telemetry()).cuts(P0, queued_s)


async def asked(bench: Bench, file_id: str, queued: int, preset: str | None = None) -> tuple[int, set[str], str]:
    """Tokens of the context, degradations, attention preset."""
    bench.predictor._rates = RATES
    bench.engine.queued_tokens = queued
    question = "What is the secret number of topic17?"
    made = request(question, files=(file_id,), deadline_s=60.0, policy=ContextPolicy.REFINED)
    events = [event async for event in bench.service.run(replace(made, attention_preset=preset))]
    (planned,) = [event for event in events if isinstance(event, Planned)]
    return planned.plan.context_tokens, codes(events), bench.engine.specs[-1].preset


async def test_contexts_shrink_and_answers_say_so() -> None:
    async with running(rates=RATES, peak_classes=(P0,), peak_queue_s=10.0) as bench:
        file_id = await bench.upload(BOOK)
        usual, said, preset = await asked(bench, file_id, 0)
        assert (said, preset) == ({"refined"}, "rag")
        cut, said, preset = await asked(bench, file_id, 12_000)
        assert cut <= usual * 0.55
        assert said == {"refined", "peak"}
        assert preset == presets.PEAK
        again, said, _ = await asked(bench, file_id, 6_000)
        assert again <= usual * 0.55
        assert "peak" in said
        _, said, preset = await asked(bench, file_id, 12_000, "contract")
        assert preset == "contract"
        after, said, _ = await asked(bench, file_id, 4_000)
        assert "peak" not in said
        assert after > cut


async def test_other_classes_get_what_they_had() -> None:
    async with running(rates=RATES, peak_classes=(P1,)) as bench:
        file_id = await bench.upload(BOOK)
        _, said, _ = await asked(bench, file_id, 60_000)
        assert "peak" not in said
