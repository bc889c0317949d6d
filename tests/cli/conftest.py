"""Runs the real `perilune` command in a process of its own, in a home folder of the test."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.api.conftest import serve as serve  # a scripted service behind the real API

START = [sys.executable, "-m", "perilune.cli.main"]


def environment(home: Path, **more: str) -> dict[str, str]:
    """The caller's environment without its Perilune settings, and with folders of the test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PERILUNE_")}
    folders = {"XDG_CONFIG_HOME": str(home / "config"), "XDG_DATA_HOME": str(home / "data")}
    return kept | folders | {"PERILUNE_HOME": str(home), "NO_COLOR": "1", "COLUMNS": "200"} | more


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    def run(*arguments: str, stdin: str = "", **more: str) -> Done:
        done = subprocess.run(
            [*START, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=90,
            env=environment(tmp_path, **more),
            cwd=tmp_path,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


async def start(home: Path, *arguments: str, **more: str) -> asyncio.subprocess.Process:
    """The command as a child of this event loop, with pipes."""
    return await asyncio.create_subprocess_exec(
        *START,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(home, **more),
        cwd=home,
    )


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The same command in this process: faster, for what doesn't depend on being one."""
    from perilune.cli.main import run as run_command

    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PERILUNE_")]:
        monkeypatch.delenv(name)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str, **more: str) -> Done:
        with monkeypatch.context() as patch:
            for name, value in more.items():
                patch.setenv(name, value)
            code = run_command(list(arguments))
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run
