"""Small deterministic stand-ins, honest about bytes: a runtime whose KV can be checked, and a KV store in memory.

`FakeRuntime` writes into every block what its tokens say, reads it back in every later step, and notes each fault:
KV of other tokens, KV written by decode inside a prompt, a block that was given up. Its next token depends on the
KV it read. So any mistake of engine or store shows as a fault or as another answer.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from perilune.core import BLOCK_TOKENS, SamplingParams
from perilune.errors import InvalidStateError
from perilune.runtime.kv.spec import BlockHash, KVSpec
from perilune.runtime.kv.store import KVEntry
from perilune.runtime.mri import (
    CancelFlag,
    Capabilities,
    EvictReply,
    KVSummary,
    KVTiers,
    SequenceSlice,
    StepAbandoned,
    StepPlan,
    StepResult,
)

TINY_SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=2, dtype="bf16", fingerprint="fake")
"""Eight bytes a token, 256 a block."""

_TOKEN_BYTES = TINY_SPEC.token_bytes
_POISON = b"\xee"


@dataclass(slots=True)
class _Context:
    tokens: list[int]
    prompt_tokens: int
    digests: list[bytes] = field(default_factory=list)  # the right KV of each token

    def digest(self, position: int) -> bytes:
        """Seven bytes that depend on every token up to `position`."""
        while len(self.digests) <= position:
            before = self.digests[-1] if self.digests else b""
            token = self.tokens[len(self.digests)].to_bytes(4, "little")
            self.digests.append(hashlib.blake2b(token, key=before, digest_size=7).digest())
        return self.digests[position]


class FakeRuntime:
    """Implements `ModelRuntime`. `prefill_s` and `decode_s` are seconds a token; `fail` raises where it says so."""

    def __init__(
        self,
        num_blocks: int = 64,
        max_context_tokens: int = 4096,
        vocabulary: int = 1000,
        prefill_s: float = 0.0,
        decode_s: float = 0.0,
        fail: Callable[[StepPlan], bool] = lambda plan: False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes = bytearray(_POISON * (num_blocks * TINY_SPEC.block_bytes))
        self._num_blocks = num_blocks
        self._max_context_tokens = max_context_tokens
        self._vocabulary = vocabulary
        self._prefill_s = prefill_s
        self._decode_s = decode_s
        self._fail = fail
        self._sleep = sleep
        self._contexts: dict[str, _Context] = {}
        self._stepping = False
        self.plans: list[StepPlan] = []
        self.faults: list[str] = []

    capabilities = Capabilities()
    kv_spec = TINY_SPEC
    tiers: KVTiers | None = None

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def max_context_tokens(self) -> int:
        return self._max_context_tokens

    @property
    def open_contexts(self) -> set[str]:
        return set(self._contexts)

    @property
    def computed_tokens(self) -> int:
        return sum(plan.num_tokens for plan in self.plans)

    def init_context(self, seq_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        if seq_id in self._contexts:
            raise InvalidStateError(f"Sequence {seq_id} is open.")
        self._contexts[seq_id] = _Context(list(prompt_token_ids), len(prompt_token_ids))

    def release_context(self, seq_id: str) -> None:
        self._contexts.pop(seq_id, None)

    def forward_step(self, plan: StepPlan, cancelled: CancelFlag) -> StepResult:
        self._stepping = True
        try:
            self.plans.append(plan)
            self._check_plan(plan)
            self._spend(plan, cancelled)
            if self._fail(plan):
                raise RuntimeError("a fault that a test asked for")
            left = cancelled.left()
            stay = [piece for piece in plan.slices if piece.seq_id not in left]
            return StepResult({s.seq_id: self._compute(s) for s in stay if self._compute_kv(s)}, {})
        finally:
            self._stepping = False

    def _check_plan(self, plan: StepPlan) -> None:
        ids = [piece.seq_id for piece in plan.slices]
        if len(set(ids)) != len(ids) or not all(piece.token_ids for piece in plan.slices):
            self.faults.append("a sequence twice in a plan, or an empty slice")
        written = [
            piece.block_table[index]
            for piece in plan.slices
            for index in range(piece.start // BLOCK_TOKENS, -(-piece.end // BLOCK_TOKENS))
        ]
        if len(set(written)) != len(written):
            self.faults.append("two sequences write one block")

    def _spend(self, plan: StepPlan, cancelled: CancelFlag) -> None:
        due_s = {
            piece.seq_id: len(piece.token_ids) * (self._decode_s if _is_decode(piece) else self._prefill_s)
            for piece in plan.slices
        }
        while True:
            if cancelled.is_set():
                raise StepAbandoned
            left = cancelled.left()
            due_s = {name: seconds for name, seconds in due_s.items() if name not in left}
            total_s = sum(due_s.values())
            if total_s <= 0:
                return
            spent_s = min(0.002, total_s)
            self._sleep(spent_s)
            due_s = {name: seconds * (1 - spent_s / total_s) for name, seconds in due_s.items()}
            due_s = {name: seconds if seconds > 1e-9 else 0.0 for name, seconds in due_s.items()}

    def _compute_kv(self, piece: SequenceSlice) -> bool:
        """Check all earlier KV, write this slice's; true when the slice samples."""
        context = self._contexts[piece.seq_id]
        if list(piece.token_ids) != context.tokens[piece.start : piece.end]:
            self.faults.append(f"{piece.seq_id}: tokens of another text at {piece.start}")
        for position in range(piece.start):
            held = bytes(self._at(piece, position))
            decoded = self._may_decode(context, position) and held[7:] == b"d"
            if held[:7] != context.digest(position) or not (decoded or held[7:] == b"p"):
                self.faults.append(f"{piece.seq_id}: wrong KV at {position}: {held!r}")
                break
        kind = b"d" if _is_decode(piece) and piece.start else b"p"
        for position in range(piece.start, piece.end):
            self._at(piece, position)[:] = context.digest(position) + kind
        return piece.sample

    def _may_decode(self, context: _Context, position: int) -> bool:
        """Whether a decode step may have written this token's KV."""
        return position >= context.prompt_tokens

    def _compute(self, piece: SequenceSlice) -> int:
        """The next token: a function of the KV bytes of every token so far."""
        seen = b"".join(bytes(self._at(piece, position)[:7]) for position in range(piece.end))
        token = int.from_bytes(hashlib.blake2b(seen, digest_size=4).digest(), "little") % self._vocabulary
        self._contexts[piece.seq_id].tokens.append(token)
        return token

    def _at(self, piece: SequenceSlice, position: int) -> memoryview:
        start = (position % BLOCK_TOKENS) * _TOKEN_BYTES
        return self.block_view(piece.block_table[position // BLOCK_TOKENS])[start : start + _TOKEN_BYTES]

    def evict_kv(self, block_ids: Sequence[int]) -> EvictReply:
        for block in block_ids:
            self.block_view(block)[:] = _POISON * TINY_SPEC.block_bytes
        return EvictReply(len(block_ids), len(block_ids) * TINY_SPEC.block_bytes)

    def get_kv_summary(self) -> KVSummary:
        if self._stepping:
            raise InvalidStateError("A step is running.")
        return KVSummary(self._num_blocks, TINY_SPEC.block_bytes, len(self._bytes))

    def block_view(self, block_id: int) -> memoryview:
        start = block_id * TINY_SPEC.block_bytes
        return memoryview(self._bytes)[start : start + TINY_SPEC.block_bytes]

    def close(self) -> None:
        self._contexts.clear()


def _is_decode(piece: SequenceSlice) -> bool:
    return piece.sample and len(piece.token_ids) == 1


def expected_tokens(prompt: Sequence[int], count: int, vocabulary: int = 1000) -> list[int]:
    """What `FakeRuntime` answers to a prompt, computed without engine, cache or batch."""
    runtime = FakeRuntime(num_blocks=1 + (len(prompt) + count) // BLOCK_TOKENS, vocabulary=vocabulary)
    runtime.init_context("alone", prompt, SamplingParams())
    tokens = list(prompt)
    table = range(runtime.num_blocks)
    for _ in range(count):
        start = 0 if len(tokens) == len(prompt) else len(tokens) - 1
        piece = SequenceSlice("alone", tokens[start:], start, table, True)
        tokens.append(runtime.forward_step(StepPlan((piece,)), CancelFlag()).tokens["alone"])
    assert not runtime.faults
    return tokens[len(prompt) :]


class MemoryKVStore:
    """`KVStore` as a dict: no durability, no quota."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._blocks: dict[BlockHash, bytes] = {}
        self._owners: dict[BlockHash, set[str]] = {}
        self._last_used: dict[str, float] = {}
        self._clock = clock
        self.saves: list[tuple[int, str]] = []

    def prefix_length(self, hashes: Sequence[BlockHash]) -> int:
        return next((i for i, name in enumerate(hashes) if name not in self._blocks), len(hashes))

    def load(self, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> int:
        count = self.prefix_length(hashes)
        for name, view in zip(hashes[:count], into[:count], strict=True):
            view[:] = self._blocks[name]
        return count

    def save(self, hashes: Sequence[BlockHash], blocks: Sequence[memoryview], owner: str) -> None:
        self.saves.append((len(hashes), owner))
        for name, view in zip(hashes, blocks, strict=True):
            if name not in self._blocks:
                self._blocks[name] = bytes(view)
            self._owners.setdefault(name, set()).add(owner)
        self._last_used[owner] = self._clock()

    def forget(self, owner: str) -> int:
        freed = 0
        for name, owners in list(self._owners.items()):
            owners.discard(owner)
            if not owners:
                del self._owners[name]
                freed += len(self._blocks.pop(name))
        self._last_used.pop(owner, None)
        return freed

    def entries(self) -> list[KVEntry]:
        owned: dict[str, list[int]] = {}
        for name, owners in self._owners.items():
            for owner in owners:
                owned.setdefault(owner, []).append(len(self._blocks[name]))
        return [
            KVEntry(owner, len(sizes), sum(sizes), self._last_used[owner]) for owner, sizes in sorted(owned.items())
        ]

    def close(self) -> None:
        self._blocks.clear()
        self._owners.clear()
