"""Tiers in the real runtime: a small random model, native kernels where there are any (spec R4, R9, R10).

Bytes are compared, not answers: KV of a tiered sequence depends on its tokens alone, and what moves or goes to disk
comes back as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from perilune.core import FinishReason, KVPolicy, SamplingParams
from perilune.engine.loop import EngineLoop
from perilune.engine.policy import EngineLimits
from perilune.engine.stepper import TierPolicy
from perilune.errors import InvalidStateError, Overloaded
from perilune.kernels import select
from perilune.kernels.tiers import AttentionPolicy
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.kv.cold import SpillFile
from perilune.runtime.kv.disk import DiskKVStore
from perilune.runtime.kv.tiers import TierSize
from perilune.runtime.mri import CancelFlag, SequenceSlice, StepPlan
from perilune.runtime.torch_runtime import TorchRuntime
from perilune.runtime.weights import WeightBuilder
from tests.engine.harness import Listener, spec

SEGMENT = 2048
BLOCKS = SEGMENT // 32
TOKENS = [(31 * i * i + 7 * i) % 311 + 3 for i in range(4 * SEGMENT)]
POLICY = AttentionPolicy(window_tokens=256, dense_tokens=512, dense_layers=1, min_units=4, max_units=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    place = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=16384,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(11)
    transformers.LlamaForCausalLM(config).eval().save_pretrained(place)
    return place


@pytest.fixture
def runtime(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchRuntime]:
    kernels = select.load(1)
    checkpoint = open_checkpoint(folder)
    weights = WeightBuilder(checkpoint, kernels, "bf16", "auto", 4 * SEGMENT).build(1 << 40)
    size = TierSize(12, 8, 4, tmp_path_factory.mktemp("spill"))
    runtime = TorchRuntime(weights, kernels, num_blocks=600, fingerprint="random", tiers=size)
    checkpoint.close()
    yield runtime
    runtime.close()


class Sequence1:
    """One tiered sequence on a runtime, stepped by hand by the rule of the brief."""

    def __init__(self, runtime: TorchRuntime, name: str, first_block: int, first_slot: int) -> None:
        self.runtime, self.name = runtime, name
        self.table = list(range(first_block, first_block + 4 * BLOCKS))
        self.slots: list[int] = []
        self.first_slot = first_slot
        runtime.init_context(name, TOKENS, SamplingParams())

    def prefill(self, start: int, end: int) -> None:
        assert self.runtime.tiers is not None
        closed = self.slots[: max(0, start // SEGMENT - 1)]
        table = [-1 if 2 <= i < len(closed) * BLOCKS else block for i, block in enumerate(self.table)]
        piece = SequenceSlice(self.name, TOKENS[start:end], start, table, False, closed)
        self.runtime.forward_step(StepPlan((piece,)), CancelFlag())
        if end % SEGMENT == 0:
            self.close(end // SEGMENT - 1)

    def close(self, index: int, batch: int = 4) -> None:
        tiers = self.runtime.tiers
        assert tiers is not None
        slot = self.first_slot + index
        tiers.open(slot)
        blocks = self.table[index * BLOCKS : (index + 1) * BLOCKS]
        if index == 0:
            blocks[:2] = [-1, -1]
        for first in range(0, tiers.spec.records, batch):
            tiers.close_records(slot, blocks, first, min(batch, tiers.spec.records - first))
        self.slots.append(slot)

    def bytes(self) -> list[bytes]:
        tiers = self.runtime.tiers
        assert tiers is not None
        segments = [bytes(part) for slot in self.slots for part in tiers.views(slot)]
        return segments + [bytes(self.runtime.block_view(block)) for block in self.table]

    def end(self) -> None:
        assert self.runtime.tiers is not None
        self.runtime.release_context(self.name)
        self.runtime.tiers.drop(self.slots)


def test_kv_does_not_depend_on_chunks(runtime: TorchRuntime) -> None:
    one = Sequence1(runtime, "one", 0, 0)
    for start in range(0, 4 * SEGMENT, SEGMENT):
        one.prefill(start, start + SEGMENT)
    cut = Sequence1(runtime, "cut", 4 * BLOCKS, 4)
    for first, last in pairwise(sorted({*range(0, 4 * SEGMENT + 1, 736), *range(0, 4 * SEGMENT + 1, SEGMENT)})):
        cut.prefill(first, last)
    assert one.bytes() == cut.bytes()
    assert len(set(one.bytes())) > 100
    one.end()
    cut.end()


def test_closing_in_parts_and_from_other_blocks_gives_the_same_bytes(runtime: TorchRuntime) -> None:
    tiers = runtime.tiers
    assert tiers is not None
    sequence = Sequence1(runtime, "a", 0, 0)
    sequence.prefill(0, SEGMENT)
    expected = [bytes(part) for part in tiers.views(0)]
    for block in range(BLOCKS):
        runtime.block_view(300 + block)[:] = runtime.block_view(block)
    tiers.open(1)
    blocks = [-1, -1, *range(302, 300 + BLOCKS)]
    for record in range(tiers.spec.records):
        tiers.close_records(1, blocks, record, 1)
    assert [bytes(part) for part in tiers.views(1)] == expected
    tiers.drop([1])
    sequence.end()


def test_ten_rounds_to_disk_and_back_change_no_byte(runtime: TorchRuntime) -> None:
    tiers = runtime.tiers
    assert tiers is not None
    sequence = Sequence1(runtime, "a", 0, 0)
    sequence.prefill(0, SEGMENT)
    before = [bytes(part) for part in tiers.views(0)]
    addresses = {int(tiers.pool.payloads[0])}
    free = tiers.warm_free, tiers.cold_free
    for round_ in range(20):
        move = tiers.begin_move(0, to_cold=round_ % 2 == 0)
        assert move is not None
        move.copy()
        tiers.end_move(move)
        addresses.add(int(tiers.pool.payloads[0]))
        assert tiers.is_cold(0) == (round_ % 2 == 0)
        assert [bytes(part) for part in tiers.views(0)] == before
    assert len(addresses) > 1
    assert (tiers.warm_free, tiers.cold_free) == free
    sequence.end()


def test_frames_run_out_cleanly(runtime: TorchRuntime) -> None:
    tiers = runtime.tiers
    assert tiers is not None
    for slot in range(tiers.spec.slots):
        tiers.open(slot, cold=slot % 2 == 0)
    assert tiers.warm_free == tiers.cold_free == 0
    with pytest.raises(InvalidStateError):
        tiers.open(0)
    assert tiers.begin_move(0, to_cold=not tiers.is_cold(0)) is None
    tiers.drop(range(tiers.spec.slots))
    assert (tiers.warm_free, tiers.cold_free) == (tiers.spec.warm_frames, tiers.spec.cold_frames)
    with pytest.raises(InvalidStateError):
        tiers.views(0)


def test_a_full_disk_is_said_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(Overloaded, match="COLD") as error:
        SpillFile(tmp_path, 4, 4096, [(0, 4096)])
    assert error.value.hint
    assert not list(tmp_path.iterdir())


def test_the_spill_file_has_no_name(tmp_path: Path) -> None:
    spill = SpillFile(tmp_path, 2, 10_000, [(0, 10_000)])
    assert not list(tmp_path.iterdir())
    spill.view(1)[:4] = b"kept"
    spill.fetch(1)
    spill.prefetch(1)
    assert bytes(spill.view(1)[:4]) == b"kept"
    assert spill.address(1) % 4096 == 0


def test_a_plan_that_reads_an_empty_slot_is_refused(runtime: TorchRuntime) -> None:
    runtime.init_context("a", TOKENS, SamplingParams())
    table = list(range(3 * BLOCKS))
    for slots in ((5,), (5, 5, 5)):
        piece = SequenceSlice("a", TOKENS[4096:4100], 4096, table, False, slots)
        with pytest.raises(ValueError, match=r"slot|segments"):
            runtime.forward_step(StepPlan((piece,)), CancelFlag())
    runtime.release_context("a")


def _engine(runtime: TorchRuntime, stores: Sequence[DiskKVStore] | None, warm_tokens: int = 1 << 20) -> EngineLoop:
    block_store, segment_store = stores or (None, None)
    engine = EngineLoop(
        runtime,
        block_store,
        EngineLimits(),
        segment_store=segment_store,
        tier_policy=TierPolicy(warm_tokens, {"general": POLICY}),
    )
    engine.start()
    return engine


def _ask(engine: EngineLoop, name: str, prompt: list[int], *, shared: int, owner: str | None = None) -> Listener:
    listener = Listener()
    engine.submit(
        spec(name, prompt, new=16, shared=shared, owner=owner, kv_policy=KVPolicy.TIERED, salt=b"tiered"), listener
    )
    assert listener.wait(120) is FinishReason.LENGTH
    return listener


def test_restored_equals_kept_and_cold_equals_warm(runtime: TorchRuntime, tmp_path: Path) -> None:
    prompt, shared = TOKENS[: 3 * SEGMENT + 700], 3 * SEGMENT + 640
    stores = DiskKVStore(tmp_path / "kv", 1 << 30), DiskKVStore(tmp_path / "segments", 1 << 30)
    engine = _engine(runtime, stores)
    computed = _ask(engine, "computed", prompt, shared=shared, owner="doc")
    kept = _ask(engine, "kept", prompt, shared=shared)
    engine.close()
    engine.check_integrity()
    assert computed.cached == (0, 0)
    assert kept.cached == (shared, 0)
    engine = _engine(runtime, stores, warm_tokens=0)
    restored = _ask(engine, "restored", prompt, shared=shared)
    again = _ask(engine, "again", prompt, shared=shared)
    assert restored.cached == (0, shared)
    engine.forget("doc")
    assert all(not store.entries() for store in stores)
    engine.close()
    engine.check_integrity()
    for store in stores:
        store.close()
    assert computed.tokens == kept.tokens == restored.tokens == again.tokens
    assert len(set(computed.tokens)) > 3


def test_full_and_tiered_share_a_step_and_change_nothing(runtime: TorchRuntime) -> None:
    engine = _engine(runtime, None)
    prompt = TOKENS[: 2 * SEGMENT + 900]
    alone = _ask(engine, "alone", prompt, shared=0).tokens
    full_alone, full_beside, beside = Listener(), Listener(), Listener()
    engine.submit(spec("full", prompt[:1500], new=16, salt=b"full"), full_alone)
    full_alone.wait(60)
    engine.submit(spec("t", prompt, new=16, shared=0, kv_policy=KVPolicy.TIERED, salt=b"tiered"), beside)
    engine.submit(spec("f", prompt[:1500], new=16, shared=0, salt=b"full"), full_beside)
    beside.wait(60)
    full_beside.wait(60)
    engine.close()
    engine.check_integrity()
    assert beside.tokens == alone
    assert full_beside.tokens == full_alone.tokens
