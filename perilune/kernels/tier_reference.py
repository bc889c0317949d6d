"""Closing segments in plain PyTorch: clustering, codec and records at their byte offsets (see `tiers`).

The oracle of the native code, and the fallback without it. Every decision about tokens (clusters, order)
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
    QUAD_UNITS,
    SEGMENT_GROUPS,
    SEGMENT_QUADS,
    SEGMENT_UNITS,
    UNIT_TOKENS,
)

_PAIR_UNITS = 2  # units that share the keys' scales


@dataclass(frozen=True, slots=True)
class Records:
    """R closed records with their arrays in logical order. U units, P = ceil(U / 2), Q = ceil(U / 4) quads.

    mean     uint8 [R, U, D], codes of rotated mean keys; mean_scale fp16 [R, U]
    signs    uint8 [R, U, 16, D], 0 or 1; spread uint8 [R, U, 16], spread_scale fp16 [R, U]
    quad_v   int8 [R, Q, D], quad_v_scale fp16 [R, Q]
    k        uint8 [R, U, 16, D], k_scale and k_zero fp16 [R, P, D]
    v        int8 [R, U, 16, D], v_scale fp16 [R, U, 16]
    """

    mean: torch.Tensor
    mean_scale: torch.Tensor
    signs: torch.Tensor
    spread: torch.Tensor
    spread_scale: torch.Tensor
    quad_v: torch.Tensor
    quad_v_scale: torch.Tensor
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

    def sketched_rests(self) -> torch.Tensor:
        """fp32 [R, U, 16, D]: what the index knows of each key beside its unit's mean, rotated."""
        return self.spreads()[..., None] * (2 * self.signs.float() - 1)

    def spreads(self) -> torch.Tensor:
        """fp32 [R, U, 16]: how much each channel of a key differs from its unit's mean, on average."""
        return (self.spread.float() + 1) * self.spread_scale.float()[..., None]

    def sign_codes(self) -> torch.Tensor:
        """uint8 [R, U, 16, D/4]: the signs of four channels as one number."""
        nibbles = self.signs.reshape(*self.signs.shape[:3], -1, 4) << torch.arange(4, dtype=torch.uint8)
        return nibbles.sum(-1, dtype=torch.uint8)

    def mean_keys(self) -> torch.Tensor:
        """fp32 [R, U, D]: the units' mean keys, rotated."""
        return (self.mean.float() - 7.5) * self.mean_scale.float()[..., None]

    def unit_values(self) -> torch.Tensor:
        """fp32 [R, U, D]: for each unit its quad's mean value, rotated."""
        quads = self.quad_v.float() * self.quad_v_scale.float()[..., None]
        return quads.repeat_interleave(QUAD_UNITS, 1)[:, : self.k.shape[1]]


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


def close(k: torch.Tensor, v: torch.Tensor) -> Records:
    """k, v [R, n, D] with n a multiple of 16 -> records of n / 16 units."""
    keys, values = k.float(), v.float()
    order = arrange(keys)
    return encode(_take(keys, order), _take(values, order))


def encode(k: torch.Tensor, v: torch.Tensor) -> Records:
    """Quantise tokens in their final order. k, v fp32 [R, 16 U, D]."""
    records, tokens, dim = k.shape
    by_unit = (records, tokens // UNIT_TOKENS, UNIT_TOKENS, dim)
    mean, mean_scale = _means(rotate(_mean(k.view(by_unit))))
    residual = rotate(k).view(by_unit) - ((mean.float() - 7.5) * mean_scale.float()[..., None])[:, :, None]
    spread, spread_scale = _spread(residual)
    quads = torch.split(v, QUAD_UNITS * UNIT_TOKENS, 1)
    quad_v, quad_v_scale = _symmetric(rotate(torch.stack([_mean(quad) for quad in quads], 1)))
    codes, k_scale, k_zero = _per_channel(k)
    values, v_scale = _symmetric(rotate(v))
    return Records(
        mean=mean,
        mean_scale=mean_scale,
        signs=(residual >= 0).to(torch.uint8),
        spread=spread,
        spread_scale=spread_scale,
        quad_v=quad_v,
        quad_v_scale=quad_v_scale,
        k=codes.view(by_unit),
        k_scale=k_scale,
        k_zero=k_zero,
        v=values.view(by_unit),
        v_scale=v_scale.view(by_unit[:3]),
    )


# ------------------------------------------------------------------------------------------------- clustering


def arrange(k: torch.Tensor) -> torch.Tensor:
    """Tokens in a record's order: k fp32 [R, n, D] -> int64 [R, n]."""
    points = _directions(k)
    centroids = points[:, ::UNIT_TOKENS].clone()
    assigned = _assign(points, centroids)
    for _ in range(CLUSTER_ROUNDS):
        centroids = _centroids(points, assigned, centroids)
        assigned = _assign(points, centroids)
    return _chain(centroids, assigned).gather(1, assigned).sort(dim=1, stable=True).indices


def _directions(k: torch.Tensor) -> torch.Tensor:
    """Mean-centred keys of length one as whole numbers -127 … 127 (held in fp32), one scale per record."""
    centred = k - _mean(k)[:, None]
    square = centred.double().square().sum(-1, keepdim=True)
    inverse = torch.where(square > 0, square.sqrt().reciprocal(), torch.zeros_like(square)).float()
    unit = centred * inverse
    peak = unit.abs().amax((1, 2), keepdim=True)
    return (unit * torch.where(peak > 0, _full_scale(peak), torch.zeros_like(peak))).round()


def _assign(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Nearest centroid (ties: the lowest index). Products' sums stay below 2^24, so fp32 is exact."""
    return (points @ centroids.transpose(1, 2)).argmax(-1)


def _centroids(points: torch.Tensor, assigned: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Sums of the clusters' points, scaled to length one and whole numbers; a sum of zero keeps its centroid."""
    sums = torch.zeros_like(before).scatter_add_(1, assigned[..., None].expand_as(points), points).double()
    square = sums.square().sum(-1, keepdim=True)
    filled = square > 0
    unit = sums * torch.where(filled, square, torch.ones_like(square)).sqrt().reciprocal()
    peak = unit.abs().amax((1, 2), keepdim=True)
    scaled = unit * _full_scale(torch.where(peak > 0, peak, torch.ones_like(peak)))
    return torch.where(filled, scaled.round().float(), before)


def _full_scale(peak: torch.Tensor) -> torch.Tensor:
    """127 / peak, rounded once: `127 / peak` alone is torch's reciprocal times 127, which breaks ties otherwise."""
    return torch.full_like(peak, 127) / peak


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


def _means(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> uint8 codes 0 … 15 and the last axis's fp16 scale: x ~ scale * (code - 7.5)."""
    scale = (x.abs().amax(-1) / 7.5).half()
    return (x * _inverse(scale.float())[..., None] + 7.5).round().clamp(0, 15).to(torch.uint8), scale


def _spread(residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, U, 16, D] -> each token's mean size as uint8 codes 0 … 15 [R, U, 16], and the unit's fp16 scale."""
    size = (residual.double().abs().sum(-1) / residual.shape[-1]).float()
    scale = (size.amax(-1) / 16).half()
    return ((size * _inverse(scale.float())[..., None]).round() - 1).clamp(0, 15).to(torch.uint8), scale


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
    """x / scale, rounded to the nearest whole number (half to even); 0 where scale is 0."""
    return (x * _inverse(scale)).round()


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """The fp32 reciprocal; 0 where scale is 0."""
    return torch.where(scale > 0, scale.reciprocal(), torch.zeros_like(scale))


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
    units, dim = records.mean.shape[1:]
    mean = _padded(records.mean[index], SEGMENT_UNITS).view(SEGMENT_GROUPS, GROUP_UNITS, 2, dim // 8, 4)
    low, high = mean.permute(2, 0, 3, 1, 4)
    signs = _padded(records.signs[index], SEGMENT_UNITS).view(SEGMENT_GROUPS, GROUP_UNITS, 4, 4, 2, dim // 8, 4)
    places = torch.arange(4, dtype=torch.uint8)
    first, second = (signs << places).sum(-1, dtype=torch.uint8).permute(4, 0, 2, 5, 3, 1)
    spread = _padded(records.spread[index], SEGMENT_UNITS).view(SEGMENT_GROUPS, GROUP_UNITS, 4, 2, 2)
    near, far = spread.permute(3, 0, 2, 4, 1)
    return {
        "mean": low | high << 4,
        "mean_scale": _padded(records.mean_scale[index], SEGMENT_UNITS),
        "signs": first | second << 4,
        "spread": near | far << 4,
        "spread_scale": _padded(records.spread_scale[index], SEGMENT_UNITS),
        "quad_v": _padded(records.quad_v[index], SEGMENT_QUADS),
        "quad_v_scale": _padded(records.quad_v_scale[index], SEGMENT_QUADS),
        "units": torch.tensor([units], dtype=torch.int16),
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

    f16, s8, u8, i16 = torch.float16, torch.int8, torch.uint8, torch.int16
    units = int(of_summary("units", i16, 1))
    pairs, quads = -(-units // _PAIR_UNITS), -(-units // QUAD_UNITS)
    packed = of_summary("mean", u8, SEGMENT_GROUPS, dim // 8, GROUP_UNITS, 4)
    mean = torch.stack([packed & 15, packed >> 4]).permute(1, 3, 0, 2, 4).reshape(SEGMENT_UNITS, dim)
    words = of_summary("signs", u8, SEGMENT_GROUPS, 4, dim // 8, 4, GROUP_UNITS)
    halves = torch.stack([words & 15, words >> 4])[..., None] >> torch.arange(4, dtype=torch.uint8) & 1
    signs = halves.permute(1, 5, 2, 4, 0, 3, 6).reshape(SEGMENT_UNITS, UNIT_TOKENS, dim)
    nibbles = of_summary("spread", u8, SEGMENT_GROUPS, 4, 2, GROUP_UNITS)
    spread = torch.stack([nibbles & 15, nibbles >> 4]).permute(1, 4, 2, 0, 3).reshape(SEGMENT_UNITS, UNIT_TOKENS)
    k = of_payload("k", u8, SEGMENT_UNITS, dim // 4, UNIT_TOKENS, 4)[:units].transpose(1, 2)
    v = of_payload("v", s8, SEGMENT_UNITS, UNIT_TOKENS // 4, dim, 4)[:units].transpose(2, 3)
    return Records(
        mean=mean[:units],
        mean_scale=of_summary("mean_scale", f16, SEGMENT_UNITS)[:units],
        signs=signs[:units],
        spread=spread[:units],
        spread_scale=of_summary("spread_scale", f16, SEGMENT_UNITS)[:units],
        quad_v=of_summary("quad_v", s8, SEGMENT_QUADS, dim)[:quads],
        quad_v_scale=of_summary("quad_v_scale", f16, SEGMENT_QUADS)[:quads],
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
