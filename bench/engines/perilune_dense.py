"""Our decode step over made-up bf16 KV of any length, read whole: what the tiered form is compared with."""

from __future__ import annotations

import torch

from bench.engines.perilune_long import LongDecode
from bench.synthetic_kv import make_blocks
from bench.worker import BenchEngine, LoadSpec
from perilune.kernels.interface import BLOCK_TOKENS, RaggedBatch
from perilune.kernels.tiers import SegmentLayout
from perilune.runtime.models.decoder import Decoder

_ROOM_TOKENS = 256


class DenseDecode(LongDecode):
    """The same steps without closed segments."""

    def _open(self, layout: SegmentLayout, max_tokens: int) -> None:
        pool = make_blocks(self._kernels, layout, max_tokens + _ROOM_TOKENS)
        self._decoder = Decoder(self._weights, self._kernels, pool)
        self._order = torch.randperm(pool.num_blocks, generator=torch.Generator().manual_seed(1)).int()
        self._set_for = 0

    def batch(self, length: int) -> RaggedBatch:
        table = self._order[None, : -(-length // BLOCK_TOKENS)].contiguous()
        return RaggedBatch(
            torch.tensor([0, 1], dtype=torch.int32), torch.tensor([length], dtype=torch.int32), table
        )

    def prefill(self, token_ids: list[int]) -> int:
        return token_ids[-1]


def load(spec: LoadSpec) -> BenchEngine:
    return DenseDecode(spec)
