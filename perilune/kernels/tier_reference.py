"""Closing segments in plain PyTorch: clustering, codec and records at their byte offsets (see `tiers`).

The oracle of the native code, and the fallback without it. Every decision about tokens (clusters, order, outliers)
is made in exact arithmetic, as `tiers` writes down, so that another implementation gets the same bytes. Knows
nothing of blocks, sequences or attention; works on any number of records at once.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, fields

import torch

from perilune.kernels.interface import SegmentPool
from perilune.kernels.tiers import (
    CLUSTER_ROUNDS,
    GROUP_UNITS,
    OUTLIERS,
    SEGMENT_GROUPS,
    SEGMENT_UNITS,
    UNIT_TOKENS,
)

_PAIR_UNITS = 2  # units that share the keys' scales


@dataclass(frozen=True, slots=True)
class Records:
    """R closed records with their arrays in logical order. U units, P = ceil(U / 2), A = ceil(U / 16) groups.

    unit_k, unit_v   int8 [R, U, D], scales fp16 [R, U]; unit_n uint8 [R, U]
    group_k, group_v fp16 [R, A, D]; group_n int16 [R, A]
    outlier_k, _v    bf16 [R, O, D]
    k                uint8 [R, U, 16, D], k_scale and k_zero fp16 [R, P, D]
    v                int8 [R, U, 16, D], v_scale fp16 [R, U, 16]
    """

    unit_k: torch.Tensor
    unit_k_scale: torch.Tensor
    unit_v: torch.Tensor
    unit_v_scale: torch.Tensor
    unit_n: torch.Tensor
    group_k: torch.Tensor
    group_v: torch.Tensor
    group_n: torch.Tensor
    outlier_k: torch.Tensor
    outlier_v: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor
    k_zero: torch.Tensor
    v: torch.Tensor
    v_scale: torch.Tensor

    def keys(self) -> torch.Tensor:
        """fp32 [R, U, 16, D]."""
        units = self.k.shape[1]
        scale, zero = (
            part.float().repeat_interleave(_PAIR_UNITS, 1)[:, :units, None] for part in (self.k_scale, self.k_zero)
        )
        return self.k.float() * scale + zero

    def rotated_values(self) -> torch.Tensor:
        """fp32 [R, U, 16, D], in the rotated space."""
        return self.v.float() * self.v_scale.float()[..., None]

    def unit_keys(self) -> torch.Tensor:
        """fp32 [R, U, D]: the units' mean keys."""
        return self.unit_k.float() * self.unit_k_scale.float()[..., None]

    def unit_values(self) -> torch.Tensor:
        """fp32 [R, U, D]: the units' mean values, rotated."""
        return self.unit_v.float() * self.unit_v_scale.float()[..., None]


def rotate(x: torch.Tensor) -> torch.Tensor:
    """The normalised Walsh-Hadamard transform of the last axis, in runs of the largest power of two in it.

    fp32 butterflies with strides 1, 2, 4, …, then one multiplication; its own inverse.
    """
    dim = x.shape[-1]
    run = dim & -dim
    mixed = x.float().reshape(-1, run)
    stride = 1
    while stride < run:
        pairs = mixed.view(-1, run // (2 * stride), 2, stride)
        left, right = pairs[:, :, 0], pairs[:, :, 1]
        mixed = torch.stack([left + right, left - right], 2)
        stride *= 2
    return (mixed.reshape(-1, run) * torch.tensor(1 / math.sqrt(run), dtype=torch.float32)).view(x.shape)


def close(k: torch.Tensor, v: torch.Tensor, *, outliers: int = OUTLIERS) -> Records:
    """k, v [R, n, D] with n and `outliers` multiples of 16 -> records of n / 16 - outliers / 16 units.

    Other numbers of outliers than 16 exist for scaled-down evaluation; n - outliers must be a multiple of 16.
    """
    keys, values = k.float(), v.float()
    order, worst = arrange(keys, outliers)
    return encode(_take(keys, order), _take(values, order), _take(keys, worst), _take(values, worst))


def encode(k: torch.Tensor, v: torch.Tensor, outlier_k: torch.Tensor, outlier_v: torch.Tensor) -> Records:
    """Quantise tokens in their final order. k, v fp32 [R, 16 U, D]; outliers [R, O, D]."""
    records, tokens, dim = k.shape
    units = tokens // UNIT_TOKENS
    by_unit = (records, units, UNIT_TOKENS, dim)
    unit_k, unit_k_scale = _symmetric(_mean(k.view(by_unit)))
    unit_v, unit_v_scale = _symmetric(rotate(_mean(v.view(by_unit))))
    group_tokens = GROUP_UNITS * UNIT_TOKENS
    k_groups, v_groups = torch.split(k, group_tokens, 1), torch.split(v, group_tokens, 1)
    codes, k_scale, k_zero = _per_channel(k)
    values, v_scale = _symmetric(rotate(v))
    return Records(
        unit_k=unit_k,
        unit_k_scale=unit_k_scale,
        unit_v=unit_v,
        unit_v_scale=unit_v_scale,
        unit_n=torch.full((records, units), UNIT_TOKENS, dtype=torch.uint8),
        group_k=torch.stack([_mean(group) for group in k_groups], 1).half(),
        group_v=rotate(torch.stack([_mean(group) for group in v_groups], 1)).half(),
        group_n=torch.tensor([group.shape[1] for group in k_groups], dtype=torch.int16).expand(records, -1),
        outlier_k=outlier_k.to(torch.bfloat16),
        outlier_v=outlier_v.to(torch.bfloat16),
        k=codes.view(by_unit),
        k_scale=k_scale,
        k_zero=k_zero,
        v=values.view(by_unit),
        v_scale=v_scale.view(by_unit[:3]),
    )


# ------------------------------------------------------------------------------------------------- clustering


def arrange(k: torch.Tensor, outliers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which token goes where: k fp32 [R, n, D] -> int64 order [R, n - outliers], outliers [R, outliers]."""
    points = _directions(k)
    centroids = points[:, ::UNIT_TOKENS].clone()
    assigned, score = _assign(points, centroids)
    for _ in range(CLUSTER_ROUNDS):
        centroids = _centroids(points, assigned, centroids)
        assigned, score = _assign(points, centroids)
    by_score = score.sort(dim=1, stable=True).indices
    worst = by_score[:, :outliers].sort(1).values
    rank = _chain(centroids, assigned).gather(1, assigned)
    rank.scatter_(1, worst, centroids.shape[1])  # behind everything
    order = rank.sort(dim=1, stable=True).indices[:, : k.shape[1] - outliers]
    return order, worst


def _directions(k: torch.Tensor) -> torch.Tensor:
    """Mean-centred keys of length one as whole numbers -127 … 127 (held in fp32), one scale per record."""
    centred = k - _mean(k)[:, None]
    square = centred.double().square().sum(-1, keepdim=True)
    inverse = torch.where(square > 0, square.sqrt().reciprocal(), torch.zeros_like(square)).float()
    unit = centred * inverse
    peak = unit.abs().amax((1, 2), keepdim=True)
    return (unit * torch.where(peak > 0, 127 / peak, torch.zeros_like(peak))).round()


def _assign(points: torch.Tensor, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest centroid (ties: the lowest index) and its product. Sums stay below 2^24, so fp32 is exact."""
    score = points @ centroids.transpose(1, 2)
    nearest = score.argmax(-1)
    return nearest, score.gather(-1, nearest[..., None])[..., 0]


def _centroids(points: torch.Tensor, assigned: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Sums of the clusters' points, scaled to length one and whole numbers; a sum of zero keeps its centroid."""
    sums = torch.zeros_like(before).scatter_add_(1, assigned[..., None].expand_as(points), points).double()
    square = sums.square().sum(-1, keepdim=True)
    filled = square > 0
    unit = sums * torch.where(filled, square, torch.ones_like(square)).sqrt().reciprocal()
    peak = unit.abs().amax((1, 2), keepdim=True)
    scaled = unit * (127 / torch.where(peak > 0, peak, torch.ones_like(peak)))
    return torch.where(filled, scaled.round().float(), before)


def _chain(centroids: torch.Tensor, assigned: torch.Tensor) -> torch.Tensor:
    """Rank of each cluster [R, C] in a walk that goes to the most similar cluster not yet seen."""
    records, clusters, _ = centroids.shape
    similarity = centroids @ centroids.transpose(1, 2)
    empty = torch.ones(records, clusters, dtype=torch.bool).scatter_(1, assigned, False)
    seen = empty.clone()
    rank = torch.full((records, clusters), clusters)
    rows = torch.arange(records)
    current = (~empty).to(torch.uint8).argmax(1)
    for step in range(clusters):
        alive = ~seen[rows, current]
        rank[rows[alive], current[alive]] = step
        seen[rows, current] = True
        current = similarity[rows, current].masked_fill(seen, -math.inf).argmax(1)
    return rank


def _take(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))


# ------------------------------------------------------------------------------------------------------ codec


def _mean(x: torch.Tensor) -> torch.Tensor:
    """Mean over the last axis but one, summed in fp64, fp32."""
    return (x.double().sum(-2) / x.shape[-2]).float()


def _symmetric(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> int8 values and the last axis's fp16 scale, max|x| / 127."""
    scale = (x.abs().amax(-1) / 127).half()
    return _divide(x, scale.float()[..., None]).clamp(-127, 127).to(torch.int8), scale


def _per_channel(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k [R, n, D] -> uint8 codes, and per 32 tokens and channel the fp16 scale and zero [R, P, D]."""
    runs = torch.split(k, _PAIR_UNITS * UNIT_TOKENS, 1)
    zeros = [run.amin(1).half() for run in runs]
    scales = [((run.amax(1) - run.amin(1)) / 255).half() for run in runs]
    codes = [
        _divide(run - zero.float()[:, None], scale.float()[:, None]).clamp(0, 255).to(torch.uint8)
        for run, zero, scale in zip(runs, zeros, scales, strict=True)
    ]
    return torch.cat(codes, 1), torch.stack(scales, 1), torch.stack(zeros, 1)


def _divide(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / scale, rounded to the nearest whole number (half to even), by the fp32 reciprocal; 0 where scale is 0."""
    return (x * torch.where(scale > 0, scale.reciprocal(), torch.zeros_like(scale))).round()


# ------------------------------------------------------------------------------------------------- records' bytes


def write_records(records: Records, pool: SegmentPool, slot: int, first: int) -> None:
    """Put records at `first` … of a slot, every byte of theirs included (padding and absent units are zero)."""
    layout = pool.layout
    for index in range(records.k.shape[0]):
        at = first + index
        _summary(pool, slot, at).copy_(_join(layout.summary_offsets, _summary_arrays(records, index)))
        _payload(pool, slot, at).copy_(_join(layout.payload_offsets, _payload_arrays(records, index)))


def read_records(pool: SegmentPool, slot: int, first: int, count: int) -> Records:
    """Records `first` … `first + count - 1` of a slot. Raises ValueError if the slot is empty."""
    parts = [_read(pool, slot, first + index) for index in range(count)]
    return Records(*(torch.stack([getattr(part, field.name) for part in parts]) for field in fields(Records)))


def _summary_arrays(records: Records, index: int) -> dict[str, torch.Tensor]:
    dim = records.k.shape[-1]
    unit_k = _padded(records.unit_k[index], SEGMENT_UNITS).view(SEGMENT_GROUPS, GROUP_UNITS, dim // 4, 4)
    outlier_k = _padded(records.outlier_k[index], OUTLIERS)
    outlier_v = _padded(records.outlier_v[index], OUTLIERS)
    return {
        "unit_k": unit_k.transpose(1, 2),
        "unit_k_scale": _padded(records.unit_k_scale[index], SEGMENT_UNITS),
        "unit_v": _padded(records.unit_v[index], SEGMENT_UNITS),
        "unit_v_scale": _padded(records.unit_v_scale[index], SEGMENT_UNITS),
        "unit_n": records.unit_n[index],
        "group_k": _padded(records.group_k[index], SEGMENT_GROUPS),
        "group_v": _padded(records.group_v[index], SEGMENT_GROUPS),
        "group_n": records.group_n[index],
        "outlier_k": outlier_k.view(OUTLIERS, dim // 2, 2).transpose(0, 1),
        "outlier_v": outlier_v.view(OUTLIERS // 2, 2, dim).transpose(1, 2),
        "outlier_n": torch.tensor([records.outlier_k.shape[1]], dtype=torch.int16),
    }


def _payload_arrays(records: Records, index: int) -> dict[str, torch.Tensor]:
    units, _, dim = records.k.shape[1:]
    return {
        "k": records.k[index].view(units, UNIT_TOKENS, dim // 4, 4).transpose(1, 2),
        "k_scale": records.k_scale[index],
        "k_zero": records.k_zero[index],
        "v": records.v[index].view(units, UNIT_TOKENS // 4, 4, dim).transpose(2, 3),
        "v_scale": records.v_scale[index],
    }


def _read(pool: SegmentPool, slot: int, at: int) -> Records:
    layout, dim = pool.layout, pool.layout.head_dim
    summary, payload = _summary(pool, slot, at), _payload(pool, slot, at)

    def array(
        data: torch.Tensor, offsets: dict[str, int], name: str, dtype: torch.dtype, *shape: int
    ) -> torch.Tensor:
        start, size = offsets[name], math.prod(shape) * dtype.itemsize
        return data[start : start + size].view(dtype).view(shape)

    def of_summary(name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return array(summary, layout.summary_offsets, name, dtype, *shape)

    def of_payload(name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return array(payload, layout.payload_offsets, name, dtype, *shape)

    f16, s8, u8, i16, bf16 = torch.float16, torch.int8, torch.uint8, torch.int16, torch.bfloat16
    unit_n = of_summary("unit_n", u8, SEGMENT_UNITS)
    units = int((unit_n > 0).sum())
    pairs, groups = -(-units // _PAIR_UNITS), -(-units // GROUP_UNITS)
    outliers = int(of_summary("outlier_n", i16, 1))
    unit_k = of_summary("unit_k", s8, SEGMENT_GROUPS, dim // 4, GROUP_UNITS, 4).transpose(1, 2)
    k = of_payload("k", u8, SEGMENT_UNITS, dim // 4, UNIT_TOKENS, 4)[:units].transpose(1, 2)
    v = of_payload("v", s8, SEGMENT_UNITS, UNIT_TOKENS // 4, dim, 4)[:units].transpose(2, 3)
    outlier_k = of_summary("outlier_k", bf16, dim // 2, OUTLIERS, 2).transpose(0, 1)
    outlier_v = of_summary("outlier_v", bf16, OUTLIERS // 2, dim, 2).transpose(1, 2)
    return Records(
        unit_k=unit_k.reshape(SEGMENT_UNITS, dim)[:units],
        unit_k_scale=of_summary("unit_k_scale", f16, SEGMENT_UNITS)[:units],
        unit_v=of_summary("unit_v", s8, SEGMENT_UNITS, dim)[:units],
        unit_v_scale=of_summary("unit_v_scale", f16, SEGMENT_UNITS)[:units],
        unit_n=unit_n[:units],
        group_k=of_summary("group_k", f16, SEGMENT_GROUPS, dim)[:groups],
        group_v=of_summary("group_v", f16, SEGMENT_GROUPS, dim)[:groups],
        group_n=of_summary("group_n", i16, SEGMENT_GROUPS)[:groups],
        outlier_k=outlier_k.reshape(OUTLIERS, dim)[:outliers],
        outlier_v=outlier_v.reshape(OUTLIERS, dim)[:outliers],
        k=k.reshape(units, UNIT_TOKENS, dim),
        k_scale=of_payload("k_scale", f16, SEGMENT_UNITS // _PAIR_UNITS, dim)[:pairs],
        k_zero=of_payload("k_zero", f16, SEGMENT_UNITS // _PAIR_UNITS, dim)[:pairs],
        v=v.reshape(units, UNIT_TOKENS, dim),
        v_scale=of_payload("v_scale", f16, SEGMENT_UNITS, UNIT_TOKENS)[:units],
    )


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def _join(offsets: dict[str, int], arrays: dict[str, torch.Tensor]) -> torch.Tensor:
    """uint8 [offsets["end"]]: the arrays at their places, zero between them."""
    whole = torch.zeros(offsets["end"], dtype=torch.uint8)
    for name, values in arrays.items():
        raw = values.contiguous().view(torch.uint8).flatten()
        whole[offsets[name] : offsets[name] + raw.numel()] = raw
    return whole


def _summary(pool: SegmentPool, slot: int, at: int) -> torch.Tensor:
    start = slot * pool.layout.segment_summary_bytes + at * pool.layout.summary_bytes
    return pool.summaries[start : start + pool.layout.summary_bytes]


def _payload(pool: SegmentPool, slot: int, at: int) -> torch.Tensor:
    """The record's payload, writable. Raises ValueError if the slot has none."""
    address = int(pool.payloads[slot])
    if address == 0:
        raise ValueError(f"segment slot {slot} has no payload")
    size = pool.layout.payload_bytes
    memory = (ctypes.c_uint8 * size).from_address(address + at * size)
    return torch.frombuffer(memory, dtype=torch.uint8)
