"""Contexts for callers without an engine: `init_context` in chunks, resumable and retryable, then tokens (spec R6).

Knows the MRI and block ids. Owns every block of its runtime, so it can't share one with an engine. Exact prefill is
causal: chunks of a context run in order; what reads documents or builds summaries runs beside it, in other threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from perilune.core import SamplingParams
from perilune.errors import InvalidStateError, Overloaded
from perilune.runtime.mri import CancelFlag, EvictReply, ModelRuntime, SequenceSlice, StepPlan

CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class InitProgress:
    """How far a context's prompt is. `elapsed_s` counts the chunks that were computed, abandoned ones too."""

    seq_id: str
    computed_tokens: int
    total_tokens: int
    elapsed_s: float


class MRISession:
    """Gives out a runtime's blocks. One thread; a `CancelFlag` may be set from any."""

    def __init__(self, runtime: ModelRuntime) -> None:
        self._runtime = runtime
        self._free = list(range(runtime.num_blocks - 1, -1, -1))

    @property
    def runtime(self) -> ModelRuntime:
        return self._runtime

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def init_context(
        self,
        seq_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> Context:
        """Open a context; nothing is computed yet. Raises what `ModelRuntime.init_context` raises, and ValueError
        for an empty prompt or chunk."""
        if not prompt_token_ids or chunk_tokens < 1:
            raise ValueError("a context needs at least one token, and chunks of at least one")
        self._runtime.init_context(seq_id, prompt_token_ids, sampling or SamplingParams())
        return Context(self, seq_id, prompt_token_ids, chunk_tokens)

    def take(self, count: int) -> list[int]:
        """Blocks for a context. Raises `Overloaded` when there aren't that many."""
        if count > len(self._free):
            raise Overloaded(
                f"{count} more KV blocks are needed, {len(self._free)} are free.", hint="Close another context."
            )
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: Sequence[int]) -> EvictReply:
        """Evict whole blocks and make them free."""
        reply = self._runtime.evict_kv(blocks)
        self._free.extend(reversed(blocks))
        return reply


class Context:
    """One token stream. After an exception it stands where it stood: the next call does the same chunk again."""

    def __init__(self, session: MRISession, seq_id: str, prompt: Sequence[int], chunk_tokens: int) -> None:
        self._session = session
        self._seq_id = seq_id
        self._tokens = list(prompt)
        self._prompt_tokens = len(prompt)
        self._chunk_tokens = chunk_tokens
        self._computed = 0
        self._elapsed_s = 0.0
        self._blocks: list[int] = []
        self._open = True

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def progress(self) -> InitProgress:
        return InitProgress(
            self._seq_id, min(self._computed, self._prompt_tokens), self._prompt_tokens, self._elapsed_s
        )

    @property
    def ready(self) -> bool:
        """The whole prompt is computed and its first token drawn."""
        return len(self._tokens) > self._prompt_tokens

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self._tokens[self._prompt_tokens :])

    def advance(self, cancelled: CancelFlag | None = None) -> InitProgress:
        """Compute the next chunk of the prompt; with the last one the first token is drawn.

        Raises what `forward_step` raises (`StepAbandoned` when cancelled) and `Overloaded` without blocks; call
        again to resume. Raises `InvalidStateError` once `ready`.
        """
        if self.ready:
            raise InvalidStateError(f"The prompt of {self._seq_id} is computed.", hint="Call next_token.")
        size = min(self._chunk_tokens, self._prompt_tokens - self._computed)
        self._run(size, self._computed + size == self._prompt_tokens, cancelled)
        return self.progress

    def prefill(
        self, report: Callable[[InitProgress], None] = lambda progress: None, cancelled: CancelFlag | None = None
    ) -> InitProgress:
        """Compute what is left of the prompt, telling `report` after each chunk. Raises as `advance` does."""
        while not self.ready:
            report(self.advance(cancelled))
        return self.progress

    def next_token(self, cancelled: CancelFlag | None = None) -> int:
        """Decode one token after those there are. Raises as `advance` does, and before the prompt is ready."""
        if not self.ready:
            raise InvalidStateError(f"The prompt of {self._seq_id} isn't computed.", hint="Call prefill.")
        self._run(1, True, cancelled)
        return self._tokens[-1]

    def close(self) -> EvictReply:
        """Release the context and evict its blocks. Idempotent. Raises `InvalidStateError` while a step runs."""
        if not self._open:
            return EvictReply(0)
        self._session.runtime.release_context(self._seq_id)
        reply = self._session.give_back(self._blocks)
        self._open, self._blocks = False, []
        return reply

    def _run(self, size: int, sample: bool, cancelled: CancelFlag | None) -> None:
        if not self._open:
            raise InvalidStateError(f"The context {self._seq_id} is closed.", hint="Open it again.")
        runtime, start = self._session.runtime, self._computed
        missing = runtime.kv_spec.blocks_for(start + size) - len(self._blocks)
        self._blocks += self._session.take(max(0, missing))
        piece = SequenceSlice(self._seq_id, self._tokens[start : start + size], start, tuple(self._blocks), sample)
        began = time.monotonic()
        try:
            result = runtime.forward_step(StepPlan((piece,)), cancelled or CancelFlag())
        finally:
            self._elapsed_s += time.monotonic() - began
        self._computed += size
        if sample:
            self._tokens.append(result.tokens[self._seq_id])
