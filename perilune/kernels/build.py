"""Compile the native kernels into one shared library beside this file: `python -m perilune.kernels.build`.

Needs gcc and nothing else. The library's name carries a hash of its sources, so an old one is never loaded
and a second run does nothing. Without a compiler it says so and succeeds: the PyTorch reference runs instead.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# -fopenmp only when compiling: the runtime's symbols stay undefined and are torch's at load time (see openmp.py).
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [
    *AVX2,
    *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni", "bf16")),
    "-mprefer-vector-width=512",
]
NEON = ["-march=armv8.2-a+fp16+dotprod+bf16"]


@dataclass(frozen=True, slots=True)
class Unit:
    """One compilation: a source, the object's name, and what this CPU level adds to the flags."""

    source: str
    name: str
    flags: tuple[str, ...] = ()


def units(machine: str) -> list[Unit]:
    """What to compile for a kind of CPU (`platform.machine()`)."""
    common = ["api", "attention", "packing", "rows", "step", "tier_prefill", "tier_close", "tier_decode"]
    common += ["tier_plan", "tier_select", "tier_choose", "tier_merge", "isa_generic", "tier_generic"]
    out = [Unit(f"{name}.c", name) for name in common]
    out += [_record_unit("portable")]
    if machine in {"x86_64", "AMD64"}:
        out += _generic_units("avx2", "AVX2 + FMA", *AVX2)
        out += [
            Unit("isa_avx512.c", "isa_avx512", (*AVX512,)),
            Unit("tier_avx512.c", "tier_avx512", (*AVX512,)),
            _record_unit("avx2", *AVX2),
            _record_unit("avx512", *AVX512),
        ]
    elif machine in {"aarch64", "arm64"}:
        out += [*_generic_units("neon", "NEON + bf16 + dot product", *NEON), _record_unit("neon", *NEON)]
    return out


def _generic_units(level: str, title: str, *flags: str) -> list[Unit]:
    """The code over vector types, once more for a level."""
    defined = [f"ISA_OPS=ops_{level}", f'ISA_NAME="{title}"', f"ISA_CLOSE=close_record_{level}"]
    defined += [f"TIER_OPS=tier_ops_{level}"]
    options = (*flags, *(f"-D{value}" for value in defined))
    return [Unit(f"{part}_generic.c", f"{part}_{level}", options) for part in ("isa", "tier")]


def _record_unit(level: str, *flags: str) -> Unit:
    """What closes records on a level. Without fused multiply-add, so that every level writes the same bytes."""
    contract = ("-ffp-contract=off", f"-DCLOSE_RECORD=close_record_{level}")
    return Unit("tier_record.c", f"tier_record_{level}", (*flags, *contract))


def library_path() -> Path:
    """Where the library for the present sources and this CPU belongs, built or not."""
    digest = hashlib.sha256(" ".join([*FLAGS, *AVX2, *AVX512, *NEON]).encode())
    for path in sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")]):
        digest.update(path.name.encode() + path.read_bytes())
    return FOLDER / f"_native-{platform.machine()}-{digest.hexdigest()[:12]}.so"


def build(compiler: str, target: Path) -> None:
    """Compile to `target`, atomically. Raises CalledProcessError with the compiler's words on stderr."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:

        def compile_unit(unit: Unit) -> str:
            made = str(Path(scratch) / f"{unit.name}.o")
            source = str(FOLDER / unit.source)
            subprocess.run([compiler, *FLAGS, *unit.flags, "-c", source, "-o", made], check=True)  # noqa: S603
            return made

        objects = list(pool.map(compile_unit, units(platform.machine())))
        linked = Path(scratch) / target.name
        subprocess.run([compiler, "-shared", "-o", str(linked), *objects, "-lm"], check=True)  # noqa: S603
        linked.replace(target)


def main() -> int:
    """Build if needed. Returns the exit code."""
    target = library_path()
    if target.exists():
        return 0
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
    if compiler is None:
        print("perilune: no C compiler found; the slower PyTorch kernels will run. Install gcc and repeat.")
        return 0
    try:
        build(compiler, target)
    except subprocess.CalledProcessError as error:
        print(f"perilune: {compiler} failed (exit {error.returncode}); its words are above.", file=sys.stderr)
        return 1
    for stale in FOLDER.glob("_native-*.so"):
        if stale != target:
            stale.unlink()
    print(f"perilune: built {target.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
