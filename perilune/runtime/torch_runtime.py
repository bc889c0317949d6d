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
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from perilune.core import BLOCK_TOKENS, SamplingParams
from perilune.errors import InvalidStateError
from perilune.kernels.interface import (
    ATTENTION_PARTS,
    ATTENTION_STATS,
    MAX_DECODE_ROWS,
    HeadBudgets,
    Kernels,
    KVLayout,
    RaggedBatch,
    SegmentBatch,
)
from perilune.kernels.memory import populate
from perilune.kernels.tiers import AttentionPolicy, SegmentLayout
from perilune.runtime.grammar import GrammarCompiler, constraint_of
from perilune.runtime.kv.spec import KVSpec
from perilune.runtime.kv.tiers import SegmentTiers, TierSize
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
from perilune.runtime.sampler import SequenceSampler, sample_each
from perilune.runtime.weights import ModelWeights

OPERATION_S = 0.01
"""Time that one matrix product of a pass should take, and half as much again at most: the flag is polled between
them, and a caller may count on 50 ms."""

MIN_PASS_ROWS, MAX_PASS_ROWS = 32, 2048
_PROBE_ROWS = 256


_EVERYTHING = AttentionPolicy(sparse=False)
"""Of sequences that name no policy."""


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


@dataclass(slots=True)
class _Measured:
    """What decode reports of its attention: `StepResult.attention` as it grows, and, where the plan is timed, int64
    [layers, parts] of nanoseconds over all threads."""

    attention: dict[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    part_ns: torch.Tensor | None = None

    @property
    def attention_s(self) -> tuple[tuple[float, ...], ...]:
        if self.part_ns is None or not self.part_ns.any():
            return ()
        seconds = self.part_ns.double() / (1e9 * torch.get_num_threads())
        return tuple(tuple(row) for row in seconds.tolist())


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
        tiers: TierSize | None = None,
        budgets: HeadBudgets | None = None,
        entropy: Callable[[], int] = lambda: secrets.randbits(64),
        grammars: GrammarCompiler | None = None,
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
        self._grammars = grammars
        self._stepping = threading.RLock()
        self._closed = False
        window = max_context_tokens or config.max_context_tokens
        self._tiers = self._make_tiers(kernels, tiers) if tiers is not None else None
        self._budgets = budgets
        self._max_context_tokens = min(window, max(num_blocks * BLOCK_TOKENS, self._tiered_tokens()))
        self._pass = _PassSize(weights)

    # ---------------------------------------------------------------------------------------------- properties

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(kv_summary=True)

    @property
    def kv_spec(self) -> KVSpec:
        return self._spec

    @property
    def tiers(self) -> SegmentTiers | None:
        return self._tiers

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

    def _make_tiers(self, kernels: Kernels, size: TierSize) -> SegmentTiers:
        config = self._weights.config
        layout = SegmentLayout(config.num_layers, config.num_kv_heads, config.head_dim)
        layers = [index for index, window in enumerate(config.windows) if window is None]
        return SegmentTiers(kernels, self._pool, layout, layers, size)

    def _tiered_tokens(self) -> int:
        """The longest tiered sequence: its slots run out first."""
        return self._tiers.spec.slots * self._tiers.spec.segment_tokens if self._tiers is not None else 0

    # ------------------------------------------------------------------------------------------------ contexts

    def init_context(self, seq_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        with self._step():
            if seq_id in self._samplers:
                raise InvalidStateError(f"Sequence {seq_id} is open already.", hint="Release it first.")
            vocab = self._weights.config.vocab_size
            constraint = constraint_of(sampling, self._grammars)
            seed = self._entropy()
            self._samplers[seq_id] = SequenceSampler(sampling, prompt_token_ids, vocab, seed, constraint)

    def release_context(self, seq_id: str) -> None:
        with self._step():
            self._samplers.pop(seq_id, None)

    # --------------------------------------------------------------------------------------------------- steps

    def forward_step(self, plan: StepPlan, cancelled: CancelFlag) -> StepResult:
        with self._step():
            self._check(plan)
            if cancelled.is_set():
                raise StepAbandoned
            logits: dict[str, torch.Tensor] = {}
            measured = _Measured()
            if plan.timed:
                measured.part_ns = torch.zeros(self._spec.num_layers, len(ATTENTION_PARTS), dtype=torch.int64)
            decode, prefill = self._split(plan)
            while decode := _staying(decode, cancelled):
                chosen = decode[:MAX_DECODE_ROWS]
                done = self._run_decode(chosen, measured, cancelled)
                if done is not None:  # else somebody left: once more, without them
                    logits |= done
                    decode = decode[len(chosen) :]
            if sum(len(piece.token_ids) for piece in prefill) > self._pass.rows:
                self._pass.probe()
            for pieces in _passes(prefill, self._pass.rows):
                logits |= self._run_prefill(pieces, cancelled)
            return self._sample(_staying(plan.slices, cancelled), logits, measured)

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Nothing else may run; calls of other threads that overlap are refused, not queued (`mri`: threads). The
        stepping thread itself may close contexts and evict blocks inside `CancelFlag.left`."""
        if not self._stepping.acquire(blocking=False):
            raise InvalidStateError("A step is running.", hint="Wait for it to end.")
        try:
            if self._closed:
                raise InvalidStateError("The runtime is closed.", hint="Load the model again.")
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
            table = self._check_tables(piece, blocks)
            tokens = np.asarray(piece.token_ids)
            if tokens.min() < 0 or tokens.max() >= self._weights.config.vocab_size:
                raise ValueError("a token id is outside the vocabulary")
            before = table[: self._spec.blocks_for(piece.start)]
            if not self._written[before[before >= 0]].all():
                raise InvalidStateError(
                    f"Sequence {piece.seq_id} continues at {piece.start}; a block before that holds no KV.",
                    hint="Compute the missing tokens first.",
                )

    def _check_tables(self, piece: SequenceSlice, blocks: int) -> npt.NDArray[np.int64]:
        """The block table as an array; -1 only where a closed segment is read instead. Raises ValueError."""
        table = np.asarray(piece.block_table[:blocks], np.int64)
        needed = table
        if piece.segments:
            spec = self._tiers.spec if self._tiers is not None else None
            if spec is None or len(piece.segments) * spec.segment_tokens > piece.start:
                raise ValueError(f"{len(piece.segments)} closed segments before position {piece.start}")
            if self._tiers is None or not all(self._tiers.holds(slot) for slot in piece.segments):
                raise ValueError("a segment table names an empty slot")
            first = len(piece.segments) * spec.segment_blocks
            needed = np.concatenate([table[: spec.sink_blocks], table[first:]])
        if needed.min() < 0 or table.min() < -1 or table.max() >= self.num_blocks:
            raise ValueError("a block table names a block outside the pool")
        return table

    def _split(self, plan: StepPlan) -> tuple[list[SequenceSlice], list[SequenceSlice]]:
        """Decode slices, and the rest."""
        decode: list[SequenceSlice] = []
        prefill: list[SequenceSlice] = []
        for piece in plan.slices:
            is_decode = len(piece.token_ids) == 1 and piece.sample and piece.start > 0
            (decode if is_decode and self._decoder.decodes_packed else prefill).append(piece)
        return decode, prefill

    def _run_decode(
        self,
        slices: Sequence[SequenceSlice],
        measured: _Measured,
        cancelled: CancelFlag,
    ) -> dict[str, torch.Tensor] | None:
        """Logits by sequence, or None when it was interrupted; `measured` gets where the attention of those went
        that ask for it, and the time."""
        pieces = [_Piece(piece, 0, 1, True) for piece in slices]
        batch = self._batch(pieces)
        if batch.segments is not None and measured.part_ns is not None:
            batch = replace(batch, segments=replace(batch.segments, part_ns=measured.part_ns))
        token_ids = torch.tensor([piece.token_ids[0] for piece in slices])
        logits = self._decoder.decode(token_ids, batch, cancelled)
        if cancelled.take_change():
            return None
        if batch.segments is not None and batch.segments.stats is not None:
            for piece, rows in zip(slices, batch.segments.stats.tolist(), strict=True):
                if piece.measure:
                    measured.attention[piece.seq_id] = tuple(tuple(row) for row in rows)
        return {piece.seq_id: row for piece, row in zip(slices, logits, strict=True)}

    def _run_prefill(self, pieces: Sequence[_Piece], cancelled: CancelFlag) -> dict[str, torch.Tensor]:
        left = cancelled.left()
        pieces = [piece for piece in pieces if piece.slice.seq_id not in left]
        if not pieces:
            return {}
        token_ids = np.concatenate(
            [np.asarray(p.slice.token_ids[p.offset : p.offset + p.count], np.int64) for p in pieces]
        )
        sampled = [index for index, piece in enumerate(pieces) if piece.sample]
        names = [piece.slice.seq_id for piece in pieces]
        logits = self._decoder.prefill(
            torch.from_numpy(token_ids),
            self._batch(pieces),
            torch.tensor(sampled, dtype=torch.int64),
            cancelled,
            names,
        )
        stayed = [name for index in sampled if (name := pieces[index].slice.seq_id) in names]
        return dict(zip(stayed, logits, strict=True))

    def _batch(self, pieces: Sequence[_Piece]) -> RaggedBatch:
        """Describe a pass to the kernels, and note which blocks it writes."""
        blocks = [self._spec.blocks_for(piece.end) for piece in pieces]
        tables = np.zeros((len(pieces), max(blocks)), np.int32)
        for row, piece, count in zip(tables, pieces, blocks, strict=True):
            row[:count] = piece.slice.block_table[:count]
            self._written[row[(piece.slice.start + piece.offset) // BLOCK_TOKENS : count]] = True
        bounds = np.cumsum([0, *(piece.count for piece in pieces)], dtype=np.int32)
        lengths = np.array([piece.end for piece in pieces], np.int32)
        return RaggedBatch(
            torch.from_numpy(bounds), torch.from_numpy(lengths), torch.from_numpy(tables), self._segments(pieces)
        )

    def _segments(self, pieces: Sequence[_Piece]) -> SegmentBatch | None:
        """The closed segments of a pass; None where no sequence has any."""
        longest = max(len(piece.slice.segments) for piece in pieces)
        if self._tiers is None or not longest:
            return None
        tables = np.zeros((len(pieces), longest), np.int32)
        for row, piece in zip(tables, pieces, strict=True):
            row[: len(piece.slice.segments)] = piece.slice.segments
        counts = np.array([len(piece.slice.segments) for piece in pieces], np.int32)
        policies = tuple(piece.slice.attention or _EVERYTHING for piece in pieces)
        stats = None
        if any(piece.slice.measure for piece in pieces):
            stats = torch.zeros(len(pieces), self._spec.num_layers, len(ATTENTION_STATS))
        return SegmentBatch(
            self._tiers.pool,
            torch.from_numpy(tables),
            torch.from_numpy(counts),
            policies,
            stats,
            budgets=self._budgets,
        )

    def _sample(
        self,
        slices: Sequence[SequenceSlice],
        logits: dict[str, torch.Tensor],
        measured: _Measured,
    ) -> StepResult:
        rows = {piece.seq_id: logits[piece.seq_id].numpy() for piece in slices if piece.sample}
        return StepResult(*sample_each(self._samplers, rows), measured.attention, measured.attention_s)

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
        if not self._closed:
            with self._step():
                self._samplers.clear()
                self._closed = True

    def _block(self, block_id: int) -> int:
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} is outside the pool of {self.num_blocks}")
        return block_id


def _staying(slices: Sequence[SequenceSlice], cancelled: CancelFlag) -> list[SequenceSlice]:
    """Those that have not left. Asked once: somebody may leave between two questions."""
    left = cancelled.left()
    return [piece for piece in slices if piece.seq_id not in left]


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
    """Rows for which the largest product of a layer takes about `OPERATION_S`, by the best rate so far.

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
