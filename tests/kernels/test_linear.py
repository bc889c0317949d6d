"""Packed weights: repacking is exact, products equal the dequantised matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perilune.kernels.interface import GgufKind
from perilune.kernels.native import NativeKernels
from perilune.kernels.packing import unpack
from perilune.kernels.reference import ReferenceKernels
from tests.kernels.cases import pack

KINDS: list[GgufKind] = ["Q4_0", "Q4_1", "Q5_0", "Q8_0"]


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_blocks_survive_packing(native: NativeKernels, reference: ReferenceKernels, kind: GgufKind) -> None:
    from gguf import GGMLQuantizationType, dequantize, quantize

    weight = np.random.default_rng(0).standard_normal((40, 96), dtype=np.float32)
    raw = quantize(weight, GGMLQuantizationType[kind])
    expected = torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind]))
    packed = native.pack_gguf(torch.from_numpy(raw), 40, 96, kind)
    assert torch.equal(packed.data, reference.pack_gguf(torch.from_numpy(raw), 40, 96, kind).data)
    assert torch.equal(unpack(packed), expected)
    assert torch.equal(native.dequantize(packed), expected.to(torch.bfloat16))
    assert torch.equal(native.gather_rows(packed, torch.tensor([39, 0, 17])), expected[[39, 0, 17]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_equals_reference(native: NativeKernels, reference: ReferenceKernels, dtype: torch.dtype) -> None:
    weight = torch.randn(50, 64).to(dtype)
    weight[3] = 0
    weight[4] *= 1e-6
    packed = native.pack_int8(weight)
    assert torch.equal(packed.data, reference.pack_int8(weight).data)
    scale = weight.float().view(50, -1, 32).abs().amax(-1).repeat_interleave(32, 1) / 127
    assert ((unpack(packed) - weight.float()).abs() <= scale * 0.57 + 4e-6).all()


def test_bf16_is_exact(native: NativeKernels, reference: ReferenceKernels) -> None:
    weight = torch.randn(50, 34)
    packed = native.pack_bf16(weight)
    assert torch.equal(packed.data, reference.pack_bf16(weight).data)
    assert torch.equal(native.dequantize(packed), weight.to(torch.bfloat16))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.sampled_from(["q4", "int8", "bf16"]), min_size=1, max_size=3),
    rows=st.integers(1, 19),
    blocks=st.integers(1, 9),
    last=st.integers(1, 70),
    spread=st.sampled_from([0.0, 3.0]),
    bias=st.booleans(),
)
def test_linear_equals_dense(
    native: NativeKernels, kinds: list[str], rows: int, blocks: int, last: int, spread: float, bias: bool
) -> None:
    cols = 32 * blocks
    x = torch.randn(rows, cols) * torch.exp(spread * torch.randn(cols))  # outlier channels with `spread`
    sizes = [16 * (index + 1) for index in range(len(kinds) - 1)] + [last]
    parts = [pack(native, kind, torch.randn(size, cols)) for kind, size in zip(kinds, sizes, strict=True)]
    addend = torch.randn(sum(sizes)) if bias else None
    got = native.linear(parts, x, bias=addend)
    dense = torch.cat([unpack(part) for part in parts])
    expected = x.double() @ dense.double().T + (0 if addend is None else addend)
    bound = x.norm(dim=1)[:, None] * dense.norm(dim=1)
    assert ((got - expected).abs() <= 2e-4 * bound + 1e-6).all()


def test_rows_do_not_depend_on_the_batch(native: NativeKernels) -> None:
    parts = [pack(native, "q4", torch.randn(48, 96)), pack(native, "bf16", torch.randn(20, 96))]
    x = torch.randn(13, 96)
    together = native.linear(parts, x)
    for row in range(13):
        assert torch.equal(native.linear(parts, x[row : row + 1].contiguous())[0], together[row])


def test_wrong_shapes_are_refused(native: NativeKernels) -> None:
    packed = native.pack_int8(torch.randn(20, 64))
    with pytest.raises(ValueError, match="need"):
        native.linear([packed], torch.randn(1, 32))
    with pytest.raises(ValueError, match="side by side"):
        native.linear([packed, packed], torch.randn(1, 64))
    with pytest.raises(ValueError, match="bytes"):
        native.pack_gguf(torch.zeros(7, dtype=torch.uint8), 1, 32, "Q4_0")
    with pytest.raises(IndexError):
        native.gather_rows(packed, torch.tensor([20]))
