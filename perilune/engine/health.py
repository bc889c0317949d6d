"""What the engine knows of its own KV and attention, in one piece, for the health view (spec R11, R12). Plain data;
causes and advice are `service.kv_health`'s."""

from __future__ import annotations

from dataclasses import dataclass

from perilune.engine.answer_lengths import AnswerLength
from perilune.engine.attention_debug import DebugSummary
from perilune.engine.kv_tally import KVTally
from perilune.engine.pressure import KVUse
from perilune.runtime.kv.spec import TierSpec


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """`tiers` is None for a runtime without tiers, `attention` while no step was measured."""

    use: KVUse
    tally: KVTally
    tiers: TierSpec | None = None
    answers: tuple[AnswerLength, ...] = ()
    debug_on: bool = False
    attention: DebugSummary | None = None
