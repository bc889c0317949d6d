"""Building and loading: one OpenMP runtime, no compiler is no failure, a stale library isn't loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from perilune.kernels import build
from perilune.kernels.memory import Arena, zeroed_bytes
from perilune.kernels.reference import ReferenceKernels
from perilune.kernels.select import load


def test_one_openmp_runtime() -> None:
    """Asked of a process of its own: other tests load embedders into this one, which bring another."""
    program = (
        "import torch; from perilune.kernels.openmp import mapped_runtimes; "
        "from perilune.kernels.select import load; "
        "load(2).rms_norm(torch.ones(64, 64), torch.ones(64), 1e-6); torch.ones(512, 512) @ torch.ones(512, 512); "
        "print(*mapped_runtimes(), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert len(done.stdout.split()) == 1, done.stdout


def test_no_compiler_is_said_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "library_path", lambda: tmp_path / "none.so")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert build.main() == 0
    assert "no C compiler" in capsys.readouterr().out
    kernels = load(2)
    assert isinstance(kernels, ReferenceKernels)
    assert "make setup" in kernels.describe()


def test_broken_library_falls_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(build, "library_path", lambda: broken)
    assert "doesn't load" in load(2).describe()


def test_library_name_follows_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("int a;")
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    before = build.library_path()
    (tmp_path / "a.c").write_text("int b;")
    assert build.library_path() != before


def test_arm_compiles_no_x86_units() -> None:
    assert [unit.name for unit in build.units("aarch64") if "avx" in unit.name] == []
    assert {"isa_avx2", "isa_avx512"} <= {unit.name for unit in build.units("x86_64")}


def test_arena_pieces_are_apart_aligned_and_zero() -> None:
    arena = Arena()
    pieces = [arena.take(size) for size in (100, 64, 20 << 20, 1, 9 << 20, 9 << 20, 9 << 20, 9 << 20)]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        assert not piece.any()
        piece.fill_(number + 1)
    assert all((piece == number + 1).all() for number, piece in enumerate(pieces))


def test_zeroed_bytes_start_on_a_huge_page() -> None:
    memory = zeroed_bytes(5)
    assert memory.data_ptr() % (2 << 20) == 0
    assert memory.tolist() == [0] * 5
