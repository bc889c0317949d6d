"""The native kernels against what the machine gives: torch's bf16 GEMM, its SDPA, and plain memory reads.

    python -m bench.kernels [--quick] [--json FILE]

SmolLM2-135M's shape (9 query heads, 3 KV heads, head_dim 64, 30 layers, Q4_1 weights, int8 head), random numbers.
KV and weights are larger than the caches, so decode figures are cold. Each round measures the yardsticks beside the
kernels, and a ratio never mixes rounds. A full run takes about two minutes on two cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.machine import calibrate, describe
from bench.report import Bar, Result, compare, finish, parse_options
from perilune.kernels.interface import (
    DecodeLayer,
    DecodeModel,
    HeadShape,
    Kernels,
    KVLayout,
    KVPool,
    PackedLinear,
    RaggedBatch,
    RopeTable,
)
from perilune.kernels.select import load

BARS = {
    "prefill_vs_gemm": Bar(at_least=0.4),
    "prefill_vs_sdpa": Bar(at_least=2.0),
    "decode_vs_read": Bar(at_least=0.7),
    "decode_vs_sdpa": Bar(at_least=2.0),
    "step_512_vs_read": Bar(at_least=0.7),
}
HEADS = HeadShape(9, 3, 64, 0.125)
_LAYERS, _HIDDEN, _FFN, _VOCAB = 30, 576, 1536, 49_152
_DECODE_TOKENS, _PREFILL_TOKENS, _QUICK_PREFILL_TOKENS = 7_680, 7_680, 2_048


@dataclass(frozen=True, slots=True)
class Bench:
    """The kernels, a filled pool of `_LAYERS` layers, one sequence in it, and a model."""

    kernels: Kernels
    pool: KVPool
    model: DecodeModel
    weight_bytes: int

    def batch(self, rows: int, length: int) -> RaggedBatch:
        blocks = torch.randperm(self.pool.num_blocks, generator=torch.Generator().manual_seed(0)).int()
        return RaggedBatch(
            torch.tensor([0, rows], dtype=torch.int32), torch.tensor([length], dtype=torch.int32), blocks[None]
        )


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options("Native kernels against GEMM, SDPA and memory reads.", argv)
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    bench = _open(threads)
    prefill_tokens = _QUICK_PREFILL_TOKENS if options.quick else _PREFILL_TOKENS
    rounds = [_round(bench, threads, prefill_tokens) for _ in range(2 if options.quick else options.rounds)]
    machine = describe() | {"kernels": bench.kernels.describe()}
    result = Result("kernels", {}, machine, [dict(figures) for figures in rounds], quick=options.quick)
    for key in rounds[0]:
        compare(result, key, [figures[key] for figures in rounds])
    finish(result, BARS, options)


def _open(threads: int) -> Bench:
    kernels = load(threads)
    pool = kernels.allocate_pool(KVLayout(_LAYERS, 3, 64, "bf16"), -(-_PREFILL_TOKENS // 32) + 1)
    pool.data.view(torch.bfloat16).normal_()
    model = _model(kernels)
    parts = [part for layer in model.layers for part in (*layer.qkv, layer.o, *layer.gate_up, layer.down)]
    return Bench(kernels, pool, model, sum(part.data.numel() for part in [*parts, model.head]))


def _model(kernels: Kernels) -> DecodeModel:
    angles = torch.arange(_PREFILL_TOKENS + 32)[:, None] * 10_000.0 ** (-torch.arange(32) / 32)
    rope, ones = RopeTable(angles.cos(), angles.sin()), torch.ones(_HIDDEN)

    def q4(rows: int, cols: int) -> PackedLinear:
        raw = torch.randint(0, 256, (rows * cols // 32, 20), dtype=torch.uint8)
        raw[:, :4] = torch.tensor([0.01, -0.075]).half().view(torch.uint8)
        return kernels.pack_gguf(raw, rows, cols, "Q4_1")

    layers = [
        DecodeLayer(
            input_norm=ones,
            qkv=(q4(HEADS.qkv_columns, _HIDDEN),),
            qkv_bias=None,
            qk_norm=None,
            rope=rope,
            window=None,
            o=q4(_HIDDEN, _HIDDEN),
            o_bias=None,
            post_attn_norm=None,
            ffn_norm=ones,
            gate_up=(q4(2 * _FFN, _HIDDEN),),
            down=q4(_HIDDEN, _FFN),
            post_ffn_norm=None,
        )
        for _ in range(_LAYERS)
    ]
    head = kernels.pack_int8(torch.randn(_VOCAB, _HIDDEN) * 0.04)
    return DecodeModel(_HIDDEN, HEADS, "silu", 1e-5, tuple(layers), ones, head)


def _best_s(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _round(bench: Bench, threads: int, prefill_tokens: int) -> dict[str, float]:
    yardstick = calibrate(threads)
    figures = {"gemm_gflops": yardstick.gemm_gflops, "read_gb_s": yardstick.read_gb_s}
    figures |= _prefill(bench, prefill_tokens, yardstick.gemm_gflops)
    figures |= _decode(bench, yardstick.read_gb_s)
    return figures | _step(bench, yardstick.read_gb_s)


def _prefill(bench: Bench, tokens: int, gemm_gflops: float) -> dict[str, float]:
    q = torch.randn(tokens, 9, 64).bfloat16()
    batch = bench.batch(tokens, tokens)
    ours_s = _best_s(lambda: bench.kernels.attention(q, bench.pool, 0, batch, HEADS), 3)
    dense = torch.randn(1, 15, tokens, 64).bfloat16()
    heads, k, v = torch.split(dense, [9, 3, 3], 1)
    sdpa_s = _best_s(lambda: scaled_dot_product_attention(heads, k, v, is_causal=True, enable_gqa=True), 2)
    gflops = 4 * 9 * 64 * tokens * (tokens + 1) / 2 / ours_s / 1e9
    return {
        "prefill_gflops": gflops,
        "prefill_vs_gemm": gflops / gemm_gflops,
        "prefill_vs_sdpa": sdpa_s / ours_s,
    }


def _decode(bench: Bench, read_gb_s: float) -> dict[str, float]:
    """One row over all layers in turn: 177 MB of KV."""
    q = torch.randn(1, 9, 64).bfloat16()
    batch = bench.batch(1, _DECODE_TOKENS)

    def all_layers() -> None:
        for layer in range(_LAYERS):
            bench.kernels.decode_attention(q, bench.pool, layer, batch, HEADS)

    ours_s = _best_s(all_layers, 5) / _LAYERS
    k, v = torch.randn(2, _LAYERS, 3, _DECODE_TOKENS, 64).bfloat16().unbind()
    heads = q.transpose(0, 1)

    def all_layers_sdpa() -> None:
        for layer in range(_LAYERS):
            scaled_dot_product_attention(heads[None], k[None, layer], v[None, layer], enable_gqa=True)

    sdpa_s = _best_s(all_layers_sdpa, 2) / _LAYERS
    gb_s = _DECODE_TOKENS * 3 * 64 * 4 / ours_s / 1e9
    return {"decode_gb_s": gb_s, "decode_vs_read": gb_s / read_gb_s, "decode_vs_sdpa": sdpa_s / ours_s}


def _step(bench: Bench, read_gb_s: float) -> dict[str, float]:
    plan = bench.kernels.prepare_decode(bench.model, bench.pool)
    x = torch.randn(1, _HIDDEN)
    figures: dict[str, float] = {}
    for name, tokens in (("512", 512), ("8k", _DECODE_TOKENS)):
        batch = bench.batch(1, tokens)
        seconds = _best_s(lambda batch=batch: bench.kernels.decode_step(plan, x.clone(), batch), 15)  # type: ignore[misc]
        read_bytes = bench.weight_bytes + tokens * bench.pool.layout.block_bytes / 32
        figures[f"step_{name}_ms"] = seconds * 1e3
        figures[f"step_{name}_vs_read"] = read_bytes / seconds / 1e9 / read_gb_s
    return figures


if __name__ == "__main__":
    main()
