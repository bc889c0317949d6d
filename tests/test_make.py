"""`make setup` heals a virtual environment that an earlier, failed try left without pip; `make soak` has
tests to run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOOD = "#!/bin/sh\nexit 0\n"
NO_PIP = '#!/bin/sh\ncase "$*" in *pip*) exit 1;; esac\n'
MAKES_VENV = f"""#!/bin/sh
echo "$@" >> calls
mkdir -p .venv/bin
printf '%b' '{GOOD}' > .venv/bin/python
chmod +x .venv/bin/python
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_a_venv_without_pip_is_made_anew_and_a_good_one_is_kept(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "perilune" / "kernels").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "perilune/kernels/build.py"):
        (tmp_path / name).touch()
    executable(tmp_path / "bin" / "python3", MAKES_VENV)
    executable(tmp_path / ".venv" / "bin" / "python", NO_PIP)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    for _ in range(2):
        (tmp_path / ".venv" / ".ready").unlink(missing_ok=True)
        done = subprocess.run(["make", "setup"], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "calls").read_text().splitlines() == ["-m venv --clear .venv"]


def test_soak_runs_something() -> None:
    """pytest fails when no test has the marker."""
    command = [sys.executable, "-m", "pytest", "-m", "soak", "--collect-only", "tests/e2e"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "test_soak.py" in done.stdout
