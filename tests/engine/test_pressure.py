"""KV pressure, adaptive windows and presets: rules on numbers (spec R7, R8, R12)."""

from __future__ import annotations

import threading

import pytest

from perilune.core import KVPolicy
from perilune.engine.hot_zone import HotZone
from perilune.engine.loop import EngineLoop
from perilune.engine.policy import EngineLimits
from perilune.engine.pressure import Counts, KVUse, Pressure, PressureGauge
from perilune.errors import Overloaded
from perilune.kernels.tiers import SegmentLayout
from perilune.runtime.kv.spec import KVSpec, TierSpec
from perilune.service.presets import choose, presets
from tests.engine.harness import Bench, Listener, spec, text
from tests.engine.tiered import FakeTiers
from tests.fakes import FakeRuntime, expected_tokens

KV = KVSpec(30, 3, 64, "bf16", "smollm2")
LAYOUT = SegmentLayout(30, 3, 64)
TIERS = TierSpec(90, LAYOUT.segment_summary_bytes, LAYOUT.segment_payload_bytes, 64, 32, 32)


def gauge(free: int, tiers: TierSpec | None = TIERS) -> PressureGauge:
    return PressureGauge(KV, tiers, lambda: free, lambda: 0.0)


def test_warm_compresses_as_promised() -> None:
    use = gauge(1 << 34).measure(Counts(66, 0, 33, 31, 66 * 32))
    assert 0.65 < use.warm_compression < 0.75
    assert use.warm_bytes == 33 * LAYOUT.segment_payload_bytes
    assert use.cold_bytes == 31 * LAYOUT.segment_payload_bytes
    assert use.summary_bytes == 64 * LAYOUT.segment_summary_bytes
    assert use.fragmentation == 0
    assert use.level is Pressure.GREEN


def test_levels_follow_measured_memory() -> None:
    block = KV.block_bytes
    assert gauge(block * 20).measure(Counts(80, 0)).level is Pressure.ORANGE
    assert gauge(block * 10).measure(Counts(90, 0)).level is Pressure.RED
    assert gauge(block * 10).measure(Counts(10, 80)).level is Pressure.GREEN, "what nobody uses can be had back"
    assert gauge(block * 20, None).measure(Counts(80, 0)).level is Pressure.GREEN, (
        "full KV has no hot zone to shrink"
    )


def test_red_ends_lower_than_it_began() -> None:
    measured = gauge(KV.block_bytes * 20, None)
    measured.use = KVUse(level=Pressure.RED)
    assert measured.measure(Counts(80, 0)).level is Pressure.RED
    assert measured.measure(Counts(77, 0)).level is Pressure.RED
    assert measured.measure(Counts(70, 0)).level is Pressure.GREEN


def test_blocks_given_back_count_as_room() -> None:
    """Their pages stay this process's, so the system doesn't call them free."""
    measured = gauge(KV.block_bytes * 10, None)
    measured.measure(Counts(300, 0))
    assert measured.measure(Counts(60, 0)).level is Pressure.GREEN


def test_red_refuses_new_work_beside_running_work(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, end = EngineLoop(FakeRuntime(), None, EngineLimits()), threading.Event()
    engine.start()
    monkeypatch.setattr(engine._stepper, "kv_use", lambda: KVUse(100, limit_bytes=110, level=Pressure.RED))
    # An idle engine takes work, or it might refuse for ever. This listener keeps it running.
    engine.submit(spec("first", text(1, 10)), lambda _: bool(end.wait(10)))
    with pytest.raises(Overloaded, match="91%") as refused:
        engine.submit(spec("a", text(1, 10)), Listener())
    assert refused.value.hint
    end.set()
    engine.close()


def test_pressure_demotes_what_is_idle_and_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = FakeTiers(warm=8, cold=8)
    bench = Bench(tiers=tiers)
    bench.answer(spec("first", text(1, 600), kv_policy=KVPolicy.TIERED))
    monkeypatch.setattr(bench.stepper, "kv_use", lambda: KVUse(level=Pressure.RED))
    listener = bench.add(spec("other", text(2, 300), new=40, kv_policy=KVPolicy.TIERED))
    bench.run()
    assert tiers.moves >= 4
    assert listener.tokens == expected_tokens(text(2, 300), 40)
    again = bench.answer(spec("again", text(1, 600) + text(3, 3), kv_policy=KVPolicy.TIERED))
    assert again.tokens == expected_tokens(text(1, 600) + text(3, 3), 4)


def row(exact: float, selected: float, summary: float, border: float, entropy: float) -> list[list[float]]:
    return [[0.0] * 6, [exact, selected, summary, border, entropy, 100.0]]


def test_a_window_grows_while_mass_is_missing_at_its_border() -> None:
    zone = HotZone(1024)
    for _ in range(11):
        assert zone.observe(row(0.5, 0.2, 0.3, 0.25, 0.1)) == 1024
    assert zone.observe(row(0.5, 0.2, 0.3, 0.25, 0.1)) == 1536
    for _ in range(60):
        zone.observe(row(0.5, 0.2, 0.3, 0.25, 0.1))
    assert zone.window_tokens == 4096


@pytest.mark.parametrize("figures", [(0.5, 0.2, 0.3, 0.01, 0.1), (0.97, 0.01, 0.02, 0.02, 0.1)])
def test_a_window_stays_where_growing_would_not_help(figures: tuple[float, ...]) -> None:
    zone = HotZone(1024)
    for _ in range(40):
        zone.observe(row(*figures))
    assert zone.window_tokens == 1024


def test_a_window_goes_back_when_attention_spreads() -> None:
    zone = HotZone(1024)
    for _ in range(20):
        zone.observe(row(0.5, 0.2, 0.3, 0.25, 0.1))
    assert zone.window_tokens > 1024
    for _ in range(10):
        zone.observe(row(0.3, 0.2, 0.5, 0.3, 0.95))
    assert zone.window_tokens == 1024


def test_presets_are_those_of_the_specification() -> None:
    named = presets(1024, 64, 1.0)
    figures = {name: (p.window_tokens, p.topk_units, p.summary_weight) for name, p in named.items()}
    assert figures["support"] == (512, 32, 0.4)
    assert figures["contract"] == (1024, 64, 0.7)
    assert figures["paper"] == (2048, 128, 0.3)
    assert figures["general"] == (1024, 64, 1.0)
    assert "rag" in figures
    assert figures["peak"] == (1024, 32, 0.0)


@pytest.mark.parametrize(
    ("names", "refined", "turns", "expected"),
    [
        (["lease_agreement.pdf"], False, 1, "contract"),
        (["采购合同.docx"], False, 1, "contract"),
        (["2402.02750.pdf"], False, 1, "paper"),
        (["notes.md"], False, 1, "general"),
        (["lease_agreement.pdf"], True, 1, "rag"),
        ([], False, 9, "support"),
        ([], False, 1, "general"),
    ],
)
def test_auto_goes_by_the_kind_of_document(names: list[str], refined: bool, turns: int, expected: str) -> None:
    assert choose(names, refined=refined, turns=turns) == expected
