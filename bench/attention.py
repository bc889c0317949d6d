"""Decode attention over closed segments: the hybrid form against the dense INT8 form of the same cache.

    python -m bench.attention [--quick] [--json FILE]

One token at 32K and 128K of context, SmolLM2's attention (9 query heads, 3 KV heads, head_dim 64) over 30 layers
and Llama-8B's (32, 8, 128) over 6 copies of a layer. Time is that of a decode step whose linears are next to
nothing, less the same step at a context of one token. Each layer has its own memory and a step reads far more of
it than caches hold, so every figure is cold, as in a real step. SmolLM2's heads have the budgets of its shipped
profile, Llama-8B's are alike. Keys and queries are random; how much a head selects follows from the spread of its
scores, which is set so that layers select as many units as they do on real text (`bench.selection`). Timed steps
take no statistics, as is the default. Read bandwidth is measured in the same round. A full run takes about two
minutes on two cores and 5 GB.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from bench.machine import CpuClock, calibrate, describe
from bench.report import Bar, Result, compare, finish, parse_options
from bench.selection import default_profile
from bench.synthetic_kv import Selection, SyntheticKV, find_spread, make_kv, units_read, unmeasured
from perilune.kernels.interface import (
    ATTENTION_PARTS,
    DecodeLayer,
    DecodeModel,
    DecodePlan,
    HeadShape,
    Kernels,
    RaggedBatch,
    RopeTable,
)
from perilune.kernels.select import load
from perilune.kernels.tiers import AttentionPolicy, SegmentLayout
from perilune.runtime.head_profile import HeadProfile

BARS = {
    "vs_dense_int8_32k": Bar(at_least=5),
    "vs_dense_int8_128k": Bar(at_least=10),
    "dense_bandwidth_share": Bar(at_least=0.55, unit="of read bandwidth"),
    "llama8b_vs_dense_int8_32k": Bar(at_least=5),
    "llama8b_vs_dense_int8_128k": Bar(at_least=10),
    "llama8b_dense_bandwidth_share": Bar(at_least=0.55, unit="of read bandwidth"),
}
LENGTHS = {"32k": 32_768, "128k": 131_072}
_HIDDEN = 32
_SPARSE = AttentionPolicy(dense_layers=0)
_TAIL_TOKENS = 3200  # bf16 blocks: the local window and a segment that is not closed yet


@dataclass(frozen=True, slots=True)
class Setup:
    """One shape's kernels, cache and model; a step attends `layers` layers."""

    prefix: str
    kernels: Kernels
    heads: HeadShape
    layers: int
    kv: SyntheticKV
    plan: dict[str, DecodePlan]
    profile: HeadProfile | None

    def batch(self, length: int, policy: AttentionPolicy) -> RaggedBatch:
        return self.kv.batch(length, policy, None if self.profile is None else self.profile.budgets())


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options("Hybrid decode attention against dense INT8 over the same cache.", argv)
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    kernels = load(threads)
    setups = [_open(kernels, "", HeadShape(9, 3, 64, 0.125), 30, default_profile())]
    setups += [_open(kernels, "llama8b_", HeadShape(32, 8, 128, 128**-0.5), 6)]
    clock = CpuClock.now([os.getpid()])
    rounds = [_round(setups, threads) for _ in range(2 if options.quick else options.rounds)]
    share = CpuClock.now([os.getpid()]).foreign_share(clock)
    machine = describe() | {"kernels": kernels.describe(), "foreign_share": round(share, 3)}
    result = Result("attention", {}, machine, [dict(figures) for figures in rounds], quick=options.quick)
    for key in rounds[0]:
        compare(result, key, [figures[key] for figures in rounds])
    result.notes.append(Selection.load().note)
    finish(result, BARS, options)


# ------------------------------------------------------------------------------------------------ the cache


def _open(
    kernels: Kernels, prefix: str, heads: HeadShape, layers: int, profile: HeadProfile | None = None
) -> Setup:
    layout = SegmentLayout(layers, heads.num_kv_heads, heads.head_dim)
    kv = make_kv(kernels, layout, max(LENGTHS.values()), _TAIL_TOKENS)
    plans = {
        name: kernels.prepare_decode(_model(kernels, heads, layers, length), kv.pool)
        for name, length in LENGTHS.items()
    }
    setup = Setup(prefix, kernels, heads, layers, kv, plans, profile)
    for name, length in LENGTHS.items():
        _set_budgets(setup, plans[name], length)
    return setup


def _queries(heads: HeadShape, layers: int) -> torch.Tensor:
    """[layers, Hq * D] of length one; heads that share a KV head are somewhat alike."""
    generator, group = torch.Generator().manual_seed(4), heads.num_q_heads // heads.num_kv_heads
    shared = torch.randn(layers, heads.num_kv_heads, 1, heads.head_dim, generator=generator)
    q = shared + 0.5 * torch.randn(layers, heads.num_kv_heads, group, heads.head_dim, generator=generator)
    unit: torch.Tensor = q / q.norm(dim=-1, keepdim=True) / heads.scale
    return unit.flatten(1)


def _set_budgets(setup: Setup, plan: DecodePlan, length: int) -> None:
    """Scale each layer's queries until its heads select as many units as its budget says."""
    biases = [layer.qkv_bias for layer in plan.model.layers]
    directions = [None if bias is None else bias.clone() for bias in biases]
    batch = setup.batch(length, _SPARSE)

    def units(spread: torch.Tensor) -> torch.Tensor:
        for bias, direction, factor in zip(biases, directions, spread.tolist(), strict=True):
            if bias is not None and direction is not None:
                bias.copy_(direction * factor)
        setup.kernels.decode_step(plan, torch.zeros(1, _HIDDEN), batch)
        return units_read(batch)

    if setup.profile is None:
        found = Selection.load().at(length, first=AttentionPolicy().dense_layers)
    else:
        found = Selection.load(profiled=True).at(length)
    wanted = [found[layer % len(found)] for layer in range(setup.layers)]
    find_spread(wanted, units, low=0.5, high=8.0)


def _model(kernels: Kernels, heads: HeadShape, layers: int, positions: int) -> DecodeModel:
    """Weights of zero, biases that are the queries, no rotation: attention alone takes time."""
    half = heads.head_dim // 2
    rope = RopeTable(torch.ones(positions, half), torch.zeros(positions, half))
    columns = heads.num_q_heads * heads.head_dim
    narrow, ones = kernels.pack_int8(torch.zeros(_HIDDEN, _HIDDEN)), torch.ones(_HIDDEN)
    qkv, o = (
        kernels.pack_int8(torch.zeros(heads.qkv_columns, _HIDDEN)),
        kernels.pack_int8(torch.zeros(_HIDDEN, columns)),
    )
    q = _queries(heads, layers)

    def bias(layer: int) -> torch.Tensor:
        return torch.cat([q[layer], torch.zeros(heads.qkv_columns - columns)])

    built = [
        DecodeLayer(
            input_norm=ones,
            qkv=(qkv,),
            qkv_bias=bias(layer),
            qk_norm=None,
            rope=rope,
            window=None,
            o=o,
            o_bias=None,
            post_attn_norm=None,
            ffn_norm=ones,
            gate_up=(narrow, narrow),
            down=narrow,
            post_ffn_norm=None,
        )
        for layer in range(layers)
    ]
    return DecodeModel(_HIDDEN, heads, "silu", 1e-5, tuple(built), ones, narrow)


# ------------------------------------------------------------------------------------------------ the rounds


def _step_s(setup: Setup, plan: DecodePlan, batch: RaggedBatch, repeats: int) -> float:
    """Median seconds of a step."""
    x, times = torch.zeros(1, _HIDDEN), []
    for _ in range(repeats):
        start = time.perf_counter()
        setup.kernels.decode_step(plan, x.clone(), batch)
        times.append(time.perf_counter() - start)
    return median(times)


def _dense_bytes(setup: Setup, batch: RaggedBatch) -> int:
    """What the dense form reads in a step: payloads of closed segments, bf16 blocks."""
    layout, tiers = setup.kv.segments.layout, batch.segments
    closed = 0 if tiers is None else int(tiers.counts[0])
    blocks = int((batch.block_tables >= 0).sum())
    return closed * layout.records * layout.payload_bytes + blocks * setup.kv.pool.layout.block_bytes


def _round(setups: Sequence[Setup], threads: int) -> dict[str, float]:
    figures = {"read_gb_s": calibrate(threads, 0.3).read_gb_s}
    for setup in setups:
        for name, length in LENGTHS.items():
            plan, key = setup.plan[name], setup.prefix
            dense_batch, batch = setup.batch(length, replace(_SPARSE, sparse=False)), setup.batch(length, _SPARSE)
            idle_s = _step_s(setup, plan, setup.batch(1, _SPARSE), 15)
            dense_s = _step_s(setup, plan, unmeasured(dense_batch), 3) - idle_s
            hybrid_s = _step_s(setup, plan, unmeasured(batch), 9) - idle_s
            figures[f"{key}vs_dense_int8_{name}"] = dense_s / hybrid_s
            figures[f"{key}hybrid_{name}_us"] = hybrid_s / setup.layers * 1e6
            share = _dense_bytes(setup, dense_batch) / dense_s / 1e9 / figures["read_gb_s"]
            figures[f"{key}dense_bandwidth_share" + ("_32k" if name == "32k" else "")] = share
            setup.kernels.decode_step(plan, torch.zeros(1, _HIDDEN), batch)
            figures[f"{key}units_{name}"] = float(units_read(batch).mean())
            parts = _parts(setup, plan, unmeasured(batch))
            figures |= {f"{key}{part}_{name}_share": value for part, value in parts.items()}
    return figures


def _parts(setup: Setup, plan: DecodePlan, batch: RaggedBatch) -> dict[str, float]:
    """Where the threads' time in a step goes."""
    if batch.segments is None:
        return {}
    part_ns = torch.zeros(setup.layers, len(ATTENTION_PARTS), dtype=torch.int64)
    timed = replace(batch, segments=replace(batch.segments, part_ns=part_ns))
    setup.kernels.decode_step(plan, torch.zeros(1, _HIDDEN), timed)
    total = part_ns.sum(0).double()
    return dict(zip(ATTENTION_PARTS, (total / total.sum()).tolist(), strict=True))


if __name__ == "__main__":
    main()
