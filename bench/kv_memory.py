"""Memory that a long context's KV keeps in RAM: bf16 over tiered, summaries counted.

    python -m bench.kv_memory [--quick] [--json FILE]

SmolLM2-135M's shape (30 layers, 3 KV heads of 64). At 128K the real engine, segment pool, closing kernels and
background moves run over random KV, at the default tier sizes. The system is then asked which pages are in RAM:
`bf16_over_resident_128k` counts those of blocks in use, of summaries, and of WARM payloads.
`bf16_over_anonymous_128k` is by the growth of the process's anonymous memory, less free blocks: token ids, hashes
and what code takes at its first use are in it. `bf16_over_all_128k` adds the pages of COLD's mapped file that the
page cache still holds; the system takes them back when memory is wanted. At 1M the bytes are computed from the
layout, and checked by allocating and touching just that. --quick takes 3 of the 30 layers: KV shrinks alike on both
sides, what else is anonymous doesn't. Without the native kernels closing takes minutes.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import torch

from bench.machine import CpuClock, describe
from bench.report import Bar, Options, Result, finish, parse_options
from perilune.core import KVPolicy, SamplingParams, SequenceSpec, ServiceClass
from perilune.engine.observe import NullObserver
from perilune.engine.policy import EngineLimits
from perilune.engine.sequence import EngineSequence
from perilune.engine.stepper import Stepper, TierPolicy
from perilune.engine.tier_rules import TierRules
from perilune.kernels import select
from perilune.kernels.interface import Kernels, KVLayout
from perilune.kernels.memory import zeroed_bytes
from perilune.kernels.tiers import SEGMENT_TOKENS, SegmentLayout
from perilune.runtime.kv.spec import KVSpec, TierSpec
from perilune.runtime.kv.tiers import SegmentTiers, TierSize
from perilune.runtime.mri import CancelFlag, Capabilities, EvictReply, KVSummary, StepPlan, StepResult
from perilune.telemetry import Telemetry

BARS = {
    "bf16_over_resident_128k": Bar(at_least=3.0),
    "bf16_over_resident_1m": Bar(at_least=12.0),
    "allocated_over_computed_1m": Bar(at_most=1.02),
}
HEADS, HEAD_DIM, LAYERS, QUICK_LAYERS = 3, 64, 30, 3
SHORT, LONG = 128 * 1024, 1024 * 1024
WARM_TOKENS = 65536
T = TypeVar("T")


class FilledRuntime:
    """An MRI whose steps write random KV instead of computing any: tiers and kernels are the real ones."""

    capabilities = Capabilities()

    def __init__(self, kernels: Kernels, layers: int, folder: Path, num_tokens: int) -> None:
        self.kv_spec = KVSpec(layers, HEADS, HEAD_DIM, "bf16", "random")
        layout = SegmentLayout(layers, HEADS, HEAD_DIM)
        segments = num_tokens // SEGMENT_TOKENS
        warm = WARM_TOKENS // SEGMENT_TOKENS
        rules = TierRules(TierSpec(1, 1, 1, 1, 1, 0), WARM_TOKENS)
        self.num_blocks = rules.blocks_needed(num_tokens)
        self._pool = kernels.allocate_pool(KVLayout(layers, HEADS, HEAD_DIM, "bf16"), self.num_blocks)
        self._bytes = self._pool.data.numpy().data
        size = TierSize(segments, warm, segments - warm, folder)
        self.tiers = SegmentTiers(kernels, self._pool, layout, range(layers), size)
        self.max_context_tokens = num_tokens
        self._noise = torch.randn(self.kv_spec.block_bytes // 2 + 4096).bfloat16().view(torch.uint8).numpy().data

    def init_context(self, seq_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        return

    def release_context(self, seq_id: str) -> None:
        return

    def forward_step(self, plan: StepPlan, cancelled: CancelFlag) -> StepResult:
        for piece in plan.slices:
            for index in range(piece.start // 32, -(-piece.end // 32)):
                shift = 2 * (index * 61 % 4096)
                self.block_view(piece.block_table[index])[:] = self._noise[shift : shift + self.kv_spec.block_bytes]
        return StepResult({}, {})

    def evict_kv(self, block_ids: Sequence[int]) -> EvictReply:
        return EvictReply(len(block_ids))

    def get_kv_summary(self) -> KVSummary:
        return KVSummary(self.num_blocks, self.kv_spec.block_bytes, 0)

    def block_view(self, block_id: int) -> memoryview:
        size = self.kv_spec.block_bytes
        return self._bytes[block_id * size : (block_id + 1) * size]

    def give_back(self, blocks: Sequence[int]) -> None:
        """Return the pages of free blocks, which hold nobody's KV, to the system."""
        libc, size, page = ctypes.CDLL(None), self.kv_spec.block_bytes, mmap.PAGESIZE
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for block in blocks:
            start = self._pool.data.data_ptr() + block * size
            first, end = -(-start // page) * page, (start + size) // page * page
            libc.madvise(first, end - first, mmap.MADV_DONTNEED)

    def kv_pages(self, blocks: Sequence[int], slots: int) -> tuple[int, int]:
        """Bytes of KV whose pages are in RAM: blocks, index and WARM payloads; and COLD payloads."""
        data, layout, pool = self._pool.data.data_ptr(), self.tiers.pool.layout, self.tiers.pool
        size = self.kv_spec.block_bytes
        resident = sum(pages_in_ram(data + block * size, size) for block in blocks)
        resident += pages_in_ram(pool.summaries.data_ptr(), slots * layout.segment_summary_bytes)
        cold = 0
        for slot in range(slots):
            found = pages_in_ram(int(pool.payloads[slot]), layout.segment_payload_bytes)
            resident, cold = (resident, cold + found) if self.tiers.is_cold(slot) else (resident + found, cold)
        return resident, cold

    def close(self) -> None:
        return


def pages_in_ram(address: int, num_bytes: int) -> int:
    """Bytes of a range, in whole pages, that the system has in RAM now (mincore)."""
    libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    first, end = address // page * page, -(-(address + num_bytes) // page) * page
    flags = ctypes.create_string_buffer((end - first) // page)
    if libc.mincore(first, end - first, flags) != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return page * sum(flag & 1 for flag in flags.raw)


class _Now:
    """A worker that does its work at once."""

    def submit(self, fn: Callable[[], T], /) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(fn())
        return future


def main() -> None:
    options = parse_options("Memory that a long context's KV keeps in RAM: bf16 over tiered.")
    layers = QUICK_LAYERS if options.quick else LAYERS
    clock = CpuClock.now([os.getpid()])
    kernels = select.load(torch.get_num_threads())
    machine = describe() | {"kernels": kernels.describe()}
    result = Result("kv_memory", {}, machine, [], quick=options.quick)
    with tempfile.TemporaryDirectory() as folder:
        _measure_128k(kernels, layers, Path(folder), result)
    _check_1m(layers, result)
    result.machine["foreign_share"] = round(CpuClock.now([os.getpid()]).foreign_share(clock), 3)
    _report(result, options)


def _report(result: Result, options: Options) -> None:
    result.notes.append(f"{result.runs[0]['layers']} layers of {LAYERS}")
    finish(result, BARS, options)


def _measure_128k(kernels: Kernels, layers: int, folder: Path, result: Result) -> None:
    """Run 128K tokens through the engine; stop before they end, when nothing has been given back."""
    gc.collect()
    before = _anonymous_bytes()
    runtime = FilledRuntime(kernels, layers, folder, SHORT)
    stepper = Stepper(
        runtime,
        None,
        EngineLimits(),
        loader=_Now(),
        saver=_Now(),
        post=lambda call: call(),
        ended=lambda sequence: None,
        clock=time.monotonic,
        telemetry=Telemetry(),
        observer=NullObserver(),
        tier_policy=TierPolicy(WARM_TOKENS),
    )
    # One token more than 128K, so that the sequence still holds everything when 128K are computed.
    tokens = range(SHORT + 1)
    spec = SequenceSpec(
        "long",
        tokens,
        b"",
        SamplingParams(),
        0,
        frozenset(),
        ServiceClass.P0_INTERACTIVE,
        kv_policy=KVPolicy.TIERED,
    )
    sequence = EngineSequence(spec, lambda event: None, [], 1, 0.0)
    stepper.add(sequence)
    start, flag = time.monotonic(), CancelFlag()
    while sequence.computed < SHORT:
        plan = stepper.plan(flag)
        assert plan is not None
        stepper.execute(plan, flag)
    seconds = time.monotonic() - start
    used = [block for block in range(runtime.num_blocks) if stepper.pool.references(block)]
    runtime.give_back(sorted(set(range(runtime.num_blocks)) - set(used)))
    resident, cold = runtime.kv_pages(used, SHORT // SEGMENT_TOKENS)
    anonymous = _anonymous_bytes() - before
    full = SHORT * runtime.kv_spec.token_bytes
    result.figures["bf16_over_resident_128k"] = round(full / resident, 3)
    result.figures["bf16_over_anonymous_128k"] = round(full / anonymous, 3)
    result.figures["bf16_over_all_128k"] = round(full / (anonymous + cold), 3)
    result.runs.append(
        {
            "layers": layers,
            "tokens": SHORT,
            "bf16_bytes": full,
            "resident_bytes": resident,
            "anonymous_bytes": anonymous,
            "cold_in_ram_bytes": cold,
            "seconds": round(seconds, 1),
        }
    )
    stepper.cancel("long")


def _check_1m(layers: int, result: Result) -> None:
    """Bytes of 1M tokens by the layout; then allocate, touch and weigh them."""
    layout = SegmentLayout(layers, HEADS, HEAD_DIM)
    kv = KVSpec(layers, HEADS, HEAD_DIM, "bf16", "random")
    rules = TierRules(TierSpec(1, 1, 1, 1, 1, 0), WARM_TOKENS)
    segments = rules.complete(LONG)
    warm = segments - rules.cold(LONG)
    held = LONG - rules.released(LONG) * SEGMENT_TOKENS + rules.spec.sink_tokens
    resident = kv.blocks_for(held) * kv.block_bytes
    resident += warm * layout.segment_payload_bytes + segments * layout.segment_summary_bytes
    gc.collect()
    before = _anonymous_bytes()
    data = zeroed_bytes(resident)
    data[::4096] = 1
    allocated = _anonymous_bytes() - before
    result.figures["bf16_over_resident_1m"] = round(LONG * kv.token_bytes / resident, 3)
    result.figures["allocated_over_computed_1m"] = round(allocated / resident, 4)
    result.runs.append({"layers": layers, "tokens": LONG, "resident_bytes": resident, "allocated_bytes": allocated})


def _anonymous_bytes() -> int:
    """Anonymous resident memory of this process; a mapped file's pages are not in it."""
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    main()
