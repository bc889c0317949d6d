"""Model Runtime Interface (MRI): what the engine asks of anything that runs a model (spec R6).

Plain data without torch. The engine decides tokens and blocks; the runtime owns bytes and arithmetic.
What a runtime can't do is a declared capability, not an exception. docs/mri.md is the long form of this module.

Threads: one thread steps. While a step runs, `forward_step`, `init_context`, `release_context`, `evict_kv`,
`get_kv_summary` and `close` from any other thread raise `InvalidStateError` and change nothing; properties,
`block_view` and `CancelFlag.set` may be used at any time. Versions and their negotiation: `mri_version`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from perilune.core import SamplingParams, TokenLogprob
from perilune.kernels.tiers import AttentionPolicy
from perilune.runtime.kv.spec import KVSpec, TierSpec

MRI_VERSION = "1.1"


class StepAbandoned(Exception):
    """Raised by `forward_step` when its flag was set; no sequence of the plan advanced."""


class CancelFlag:
    """What a running step has to look at: a word of memory, and which of its sequences have left.

    `address` points to an int32 that native code polls between layers and attention tiles: 0 runs, anything else
    abandons the step. `left` is asked by the runtime, on its own thread, at least every 40 ms of a step that
    several sequences share: it names sequences whose slices nobody wants any more. From the answer on the runtime
    computes no row of theirs, touches none of their blocks and samples nothing for them; the others' results stay
    what they would have been. The engine gives a leaving sequence's blocks back inside `left`, so `release_context`
    and `evict_kv` may be called there.
    """

    def __init__(self, left: Callable[[], Set[str]] = frozenset) -> None:
        self._words = (ctypes.c_int32 * 2)(0, 0)  # abandon; abandon, or somebody leaves
        self.left = left

    @property
    def address(self) -> int:
        return ctypes.addressof(self._words)

    @property
    def change_address(self) -> int:
        """As `address`, of a word that `wake` sets too: for calls that many sequences share and that are soon made
        again."""
        return ctypes.addressof(self._words) + ctypes.sizeof(ctypes.c_int32)

    def set(self) -> None:
        self._words[0] = self._words[1] = 1

    def wake(self) -> None:
        """Somebody leaves: `left` will say who. Any thread."""
        self._words[1] = 1

    def take_change(self) -> bool:
        """Whether the second word was set; clears it. The stepping thread only, before it asks `left` again."""
        changed = self._words[1] != 0
        self._words[1] = self._words[0]
        return changed

    def clear(self) -> None:
        self._words[0] = self._words[1] = 0

    def is_set(self) -> bool:
        return self._words[0] != 0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a runtime offers beyond the minimum."""

    version: str = MRI_VERSION
    kv_summary: bool = False
    kv_bytes: bool = True  # `block_view` gives the bytes of a block, so tiers can move it
    logprobs: bool = True
    chunk_invariant: bool = True  # no bit depends on how a prompt was cut or on what else ran in the step
    max_branches: int = 0  # most blocks that may hold KV of the same positions; 0: no bound


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's share of a step: compute `token_ids` at `start`, … with KV in `block_table`.

    `block_table[i]` holds tokens `i*BLOCK_TOKENS` … ; it covers every token up to the slice's end. With `sample`
    the last position's logits are sampled. One token with `sample` is a decode step; the runtime may run such
    slices through a path of their own.

    `segments` are the slots of closed segments (see `KVTiers`) that the slice reads instead of blocks: the leading
    `len(segments)` segments. Of their blocks only the sinks' are read; the others' entries may be -1. `attention`
    says how a decode step reads them (None: every token). Empty and None, the defaults, are the "full" policy.
    With `measure` a decode step also reports where its attention went.
    """

    seq_id: str
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: bool
    segments: Sequence[int] = ()
    attention: AttentionPolicy | None = None
    measure: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Frozen instructions for one step. Sequences appear at most once. `timed`: say what attention spent its time
    on, where the runtime can."""

    slices: tuple[SequenceSlice, ...]
    timed: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(len(piece.token_ids) for piece in self.slices)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens by sequence; sequences without `sample` are absent.

    `faults`: why a sequence got no token though it samples; it concerns nobody else in the step.

    `attention`: of sequences that were measured, for every layer the figures that
    `kernels.interface.ATTENTION_STATS` names, in that order; zeros for layers that read blocks only.

    `attention_s`: of a timed plan, for every layer the seconds (of all threads, over their number) that decode
    attention over closed segments took, by `kernels.interface.ATTENTION_PARTS`; empty where it wasn't measured.
    """

    tokens: dict[str, int]
    logprobs: dict[str, TokenLogprob]
    faults: dict[str, Exception] = field(default_factory=dict)
    attention: dict[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    attention_s: tuple[tuple[float, ...], ...] = ()


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


@dataclass(frozen=True, slots=True, eq=False)
class PayloadMove:
    """A payload on its way to the other tier. `copy` may run on any thread, beside steps: the slot is read where it
    was until `KVTiers.end_move`."""

    slot: int
    to_cold: bool
    frame: int
    copy: Callable[[], None]


class KVTiers(Protocol):
    """Closed segments of a runtime that has tiers (spec R4). Slots are 0 … spec.slots-1; who holds one is the
    engine's business. The engine thread calls everything here, between steps; the bytes of `views` and
    `PayloadMove.copy` may be used elsewhere while the slot is neither dropped nor moved."""

    @property
    def spec(self) -> TierSpec: ...

    @property
    def warm_free(self) -> int:
        """RAM frames that no slot has."""
        ...

    @property
    def cold_free(self) -> int:
        """Frames of the file that no slot has."""
        ...

    def open(self, slot: int, *, cold: bool = False) -> None:
        """Give an empty slot a frame: of the tier asked for, else of the other. Raises `Overloaded` if both are
        full, `InvalidStateError` if it has one."""
        ...

    def is_cold(self, slot: int) -> bool:
        """Raises `InvalidStateError` for a slot without a frame."""
        ...

    def close_records(self, slot: int, blocks: Sequence[int], first: int, count: int) -> None:
        """Make records `first` … `first + count - 1` of a segment from its blocks, in prompt order; the sinks' are
        -1. Bytes depend on the blocks' KV alone."""
        ...

    def views(self, slot: int) -> list[memoryview]:
        """The writable bytes of a slot with a frame, for the disk: `spec.parts` runs, each always as long."""
        ...

    def begin_move(self, slot: int, *, to_cold: bool) -> PayloadMove | None:
        """Prepare a move to the other tier; None if that tier is full."""
        ...

    def end_move(self, move: PayloadMove) -> None:
        """After the copy: the slot is read in its new place from the next step on."""
        ...

    def abandon_move(self, move: PayloadMove) -> None:
        """The copy failed: the slot stays where it is."""
        ...

    def prefetch(self, slots: Sequence[int]) -> None:
        """Ask the system to read COLD payloads ahead. Returns at once."""
        ...

    def fetch(self, slots: Sequence[int]) -> None:
        """Read COLD payloads into RAM now, as far as the system has room."""
        ...

    def drop(self, slots: Sequence[int]) -> None:
        """Slots are empty: their frames are free, their bytes undefined."""
        ...


class ModelRuntime(Protocol):
    """One model, loaded. See the module header for who may call what."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def kv_spec(self) -> KVSpec: ...

    @property
    def tiers(self) -> KVTiers | None:
        """Closed segments; None for a runtime that keeps whole blocks only."""
        ...

    @property
    def num_blocks(self) -> int:
        """Size of the block pool; valid block ids are 0 … num_blocks-1."""
        ...

    @property
    def max_context_tokens(self) -> int: ...

    def init_context(self, seq_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Open a sequence: sampler state only, no compute, no KV.

        The prompt is computed by `forward_step`, in chunks of any size and in order; a chunk that was abandoned or
        failed may be given again (`mri_session` does so for callers without an engine).

        Raises `InvalidStateError` if `seq_id` is open, a step runs or the runtime is closed, `InvalidRequest` for
        sampling parameters out of range.
        """
        ...

    def forward_step(self, plan: StepPlan, cancelled: CancelFlag) -> StepResult:
        """Compute a step and sample. Raises `StepAbandoned` within 50 ms of the flag being set. A sequence that
        left on the way (`CancelFlag.left`) is absent from the result, and its slice did not advance.

        The KV of the plan's tokens is written to the blocks that the tables name, and nothing else changes. After
        `StepAbandoned` and every refusal nothing advanced: KV from each slice's `start` on is undefined, samplers
        are as before, and the same plan may be given again. After another failure so may slices without `sample`.

        Raises `InvalidStateError` if a step runs already, a sequence isn't open, or a block that is read was
        evicted or never written; ValueError for a plan outside its bounds (a sequence twice, an empty slice, the
        window, the pool, the vocabulary, a table too short), before anything changes.
        """
        ...

    def release_context(self, seq_id: str) -> None:
        """Close a sequence; its blocks stay until they are evicted. Unknown ids are ignored.

        Raises `InvalidStateError` while a step runs.
        """
        ...

    def evict_kv(self, block_ids: Sequence[int]) -> EvictReply:
        """Tell the runtime that whole blocks are free; their bytes become undefined. Never part of a block.

        Naming a block twice counts once; one that holds nothing counts, and frees no bytes. All or nothing: raises
        ValueError for an id outside the pool, `InvalidStateError` while a step runs, and evicts none then.
        """
        ...

    def get_kv_summary(self) -> KVSummary:
        """Occupancy, where `Capabilities.kv_summary`. Raises `InvalidStateError` during a running step, or if the
        runtime can't tell."""
        ...

    def block_view(self, block_id: int) -> memoryview:
        """The writable bytes of a block, `kv_spec.block_bytes` long, where `Capabilities.kv_bytes`. Valid for the
        runtime's life. A block whose view was taken counts as written.

        Raises ValueError for an id outside the pool, `InvalidStateError` if the runtime doesn't show bytes.
        """
        ...

    def close(self) -> None:
        """Free the model. Idempotent. Raises `InvalidStateError` while a step runs."""
        ...
