"""Ratios, recorded peers and the JSON file: what the figures in the docs rest on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import report
from bench.cancel import percentile
from bench.driver import OURS, Reading
from bench.machine import Calibration
from bench.report import Bar, Options, Result


def reading(number: int, engine: str, rate: float, what: str = "prefill_2k", foreign: float = 0.0) -> Reading:
    return Reading(number, engine, what, tokens=2048, seconds=2048 / rate, foreign_share=foreign)


def test_a_ratio_is_taken_round_by_round() -> None:
    # A slow second round hits both engines: the ratio stays.
    readings = [
        reading(0, OURS, 900.0),
        reading(0, "llamacpp", 300.0),
        reading(1, OURS, 450.0),
        reading(1, "llamacpp", 150.0),
        reading(2, OURS, 900.0),  # the peer's turn is missing: this round doesn't count
        reading(0, "llamacpp", 1.0, what="prefill_8k"),
    ]
    assert report.ratios(readings, "llamacpp", "prefill_2k") == pytest.approx([3.0, 3.0])
    assert report.ratios(readings, "vllm", "prefill_2k") == []


def test_the_figure_is_the_median_and_the_spread_is_kept() -> None:
    result = Result("prefill", {}, {}, [])
    report.compare(result, "vs_llamacpp_2k", [3.0, 1.0, 10.0])
    report.compare(result, "vs_llamacpp_8k", [])
    assert result.figures == {"vs_llamacpp_2k": 3.0, "vs_llamacpp_8k": None}
    assert result.spread == {"vs_llamacpp_2k": (1.0, 10.0)}


def test_a_recorded_peer_is_scaled_to_the_machine_and_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RECORDED", tmp_path / "recorded")
    then = Calibration(gemm_gflops=400.0, read_gb_s=30.0)
    disturbed = reading(2, "llamacpp", 9.0, foreign=0.5)  # is not kept
    quiet = [reading(0, "llamacpp", 100.0), reading(1, "llamacpp", 300.0), reading(0, OURS, 999.0)]
    report.record([*quiet, disturbed], then)
    assert [path.name for path in (tmp_path / "recorded").iterdir()] == ["llamacpp.json"]

    half = Calibration(gemm_gflops=200.0, read_gb_s=30.0)
    scaled = report.recorded_readings("llamacpp", "prefill_2k", "gemm_gflops", half, rounds=2)
    assert [r.rate for r in scaled] == pytest.approx([100.0, 100.0])  # median 200 on a machine half as fast
    assert all(r.recorded for r in scaled)
    same = report.recorded_readings("llamacpp", "prefill_2k", "read_gb_s", half, rounds=1)
    assert same[0].rate == pytest.approx(200.0)
    assert report.recorded_readings("llamacpp", "decode_8k", "read_gb_s", half, rounds=1) == []
    assert report.recorded_readings("vllm", "prefill_2k", "gemm_gflops", half, rounds=1) == []


def test_recording_one_size_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RECORDED", tmp_path)
    calibration = Calibration(400.0, 30.0)
    report.record([reading(0, "vllm", 430.0)], calibration)
    report.record([reading(0, "vllm", 24.0, what="decode_8k")], calibration)
    kept = json.loads((tmp_path / "vllm.json").read_text(encoding="utf-8"))["readings"]
    assert set(kept) == {"prefill_2k", "decode_8k"}


def test_the_json_file_has_the_agreed_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out" / "result.json"
    result = Result(
        "prefill", {"vs_vllm_2k": 1.2}, {"cpu": "test", "foreign_share": 0.4}, [], recorded=True, quick=True
    )
    options = Options(quick=True, json_file=file, rounds=5, record=False, engines=())
    report.finish(result, {"vs_vllm_2k": Bar(at_least=1.3)}, options)
    written = json.loads(file.read_text(encoding="utf-8"))
    assert {"name", "figures", "machine", "runs"} <= set(written)
    assert written["recorded"] is True
    printed = capsys.readouterr().out
    assert "not a quiet run" in printed
    assert "NOT met (recorded peer: not an acceptance)" in printed


@pytest.mark.parametrize(
    ("bar", "value", "met"),
    [
        (Bar(at_least=3.0), 3.0, True),
        (Bar(at_least=3.0), 2.99, False),
        (Bar(at_most=50.0), 50.0, True),
        (Bar(at_most=50.0), 50.1, False),
        (Bar(at_least=1), True, True),
        (Bar(at_least=1), False, False),
    ],
)
def test_bars(bar: Bar, value: float, met: bool) -> None:
    assert bar.met(value) is met


def test_percentiles_are_nearest_rank() -> None:
    values = [float(v) for v in range(1, 105)]
    assert percentile(values, 0.99) == 103.0  # two of 104 may not exceed it: rank ceil(102.96)
    assert percentile(values, 0.5) == 52.0
    assert percentile([7.0], 0.99) == 7.0


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(SystemExit):
        report.parse_options("test", ["--engines", "nobody"], engines=("perilune",))
