"""How many units the default attention policy selects on real text: measured, kept, and read by the speed benches.

    python -m bench.selection [--quick] [--json FILE] [--record]

Python's reference as text. A stretch is prefilled at full precision, its segments are closed as in use, and decode
rows are read with the text's own tokens. SmolLM2 (30 layers, 3 KV heads) gives the units of each layer at the 8K it
was trained for, with its heads alike and with its head profile; Gemma-3-270M, whose 3 layers without a window reach
to 32K, gives how they grow with the context.
`--record` renews `recorded/selection.json` and is due whenever the index or the policy changes. A full run takes
about five minutes, and what else runs doesn't change its figures.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch

from bench import peers
from bench.corpus import text
from bench.driver import say
from bench.machine import CpuClock, describe
from bench.report import Result, finish, parse_options
from bench.synthetic_kv import MEASURED_POLICY, SELECTION_FILE, units_read
from perilune.kernels.interface import (
    ATTENTION_STATS,
    BLOCK_TOKENS,
    HeadBudgets,
    Kernels,
    KVLayout,
    RaggedBatch,
    SegmentBatch,
    SegmentPool,
)
from perilune.kernels.memory import zeroed_bytes
from perilune.kernels.select import load as load_kernels
from perilune.kernels.tiers import SEGMENT_TOKENS, SINK_TOKENS, SegmentLayout
from perilune.runtime.checkpoint import GGUFCheckpoint
from perilune.runtime.head_profile import HeadProfile, find_profile
from perilune.runtime.hub.pull import pull
from perilune.runtime.loader import content_name
from perilune.runtime.memory import free_memory_bytes
from perilune.runtime.models.decoder import Decoder
from perilune.runtime.mri import CancelFlag
from perilune.runtime.tokenizer import load_tokenizer
from perilune.runtime.weights import WeightBuilder

_ROWS = 64
_THREADS = 1  # nothing is timed: two would only wait for each other on a busy machine
_PASS_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, the contexts at which its rows are read, and how many stretches of text."""

    model: str
    file: Path
    lengths: tuple[int, ...]
    stretches: int


class RealText:
    """A model's decode rows over closed segments of real text. `budgets`: how its heads differ."""

    def __init__(self, subject: Subject, budgets: HeadBudgets | None = None) -> None:
        self._budgets = budgets
        torch.set_num_threads(_THREADS)
        self._kernels: Kernels = load_kernels(_THREADS)
        most = subject.lengths[-1] + _ROWS
        checkpoint = GGUFCheckpoint(subject.file)
        try:
            self.text = load_tokenizer(checkpoint).encode(text())
            builder = WeightBuilder(checkpoint, self._kernels, "bf16", "auto", most)
            weights = builder.build(free_memory_bytes())
        finally:
            checkpoint.close()
        config = weights.config
        self.layers = [index for index, window in enumerate(config.windows) if window is None]
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, "bf16")
        blocks = -(-most // BLOCK_TOKENS)
        self._pool = self._kernels.allocate_pool(layout, blocks)
        self._decoder = Decoder(weights, self._kernels, self._pool)
        self._table = torch.arange(blocks, dtype=torch.int32)
        self._layout = SegmentLayout(config.num_layers, config.num_kv_heads, config.head_dim)
        slots = most // SEGMENT_TOKENS
        self._payloads = zeroed_bytes(slots * self._layout.segment_payload_bytes)
        self._segments: SegmentPool = self._kernels.allocate_segments(self._layout, slots)
        steps = torch.arange(slots) * self._layout.segment_payload_bytes
        self._segments.payloads.copy_(self._payloads.data_ptr() + steps)
        self._stats = torch.zeros(1, config.num_layers, len(ATTENTION_STATS))

    def prefill(self, tokens: Sequence[int]) -> None:
        """Compute a stretch and close its segments."""
        for start in range(0, len(tokens), _PASS_TOKENS):
            piece = tokens[start : start + _PASS_TOKENS]
            batch = self._batch(len(piece), start + len(piece), None)
            self._decoder.prefill(torch.tensor(piece), batch, torch.zeros(0, dtype=torch.int64), CancelFlag())
        per_segment = SEGMENT_TOKENS // BLOCK_TOKENS
        for slot in range(len(tokens) // SEGMENT_TOKENS):
            blocks = self._table[slot * per_segment : (slot + 1) * per_segment].clone()
            if slot == 0:
                blocks[: SINK_TOKENS // BLOCK_TOKENS] = -1
            self._kernels.close_records(self._pool, blocks, self._segments, slot, 0, self._layout.records)

    def units(self, tokens: Sequence[int], context_tokens: int) -> torch.Tensor:
        """fp32 [rows, layers]: units selected by the rows after `context_tokens` of a prefilled stretch."""
        rows = []
        for position in range(context_tokens, context_tokens + _ROWS):
            batch = self._batch(1, position + 1, self._closed(context_tokens))
            self._decoder.decode(torch.tensor([tokens[position]]), batch, CancelFlag())
            rows.append(units_read(batch)[self.layers])
        return torch.stack(rows)

    def _closed(self, context_tokens: int) -> SegmentBatch:
        """The segments that end before the local window."""
        count = (context_tokens - MEASURED_POLICY.window_tokens) // SEGMENT_TOKENS
        table = torch.arange(self._segments.num_slots, dtype=torch.int32)[None]
        return SegmentBatch(
            self._segments,
            table,
            torch.tensor([count], dtype=torch.int32),
            (MEASURED_POLICY,),
            self._stats,
            budgets=self._budgets,
        )

    def _batch(self, rows: int, length: int, segments: SegmentBatch | None) -> RaggedBatch:
        table = self._table[None, : -(-length // BLOCK_TOKENS)].contiguous()
        bounds = torch.tensor([0, rows], dtype=torch.int32)
        return RaggedBatch(bounds, torch.tensor([length], dtype=torch.int32), table, segments)


def default_profile() -> HeadProfile:
    """The head profile that comes with the default model. Raises RuntimeError where it has none."""
    checkpoint = GGUFCheckpoint(peers.model_gguf())
    try:
        content, config = content_name(checkpoint), checkpoint.config
    finally:
        checkpoint.close()
    found = find_profile(peers.model_gguf(), content, config.num_layers, config.num_kv_heads)
    if found is None:
        raise RuntimeError("the default model has no head profile")
    return found


def measure(subject: Subject, profile: HeadProfile | None = None) -> dict[str, object]:
    """Means by layer, and the 10th and 90th percentile over layers and rows, at each context."""
    model = RealText(subject, None if profile is None else profile.budgets())
    most = subject.lengths[-1] + _ROWS
    found: dict[int, list[torch.Tensor]] = {length: [] for length in subject.lengths}
    for stretch in range(subject.stretches):
        start = stretch * (len(model.text) - most) // max(1, subject.stretches - 1)
        tokens = model.text[start : start + most]
        model.prefill(tokens)
        for length, rows in found.items():
            rows.append(model.units(tokens, length))
            say(f"{subject.model}, text {stretch + 1}, {length} tokens: {rows[-1].mean():.1f} units")
    joined = {length: torch.cat(rows) for length, rows in found.items()}
    tenths = {length: torch.quantile(rows.flatten(), torch.tensor([0.1, 0.9])) for length, rows in joined.items()}
    return {
        "model": subject.model,
        "shares": [] if profile is None else [round(fmean(row), 4) for row in profile.shares],
        "rows": subject.stretches * _ROWS,
        "units": {str(length): [round(u, 1) for u in rows.mean(0).tolist()] for length, rows in joined.items()},
        "tenths": {str(length): [round(u, 1) for u in pair.tolist()] for length, pair in tenths.items()},
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options("Units that the default policy selects on real text.", argv)
    clock = CpuClock.now([os.getpid()])
    subjects = [Subject("SmolLM2-135M-Instruct Q4_1", peers.model_gguf(), (7936,), 1 if options.quick else 3)]
    if not options.quick:
        gemma = pull("gemma3-270m", peers.home()).path
        subjects.append(Subject("Gemma-3-270M Q4_K_M", gemma, (7936, 15_872, 32_256), 1))
    models = []
    for subject in subjects:
        models.append(measure(subject))
        say(json.dumps(models[-1]))
    profiled = measure(subjects[0], default_profile())
    say(json.dumps(profiled))
    share = CpuClock.now([os.getpid()]).foreign_share(clock)
    machine = describe() | {"foreign_share": round(share, 3)}
    result = Result("selection", {}, machine, models, quick=options.quick)
    for subject, model in zip(subjects, models, strict=True):
        name = subject.model.partition("-")[0].lower()
        for length, units in dict(model["units"]).items():  # type: ignore[call-overload]
            result.figures[f"{name}_{length}"] = round(fmean(units), 1)
    name = subjects[0].model.partition("-")[0].lower()
    for length, units in dict(profiled["units"]).items():  # type: ignore[call-overload]
        result.figures[f"{name}_profiled_{length}"] = round(fmean(units), 1)
    finish(result, {}, options)
    if options.record and not options.quick:
        kept = {"date": time.strftime("%Y-%m-%d"), "policy": asdict(MEASURED_POLICY), "models": models}
        kept["profiled"] = profiled
        SELECTION_FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
