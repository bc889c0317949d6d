"""Our decode step on the model's own weights over made-up KV of any length: the tiered form.

The step is the runtime's (`Decoder`, default attention policy), without the engine loop around it. KV is
`bench.synthetic_kv`; the index of each layer is scaled until its heads, with the budgets of the model's profile,
select as many units as on real text.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from bench.selection import default_profile
from bench.synthetic_kv import Selection, SyntheticKV, find_spread, make_kv, units_read, unmeasured
from bench.worker import BenchEngine, LoadSpec
from perilune.kernels.interface import Kernels, RaggedBatch
from perilune.kernels.select import load as load_kernels
from perilune.kernels.tiers import SEGMENT_UNITS, AttentionPolicy, SegmentLayout
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.memory import free_memory_bytes
from perilune.runtime.models.decoder import Decoder
from perilune.runtime.mri import CancelFlag
from perilune.runtime.weights import ModelWeights, WeightBuilder

_ROOM_TOKENS = 256
_TAIL_TOKENS = 4096
_TOKEN = 7  # the token that is decoded while the spread is set


class LongDecode:
    """Decode steps at any context length. `batch` says what a step reads."""

    def __init__(self, spec: LoadSpec) -> None:
        torch.set_num_threads(spec.threads)
        self._kernels = load_kernels(spec.threads)
        self._weights = load_weights(spec, self._kernels)
        config = self._weights.config
        layout = SegmentLayout(config.num_layers, config.num_kv_heads, config.head_dim)
        self._open(layout, spec.max_context_tokens)

    def _open(self, layout: SegmentLayout, max_tokens: int) -> None:
        self._kv = make_kv(self._kernels, layout, max_tokens, _TAIL_TOKENS)
        self._decoder = Decoder(self._weights, self._kernels, self._kv.pool)
        self._index = _Index(self._kv)
        self._budgets = default_profile().budgets()
        self._selection = Selection.load(profiled=True)
        self._spreads: dict[int, torch.Tensor] = {}
        self._set_for = 0

    def batch(self, length: int) -> RaggedBatch:
        return self._kv.batch(length, AttentionPolicy(), self._budgets)

    def prefill(self, token_ids: list[int]) -> int:
        """Set the spread for a context of this length; the tokens don't matter."""
        length = len(token_ids)

        def units(spread: torch.Tensor) -> torch.Tensor:
            self._index.scale(spread)
            batch = self.batch(length + 1)
            self._step(_TOKEN, batch)
            return units_read(batch)

        if length not in self._spreads:
            self._spreads[length] = find_spread(self._selection.at(length), units, low=0.01, high=16.0)
        self._index.scale(self._spreads[length])
        return token_ids[-1]

    def decode(self, token_ids: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
        if self._set_for != len(token_ids):
            self.prefill(token_ids)
            self._set_for = len(token_ids)
        tokens, seconds = [token_ids[-1]], []
        while len(tokens) < new_tokens:
            start = time.perf_counter()
            tokens.append(self._step(tokens[-1], unmeasured(self.batch(len(token_ids) + len(tokens)))))
            seconds.append(time.perf_counter() - start)
        return tokens, seconds

    def close(self) -> None:
        return

    def _step(self, token: int, batch: RaggedBatch) -> int:
        logits = self._decoder.decode(torch.tensor([token]), batch, CancelFlag())
        return int(logits[0].argmax())


class _Index:
    """The sketched keys of every layer, to be scaled: the wider the scores, the fewer units are selected."""

    def __init__(self, kv: SyntheticKV) -> None:
        layout = kv.segments.layout
        at = layout.summary_offsets
        shape = (kv.segments.num_slots, layout.num_layers, layout.num_kv_heads, layout.summary_bytes)
        records = kv.segments.summaries.view(shape)
        names, size = ("mean_scale", "spread_scale"), 2 * SEGMENT_UNITS
        self._parts = [records[..., at[name] : at[name] + size] for name in names]
        self._original = [part.contiguous().view(torch.float16) for part in self._parts]

    def scale(self, spread: torch.Tensor) -> None:
        """spread: fp32 [layers], factors of the original keys."""
        for part, original in zip(self._parts, self._original, strict=True):
            part.copy_((original * spread[:, None, None]).half().view(torch.uint8))


def load_weights(spec: LoadSpec, kernels: Kernels) -> ModelWeights:
    """The model with rotary tables for the whole context, past what it was trained for."""
    checkpoint = open_checkpoint(Path(spec.model))
    try:
        builder = WeightBuilder(checkpoint, kernels, "bf16", "auto", spec.max_context_tokens + _ROOM_TOKENS)
        return builder.build(free_memory_bytes())
    finally:
        checkpoint.close()


def load(spec: LoadSpec) -> BenchEngine:
    return LongDecode(spec)
