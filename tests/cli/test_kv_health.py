"""Tiered KV through the whole product with a real model: the probe of `kv health`, and its answer's report."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perilune.cli import kv_health
from perilune.cli.client import LocalClient, Question
from perilune.config import AttentionSettings, KVCacheSettings, ModelSettings, RuntimeSettings, Settings
from perilune.core import Completed, Event

TOKENS = 4096  # the fewest that the command takes; up to here contexts are read whole


def test_without_a_server_a_probe_measures_a_text_of_that_many_tokens(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(
        home=tmp_path,
        model=ModelSettings(path=str(smollm2_path)),
        kv_cache=KVCacheSettings(ram=192 * 1024**2, spill=0),
        attention=AttentionSettings(window_size=64, sparse_topk=2),
        runtime=RuntimeSettings(cache_warmup=False),
    )
    seen: list[Event] = []
    ask = LocalClient.ask

    async def watched(client: LocalClient, question: Question) -> AsyncIterator[Event]:
        async for event in ask(client, question):
            seen.append(event)
            yield event

    monkeypatch.setattr(LocalClient, "ask", watched)
    kv_health.run(settings, kv_health.Options(None, 2, TOKENS, (), as_json=True), model_given=True)
    debug = json.loads(capsys.readouterr().out)["attention_debug"]
    assert debug["summary"]["steps"] > 8, "they reach a closed segment"
    assert TOKENS < debug["summary"]["context_tokens"] < TOKENS + 128
    assert [len(step["layers"]) for step in debug["steps"]] == [30, 30]
    assert 0 < debug["summary"]["topk_units"] < 9
    tokens = next(event.report.tokens for event in seen if isinstance(event, Completed))
    assert TOKENS < tokens.offered < TOKENS + 128
    assert tokens.exact + tokens.estimated == tokens.offered
    # Little more than sinks, window and a few units; the model's profile has no layer that reads everything.
    assert 0.8 < tokens.estimated / tokens.offered < 0.97
