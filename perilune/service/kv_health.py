"""The health view: what KV and attention do, what is wrong with it, and which setting to change (spec R11, R12).

Knows the engine's figures (`engine.health`) and the settings' names; nothing of how either came about. Rules over
plain data; docs/runtime.md lists them. A share of time is one of whole decode steps: what the weights take counts,
so that nobody turns at a part that hardly costs anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from perilune.config import Settings
from perilune.engine.answer_lengths import AnswerLength
from perilune.engine.attention_debug import DebugSummary, StepFigures
from perilune.engine.health import EngineHealth
from perilune.engine.pressure import HOT_SHARE, RED_SHARE, WARM_COMPRESSION, KVUse, Pressure

LOCAL_SHARE, SPARSE_SHARE, KV_SHARE = 0.6, 0.5, 0.7
"""Of a decode step's time, above which a part is told of."""

HIT_RATE = 0.5
"""Below this most of the far mass falls on units that weren't read: the index ranks badly."""

LEAST_STEPS = 8
LEAST_ANSWERS = 8
SHRUNK = 0.5
"""Answers to the longer prompts that are shorter than this, over those to the shorter prompts, are told of."""

LONGER = 2.0
"""How much longer the longer half of the prompts must be for that."""

PARTS = ("local_attn", "sparse_attn", "summary_attn", "kv_cache", "other")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. `setting` is the one to change, by its dotted name; `value` and `limit` are
    shares."""

    code: str
    cause: str
    setting: str
    advice: str
    value: float
    limit: float


class HealthSource(Protocol):
    """`engine.loop.EngineLoop`. Everything from any thread."""

    def health(self) -> EngineHealth: ...
    def attention_steps(self, count: int) -> list[StepFigures]: ...
    def debug_attention(self, on: bool) -> None: ...


class KVHealth:
    """Implements `ports.KVView`."""

    def __init__(self, source: HealthSource, settings: Settings) -> None:
        self._source = source
        self._settings = settings

    def view(self, steps: int = 0) -> dict[str, Any]:
        return as_json(self._source.health(), self._settings, self._source.attention_steps(steps))

    def debug(self, on: bool) -> None:
        self._source.debug_attention(on)


def diagnose(health: EngineHealth, settings: Settings) -> tuple[Finding, ...]:
    """What is wrong, worst first within time, memory, answers; empty when nothing is."""
    found: list[Finding] = []
    attention = health.attention
    if attention is not None and attention.steps >= LEAST_STEPS:
        found += [*_local(attention, settings), *_sparse(attention, settings), *_kv(attention, health, settings)]
    found += _memory(health.use, settings) if health.tiers is not None else _red(health.use)
    found += _answers(health.answers)
    return tuple(found)


def as_json(health: EngineHealth, settings: Settings, steps: Sequence[StepFigures] = ()) -> dict[str, Any]:
    """The whole view as plain data, with the per-layer figures of `steps`."""
    use, attention = health.use, health.attention
    told: dict[str, Any] = {
        "pressure": use.level.name.lower(),
        "kv": {
            **{name: value for name, value in asdict(use).items() if name != "level"},
            "resident_bytes": use.resident_bytes,
            "limit_share": use.share,
        },
        "tiers": asdict(health.tiers) if health.tiers is not None else None,
        "counts": asdict(health.tally),
        "attention_debug": {"on": health.debug_on, "summary": None, "steps": [asdict(step) for step in steps]},
        "answers": {"known": len(health.answers), "cut": sum(answer.cut for answer in health.answers)},
        "findings": [asdict(finding) for finding in diagnose(health, settings)],
    }
    ratio = told["kv"].pop("warm_compression")
    told["kv"]["warm_compression_ratio"] = ratio if health.tiers is not None else None
    told["kv"]["bf16_over_warm"] = _bf16_over_warm(use) if health.tiers is not None else None
    if attention is not None:
        shares = {f"{part}_share": attention.share(part) for part in PARTS}
        told["attention_debug"]["summary"] = asdict(attention) | shares
    return told


def _bf16_over_warm(use: KVUse) -> float:
    return 0.5 / (1 - use.warm_compression)


# --------------------------------------------------------------------------------------------- where time goes


def _local(attention: DebugSummary, settings: Settings) -> list[Finding]:
    share = attention.share("local_attn")
    if share <= LOCAL_SHARE:
        return []
    return [
        Finding(
            "local_attention",
            f"Tokens that are always read exactly take {share:.0%} of a decode step: the local window "
            f"({settings.attention.window_size:,} tokens in the general preset) or the hot zone "
            f"({settings.kv_cache.hot_size:,}) is too large.",
            "attention.window_size",
            "Lower attention.window_size, or choose attention.preset support or rag (512).",
            share,
            LOCAL_SHARE,
        )
    ]


def _sparse(attention: DebugSummary, settings: Settings) -> list[Finding]:
    share = attention.share("sparse_attn")
    if share <= SPARSE_SHARE:
        return []
    rate, units = attention.sparse_attn_hit_rate, attention.topk_units or 0.0
    if rate is not None and rate < HIT_RATE:
        return [
            Finding(
                "sparse_index",
                f"Selected units take {share:.0%} of a decode step, and yet hold only {rate:.0%} of the far "
                "attention: the index is stale or ranks this text badly.",
                "kv_cache.policy",
                "Measure it with `perilune eval kv` on this text; kv_cache.policy full reads everything.",
                share,
                SPARSE_SHARE,
            )
        ]
    what = "Scoring units" if 2 * attention.index_ms > attention.sparse_attn_ms else "Reading selected units"
    return [
        Finding(
            "sparse_budget",
            f"{what} takes most of the {share:.0%} of a decode step that sparse attention needs; a head selects "
            f"{units:.0f} units: the budget is too large.",
            "attention.sparse_topk",
            f"Lower attention.sparse_topk ({settings.attention.sparse_topk} in the general preset), or choose "
            "attention.preset support.",
            share,
            SPARSE_SHARE,
        )
    ]


def _kv(attention: DebugSummary, health: EngineHealth, settings: Settings) -> list[Finding]:
    share = attention.share("kv_cache")
    if share <= KV_SHARE:
        return []
    start = f"Keeping KV takes {share:.0%} of a decode step"
    if 2 * attention.stall_ms > attention.kv_cache_ms:
        return [
            Finding(
                "kv_cold",
                f"{start}, most of it waiting for the COLD tier's disk: the WARM tier is too small for what is "
                "read, or the disk too slow.",
                "kv_cache.warm_size",
                f"Raise kv_cache.warm_size ({settings.kv_cache.warm_size:,}) and kv_cache.ram, or put the home "
                "folder on a faster disk.",
                share,
                KV_SHARE,
            )
        ]
    if health.use.warm_compression < WARM_COMPRESSION or not settings.kv_cache.warm_compress:
        cause, setting = "compression of the WARM tier is ineffective", "kv_cache.warm_compress"
        advice = "Set kv_cache.warm_compress to true."
    else:
        cause, setting = (
            "segments are closed and moved all the time: the hot zone is too large",
            "kv_cache.hot_size",
        )
        advice = f"Lower kv_cache.hot_size ({settings.kv_cache.hot_size:,}), or raise kv_cache.ram."
    return [Finding("kv_upkeep", f"{start}; {cause}.", setting, advice, share, KV_SHARE)]


# --------------------------------------------------------------------------------------------- where memory goes


def _memory(use: KVUse, settings: Settings) -> list[Finding]:
    found = _red(use)
    hot = (use.hot_bytes - use.idle_bytes) / use.limit_bytes if use.limit_bytes else 0.0
    if hot > HOT_SHARE:
        larger = not settings.kv_cache.warm_compress or settings.kv_cache.hot_size > 2048
        cause = (
            "the hot zone of each sequence is larger than it need be"
            if larger
            else "many sequences are open at once"
        )
        found.append(
            Finding(
                "hot_share",
                f"Full-precision KV takes {hot:.0%} of the memory that KV may have: {cause}.",
                "kv_cache.hot_size" if larger else "runtime.max_batch_size",
                "Lower kv_cache.hot_size, and keep kv_cache.warm_compress on."
                if larger
                else "Lower runtime.max_batch_size, or give the machine more memory.",
                hot,
                HOT_SHARE,
            )
        )
    if use.warm_compression < WARM_COMPRESSION:
        found.append(
            Finding(
                "warm_compression",
                f"The WARM tier is only {use.warm_compression:.0%} smaller than fp32: scales and summaries "
                "take much of it, as with very small heads.",
                "kv_cache.policy",
                "Set kv_cache.policy to full: tiers gain little with this model.",
                use.warm_compression,
                WARM_COMPRESSION,
            )
        )
    return found


def _red(use: KVUse) -> list[Finding]:
    if use.level is not Pressure.RED:
        return []
    return [
        Finding(
            "memory",
            f"KV in use takes {use.share:.0%} of the memory that it may have; new work is refused.",
            "kv_cache.ram",
            "Lower kv_cache.ram or runtime.max_batch_size, or give the machine more memory.",
            use.share,
            RED_SHARE,
        )
    ]


# --------------------------------------------------------------------------------------------- answers


def _answers(answers: Sequence[AnswerLength]) -> list[Finding]:
    """Answers that shrink as prompts grow."""
    if len(answers) < LEAST_ANSWERS:
        return []
    ranked = sorted(answers, key=lambda answer: answer.prompt_tokens)
    shorter, longer = ranked[: len(ranked) // 2], ranked[-(len(ranked) // 2) :]
    if _mean_prompt(longer) < LONGER * _mean_prompt(shorter) or not _mean_tokens(shorter):
        return []
    ratio = _mean_tokens(longer) / _mean_tokens(shorter)
    if ratio >= SHRUNK:
        return []
    start = (
        f"Answers to prompts of about {_mean_prompt(longer):,.0f} tokens have {_mean_tokens(longer):.0f} tokens, "
        f"those to prompts of about {_mean_prompt(shorter):,.0f} have {_mean_tokens(shorter):.0f}"
    )
    if 2 * sum(answer.cut for answer in longer) > len(longer):
        return [
            Finding(
                "answers_cut",
                f"{start}: the prompt leaves no room, and answers are cut.",
                "kv_cache.ram",
                "Raise kv_cache.ram if it holds less than the model's window; else load a model with a longer "
                "window, or ask with context_policy auto.",
                ratio,
                SHRUNK,
            )
        ]
    return [
        Finding(
            "answers_shrink",
            f"{start}: the model loses the thread of long prompts, or selection does.",
            "attention.sparse_topk",
            "Find out which with `perilune eval length` (the model) and `perilune eval kv` (selection); raise "
            "attention.sparse_topk and attention.summary_weight, or set kv_cache.policy to full.",
            ratio,
            SHRUNK,
        )
    ]


def _mean_prompt(answers: Sequence[AnswerLength]) -> float:
    return sum(answer.prompt_tokens for answer in answers) / len(answers)


def _mean_tokens(answers: Sequence[AnswerLength]) -> float:
    return sum(answer.tokens for answer in answers) / len(answers)
