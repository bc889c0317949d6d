"""Row-wise pieces and the fused decode step against the reference."""

from __future__ import annotations

import pytest
import torch

from perilune.kernels.interface import HeadShape, KVLayout, KVPool, RaggedBatch
from perilune.kernels.native import NativeKernels
from perilune.kernels.reference import ReferenceKernels
from perilune.runtime.mri import CancelFlag
from tests.kernels.cases import block_tables, head_shape, ragged, random_model


@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_pieces(native: NativeKernels, reference: ReferenceKernels, rows: int, dtype: torch.dtype) -> None:
    x, weight = 3 * torch.randn(rows, 200), torch.randn(200)
    close = {"rtol": 2**-7, "atol": 1e-5}
    for out in (torch.float32, torch.bfloat16):
        got = native.rms_norm(x.to(dtype), weight, 1e-5, offset=1.0, out_dtype=out)
        expected = reference.rms_norm(x.to(dtype), weight, 1e-5, offset=1.0, out_dtype=out)
        torch.testing.assert_close(got, expected, **close)
    for act in ("silu", "gelu_tanh"):
        for scale in (1.0, 60.0):
            gate_up = (scale * x).to(dtype)
            got, expected = native.gated_act(gate_up, act), reference.gated_act(gate_up, act)
            torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-4)
    for norm in (None, weight):
        mine, theirs = torch.ones(rows, 200), torch.ones(rows, 200)
        for out in (torch.float32, torch.bfloat16):
            got = native.add_norm_(mine, x.to(dtype), 1 + weight, 1e-6, post_norm=norm, out_dtype=out)
            expected = reference.add_norm_(theirs, x.to(dtype), 1 + weight, 1e-6, post_norm=norm, out_dtype=out)
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got, expected, **close)


def test_rms_norm_rows_do_not_depend_on_the_batch(native: NativeKernels) -> None:
    x, weight = torch.randn(40, 131), torch.randn(131)
    whole = native.rms_norm(x, weight, 1e-6)
    assert torch.equal(native.rms_norm(x[7:9].contiguous(), weight, 1e-6), whole[7:9])


STEPS = [
    (head_shape(3, 3, 64), 576, 96, False, ["q4"]),
    (head_shape(4, 1, 256), 640, 128, True, ["int8", "q4"]),
    (head_shape(7, 2, 64), 128, 160, False, ["bf16", "int8", "q4"]),
]


@pytest.mark.parametrize("sequences", [1, 3, 16])
@pytest.mark.parametrize(("heads", "hidden", "ffn", "gemma", "kinds"), STEPS)
def test_decode_step_equals_reference(
    native: NativeKernels,
    reference: ReferenceKernels,
    sequences: int,
    heads: HeadShape,
    hidden: int,
    ffn: int,
    gemma: bool,
    kinds: list[str],
) -> None:
    model = random_model(native, heads, hidden, ffn, gemma=gemma, kinds=kinds)
    generator = torch.Generator().manual_seed(sequences)
    lengths = tuple(int(n) for n in torch.randint(1, 230, (sequences,), generator=generator))
    batch = ragged((1,) * sequences, lengths, block_tables(lengths, generator))
    layout = KVLayout(2, heads.num_kv_heads, heads.head_dim, "bf16")
    pool = native.allocate_pool(layout, int(batch.block_tables.max()) + 4)
    numbers = pool.data.view(torch.bfloat16)
    numbers.copy_(torch.randn(numbers.numel(), generator=generator))
    other = KVPool(layout, pool.data.clone())
    x = torch.randn(sequences, hidden, generator=generator)
    mine, theirs = x.clone(), x.clone()
    got = native.decode_step(native.prepare_decode(model, pool), mine, batch)
    expected = reference.decode_step(reference.prepare_decode(model, other), theirs, batch)
    scale = expected.std()
    assert (got - expected).abs().max() < 0.02 * scale
    assert (mine - theirs).abs().max() < 0.02 * theirs.std()
    difference = pool.data.view(torch.bfloat16).float() - other.data.view(torch.bfloat16).float()
    assert difference.abs().max() < 0.06


def test_decode_step_stops_when_cancelled(native: NativeKernels) -> None:
    heads = head_shape(3, 1, 64)
    model = random_model(native, heads, 64, 96, gemma=False, kinds=["q4"])
    pool = native.allocate_pool(KVLayout(2, 1, 64, "bf16"), 4)
    batch = ragged((1,), (1,), torch.zeros(1, 1, dtype=torch.int32))
    flag = CancelFlag()
    flag.set()
    x = torch.ones(1, 64)
    native.decode_step(native.prepare_decode(model, pool), x, batch, cancel_address=flag.address)
    assert torch.equal(x, torch.ones(1, 64)), "a cancelled step went on"


def test_decode_step_refuses_what_does_not_fit(native: NativeKernels) -> None:
    heads = head_shape(3, 1, 64)
    model = random_model(native, heads, 64, 96, gemma=False, kinds=["q4"])
    with pytest.raises(ValueError, match="doesn't fit"):
        native.prepare_decode(model, native.allocate_pool(KVLayout(2, 2, 64, "bf16"), 4))
    plan = native.prepare_decode(model, native.allocate_pool(KVLayout(2, 1, 64, "bf16"), 4))
    far = RaggedBatch(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([5000], dtype=torch.int32),
        torch.zeros(1, 200, dtype=torch.int32),
    )
    with pytest.raises(ValueError, match="blocks or positions"):
        native.decode_step(plan, torch.ones(1, 64), far)
    for rows, length in ((1, 0), (0, 5)):
        odd = ragged((rows,), (length,), torch.zeros(1, 1, dtype=torch.int32))
        with pytest.raises(ValueError, match="blocks or positions"):
            native.decode_step(plan, torch.ones(1, 64), odd)
