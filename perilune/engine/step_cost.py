"""What a step of a machine takes, as a formula: the simulator's stand-in for a runtime (spec E12).

Knows plans and arithmetic. Two formulas: `LinearCost`, whose five constants are fitted on steps of a real engine,
and `RooflineCost`, computed from a data sheet for machines that aren't here. Its figures are never measured ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from perilune.runtime.mri import StepPlan


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes: prompt tokens, the sum of the context each of them attends, decoded rows, the sum of
    theirs."""

    prompt_tokens: int = 0
    prompt_context: float = 0.0
    rows: int = 0
    row_context: int = 0

    @property
    def features(self) -> tuple[float, ...]:
        """What `LinearCost` weighs; the first is the step itself."""
        return 1.0, float(self.prompt_tokens), self.prompt_context, float(self.rows), float(self.row_context)


def shape_of(plan: StepPlan) -> StepShape:
    tokens, context, rows, row_context = 0, 0.0, 0, 0
    for piece in plan.slices:
        size = len(piece.token_ids)
        if size == 1 and piece.sample and piece.start:
            rows += 1
            row_context += piece.start + 1
        else:
            tokens += size
            context += size * (piece.start + size / 2)
    return StepShape(tokens, context, rows, row_context)


class StepCost(Protocol):
    def seconds(self, shape: StepShape) -> float: ...


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds: a step, a prompt token, one of its context, a decoded row, one of its context."""

    step_s: float
    token_s: float
    token_context_s: float
    row_s: float
    row_context_s: float

    def seconds(self, shape: StepShape) -> float:
        return (
            self.step_s
            + self.token_s * shape.prompt_tokens
            + self.token_context_s * shape.prompt_context
            + self.row_s * shape.rows
            + self.row_context_s * shape.row_context
        )


def fit(steps: Sequence[tuple[StepShape, float]]) -> LinearCost:
    """Least squares of the relative error, no constant negative. `steps` are shapes and measured seconds."""
    import numpy as np

    seconds = np.array([max(measured, 1e-6) for _, measured in steps])
    features = np.array([shape.features for shape, _ in steps]) / seconds[:, None]
    used = [column for column in range(features.shape[1]) if features[:, column].any()]
    weights = np.zeros(features.shape[1])
    while used:
        scale = features[:, used].max(axis=0)
        found = np.linalg.lstsq(features[:, used] / scale, np.ones(len(steps)), rcond=None)[0] / scale
        if found.min() >= 0:
            weights[used] = found
            break
        used.pop(int(found.argmin()))
    return LinearCost(*(float(weight) for weight in weights))


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """The greater of arithmetic and memory traffic, and `overhead_s` a step. `flops` and `bytes_per_s` are what is
    really reached, not the data sheet's."""

    parameters: float
    layers: int
    width: int
    kv_token_bytes: float
    flops: float
    bytes_per_s: float
    overhead_s: float

    def seconds(self, shape: StepShape) -> float:
        tokens, context = shape.prompt_tokens + shape.rows, shape.prompt_context + shape.row_context
        arithmetic_s = (2 * self.parameters * tokens + 4 * self.layers * self.width * context) / self.flops
        # A chunk reads its context once, not once a token.
        chunk_context = shape.prompt_context / shape.prompt_tokens if shape.prompt_tokens else 0.0
        read_bytes = 2 * self.parameters + self.kv_token_bytes * (shape.row_context + chunk_context)
        return self.overhead_s + max(arithmetic_s, read_bytes / self.bytes_per_s)


A100_8B = RooflineCost(
    parameters=8.03e9,
    layers=32,
    width=4096,
    kv_token_bytes=131_072,
    flops=156e12,
    bytes_per_s=1.6e12,
    overhead_s=0.003,
)
"""A model of Llama-3-8B's shape in bf16 on one 80 GB A100: half of its arithmetic, four fifths of its bandwidth."""
