"""Attention debug: where the time of decode steps goes, layer by layer (spec R11). Off, it costs a look at a flag.

Knows what a timed step reports (`runtime.mri.StepResult`) and what the engine measured around it. Knows nothing of
tensors, causes or advice: `service.kv_health` reads these figures. The engine thread writes, any thread reads.

Times are wall time, in ms. A layer's five add up to its share of the step:

    local_attn    sinks, full-precision blocks, segments read whole
    sparse_attn   scoring and choosing units, and reading the chosen ones
    summary_attn  the means of the units that weren't chosen
    kv_cache      closing segments, moving them between tiers, waiting for COLD: an equal share of the step's
    other         merging the parts, and an equal share of what is left of the step: weights, sampling

A step without closed segments has no parts to tell apart, and isn't kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from perilune.kernels.tiers import SEGMENT_TOKENS, SINK_TOKENS, UNIT_TOKENS
from perilune.runtime.mri import SequenceSlice, StepPlan, StepResult

KEPT_STEPS = 256
"""The newest steps, over which means are taken and which can be looked at."""

_MS = 1000.0


@dataclass(frozen=True, slots=True)
class TopK:
    """Units that a KV head chose, mean over heads and sequences, and by which share of it that differs from the
    step before (None in a sequence's first step)."""

    units: float
    change: float | None


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """One layer in one step. `sparse_attn_hit_rate`: share of the far attention mass that fell on units read
    exactly; None, like `topk_dynamics`, in layers that read everything or have a sliding window of their own."""

    local_attn_ms: float
    sparse_attn_ms: float
    summary_attn_ms: float
    kv_cache_ms: float
    other_ms: float
    sparse_attn_hit_rate: float | None
    topk_dynamics: TopK | None


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One decode step: `rows` sequences with closed segments, `context_tokens` their mean context."""

    number: int
    rows: int
    context_tokens: int
    step_ms: float
    index_ms: float  # of sparse_attn: scoring and choosing
    stall_ms: float  # of kv_cache: waiting for COLD inside the step
    layers: tuple[LayerFigures, ...]


@dataclass(frozen=True, slots=True)
class DebugSummary:
    """Means over the kept steps. Times are of whole steps, `*_share` of `step_ms`."""

    steps: int
    context_tokens: float
    step_ms: float
    local_attn_ms: float
    sparse_attn_ms: float
    summary_attn_ms: float
    kv_cache_ms: float
    other_ms: float
    index_ms: float
    stall_ms: float
    sparse_attn_hit_rate: float | None
    topk_units: float | None
    topk_change: float | None

    def share(self, part: str) -> float:
        """Of a step's time, e.g. of "local_attn"."""
        return float(getattr(self, f"{part}_ms")) / self.step_ms if self.step_ms else 0.0


class AttentionDebug:
    """Keeps the figures of the newest steps while `on`."""

    def __init__(self, on: bool = False) -> None:
        self.on = on
        self._lock = threading.Lock()
        self._steps: deque[StepFigures] = deque(maxlen=KEPT_STEPS)
        self._number = 0
        self._units: dict[str, tuple[float | None, ...]] = {}  # by sequence and layer, in its last step

    def switch(self, on: bool) -> None:
        """Start afresh, or stop; what was kept stays to be looked at. From any thread."""
        with self._lock:
            if on and not self.on:
                self._steps.clear()
                self._units.clear()
            self.on = on

    def mark(self, plan: StepPlan) -> StepPlan:
        """The same decode step, measured."""
        return StepPlan(tuple(replace(piece, measure=bool(piece.segments)) for piece in plan.slices), timed=True)

    def record(self, plan: StepPlan, result: StepResult, forward_s: float, upkeep_s: float, stall_s: float) -> None:
        """A measured step has ended: `forward_s` in the runtime, of which `stall_s` waiting for COLD, and
        `upkeep_s` beside it for KV."""
        rows = [piece for piece in plan.slices if piece.seq_id in result.attention]
        if not rows or not result.attention_s:
            return
        figures = self._figures(rows, result, forward_s, upkeep_s, stall_s)
        with self._lock:
            if self.on:
                self._steps.append(figures)

    def steps(self, count: int = KEPT_STEPS) -> list[StepFigures]:
        """The newest steps, oldest first. From any thread."""
        with self._lock:
            return list(self._steps)[-count:] if count else []

    def summary(self) -> DebugSummary | None:
        """None while nothing was measured. From any thread."""
        return summarise(self.steps())

    def _figures(
        self, rows: Sequence[SequenceSlice], result: StepResult, forward_s: float, upkeep_s: float, stall_s: float
    ) -> StepFigures:
        parts = result.attention_s
        reading_s = sum(row[1] + row[2] for row in parts)  # what may read COLD; each loses as much of its time
        stall_s = min(stall_s, reading_s)
        kept = 1 - stall_s / reading_s if reading_s else 1.0
        attended_s = sum(map(sum, parts))
        kv_s = (upkeep_s + stall_s) / len(parts)
        other_s = max(0.0, forward_s - attended_s) / len(parts)
        choices = self._choices(rows, result)
        layers = tuple(
            LayerFigures(
                _MS * exact * kept,
                _MS * (index + selected * kept),
                _MS * summary,
                _MS * kv_s,
                _MS * (merge + other_s),
                *choices[layer],
            )
            for layer, (index, exact, selected, summary, merge) in enumerate(parts)
        )
        self._number += 1
        return StepFigures(
            self._number,
            len(rows),
            sum(piece.end for piece in rows) // len(rows),
            _MS * (forward_s + upkeep_s),
            _MS * sum(row[0] for row in parts),
            _MS * stall_s,
            layers,
        )

    def _choices(self, rows: Sequence[SequenceSlice], result: StepResult) -> list[tuple[float | None, TopK | None]]:
        """By layer: the hit rate and the units chosen, means over the sequences that chose there."""
        units = {piece.seq_id: _units(piece, result.attention[piece.seq_id]) for piece in rows}
        found: list[tuple[float | None, TopK | None]] = []
        for layer in range(len(result.attention_s)):
            rates, chosen, changes = [], [], []
            for piece in rows:
                selected, summary = result.attention[piece.seq_id][layer][1:3]
                count = units[piece.seq_id][layer]
                if count is None:
                    continue
                rates.append(selected / (selected + summary))
                chosen.append(count)
                before = self._units.get(piece.seq_id)
                if before is not None and (last := before[layer]):
                    changes.append(abs(count - last) / last)
            found.append((_mean(rates), TopK(sum(chosen) / len(chosen), _mean(changes)) if chosen else None))
        self._units = units
        return found


def summarise(steps: Sequence[StepFigures]) -> DebugSummary | None:
    """Means over steps; None for none."""
    if not steps:
        return None

    def time_ms(name: str) -> float:
        return sum(sum(getattr(layer, name) for layer in step.layers) for step in steps) / len(steps)

    layers = [layer for step in steps for layer in step.layers]
    rates = [layer.sparse_attn_hit_rate for layer in layers if layer.sparse_attn_hit_rate is not None]
    chosen = [layer.topk_dynamics for layer in layers if layer.topk_dynamics is not None]
    times = {field.name: time_ms(field.name) for field in fields(LayerFigures) if field.name.endswith("_ms")}
    return DebugSummary(
        steps=len(steps),
        context_tokens=sum(step.context_tokens for step in steps) / len(steps),
        step_ms=sum(step.step_ms for step in steps) / len(steps),
        index_ms=sum(step.index_ms for step in steps) / len(steps),
        stall_ms=sum(step.stall_ms for step in steps) / len(steps),
        sparse_attn_hit_rate=_mean(rates),
        topk_units=_mean([top.units for top in chosen]),
        topk_change=_mean([top.change for top in chosen if top.change is not None]),
        **times,
    )


def _units(piece: SequenceSlice, rows: Sequence[Sequence[float]]) -> tuple[float | None, ...]:
    """Units that a KV head chose in each layer; None where it had nothing to choose from. Rows are in the order of
    `kernels.interface.ATTENTION_STATS`."""
    closed, window = len(piece.segments), piece.attention.window_tokens if piece.attention is not None else 0
    forced = sum((index + 1) * SEGMENT_TOKENS > piece.end - window for index in range(closed))
    exact = SINK_TOKENS + piece.end - (closed - forced) * SEGMENT_TOKENS
    return tuple(
        max(0.0, row[5] - exact) / UNIT_TOKENS if closed and row[1] > 0 and row[1] + row[2] > 0 else None
        for row in rows
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
