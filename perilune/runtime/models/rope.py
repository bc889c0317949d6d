"""Rotary angle tables from a model's rope description.

Knows the scaling formulas; the rotation itself is a kernel.
"""

from __future__ import annotations

import math

import torch

from perilune.kernels.interface import RopeTable
from perilune.runtime.model_config import Rope, RopeScaling


def rope_table(rope: Rope, head_dim: int, max_positions: int) -> RopeTable:
    """cos and sin of every position, fp32 [max_positions, head_dim / 2], computed as `transformers` does."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return RopeTable((angles.cos() * factor).contiguous(), (angles.sin() * factor).contiguous())


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians per token, fp32 [head_dim / 2], and the factor on cos and sin (yarn's attention temperature)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.base**exponents)
    factor = 1.0
    if rope.divisors is not None:
        frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.scaling is not None:
        if rope.scaling.kind == "linear":
            frequencies = frequencies / rope.scaling.factor
        elif rope.scaling.kind == "llama3":
            frequencies = _llama3(frequencies, rope.scaling)
        else:
            frequencies, factor = _yarn(frequencies, rope, rope.scaling, head_dim)
    return frequencies, factor


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long waves are stretched, short ones kept, those between blended (Llama 3.1's `apply_scaling`)."""
    wavelength = 2 * math.pi / frequencies
    low = scaling.original_tokens / scaling.low_freq_factor
    high = scaling.original_tokens / scaling.high_freq_factor
    stretched = torch.where(wavelength > low, frequencies / scaling.factor, frequencies)
    smooth = (scaling.original_tokens / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    between = ~(wavelength < high) & ~(wavelength > low)
    return torch.where(between, blended, stretched)


def _yarn(frequencies: torch.Tensor, rope: Rope, scaling: RopeScaling, head_dim: int) -> tuple[torch.Tensor, float]:
    """Interpolate slow dimensions, keep fast ones, ramp between (arXiv 2309.00071, section 3.2)."""

    def dimension(rotations: float) -> float:
        turns = scaling.original_tokens / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.base))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    mixed = frequencies / scaling.factor * (1 - kept) + frequencies * kept
    factor = scaling.attention_factor
    return mixed, 0.1 * math.log(scaling.factor) + 1.0 if factor is None else factor
