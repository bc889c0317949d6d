"""The figures of the long benches: budgets of real text, and llama.cpp past what is measured of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.concurrency import NEW_TOKENS, PROMPT_TOKENS, check
from bench.driver import Reading
from bench.long_decode import LLAMACPP, SIZES, TIERED, extrapolated_s, figure
from bench.server import Answer, ServerError
from bench.synthetic_kv import MEASURED_POLICY, Selection


def step(engine: str, what: str, seconds: float, number: int = 0) -> Reading:
    return Reading(number, engine, what, tokens=4, seconds=4 * seconds, foreign_share=0.0)


def test_llamacpp_at_128k_lies_on_the_line_through_8k_and_32k() -> None:
    def line(tokens: int) -> float:
        return 0.01 + 2e-6 * tokens

    readings = [step(LLAMACPP, size, line(SIZES[size])) for size in ("8k", "16k", "32k")]
    readings += [step(TIERED, "128k", 0.02)]
    assert extrapolated_s(readings)[0] == pytest.approx(line(131_072))
    assert figure(readings, "vs_llamacpp_128k") == [pytest.approx(line(131_072) / 0.02)]


@pytest.mark.parametrize(("measured_s", "expected"), [(0.1, 5.0), (9.0, 13.6)])
def test_the_smaller_of_measured_and_extrapolated_stands(measured_s: float, expected: float) -> None:
    readings = [step(LLAMACPP, "8k", 0.032), step(LLAMACPP, "32k", 0.08), step(LLAMACPP, "128k", measured_s)]
    readings += [step(TIERED, "128k", 0.02)]
    assert figure(readings, "vs_llamacpp_128k") == [pytest.approx(expected)]


def test_itl_is_paired_round_by_round() -> None:
    # The second round is slow at both lengths; the sizes' own turns don't count.
    readings = [step(TIERED, "itl_8k", 0.010), step(TIERED, "itl_64k", 0.012), step(TIERED, "64k", 9.0)]
    readings += [step(TIERED, "itl_8k", 0.050, 1), step(TIERED, "itl_64k", 0.060, 1)]
    assert figure(readings, "itl_64k_over_8k") == pytest.approx([1.2, 1.2])


def record(folder: Path, layers: list[float], policy: dict[str, object] | None = None) -> Path:
    long = {"8000": [50.0, 70.0], "32000": [100.0, 140.0]}
    models = [{"units": {"8000": layers}}, {"units": long}]
    file = folder / "selection.json"
    kept = {"date": "2026-11-30", "policy": policy or asdict(MEASURED_POLICY), "models": models}
    file.write_text(json.dumps(kept), encoding="utf-8")
    return file


def test_budgets_grow_as_measured_and_within_the_policy(tmp_path: Path) -> None:
    found = Selection.load(record(tmp_path, [60.0, 60.0, 60.0, 200.0, 10.0]))
    assert (
        found.at(4096) == found.at(8000) == (128, 128, 60, 200, 32)
    )  # the first two layers have four times as much
    assert found.at(16_000) == pytest.approx((128, 128, 84.9, 256, 32), abs=0.1)
    assert found.at(128_000, first=2) == pytest.approx((240, 256, 40), abs=0.1)  # the line goes on


def test_budgets_whose_growth_is_unknown_stay_and_say_so(tmp_path: Path) -> None:
    file = record(tmp_path, [60.0, 60.0, 70.0])
    kept = json.loads(file.read_text(encoding="utf-8"))
    kept["models"].pop()
    file.write_text(json.dumps(kept), encoding="utf-8")
    found = Selection.load(file)
    assert found.at(8000) == found.at(131_072) == (128, 128, 70)
    assert "NOT measured" in found.note


def test_a_record_of_another_policy_says_so(tmp_path: Path) -> None:
    assert "ANOTHER" not in Selection.load(record(tmp_path, [60.0])).note
    other = asdict(MEASURED_POLICY) | {"top_p": 0.5}
    assert "ANOTHER" in Selection.load(record(tmp_path, [60.0], other)).note


def test_a_profiles_shares_are_its_layers_limits(tmp_path: Path) -> None:
    file = record(tmp_path, [60.0, 60.0, 60.0])
    kept = json.loads(file.read_text(encoding="utf-8"))
    kept["profiled"] = {"units": {"8000": [5.0, 60.0, 300.0]}, "shares": [0.25, 1.0, 2.0]}
    file.write_text(json.dumps(kept), encoding="utf-8")
    found = Selection.load(file, profiled=True)
    assert found.at(8000) == (8, 60, 300)  # at least a quarter of 32, at most twice 256
    assert found.at(128_000) == pytest.approx((20, 240, 512), abs=0.1)
    assert Selection.load(file).at(8000) == (128, 128, 60)


def test_a_stream_of_another_size_or_from_a_cache_is_refused() -> None:
    good = {"prompt_tokens": PROMPT_TOKENS + 9, "completion_tokens": NEW_TOKENS}
    check(Answer(usage=good))
    check(Answer(usage=good | {"prompt_tokens_details": {"cached_tokens": 31}}))
    for wrong in (
        {"completion_tokens": NEW_TOKENS - 1},
        {"prompt_tokens": 1900},
        {"prompt_tokens_details": {"cached_tokens": 512}},
    ):
        with pytest.raises(ServerError):
            check(Answer(usage=good | wrong))
