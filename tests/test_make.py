"""`make setup` heals a virtual environment that an earlier, failed try left without pip, and brings PyTorch's CPU
build also where pip would take CUDA's; `make soak` has tests to run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONGEST

ROOT = Path(__file__).resolve().parent.parent
GOOD = "#!/bin/sh\nexit 0\n"
NO_PIP = '#!/bin/sh\ncase "$*" in *pip*) exit 1;; esac\n'
MAKES_VENV = f"""#!/bin/sh
echo "$@" >> calls
mkdir -p .venv/bin
printf '%b' '{GOOD}' > .venv/bin/python
chmod +x .venv/bin/python
"""


RECORDS = """#!/bin/sh
case "$*" in *--dry-run*) echo '{"metadata": {"name": "REPORTED"}}';; *install*) echo "$@" >> calls;; esac
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def source(folder: Path) -> None:
    """The Makefile, and empty files that it looks at."""
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "perilune" / "kernels").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "perilune/kernels/build.py"):
        (folder / name).touch()


def test_a_venv_without_pip_is_made_anew_and_a_good_one_is_kept(tmp_path: Path) -> None:
    source(tmp_path)
    executable(tmp_path / "bin" / "python3", MAKES_VENV)
    executable(tmp_path / ".venv" / "bin" / "python", NO_PIP)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    for _ in range(2):
        (tmp_path / ".venv" / ".ready").unlink(missing_ok=True)
        done = subprocess.run(["make", "setup"], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "calls").read_text().splitlines() == ["-m venv --clear .venv"]


@pytest.mark.parametrize(
    ("reported", "given", "asked"),
    [
        ("sympy", [], ""),
        ("nvidia-cudnn-cu13", [], "--extra-index-url https://download.pytorch.org/whl/cpu "),
        (
            "nvidia-cudnn-cu13",
            ["TORCH_INDEX=https://mirror.example/cpu"],
            "--extra-index-url https://mirror.example/cpu ",
        ),
    ],
)
def test_cuda_is_not_taken_for_torch(tmp_path: Path, reported: str, given: list[str], asked: str) -> None:
    """pip's own index is enough where it has the CPU build; what would bring NVIDIA's packages isn't."""
    source(tmp_path)
    executable(tmp_path / ".venv" / "bin" / "python", RECORDS.replace("REPORTED", reported))
    done = subprocess.run(["make", "setup", *given], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert first == f"-m pip install --quiet --constraint constraints.txt {asked}torch"
    assert second.endswith("--editable .[dev]")


def test_the_longest_files_begin_first() -> None:
    """In the order of `make test`, wherever they stand on the command line."""
    files = ["tests/test_make.py", *(f"tests/{name}" for name in LONGEST)]
    command = [sys.executable, "-m", "pytest", "-m", "not soak", "--collect-only", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    shown = [*dict.fromkeys(re.findall(r"^(tests/.*?):", done.stdout, re.MULTILINE))]
    assert "--no-loadscope-reorder" in (ROOT / "Makefile").read_text()
    assert set(shown[:-1]) == {f"tests/{name}" for name in LONGEST}
    assert shown[-1] == "tests/test_make.py"


def test_soak_runs_something() -> None:
    """pytest fails when no test has the marker."""
    command = [sys.executable, "-m", "pytest", "-m", "soak", "--collect-only", "tests/e2e"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "test_soak.py" in done.stdout
