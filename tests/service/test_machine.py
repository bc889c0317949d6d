"""The machine's view: figures, and warnings in words where something doesn't fit or runs slowly."""

from __future__ import annotations

from pathlib import Path

import pytest

from perilune.config import Settings
from perilune.service.checks import BASE_BYTES
from perilune.service.machine import LoadedFacts, Machine
from perilune.service.model import ServedModel
from perilune.service.predictor import Predictor
from perilune.telemetry import Telemetry

NATIVE = "native avx512, 2 threads on libgomp.so.1"
FREE = 4 * 1024**3


def machine(home: Path, free: int = FREE, kernels: str = NATIVE, trained: int = 8192) -> Machine:
    settings = Settings(home=home, kv_cache={"disk_quota": "1M"})  # type: ignore[arg-type]
    model = ServedModel("m", 8192, "MIT", 0, 100, languages=frozenset({"zh", "en"}), file_bytes=90)
    facts = LoadedFacts(135_000_000, trained, 1024**3, 9_000, kernels, 2)
    return Machine(settings, model, facts, Predictor(home / "rates.json", Telemetry(), 1), lambda: free)


def test_everything_in_order(tmp_path: Path) -> None:
    view = machine(tmp_path).view()
    assert view["warnings"] == []
    assert (view["fit"], view["kernels"]) == ("ok", {"path": NATIVE, "native": True})
    assert view["model"]["parameters"] == 135_000_000
    assert view["model"]["languages"] == ["en", "zh"]
    assert view["memory"]["free_bytes"] == FREE < view["memory"]["total_bytes"] * 100
    assert view["rates"]["measured"] is False
    assert view["rates"]["prefill_tokens_per_s"] > view["rates"]["decode_tokens_per_s"] > 0
    assert view["rates"]["tokens_within_deadline"] > 0


@pytest.mark.parametrize(
    ("changes", "says", "fit"),
    [
        ({"free": BASE_BYTES - 1}, "Memory: 500 MiB free", "tight"),
        ({"trained": 10_000}, "KV holds 9,000 tokens, less than the model's window of 10,000", "tight"),
        ({"kernels": "PyTorch reference (no library)"}, "Kernels: PyTorch reference", "ok"),
    ],
)
def test_warnings(tmp_path: Path, changes: dict[str, object], says: str, fit: str) -> None:
    view = machine(tmp_path, **changes).view()  # type: ignore[arg-type]
    (warning,) = view["warnings"]
    assert says in warning
    assert view["fit"] == fit
    wrong = [check for check in view["checks"] if check["state"] != "ok"]
    assert wrong[0]["fix"]
