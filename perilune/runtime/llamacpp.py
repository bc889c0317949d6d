"""`LlamaCppRuntime`: the MRI over llama.cpp, on GGUF files as stored (optional extra `llamacpp`).

Knows sampler states, which blocks a plan reads and writes, and how it is cut into llama.cpp's batches. llama.cpp's
cache doesn't show its bytes, so there is no disk tier (`kv_bytes`); its arithmetic depends a little on how many
tokens run together (`chunk_invariant`); and at most `max_branches` blocks may hold KV of the same positions
(`llamacpp_rows` says why). No torch here: PyTorch's OpenMP and llama.cpp's threads needn't meet.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perilune.core import BLOCK_TOKENS, SamplingParams
from perilune.errors import InvalidStateError
from perilune.runtime.grammar import GrammarCompiler, constraint_of
from perilune.runtime.kv.spec import KVSpec
from perilune.runtime.llamacpp_library import LlamaContext, Row
from perilune.runtime.llamacpp_rows import RowTable
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

LAYER_S = 0.01
"""Time that a batch may spend per layer: the flag is polled between operations, of which a layer has several, and a
caller may count on 50 ms."""

MIN_BATCH_ROWS, MAX_BATCH_ROWS = 32, 512
_CELL_PADDING = 256  # llama.cpp rounds a cache's size up to it

Logits = NDArray[np.float32]

_Entry = tuple[SequenceSlice, int, bool]
"""A token to compute: its slice, its position, and whether it is the slice's last."""


class LlamaCppRuntime:
    """A `ModelRuntime`. `entropy` gives the seeds of sequences that name none; `threads` 0 is every core."""

    def __init__(
        self,
        path: Path,
        spec: KVSpec,
        *,
        num_blocks: int,
        max_context_tokens: int | None = None,
        threads: int = 0,
        entropy: Callable[[], int] = lambda: secrets.randbits(64),
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`spec` describes the model's cache (f16); `llamacpp_loader` reads it from the file.

        Raises `ConfigError` without llama-cpp-python, `UnsupportedModel` and `Overloaded` as `LlamaContext` does.
        """
        cells = -(-num_blocks * BLOCK_TOKENS // _CELL_PADDING) * _CELL_PADDING
        self._llama = LlamaContext(path, num_cells=cells, max_rows=MAX_BATCH_ROWS, threads=threads)
        self._rows = RowTable(self._llama.num_sequences, self._llama)
        self._spec = spec
        self._num_blocks = num_blocks
        window = max_context_tokens or self._llama.trained_tokens
        self._max_context_tokens = min(window, num_blocks * BLOCK_TOKENS)
        self._vocab_size = self._llama.vocab_size
        self._samplers: dict[str, SequenceSampler] = {}
        self._entropy = entropy
        self._grammars = grammars
        self._stepping = threading.RLock()
        self._closed = False
        self._row_s = 0.0  # seconds per token of the last large batch

    # ---------------------------------------------------------------------------------------------- properties

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            kv_summary=True, kv_bytes=False, chunk_invariant=False, max_branches=self._llama.num_sequences
        )

    @property
    def kv_spec(self) -> KVSpec:
        return self._spec

    @property
    def tiers(self) -> None:
        """llama.cpp keeps cells of its own; there are no segments to close."""
        return

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def max_context_tokens(self) -> int:
        return self._max_context_tokens

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    # ------------------------------------------------------------------------------------------------ contexts

    def init_context(self, seq_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        with self._alone():
            if seq_id in self._samplers:
                raise InvalidStateError(f"Sequence {seq_id} is open already.", hint="Release it first.")
            constraint = constraint_of(sampling, self._grammars)
            seed, vocab = self._entropy(), self._vocab_size
            self._samplers[seq_id] = SequenceSampler(sampling, prompt_token_ids, vocab, seed, constraint)

    def release_context(self, seq_id: str) -> None:
        with self._alone():
            self._samplers.pop(seq_id, None)
            self._rows.release(seq_id)

    @contextmanager
    def _alone(self) -> Iterator[None]:
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

    # --------------------------------------------------------------------------------------------------- steps

    def forward_step(self, plan: StepPlan, cancelled: CancelFlag) -> StepResult:
        with self._alone():
            self._check(plan)
            if not plan.slices:
                return StepResult({}, {})
            rows = self._rows.open(plan.slices)
            try:
                logits = self._compute(plan, rows, cancelled)
            except BaseException:
                for piece in plan.slices:
                    self._rows.roll_back(rows[piece.seq_id], piece)
                raise
            return self._sample(plan, logits)

    def _check(self, plan: StepPlan) -> None:
        """Refuse what would read or write outside its blocks, before anything changes. See `ModelRuntime`."""
        for piece in plan.slices:
            if piece.seq_id not in self._samplers:
                raise InvalidStateError(f"Sequence {piece.seq_id} is not open.", hint="Call init_context first.")
            if piece.segments:
                raise ValueError("llama.cpp has no closed segments (`tiers` is None)")
            if not piece.token_ids or piece.start < 0 or piece.end > self._max_context_tokens:
                raise ValueError(f"slice {piece.start}…{piece.end} is empty or outside the window")
            table = np.asarray(piece.block_table)
            if len(table) < self._spec.blocks_for(piece.end):
                raise ValueError(f"{len(table)} blocks can't hold {piece.end} tokens")
            if table.min() < 0 or table.max() >= self._num_blocks:
                raise ValueError("a block table names a block outside the pool")
            tokens = np.asarray(piece.token_ids)
            if tokens.min() < 0 or tokens.max() >= self._vocab_size:
                raise ValueError("a token id is outside the vocabulary")
        self._check_overlap(plan)
        for piece in plan.slices:
            self._rows.check(piece)

    def _check_overlap(self, plan: StepPlan) -> None:
        """Raises ValueError if a sequence is there twice, or a block that one slice writes is in another's use."""
        if len({piece.seq_id for piece in plan.slices}) != len(plan.slices):
            raise ValueError("a sequence appears twice in a plan")
        uses: Counter[int] = Counter()
        written: list[int] = []
        for piece in plan.slices:
            blocks = piece.block_table[: self._spec.blocks_for(piece.end)]
            uses.update(blocks)
            written += blocks[piece.start // BLOCK_TOKENS :]
        if any(uses[block] > 1 for block in written):
            raise ValueError("a block that is written is used twice in a plan")

    def _compute(self, plan: StepPlan, rows: dict[str, int], cancelled: CancelFlag) -> dict[str, Logits]:
        """Logits by sequence of the slices that sample and whose sequences have not left."""
        found: dict[str, Logits] = {}
        tokens = [
            (piece, position, position == piece.end - 1)
            for piece in plan.slices
            for position in range(piece.start, piece.end)
        ]
        gone: Set[str] = frozenset()
        while tokens:
            if cancelled.is_set():
                raise StepAbandoned
            cancelled.take_change()
            if not gone >= (left := cancelled.left()):
                gone |= left
                tokens = [entry for entry in tokens if entry[0].seq_id not in gone]
                continue
            part = self._next_part(tokens)
            batch = [
                Row(piece.token_ids[at - piece.start], at, rows[piece.seq_id], piece.sample and last)
                for piece, at, last in part
            ]
            began = time.perf_counter()
            logits = self._llama.decode(batch, cancelled)
            if logits is None:  # somebody leaves: the rest of the batch runs without it
                for seq_id in {piece.seq_id for piece, _, _ in part}:
                    at = next(position for piece, position, _ in part if piece.seq_id == seq_id)
                    self._llama.remove(rows[seq_id], at, -1)
                continue
            self._measure(len(batch), time.perf_counter() - began)
            found |= {part[index][0].seq_id: row for index, row in logits.items()}
            self._commit(part, rows)
            tokens = tokens[len(part) :]
        return {seq_id: row for seq_id, row in found.items() if seq_id not in gone}

    def _next_part(self, tokens: Sequence[_Entry]) -> Sequence[_Entry]:
        """The next batch: as many tokens as `batch_rows`, and no more answers than llama.cpp gives at once."""
        part = tokens[: self.batch_rows]
        answers = [index for index, (piece, _, last) in enumerate(part) if piece.sample and last]
        most = self._llama.num_sequences
        return part[: answers[most]] if len(answers) > most else part

    def _commit(self, part: Sequence[_Entry], rows: dict[str, int]) -> None:
        spans: dict[str, tuple[SequenceSlice, int, int]] = {}
        for piece, at, _ in part:
            _, start, _ = spans.get(piece.seq_id, (piece, at, at))
            spans[piece.seq_id] = (piece, start, at + 1)
        for seq_id, (piece, start, end) in spans.items():
            self._rows.commit(rows[seq_id], piece.block_table, start, end)

    @property
    def batch_rows(self) -> int:
        """Tokens of one llama.cpp batch, by the speed of the last one."""
        if not self._row_s:
            return MIN_BATCH_ROWS
        fitting = int(LAYER_S * self._llama.num_layers / self._row_s)
        return max(MIN_BATCH_ROWS, min(MAX_BATCH_ROWS, fitting // BLOCK_TOKENS * BLOCK_TOKENS))

    def _measure(self, rows: int, seconds: float) -> None:
        if rows >= MIN_BATCH_ROWS:  # a smaller batch is mostly fixed cost
            self._row_s = max(seconds / rows, 1e-9)

    def _sample(self, plan: StepPlan, logits: dict[str, Logits]) -> StepResult:
        rows = {piece.seq_id: logits[piece.seq_id] for piece in plan.slices if piece.seq_id in logits}
        return StepResult(*sample_each(self._samplers, rows))

    # ------------------------------------------------------------------------------------------------------ KV

    def evict_kv(self, block_ids: Sequence[int]) -> EvictReply:
        with self._alone():
            blocks = list(dict.fromkeys(block_ids))
            if any(not 0 <= block < self._num_blocks for block in blocks):
                raise ValueError(f"a block is outside the pool of {self._num_blocks}")
            freed = sum(self._rows.holds(block) for block in blocks)
            self._rows.evict(blocks)
            return EvictReply(len(blocks), freed * self._spec.block_bytes)

    def get_kv_summary(self) -> KVSummary:
        with self._alone():
            resident = self._rows.written_blocks * self._spec.block_bytes
            return KVSummary(self._num_blocks, self._spec.block_bytes, resident)

    def block_view(self, block_id: int) -> memoryview:
        if not 0 <= block_id < self._num_blocks:
            raise ValueError(f"block {block_id} is outside the pool of {self._num_blocks}")
        raise InvalidStateError(
            "llama.cpp doesn't show the bytes of its KV cache.", hint="Look at capabilities.kv_bytes first."
        )

    def close(self) -> None:
        if self._closed:
            return
        with self._alone():
            self._samplers.clear()
            self._closed = True
            self._llama.close()
