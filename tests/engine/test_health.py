"""Attention debug and the health view on a real model, each diagnosis with the fault that it names (spec R11, R12).

One document of three closed segments is computed once and kept on disk; every test then loads it into an engine
with one thing wrong, lets questions decode beside each other, and looks at what the view says.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from perilune.config import Settings
from perilune.core import FinishReason, KVPolicy, SequenceSpec
from perilune.engine.loop import EngineLoop
from perilune.engine.policy import EngineLimits
from perilune.engine.stepper import TierPolicy
from perilune.kernels.tiers import SEGMENT_UNITS, AttentionPolicy
from perilune.runtime.kv.disk import DiskKVStore
from perilune.runtime.kv.sizing import TierSettings
from perilune.runtime.loader import LoadedModel, load_model
from perilune.runtime.mri import CancelFlag, StepPlan
from perilune.runtime.torch_runtime import TorchRuntime
from perilune.service.kv_health import as_json, diagnose
from tests.engine.harness import Listener, ingest, spec

DOCUMENT_TOKENS = 6144
TAIL_TOKENS = 100
QUESTIONS = 12
NEW_TOKENS = 20
SETTINGS = Settings()
_MADV_PAGEOUT = 21


@dataclass(frozen=True)
class Kept:
    """The model, and the document's KV on disk."""

    model: LoadedModel
    document: list[int]
    blocks: DiskKVStore
    segments: DiskKVStore

    @property
    def runtime(self) -> TorchRuntime:
        assert isinstance(self.model.runtime, TorchRuntime)
        return self.model.runtime

    def question(self, number: int) -> SequenceSpec:
        words = self.model.tokenizer.encode(f"Question {number}: which of these statements binds a name? ")
        tail = (words * TAIL_TOKENS)[:TAIL_TOKENS]
        wanted = spec(f"q{number}", self.document + tail, new=NEW_TOKENS, shared=DOCUMENT_TOKENS)
        return replace(wanted, kv_policy=KVPolicy.TIERED)

    @contextmanager
    def engine(
        self, policy: AttentionPolicy, *, warm_tokens: int = 65536, debug: bool = True
    ) -> Iterator[EngineLoop]:
        tier_policy = TierPolicy(warm_tokens, {"general": policy}, debug=debug)
        engine = EngineLoop(
            self.runtime, self.blocks, EngineLimits(), segment_store=self.segments, tier_policy=tier_policy
        )
        engine.start()
        try:
            yield engine
        finally:
            engine.close()
        engine.check_integrity()

    def ask(self, engine: EngineLoop, questions: int = QUESTIONS) -> list[list[int]]:
        listeners = [Listener() for _ in range(questions)]
        for number, listener in enumerate(listeners):
            engine.submit(self.question(number), listener)
        assert all(listener.wait(300) is FinishReason.LENGTH for listener in listeners)
        return [listener.tokens for listener in listeners]


@pytest.fixture(scope="module")
def kept(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    from pydoc_data.topics import topics

    home = tmp_path_factory.mktemp("home")
    tiers = TierSettings(spill_bytes=100 * 1024**2, spill_folder=home, ram_bytes=160 * 1024**2)
    model = load_model(smollm2_path, num_blocks=400, tiers=tiers, threads=1)
    document = model.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))[:DOCUMENT_TOKENS]
    blocks, segments = DiskKVStore(home / "kv", 1 << 31), DiskKVStore(home / "segments", 1 << 31)
    kept = Kept(model, document, blocks, segments)
    with kept.engine(AttentionPolicy(), debug=False) as engine:
        listener = Listener()
        engine.submit(replace(ingest("doc", document), kv_policy=KVPolicy.TIERED), listener)
        assert listener.wait(200) is FinishReason.STOP
    yield kept
    blocks.close()
    segments.close()
    model.close()


def codes(engine: EngineLoop, settings: Settings = SETTINGS) -> dict[str, str]:
    """Findings and the setting that each names."""
    return {finding.code: finding.setting for finding in diagnose(engine.health(), settings)}


def found(kept: Kept, engine: EngineLoop) -> dict[str, str]:
    """What is found within ten rounds of questions: a busy neighbour can shift one round's shares of the time."""
    for _ in range(10):
        engine.debug_attention(False)
        engine.debug_attention(True)
        kept.ask(engine)
        if told := codes(engine):
            return told
    return {}


def test_a_sound_engine_has_no_finding_and_its_figures_add_up(kept: Kept) -> None:
    with kept.engine(AttentionPolicy(), debug=False) as engine:
        plain = kept.ask(engine, 2)
        assert engine.health().attention is None
    with kept.engine(AttentionPolicy()) as engine:
        assert kept.ask(engine)[:2] == plain, "measuring changes no answer"
        told = as_json(engine.health(), SETTINGS, engine.attention_steps(4))
    assert told["findings"] == []
    debug = told["attention_debug"]
    assert debug["on"]
    assert len(debug["steps"]) == 4
    for step in debug["steps"]:
        assert len(step["layers"]) == 30
        parts = ("local_attn_ms", "sparse_attn_ms", "summary_attn_ms", "kv_cache_ms", "other_ms")
        total = sum(layer[part] for layer in step["layers"] for part in parts)
        assert total == pytest.approx(step["step_ms"], rel=0.02)
        units = [layer["topk_dynamics"]["units"] for layer in step["layers"]]
        assert 31 < sum(units) / len(units) < 377
        assert max(units) > 2 * min(units), "the model's profile gives heads shares of their own"
        for layer in step["layers"]:
            assert 0.3 < layer["sparse_attn_hit_rate"] <= 1
    assert told["counts"]["rehydrated_tokens"] == DOCUMENT_TOKENS
    assert told["counts"]["hit_tokens"] == (QUESTIONS - 1) * DOCUMENT_TOKENS
    assert told["kv"]["warm_bytes"] > 0
    assert 0.65 < told["kv"]["warm_compression_ratio"] < 0.75
    assert told["kv"]["bf16_over_warm"] == pytest.approx(0.5 / (1 - told["kv"]["warm_compression_ratio"]))


def test_a_huge_window_is_named(kept: Kept) -> None:
    with kept.engine(AttentionPolicy(window_tokens=8192)) as engine:
        assert found(kept, engine) == {"local_attention": "attention.window_size"}


def test_a_huge_budget_is_named(kept: Kept) -> None:
    units = 4 * SEGMENT_UNITS
    with kept.engine(AttentionPolicy(window_tokens=64, min_units=units, max_units=units)) as engine:
        assert found(kept, engine) == {"sparse_budget": "attention.sparse_topk"}


def test_an_index_of_other_segments_is_named(kept: Kept) -> None:
    """A stale index: the means in RAM belong to other records than the units behind them."""
    policy = AttentionPolicy(window_tokens=64, min_units=280, max_units=280, dense_layers=0)
    with kept.engine(policy) as engine:
        kept.ask(engine, 1)
        tiers = kept.runtime.tiers
        assert tiers is not None
        summaries = tiers.pool.summaries.view(tiers.pool.num_slots, -1)
        summaries.copy_(summaries.roll(7 * tiers.pool.layout.summary_bytes, 1))
        assert found(kept, engine) == {"sparse_index": "kv_cache.policy"}


def test_a_fault_of_the_debug_ends_nobodys_answer(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("planted")

    with kept.engine(AttentionPolicy()) as engine:
        monkeypatch.setattr(engine._stepper.debug, "record", fails)
        kept.ask(engine, 1)
        assert not engine.health().debug_on


def test_a_cold_tier_that_the_disk_serves_is_named(kept: Kept) -> None:
    """No WARM tier, and a system so short of memory that it drops COLD's pages as soon as they were read.

    How long a step then waits depends on the disk: the finding is asked for one that takes 1,000 times as long.
    """
    with kept.engine(AttentionPolicy(window_tokens=64), warm_tokens=0, debug=False) as engine:
        kept.ask(engine, 1)
        listener = Listener()
        engine.submit(kept.question(1), listener)
        listener.wait_token(120)  # prefill reads all of COLD first: it would take minutes
        short_of_memory(engine, kept.runtime)
        engine.debug_attention(True)
        assert listener.wait(200) is FinishReason.LENGTH
        health = engine.health()
        assert health.tally.cold_steps_missed > 0
        assert health.tally.cold_stall_s > 0
        seen = health.attention
        assert seen is not None
        waits_ms = 1000 * seen.stall_ms
        assert waits_ms > 0
        slow = replace(
            seen,
            step_ms=seen.step_ms + waits_ms,
            kv_cache_ms=seen.kv_cache_ms + waits_ms,
            stall_ms=seen.stall_ms + waits_ms,
        )
        found = diagnose(replace(health, attention=slow), SETTINGS)
        assert [(finding.code, finding.setting) for finding in found] == [("kv_cold", "kv_cache.warm_size")]


def test_answers_cut_for_want_of_room_are_named(smollm2_path: Path) -> None:
    """kv_cache.ram that holds 768 tokens: long prompts leave no room to answer."""
    model = load_model(smollm2_path, num_blocks=24, threads=1)
    assert model.chat_template is not None
    engine = EngineLoop(model.runtime, None, EngineLimits())
    engine.start()
    filler = (model.tokenizer.encode("The harbour's tide tables are printed twice a year. ") * 80)[:750]
    for number in range(4):
        asked = [{"role": "user", "content": f"Write {number + 2} sentences about the moon."}]
        short = model.tokenizer.encode_template(model.chat_template.render(asked))
        for name, prompt, ends in (("short", short, FinishReason.STOP), ("long", filler, FinishReason.LENGTH)):
            listener = Listener()
            stop = model.tokenizer.stop_ids if name == "short" else frozenset()
            engine.submit(spec(f"{name}{number}", prompt, new=600, stop=stop), listener)
            assert listener.wait(300) is ends
    told = codes(engine)
    engine.close()
    model.close()
    assert told == {"answers_cut": "kv_cache.ram"}


def short_of_memory(engine: EngineLoop, runtime: TorchRuntime) -> None:
    """From now on the system drops COLD's pages before each step."""
    assert runtime.tiers is not None
    cold, plan = runtime.tiers._cold, engine._stepper.plan
    assert cold is not None
    cold._map.flush()  # what is clean can be dropped
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def after_a_shortage(cancelled: CancelFlag) -> StepPlan | None:
        libc.madvise(cold.address(0), len(cold._map), _MADV_PAGEOUT)
        return plan(cancelled)

    engine._stepper.plan = after_a_shortage  # type: ignore[method-assign]
