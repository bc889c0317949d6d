"""The Arm build: cross-compiled, run under emulation, held against the PyTorch reference.

Needs Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user, which CI installs.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from perilune.kernels import abi, build
from perilune.kernels.interface import HeadShape, KVLayout, KVPool, RaggedBatch, SegmentBatch
from perilune.kernels.reference import ReferenceKernels
from perilune.kernels.tiers import SEGMENT_TOKENS, AttentionPolicy, SegmentLayout
from tests.kernels.cases import head_shape, pack

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
SEGMENTS, LAYERS, ROWS, TAIL = 2, 1, 9, 50
LENGTH = SEGMENTS * SEGMENT_TOKENS + TAIL
POLICY = AttentionPolicy(sparse=False)  # every unit: rounding can't change what is selected
WEIGHT_ROWS, COLS, X_ROWS = 40, 128, 5
CPUS = {  # what qemu plays, the level asked for, the level that must run
    "old": ("cortex-a72", 2, "portable"),
    "new": ("max", 2, "NEON"),
    "new, asked for portable": ("max", 0, "portable"),
}


@dataclass(frozen=True)
class Inputs:
    heads: HeadShape
    pool: KVPool
    table: torch.Tensor
    q: torch.Tensor
    x: torch.Tensor
    norm: torch.Tensor
    weights: list[torch.Tensor]


@pytest.fixture(scope="session")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None:
        pytest.skip(
            f"needs {COMPILER} and {EMULATOR} (apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)"
        )
    folder = tmp_path_factory.mktemp("arm")
    program, main = folder / "harness", Path(__file__).parent / "arm_harness.c"
    sources = [(build.FOLDER / unit.source, unit.name, unit.flags) for unit in build.units("aarch64")]

    def compile_one(unit: tuple[Path, str, tuple[str, ...]]) -> str:
        source, name, flags = unit
        made = str(folder / f"{name}.o")
        include = f"-I{build.FOLDER}"
        subprocess.run(
            [COMPILER, *build.FLAGS, "-Werror", *flags, include, "-c", str(source), "-o", made], check=True
        )
        return made

    with ThreadPoolExecutor() as workers:
        objects = list(workers.map(compile_one, [*sources, (main, "harness_main", ())]))
    subprocess.run([COMPILER, "-static", "-fopenmp", "-o", str(program), *objects, "-lm"], check=True)
    return program


def make_inputs(reference: ReferenceKernels, group: int, dim: int) -> Inputs:
    generator = torch.Generator().manual_seed(dim)
    heads = head_shape(group, 2, dim)
    blocks = -(-LENGTH // 32)
    pool = reference.allocate_pool(KVLayout(LAYERS, 2, dim, "bf16"), blocks)
    numbers = pool.data.view(torch.bfloat16)
    numbers.copy_(torch.randn(numbers.numel(), generator=generator))
    q = torch.randn(ROWS, heads.num_q_heads, dim, generator=generator)
    return Inputs(
        heads,
        pool,
        torch.randperm(blocks, generator=generator).int().view(1, -1),
        (2 * q).to(torch.bfloat16),
        torch.randn(X_ROWS, COLS, generator=generator),
        torch.rand(COLS, generator=generator),
        [torch.randn(WEIGHT_ROWS, COLS, generator=generator) for _ in range(3)],
    )


def close_tables(table: torch.Tensor) -> torch.Tensor:
    """int32 [SEGMENTS, 64]; the sinks stay out of the first."""
    tables = table[0, : SEGMENTS * 64].view(SEGMENTS, 64).clone()
    tables[0, :2] = -1
    return tables


def tiered(given: Inputs, reference: ReferenceKernels) -> tuple[SegmentBatch, torch.Tensor]:
    """The reference's closed segments, and their payloads one after another."""
    layout = SegmentLayout(LAYERS, 2, given.heads.head_dim)
    slots = reference.allocate_segments(layout, SEGMENTS)
    payloads = torch.zeros(SEGMENTS * layout.segment_payload_bytes, dtype=torch.uint8)
    for segment, blocks in enumerate(close_tables(given.table)):
        slots.payloads[segment] = payloads.data_ptr() + segment * layout.segment_payload_bytes
        reference.close_records(given.pool, blocks, slots, segment, 0, layout.records)
    counts, order = torch.tensor([SEGMENTS], dtype=torch.int32), torch.arange(SEGMENTS).int().view(1, -1)
    return SegmentBatch(slots, order, counts, (POLICY,)), payloads


def run(harness: Path, folder: Path, cpu: str, given: Inputs, reference: ReferenceKernels) -> list[bytes]:
    """Writes the harness's input, runs it, checks the level it names. -> the arrays it made."""
    processor, level, expected = CPUS[cpu]
    heads, blocks = given.heads, given.pool.num_blocks
    numbers = [
        heads.num_q_heads,
        2,
        heads.head_dim,
        LAYERS,
        blocks,
        LENGTH,
        ROWS,
        SEGMENTS,
        X_ROWS,
        COLS,
        WEIGHT_ROWS,
    ]
    released = given.table.clone()
    slots = reference.allocate_segments(SegmentLayout(LAYERS, 2, heads.head_dim), SEGMENTS)
    packed = [
        pack(reference, kind, weight).data
        for kind, weight in zip(("q4", "int8", "bf16"), given.weights, strict=True)
    ]
    arrays = [
        struct.pack("11i", *numbers),
        struct.pack("f", heads.scale),
        raw(given.pool.data),
        raw(close_tables(given.table)),
        bytes(abi.segment_pool(slots).at),
        bytes(abi.policy(POLICY)),
        raw(released),
        raw(torch.arange(SEGMENTS).int()),
        *(raw(each) for each in (given.q, given.x, *packed, given.norm)),
    ]
    source, target = folder / "in.bin", folder / "out.bin"
    source.write_bytes(b"".join(struct.pack("q", len(array)) + array for array in arrays))
    command = [EMULATOR, "-cpu", processor, str(harness), str(level), str(source), str(target)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert expected in done.stdout
    data, made = target.read_bytes(), []
    while data:
        size = struct.unpack("q", data[:8])[0]
        made.append(data[8 : 8 + size])
        data = data[8 + size :]
    return made


def raw(tensor: torch.Tensor) -> bytes:
    contents: bytes = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return contents


def tensor(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)


@pytest.mark.parametrize(("group", "dim", "cpu"), [*((3, 64, cpu) for cpu in CPUS), (4, 80, "new")])
def test_arm_equals_reference(
    harness: Path, tmp_path: Path, reference: ReferenceKernels, group: int, dim: int, cpu: str
) -> None:
    given = make_inputs(reference, group, dim)
    made = run(harness, tmp_path, cpu, given, reference)
    products, norm, act = made[:3], made[3], made[4]
    for kind, weight, product in zip(("q4", "int8", "bf16"), given.weights, products, strict=True):
        exact = reference.linear([pack(reference, kind, weight)], given.x)
        torch.testing.assert_close(tensor(product, torch.float32).view_as(exact), exact, rtol=1e-3, atol=2e-3)
    normed = reference.rms_norm(given.x, given.norm, 1e-5, out_dtype=torch.float32)
    torch.testing.assert_close(tensor(norm, torch.float32).view_as(normed), normed, rtol=1e-5, atol=1e-6)
    gated = reference.gated_act(given.x, "silu")
    torch.testing.assert_close(tensor(act, torch.float32).view_as(gated), gated, rtol=1e-5, atol=1e-6)

    segments, payloads = tiered(given, reference)
    assert b"".join(made[5 : 5 + SEGMENTS]) == raw(payloads)  # the bytes of a closed segment know no CPU
    assert made[5 + SEGMENTS] == raw(segments.pool.summaries)
    outputs = [tensor(data, torch.bfloat16).view(-1, *given.q.shape[1:]).float() for data in made[6 + SEGMENTS :]]
    lengths = torch.tensor([LENGTH], dtype=torch.int32)
    for tiers, closed in enumerate((None, segments)):
        for decode, rows in enumerate((ROWS, 1)):
            batch = RaggedBatch(torch.tensor([0, rows], dtype=torch.int32), lengths, given.table, closed)
            call = reference.decode_attention if decode else reference.attention
            expected = call(given.q[:rows], given.pool, LAYERS - 1, batch, given.heads).float()
            error = (outputs[2 * tiers + decode] - expected).abs()
            assert error.max() < 0.02, (tiers, decode, error.max())
