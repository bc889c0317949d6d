"""The engine: its limits, how it schedules and keeps tiers, and what `/metrics` asks it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from perilune.config import SchedulerSettings, Settings
from perilune.errors import ConfigError
from perilune.telemetry import Telemetry

if TYPE_CHECKING:
    from perilune.engine.loop import EngineLoop
    from perilune.engine.scheduling import SchedulingPolicy
    from perilune.engine.stepper import TierPolicy
    from perilune.runtime.kv.disk import DiskKVStore
    from perilune.runtime.loader import LoadedModel
    from perilune.service.predictor import Predictor


def engine_loop(
    settings: Settings,
    loaded: LoadedModel,
    kv: DiskKVStore | None,
    segments: DiskKVStore | None,
    predictor: Predictor,
    telemetry: Telemetry,
) -> EngineLoop:
    """The engine over `loaded`, not yet started. Raises `ConfigError` for policies that can't go together."""
    from perilune.engine.loop import EngineLoop
    from perilune.engine.policy import EngineLimits

    limits = EngineLimits(
        batch=settings.runtime.max_batch_size,
        chunk_tokens=settings.runtime.prefill_chunk_size,
        queue=settings.server.max_queue,
    )
    return EngineLoop(
        loaded.runtime,
        kv,
        limits,
        telemetry,
        predictor,
        segment_store=segments,
        tier_policy=_tier_policy(settings),
        policy=scheduling_policy(settings.scheduler, telemetry),
    )


def _tier_policy(settings: Settings) -> TierPolicy:
    from perilune.engine.stepper import TierPolicy
    from perilune.service.presets import presets

    attention, kv = settings.attention, settings.kv_cache
    named = presets(attention.window_size, attention.sparse_topk, attention.summary_weight)
    warm_tokens = kv.warm_size if kv.warm_compress else 0
    return TierPolicy(warm_tokens, named, attention.adaptive_window, attention.debug)


def scheduling_policy(settings: SchedulerSettings, telemetry: Telemetry) -> SchedulingPolicy:
    """The one that acts, or those that are compared. Raises `ConfigError` for both at once."""
    from perilune.engine.trial import Trial

    acting = settings.experiment or (settings.policy,)
    if settings.experiment and settings.shadow:
        raise ConfigError(
            "scheduler.shadow and scheduler.experiment can't both be set.", hint="Compare first, then let them act."
        )
    names = dict.fromkeys((*acting, *settings.shadow))
    if len(names) == 1:
        return _policy(acting[0], settings)
    slot_s = settings.experiment_slot if settings.experiment else None
    return Trial({name: _policy(name, settings) for name in names}, telemetry, time.monotonic, slot_s)


def _policy(name: str, settings: SchedulerSettings) -> SchedulingPolicy:
    from perilune.engine import deadlines, scheduling

    if name == "fcfs":
        return scheduling.FirstComeFirstServed()
    if name == "edf":
        return scheduling.EarliestDeadlineFirst()
    if name == "static":
        return scheduling.StaticPriority(settings.kv_reserve)
    return deadlines.DeadlinePolicy(
        deadlines.DeadlineSettings(
            reserve=settings.kv_reserve,
            tenant_share=settings.tenant_kv_share,
            lead=settings.tenant_lead,
            lane_tokens=settings.lane_tokens,
            late=settings.late,
        )
    )


def engine_gauges(engine: EngineLoop, telemetry: Telemetry) -> None:
    """What `/metrics` asks the engine for when it is read."""
    stats = engine.stats()
    telemetry.gauge("sequences_running", float(stats.running))
    telemetry.gauge("sequences_waiting", float(stats.waiting))
    telemetry.gauge("queued_prefill_tokens", float(stats.queued_prefill_tokens))
    used = 1 - stats.free_blocks / stats.total_blocks if stats.total_blocks else 0.0
    telemetry.gauge("kv_cache_usage_ratio", used)
    use = engine.kv_use()
    for tier, size in (
        ("hot", use.hot_bytes),
        ("warm", use.warm_bytes),
        ("cold", use.cold_bytes),
        ("summary", use.summary_bytes),
    ):
        telemetry.gauge("kv_tier_bytes", float(size), tier=tier)
    telemetry.gauge("kv_idle_bytes", float(use.idle_bytes))
    telemetry.gauge("kv_limit_bytes", float(use.limit_bytes))
    telemetry.gauge("kv_fragmentation_ratio", use.fragmentation)
    telemetry.gauge("warm_compression_ratio", use.warm_compression)
    telemetry.gauge("kv_pressure", float(use.level))
