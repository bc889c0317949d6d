"""`.ci/run`: whichever part fails, beside others or by itself, the run fails, says what that part said, and leaves
nothing running."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# A part writes its name and ends as `FAILS` says; the slow one would run on.
PART = """#!/bin/bash
part="$(basename "$0") $*"
echo "$part" >> "$ROOT/begun"
[[ "$part" != "$SLOW"* ]] || { echo $$ > "$ROOT/slow"; sleep 60; }
[[ "$part" != "$FAILS"* ]] || { echo "words of $part"; exit 3; }
"""
PROGRAMS = ("apt-get", "make", "nice")
NEWCOMER = "newcomer"


def run(folder: Path, fails: str, slow: str = "nothing") -> subprocess.CompletedProcess[str]:
    """The script in a folder where every program that it starts is a stand-in."""
    (folder / ".ci").mkdir()
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / "bin").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    stand_ins = [folder / "bin" / name for name in PROGRAMS]
    for path in (*stand_ins, folder / ".ci" / "newcomer", folder / ".venv" / "bin" / "python"):
        path.write_text(PART)
        path.chmod(0o755)
    variables = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "ROOT": str(folder), "FAILS": fails, "SLOW": slow}
    command = ["bash", ".ci/run"]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=50)


def begun(folder: Path) -> list[str]:
    return (folder / "begun").read_text().splitlines()


def test_all_parts_run_and_the_tests_come_last(tmp_path: Path) -> None:
    done = run(tmp_path, "nothing")
    assert done.returncode == 0, done.stdout + done.stderr
    parts = begun(tmp_path)
    assert {"make setup", "make check", "nice -n 19 make llamacpp"} < set(parts)
    assert any(part.startswith(NEWCOMER) for part in parts)
    assert parts[-1] == "make test"


@pytest.mark.parametrize(
    "part",
    [
        "apt-get install -y -qq --no-install-recommends curl",
        NEWCOMER,
        "nice -n 19 make llamacpp",
        "nice -n 19 .venv/bin/python",
        "make check",
    ],
)
def test_a_part_that_fails_fails_the_run_with_its_words(tmp_path: Path, part: str) -> None:
    done = run(tmp_path, part)
    assert done.returncode == 3
    assert "make test" not in begun(tmp_path)
    assert f"words of {part}" in done.stdout


def test_what_runs_beside_ends_with_the_run(tmp_path: Path) -> None:
    assert run(tmp_path, "make check", slow=NEWCOMER).returncode == 3
    pid = int((tmp_path / "slow").read_text())
    until_s = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until_s, "a part outlived the run"
        time.sleep(0.05)
