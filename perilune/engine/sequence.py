"""One token stream inside the engine: what is known, what is computed, which blocks hold it.

Knows tokens, counts and block ids. Knows nothing of classes of work beyond its spec, of bytes or of threads.
Touched by the engine thread only. There are no phases: a sequence has `tokens`, of which `computed` have KV;
when one is left and the prompt is done, the next step decodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from perilune.core import BLOCK_TOKENS, EngineEvent, KVPolicy, SequenceSpec, ServiceClass
from perilune.engine.hot_zone import HotZone
from perilune.kernels.tiers import AttentionPolicy
from perilune.runtime.kv.spec import BlockHash

Emit = Callable[[EngineEvent], None]

MIN_TAIL_TOKENS = 2
"""Prompt tokens always left to a last prefill slice. One sampled token is a decode step (`runtime.mri`), with
decode's own weights: an answer would then depend on how much of its prompt was cached."""


class SequenceState(StrEnum):
    WAITING = "waiting"  # new, or preempted
    LOADING = "loading"  # its blocks are coming from disk
    CLOSING = "closing"  # they came, and become a closed segment before more are loaded
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class EngineSequence:
    """`hashes` name the whole blocks of the prompt; `serial` is the order of arrival.

    The last fields are those of tiered sequences (`segments`): `block_table` holds -1 where a closed segment is
    read instead.
    """

    spec: SequenceSpec
    emit: Emit
    hashes: list[BlockHash]
    serial: int
    arrival_s: float
    work_s: float = 0.0  # predicted prefill of `expected_tokens`
    due_s: float = float("inf")  # when its first token is due; set by the policy, as is `late`
    late: bool = False  # it can't be in time any more
    started: bool = False  # something was computed for it
    end_s: float = field(init=False)  # when it ends if it has no token by then
    state: SequenceState = SequenceState.WAITING
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = field(init=False)
    computed: int = 0
    block_table: list[int] = field(default_factory=list)
    owner: str | None = None  # who the prompt's blocks are saved for; None once forgotten
    admitted: bool = False  # has left the queue at least once
    preempted: bool = False  # `cached_*` keep what the first admission found
    forgotten: bool = False  # its owner was deleted: nothing of it is shared any more
    parked: list[BlockHash] = field(default_factory=list)  # names of its leading blocks while it is preempted
    named_blocks: int = 0  # leading blocks offered to the prefix cache
    saved_blocks: int = 0  # leading blocks handed to the saver
    expected_tokens: int = 0  # uncached prompt tokens when it was queued
    cached_ram_tokens: int = 0
    cached_disk_tokens: int = 0
    disk_failed: bool = False  # a load came back short: compute the rest, don't ask the disk again
    opened: bool = False  # the runtime has a context for it
    attention: AttentionPolicy | None = None  # how decode reads closed segments
    zone: HotZone | None = None  # of a sequence whose window adapts
    segments: list[int] = field(default_factory=list)  # slots of the complete segments, in order
    closing: dict[int, int] = field(default_factory=dict)  # segments not closed yet: records that are made
    exact_share: float = 1.0  # of its context, what the last measured decode step read exactly
    released_segments: int = 0  # leading segments whose blocks were given back
    released_blocks: int = 0
    failed_jumps: int = 0  # loads of segments that came back short

    def __post_init__(self) -> None:
        self.tokens = list(self.spec.token_ids)
        self.prompt_tokens = len(self.tokens)
        self.end_s = self.expiry_s
        self.owner = self.spec.persist_owner

    @property
    def tiered(self) -> bool:
        return self.spec.kv_policy is KVPolicy.TIERED

    @property
    def held_blocks(self) -> int:
        return len(self.block_table) - self.released_blocks

    @property
    def seq_id(self) -> str:
        return self.spec.seq_id

    @property
    def service_class(self) -> ServiceClass:
        return self.spec.service_class

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def shared_blocks(self) -> int:
        """Leading blocks that may enter the shared cache."""
        return min(self.spec.shared_tokens, self.prompt_tokens) // BLOCK_TOKENS

    @property
    def persisted_blocks(self) -> int:
        """Leading blocks that may go to disk."""
        limit = self.spec.persist_tokens
        return self.shared_blocks if limit is None else min(self.shared_blocks, limit // BLOCK_TOKENS)

    @property
    def expiry_s(self) -> float:
        """When its time to live ends."""
        return float("inf") if self.spec.ttl_s is None else self.arrival_s + self.spec.ttl_s

    @property
    def remaining_s(self) -> float:
        """Predicted prefill that is left. What it parked counts as computed: that is there until the room is
        needed."""
        done = self.expected_tokens - self.target + max(self.computed, len(self.parked) * BLOCK_TOKENS)
        return self.work_s * (1 - max(0, done) / self.expected_tokens) if self.expected_tokens else 0.0

    @property
    def samples(self) -> bool:
        return not self.spec.prefill_only and self.spec.max_new_tokens > 0

    @property
    def target(self) -> int:
        """Tokens whose KV the next sample (or the end of an ingest) needs.

        An ingest stops at its last shareable block: nobody could reuse what lies behind it.
        """
        if self.spec.prefill_only and self.shared_blocks:
            return self.shared_blocks * BLOCK_TOKENS
        return len(self.tokens)

    @property
    def remaining(self) -> int:
        return self.target - self.computed

    @property
    def decodes(self) -> bool:
        """The next step is a decode step."""
        tokens = len(self.tokens)
        return tokens > self.prompt_tokens and tokens - self.computed == 1

    @property
    def reusable(self) -> list[BlockHash]:
        """Names of the leading blocks that may come from a cache; what is left can be prefilled and sampled."""
        spare = MIN_TAIL_TOKENS if self.samples else 0
        names = self.parked + self.hashes[len(self.parked) :] if self.parked else self.hashes
        return names[: max(0, self.target - spare) // BLOCK_TOKENS]

    @property
    def own_owner(self) -> str:
        """Under which what it parked is owned in the caches."""
        return f"parked {self.serial}"

    def own_name(self, index: int) -> BlockHash:
        """Names a block that only this sequence may read; as long as the others."""
        return hashlib.sha256(f"{self.own_owner} {index}".encode()).digest()

    @property
    def whole_blocks(self) -> int:
        """Leading shared blocks whose KV is complete."""
        return min(self.computed // BLOCK_TOKENS, self.shared_blocks)

    def unsaved_blocks(self, end: int) -> bool:
        """Some of the blocks before `end` still have to be handed to the saver."""
        return self.owner is not None and self.saved_blocks < min(end, self.persisted_blocks)

    def next_chunk(self, limit: int, border: int | None = None) -> int:
        """At most `limit` tokens of prompt, ending where blocks end, and never leaving one token behind.

        `border` tokens on the chunk ends in any case: a last token that stands behind it always does."""
        if border is not None and border <= min(limit, self.remaining):
            return border
        if limit >= self.remaining:
            return self.remaining
        end = (self.computed + limit) // BLOCK_TOKENS * BLOCK_TOKENS
        size = end - self.computed if end > self.computed else limit
        if self.samples and self.remaining - size < MIN_TAIL_TOKENS:
            size -= 1
        return size
