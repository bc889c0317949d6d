"""Model Runtime Interface (MRI): what the engine asks of anything that runs a model (spec R6).

Plain data without torch. The engine decides tokens and blocks; the runtime owns bytes and arithmetic.
Only the engine thread calls `init_context`, `forward_step`, `evict_kv` and `release_context`; a `CancelFlag` may be
set from any thread. What a runtime can't do is a declared capability, not an exception.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from perilune.core import SamplingParams, TokenLogprob
from perilune.runtime.kv.spec import KVSpec

MRI_VERSION = "1.1"


class StepAbandoned(Exception):
    """Raised by `forward_step` when its flag was set; no sequence of the plan advanced."""


class CancelFlag:
    """A word of memory that native code polls between layers and attention tiles.

    `address` points to an int32: 0 runs, anything else abandons the step.
    """

    def __init__(self) -> None:
        self._word = ctypes.c_int32(0)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._word)

    def set(self) -> None:
        self._word.value = 1

    def clear(self) -> None:
        self._word.value = 0

    def is_set(self) -> bool:
        return self._word.value != 0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a runtime offers beyond the minimum."""

    version: str = MRI_VERSION
    kv_summary: bool = False
    kv_bytes: bool = True  # `block_view` gives the bytes of a block, so tiers can move it
    logprobs: bool = True


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's share of a step: compute `token_ids` at `start`, … with KV in `block_table`.

    `block_table[i]` holds tokens `i*BLOCK_TOKENS` … ; it covers every token up to the slice's end. With `sample`
    the last position's logits are sampled. One token with `sample` is a decode step; the runtime may run such
    slices through a path of their own.
    """

    seq_id: str
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: bool

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Frozen instructions for one step. Sequences appear at most once."""

    slices: tuple[SequenceSlice, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(piece.token_ids) for piece in self.slices)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens by sequence; sequences without `sample` are absent."""

    tokens: dict[str, int]
    logprobs: dict[str, TokenLogprob]


@dataclass(frozen=True, slots=True)
class EvictReply:
    """What an eviction freed. (1.0 replies carried only `evicted_blocks`.)"""

    evicted_blocks: int
    freed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KVSummary:
    """Occupancy of a runtime's KV."""

    total_blocks: int
    block_bytes: int
    resident_bytes: int


class ModelRuntime(Protocol):
    """One model, loaded. See the module header for who may call what."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def kv_spec(self) -> KVSpec: ...

    @property
    def num_blocks(self) -> int:
        """Size of the block pool; valid block ids are 0 … num_blocks-1."""
        ...

    @property
    def max_context_tokens(self) -> int: ...

    def init_context(self, seq_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Open a sequence: sampler state only, no compute, no KV.

        Raises `InvalidStateError` if `seq_id` is open.
        """
        ...

    def forward_step(self, plan: StepPlan, cancelled: CancelFlag) -> StepResult:
        """Compute a step and sample. Raises `StepAbandoned` within 50 ms of the flag being set.

        The KV of the plan's tokens is written to the blocks that the tables name, and nothing else changes.
        """
        ...

    def release_context(self, seq_id: str) -> None:
        """Close a sequence. Unknown ids are ignored."""
        ...

    def evict_kv(self, block_ids: Sequence[int]) -> EvictReply:
        """Tell the runtime that whole blocks are free; their bytes become undefined."""
        ...

    def get_kv_summary(self) -> KVSummary:
        """Occupancy. Raises `InvalidStateError` during a running step."""
        ...

    def block_view(self, block_id: int) -> memoryview:
        """The writable bytes of a block, `kv_spec.block_bytes` long. Valid for the runtime's life."""
        ...

    def close(self) -> None: ...
