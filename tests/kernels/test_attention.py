"""Attention over paged KV: native equals the reference, rows don't depend on chunks, cancelling is quick."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perilune.kernels.interface import KVPool, QKNorm, RaggedBatch
from perilune.kernels.native import NativeKernels
from perilune.kernels.reference import ReferenceKernels, kv_views
from perilune.runtime.mri import CancelFlag
from tests.kernels.cases import Case, block_tables, head_shape, ragged, random_pool, random_rows, rope_table

RELAXED = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def cases(draw: st.DrawFn, *, decode: bool = False) -> Case:
    heads = head_shape(
        draw(st.sampled_from([1, 2, 3, 4, 7, 8])),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([16, 64, 80, 128, 256])),
    )
    sequences = draw(st.integers(1, 4))
    counts = [1 if decode else draw(st.integers(1, 90)) for _ in range(sequences)]
    lengths = [count + draw(st.integers(0, 200)) for count in counts]
    window = draw(st.one_of(st.none(), st.integers(1, 150)))
    return Case(heads, tuple(counts), tuple(lengths), window, draw(st.integers(0, 99)))


def open_case(kernels: NativeKernels, case: Case) -> tuple[torch.Tensor, KVPool, RaggedBatch]:
    """q, a filled pool whose slots past every sequence's end are NaN, the batch."""
    generator = torch.Generator().manual_seed(case.seed)
    tables = block_tables(case.lengths, generator)
    pool = random_pool(kernels, case, generator)
    k, v = kv_views(pool, 1)
    for row, length in enumerate(case.lengths):
        if length % 32:
            block = int(tables[row, length // 32])
            k[block, :, length % 32 :] = float("nan")
            for slot in range(length % 32, 32):
                v[block, :, slot // 2, slot % 2] = float("nan")
    return random_rows(case, generator), pool, ragged(case.counts, case.lengths, tables)


def clean(pool: KVPool) -> KVPool:
    data = pool.data.view(torch.bfloat16).nan_to_num(0.0).view(torch.uint8)
    return KVPool(pool.layout, data)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Values are averages of unit normals: bf16 probabilities and output leave about 2^-8 of 1 to 4."""
    assert torch.isfinite(got).all()
    error = (got.float() - expected.float()).abs()
    assert error.max() < 0.035, error.max()
    assert error.mean() < 0.003, error.mean()


@RELAXED
@given(case=cases())
def test_prefill_equals_reference(native: NativeKernels, reference: ReferenceKernels, case: Case) -> None:
    q, pool, batch = open_case(native, case)
    got = native.attention(q, pool, 1, batch, case.heads, window=case.window)
    assert_close(got, reference.attention(q, clean(pool), 1, batch, case.heads, window=case.window))


@RELAXED
@given(case=cases(decode=True))
def test_decode_equals_reference(native: NativeKernels, reference: ReferenceKernels, case: Case) -> None:
    q, pool, batch = open_case(native, case)
    got = native.decode_attention(q, pool, 1, batch, case.heads, window=case.window)
    assert_close(got, reference.attention(q, clean(pool), 1, batch, case.heads, window=case.window))


@RELAXED
@given(
    length=st.integers(2, 300),
    cuts=st.lists(st.integers(1, 299), max_size=4),
    group=st.sampled_from([1, 3, 7]),
    window=st.one_of(st.none(), st.integers(1, 100)),
)
def test_rows_do_not_depend_on_chunks(
    native: NativeKernels, length: int, cuts: list[int], group: int, window: int | None
) -> None:
    case = Case(head_shape(group, 2, 64), (length,), (length,), window)
    q, pool, batch = open_case(native, case)
    whole = native.attention(q, pool, 1, batch, case.heads, window=window)
    edges = sorted({0, length, *(cut for cut in cuts if cut < length)})
    for start, end in itertools.pairwise(edges):
        chunk = ragged((end - start,), (end,), batch.block_tables)
        part = native.attention(q[start:end].contiguous(), pool, 1, chunk, case.heads, window=window)
        assert torch.equal(part, whole[start:end]), (start, end)


def test_sharp_scores_stay_finite(native: NativeKernels, reference: ReferenceKernels) -> None:
    case = Case(head_shape(3, 1, 64), (70,), (70,))
    q, pool, batch = open_case(native, case)
    q *= 40
    got = native.attention(q, pool, 1, batch, case.heads)
    assert_close(got, reference.attention(q, clean(pool), 1, batch, case.heads))


@RELAXED
@given(case=cases(), norm=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_rope_store_equals_reference(
    native: NativeKernels, reference: ReferenceKernels, case: Case, norm: bool, dtype: torch.dtype
) -> None:
    _, pool, batch = open_case(native, case)
    other = KVPool(pool.layout, pool.data.clone())
    heads = case.heads
    qkv = torch.randn(sum(case.counts), heads.qkv_columns).to(dtype)
    weights = QKNorm(torch.rand(heads.head_dim), torch.rand(heads.head_dim), 1e-6, 1.0) if norm else None
    rope = rope_table(512, heads.head_dim)
    got = native.rope_store(qkv, heads, rope, pool, 1, batch, qk_norm=weights)
    expected = reference.rope_store(qkv, heads, rope, other, 1, batch, qk_norm=weights)
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-3)
    mine, theirs = pool.data.view(torch.bfloat16), other.data.view(torch.bfloat16)
    torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=1e-3, equal_nan=True)


def test_bad_batches_are_refused(native: NativeKernels) -> None:
    case = Case(head_shape(1, 1, 64), (10,), (40,))
    q, pool, batch = open_case(native, case)
    stray = RaggedBatch(batch.cu_q, batch.kv_lengths, batch.block_tables.clone())
    stray.block_tables[0, 1] = pool.num_blocks
    with pytest.raises(ValueError, match="blocks or positions"):
        native.attention(q, pool, 1, stray, case.heads)
    beyond = torch.zeros(64, dtype=torch.int32)  # what lies after the table in memory would pass as block numbers
    longer = RaggedBatch(batch.cu_q, batch.kv_lengths + 320, beyond[:2].view(1, 2))
    with pytest.raises(ValueError, match="blocks or positions"):
        native.attention(q, pool, 1, longer, case.heads)
    with pytest.raises(ValueError, match="doesn't fit"):
        native.attention(q, pool, 9, batch, case.heads)
    with pytest.raises(ValueError, match="need"):
        native.attention(q[:5], pool, 1, batch, case.heads)


def test_cancel_stops_a_long_prefill(native: NativeKernels) -> None:
    case = Case(head_shape(3, 3, 64), (8192,), (8192,))
    generator = torch.Generator().manual_seed(1)
    pool, q = random_pool(native, case, generator), random_rows(case, generator)
    batch = ragged(case.counts, case.lengths, block_tables(case.lengths, generator))
    flag = CancelFlag()
    set_at: list[float] = []

    def stop() -> None:
        flag.set()
        set_at.append(time.process_time())  # CPU time of all threads: neighbours on the machine don't count

    timer = threading.Timer(0.02, stop)
    timer.start()
    native.attention(q, pool, 1, batch, case.heads, cancel_address=flag.address)
    ended = time.process_time()
    timer.join()
    assert set_at, "the whole prefill took less than 20 ms"
    assert ended - set_at[0] < 0.05
