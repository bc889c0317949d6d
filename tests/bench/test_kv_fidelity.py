"""The end of bench.kv_fidelity: what was measured becomes figures, with the machine beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import kv_fidelity
from perilune.runtime.evaluate.kv_eval import KvReport
from perilune.runtime.evaluate.kv_tiers import Scale


def test_a_run_ends_in_a_result_that_says_how_busy_others_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measuring itself, minutes long, is tested with `perilune eval kv`; here it finds nothing."""
    nothing = KvReport("model", Scale(), None, (), (), ())
    monkeypatch.setattr(kv_fidelity, "evaluate_kv", lambda *_: nothing)
    monkeypatch.setattr(kv_fidelity, "model_gguf", lambda: tmp_path / "model.gguf")
    file = tmp_path / "result.json"
    kv_fidelity.main(["--quick", "--json", str(file)])
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["figures"] == dict.fromkeys(kv_fidelity.BARS)
    assert 0 <= result["machine"]["foreign_share"] <= 1
