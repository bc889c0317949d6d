"""The rules of the health view on made-up figures: limits and what is not told. Planted faults: tests/engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perilune.config import KVCacheSettings, Settings
from perilune.engine.answer_lengths import AnswerLength
from perilune.engine.attention_debug import DebugSummary
from perilune.engine.health import EngineHealth
from perilune.engine.kv_tally import KVTally
from perilune.engine.pressure import KVUse, Pressure
from perilune.runtime.kv.spec import TierSpec
from perilune.service.kv_health import as_json, diagnose

SOUND = DebugSummary(20, 9000, 10.0, 3.0, 2.0, 0.5, 0.5, 4.0, 0.5, 0.0, 0.9, 50.0, 0.1)
TIERS = TierSpec(90, 1 << 20, 23 << 20, 12, 8, 4)
USE = KVUse(100, 500, 0, 50, warm_compression=0.71, limit_bytes=10_000)


def found(
    attention: DebugSummary | None = SOUND,
    use: KVUse = USE,
    answers: tuple[AnswerLength, ...] = (),
    settings: Settings | None = None,
) -> dict[str, str]:
    health = EngineHealth(use, KVTally(), TIERS, answers, True, attention)
    told = diagnose(health, settings or Settings())
    assert all(finding.cause.endswith(".") and finding.advice.endswith(".") for finding in told)
    return {finding.code: finding.setting for finding in told}


def test_nothing_is_wrong() -> None:
    assert found() == {}
    assert found(attention=None) == {}


@pytest.mark.parametrize(
    ("figures", "code", "setting"),
    [
        ({"local_attn_ms": 6.1}, "local_attention", "attention.window_size"),
        ({"sparse_attn_ms": 5.1}, "sparse_budget", "attention.sparse_topk"),
        ({"sparse_attn_ms": 5.1, "sparse_attn_hit_rate": 0.4}, "sparse_index", "kv_cache.policy"),
        ({"kv_cache_ms": 7.1, "stall_ms": 6.0}, "kv_cold", "kv_cache.warm_size"),
        ({"kv_cache_ms": 7.1}, "kv_upkeep", "kv_cache.hot_size"),
    ],
)
def test_shares_of_time(figures: dict[str, float], code: str, setting: str) -> None:
    assert found(replace(SOUND, **figures)) == {code: setting}
    below = {name: value - 0.2 if name.endswith("_ms") else value for name, value in figures.items()}
    assert found(replace(SOUND, **below)) == {}
    assert found(replace(SOUND, steps=3, **figures)) == {}, "too few steps for a claim"


def test_kv_without_compression_names_it() -> None:
    plain = Settings(kv_cache=KVCacheSettings(warm_compress=False))
    assert found(replace(SOUND, kv_cache_ms=7.1), settings=plain) == {"kv_upkeep": "kv_cache.warm_compress"}


def test_memory() -> None:
    assert found(use=replace(USE, warm_compression=0.6)) == {"warm_compression": "kv_cache.policy"}
    assert found(use=replace(USE, hot_bytes=1600)) == {"hot_share": "runtime.max_batch_size"}
    large = Settings(kv_cache=KVCacheSettings(hot_size=8192))
    assert found(use=replace(USE, hot_bytes=1600), settings=large) == {"hot_share": "kv_cache.hot_size"}
    assert found(use=replace(USE, hot_bytes=1600, idle_bytes=200)) == {}, "what is merely cached gives way"
    assert found(use=replace(USE, level=Pressure.RED)) == {"memory": "kv_cache.ram"}


def test_answers_that_shrink() -> None:
    short = tuple(AnswerLength(500 + i, 100, False) for i in range(4))
    long = tuple(AnswerLength(5000 + i, 20, False) for i in range(4))
    assert found(answers=short + long) == {"answers_shrink": "attention.sparse_topk"}
    assert found(answers=short + tuple(replace(one, cut=True) for one in long)) == {"answers_cut": "kv_cache.ram"}
    assert found(answers=short + tuple(replace(one, tokens=60) for one in long)) == {}
    assert found(answers=short + tuple(replace(one, prompt_tokens=700) for one in long)) == {}
    assert found(answers=(short + long)[1:]) == {}, "too few"


def test_a_runtime_without_tiers_has_no_tier_figures() -> None:
    health = EngineHealth(replace(USE, warm_compression=1.0, hot_bytes=5000), KVTally())
    told = as_json(health, Settings())
    assert told["tiers"] is told["kv"]["warm_compression_ratio"] is told["kv"]["bf16_over_warm"] is None
    assert told["attention_debug"] == {"on": False, "summary": None, "steps": []}
    assert told["findings"] == []
