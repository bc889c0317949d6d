"""`TorchRuntime`: the MRI over our own decoder, PyTorch's bf16 GEMM and the kernels.

Knows the block pool's bytes, sampler states and how a step plan is cut into passes. Decode slices run through
the kernels' packed decode step, everything else as prefill rows. A prefill row's KV is a function of the tokens
up to it only: never of chunking, of the batch, or of the pass it fell into. KV that a decode step wrote is not
bitwise what prefill would write, so the engine keeps such blocks private (design.md, KV provenance).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from perilune.core import BLOCK_TOKENS, SamplingParams, TokenLogprob
from perilune.errors import InvalidStateError
from perilune.kernels.interface import MAX_DECODE_ROWS, Kernels, KVLayout, RaggedBatch
from perilune.kernels.memory import populate
from perilune.runtime.kv.spec import KVSpec
from perilune.runtime.models.decoder import Decoder
from perilune.runtime.mri import (
    CancelFlag,
    Capabilities,
    EvictReply,
    KVSummary,
    SequenceSlice,
    StepAbandoned,
    StepPlan,
    StepResult,
)
from perilune.runtime.sampler import SequenceSampler
from perilune.runtime.weights import ModelWeights

OPERATION_S = 0.01
"""Time that one matrix product of a pass should take, and half as much again at most: the flag is polled between
them, and a caller may count on 50 ms."""

MIN_PASS_ROWS, MAX_PASS_ROWS = 32, 2048
_PROBE_ROWS = 256


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a slice that runs in one pass. `sample` is set on the last part of a sampling slice."""

    slice: SequenceSlice
    offset: int
    count: int
    sample: bool

    @property
    def end(self) -> int:
        return self.slice.start + self.offset + self.count


class TorchRuntime:
    """A `ModelRuntime`. `entropy` gives the seeds of sequences that name none."""

    def __init__(
        self,
        weights: ModelWeights,
        kernels: Kernels,
        *,
        num_blocks: int,
        fingerprint: str,
        max_context_tokens: int | None = None,
        entropy: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        config = weights.config
        self._weights = weights
        self._spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, weights.precision, fingerprint)
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, weights.precision)
        self._pool = kernels.allocate_pool(layout, num_blocks)
        self._bytes = self._pool.data.numpy().data
        self._decoder = Decoder(weights, kernels, self._pool)
        self._written = np.zeros(num_blocks, np.bool_)
        self._samplers: dict[str, SequenceSampler] = {}
        self._entropy = entropy
        self._stepping = threading.Lock()
        window = max_context_tokens or config.max_context_tokens
        self._max_context_tokens = min(window, num_blocks * BLOCK_TOKENS)
        self._pass = _PassSize(weights)

    # ---------------------------------------------------------------------------------------------- properties

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(kv_summary=True)

    @property
    def kv_spec(self) -> KVSpec:
        return self._spec

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def max_context_tokens(self) -> int:
        return self._max_context_tokens

    @property
    def weights_resident(self) -> str:
        """Which copies of the weights are in memory: `bf16+q4` is two, `bf16` alone means that two did not fit."""
        return self._weights.resident

    @property
    def pass_rows(self) -> int:
        """Prompt tokens of one pass through the layers; chunks half as long again or longer run as several."""
        return self._pass.rows

    def populate_pool(self, num_tokens: int) -> None:
        """Take the RAM of the blocks that are given out first, enough for `num_tokens`, before they are needed.

        May run beside anything; content is untouched.
        """
        num_bytes = self._spec.blocks_for(num_tokens) * self._spec.block_bytes
        populate(self._pool.data[:num_bytes])

    # ------------------------------------------------------------------------------------------------ contexts

    def init_context(self, seq_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        if seq_id in self._samplers:
            raise InvalidStateError(f"Sequence {seq_id} is open already.", hint="Release it first.")
        vocab = self._weights.config.vocab_size
        self._samplers[seq_id] = SequenceSampler(sampling, prompt_token_ids, vocab, self._entropy())

    def release_context(self, seq_id: str) -> None:
        self._samplers.pop(seq_id, None)

    # --------------------------------------------------------------------------------------------------- steps

    def forward_step(self, plan: StepPlan, cancelled: CancelFlag) -> StepResult:
        with self._step():
            self._check(plan)
            if cancelled.is_set():
                raise StepAbandoned
            logits: dict[str, torch.Tensor] = {}
            decode, prefill = self._split(plan)
            for first in range(0, len(decode), MAX_DECODE_ROWS):
                logits |= self._run_decode(decode[first : first + MAX_DECODE_ROWS], cancelled)
            if sum(len(piece.token_ids) for piece in prefill) > self._pass.rows:
                self._pass.probe()
            for pieces in _passes(prefill, self._pass.rows):
                logits |= self._run_prefill(pieces, cancelled)
            return self._sample(plan, logits)

    @contextmanager
    def _step(self) -> Iterator[None]:
        if not self._stepping.acquire(blocking=False):
            raise InvalidStateError("A step is running.", hint="Wait for it to end.")
        try:
            yield
        finally:
            self._stepping.release()

    def _check(self, plan: StepPlan) -> None:
        """Raises ValueError for a plan that would read or write outside its blocks, before anything changes."""
        seen: set[str] = set()
        for piece in plan.slices:
            if piece.seq_id in seen:
                raise ValueError(f"sequence {piece.seq_id} appears twice in a plan")
            seen.add(piece.seq_id)
            if piece.seq_id not in self._samplers:
                raise InvalidStateError(f"Sequence {piece.seq_id} is not open.", hint="Call init_context first.")
            if not piece.token_ids or piece.start < 0 or piece.end > self._max_context_tokens:
                raise ValueError(f"slice {piece.start}…{piece.end} is empty or outside the window")
            blocks = self._spec.blocks_for(piece.end)
            if len(piece.block_table) < blocks:
                raise ValueError(f"{len(piece.block_table)} blocks can't hold {piece.end} tokens")
            table = np.asarray(piece.block_table[:blocks])
            if table.min() < 0 or table.max() >= self.num_blocks:
                raise ValueError("a block table names a block outside the pool")
            tokens = np.asarray(piece.token_ids)
            if tokens.min() < 0 or tokens.max() >= self._weights.config.vocab_size:
                raise ValueError("a token id is outside the vocabulary")

    def _split(self, plan: StepPlan) -> tuple[list[SequenceSlice], list[SequenceSlice]]:
        """Decode slices, and the rest."""
        decode: list[SequenceSlice] = []
        prefill: list[SequenceSlice] = []
        for piece in plan.slices:
            is_decode = len(piece.token_ids) == 1 and piece.sample and piece.start > 0
            (decode if is_decode and self._decoder.decodes_packed else prefill).append(piece)
        return decode, prefill

    def _run_decode(self, slices: Sequence[SequenceSlice], cancelled: CancelFlag) -> dict[str, torch.Tensor]:
        pieces = [_Piece(piece, 0, 1, True) for piece in slices]
        batch = self._batch(pieces)
        token_ids = torch.tensor([piece.token_ids[0] for piece in slices])
        logits = self._decoder.decode(token_ids, batch, cancelled)
        return {piece.seq_id: row for piece, row in zip(slices, logits, strict=True)}

    def _run_prefill(self, pieces: Sequence[_Piece], cancelled: CancelFlag) -> dict[str, torch.Tensor]:
        token_ids = np.concatenate(
            [np.asarray(p.slice.token_ids[p.offset : p.offset + p.count], np.int64) for p in pieces]
        )
        sampled = [index for index, piece in enumerate(pieces) if piece.sample]
        logits = self._decoder.prefill(
            torch.from_numpy(token_ids), self._batch(pieces), torch.tensor(sampled, dtype=torch.int64), cancelled
        )
        return {pieces[index].slice.seq_id: row for index, row in zip(sampled, logits, strict=True)}

    def _batch(self, pieces: Sequence[_Piece]) -> RaggedBatch:
        """Describe a pass to the kernels, and note which blocks it writes."""
        blocks = [self._spec.blocks_for(piece.end) for piece in pieces]
        tables = np.zeros((len(pieces), max(blocks)), np.int32)
        for row, piece, count in zip(tables, pieces, blocks, strict=True):
            row[:count] = piece.slice.block_table[:count]
            self._written[row[(piece.slice.start + piece.offset) // BLOCK_TOKENS : count]] = True
        bounds = np.cumsum([0, *(piece.count for piece in pieces)], dtype=np.int32)
        lengths = np.array([piece.end for piece in pieces], np.int32)
        return RaggedBatch(torch.from_numpy(bounds), torch.from_numpy(lengths), torch.from_numpy(tables))

    def _sample(self, plan: StepPlan, logits: dict[str, torch.Tensor]) -> StepResult:
        tokens: dict[str, int] = {}
        logprobs: dict[str, TokenLogprob] = {}
        for piece in plan.slices:
            if piece.sample:
                row = logits[piece.seq_id].numpy()
                tokens[piece.seq_id], logprob = self._samplers[piece.seq_id].sample(row)
                if logprob is not None:
                    logprobs[piece.seq_id] = logprob
        return StepResult(tokens, logprobs)

    # ------------------------------------------------------------------------------------------------------ KV

    def evict_kv(self, block_ids: Sequence[int]) -> EvictReply:
        with self._step():
            ids = [self._block(block_id) for block_id in dict.fromkeys(block_ids)]
            freed = int(self._written[ids].sum()) if ids else 0
            self._written[ids] = False
            return EvictReply(len(ids), freed * self._spec.block_bytes)

    def get_kv_summary(self) -> KVSummary:
        with self._step():
            resident = int(self._written.sum()) * self._spec.block_bytes
            return KVSummary(self.num_blocks, self._spec.block_bytes, resident)

    def block_view(self, block_id: int) -> memoryview:
        size = self._spec.block_bytes
        start = self._block(block_id) * size
        self._written[block_id] = True
        return self._bytes[start : start + size]

    def close(self) -> None:
        self._samplers.clear()

    def _block(self, block_id: int) -> int:
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} is outside the pool of {self.num_blocks}")
        return block_id


def _passes(slices: Sequence[SequenceSlice], rows: int) -> Iterator[list[_Piece]]:
    """Cut slices into equal passes of about `rows` rows, at most half as many again: a small last pass would cost
    as much overhead as a full one. A sequence's pieces stay in order."""
    total = sum(len(piece.token_ids) for piece in slices)
    size = -(-total // max(1, round(total / rows)))
    size = -(-size // BLOCK_TOKENS) * BLOCK_TOKENS
    pieces: list[_Piece] = []
    free = size
    for piece in slices:
        offset = 0
        while offset < len(piece.token_ids):
            count = min(free, len(piece.token_ids) - offset)
            ends = offset + count == len(piece.token_ids)
            pieces.append(_Piece(piece, offset, count, piece.sample and ends))
            offset, free = offset + count, free - count
            if free == 0:
                yield pieces
                pieces, free = [], size
    if pieces:
        yield pieces


class _PassSize:
    """Rows for which the largest product of a layer takes about `OPERATION_S`, by the best rate seen so far.

    A busy neighbour at start would otherwise leave passes too small for good, so long steps measure once more.
    """

    def __init__(self, weights: ModelWeights) -> None:
        self._matrix = weights.layers[0].gate_up
        self._input = torch.zeros(_PROBE_ROWS, self._matrix.cols, dtype=self._matrix.dtype)
        self._best_s = float("inf")
        for _ in range(10):
            self.probe()

    @property
    def rows(self) -> int:
        fitting = int(_PROBE_ROWS * OPERATION_S / self._best_s)
        return max(MIN_PASS_ROWS, min(MAX_PASS_ROWS, fitting // BLOCK_TOKENS * BLOCK_TOKENS))

    def probe(self) -> None:
        """Time one product; milliseconds."""
        start = time.perf_counter()
        self._matrix(self._input)
        self._best_s = min(self._best_s, max(time.perf_counter() - start, 1e-9))
