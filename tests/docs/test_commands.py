"""Every command of the quick start, the how-to pages and of tuning is run, in a fresh home."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import servers
from tests.docs.pages import ROOT, blocks, pages, preamble, script
from tests.e2e.conftest import new_home

TOGETHER = ("quick-start.md", "backup.md", "documents.md", "endless-chat.md", "privacy.md", "tuning.md")
"""These share a home and its server; the others make keys, change the model or move the home."""

LIMIT_S = 170
CURL = shutil.which("curl") or "curl"
NOT_RUN_AT_MOST = 12
"""A page whose commands nobody can run is no how-to."""


def free_ports() -> tuple[str, str]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1]), str(two.getsockname()[1])


class Newcomer:
    """Someone with an empty home folder, the source's docs, and `perilune` in the path."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.model = model
        self._folder = folder
        self.ports = free_ports()
        self.home = new_home(self._made("perilune-home"), model)
        self.work = self._made("work")
        for name in ("docs", "README.md"):
            (self.work / name).symlink_to(ROOT / name)
        for name, words in (("perilune", "-m perilune.cli.main"), ("python", "")):
            shim = self._made("bin") / name
            shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
            shim.chmod(0o755)
        shim = self._made("bin") / "curl"  # which takes an HTTP error for success, unless told
        shim.write_text(f'#!/bin/sh\nexec {shlex.quote(CURL)} --fail-with-body "$@"\n')
        shim.chmod(0o755)
        self.servers = self._made("servers")

    def run(self, page: Path) -> subprocess.CompletedProcess[str]:
        user_home = self._made(f"user-{page.stem}")
        (user_home / "models").mkdir()
        (user_home / "models" / "my-model.gguf").symlink_to(self.model)
        environment = {
            **os.environ,
            "HOME": str(user_home),
            "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PERILUNE_HOME": str(self.home),
            "PERILUNE_SERVER__PORT": self.ports[0],
            "PERILUNE_KV_CACHE__RAM": "192M",
            "PERILUNE_KV_CACHE__DISK_QUOTA": "1G",
            "PERILUNE_MEMORY__EMBEDDER": "wordllama",  # there at once
            "PERILUNE_DEADLINES__INTERACTIVE_S": "300",  # machines that run tests are slow and busy
            "DOCS_SERVERS": str(self.servers),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }
        for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "PERILUNE_API_KEY"):
            environment.pop(name, None)
        text = preamble([sys.executable, "-m", "tests.docs.servers"]) + script(page, self.ports)
        return subprocess.run(
            ["bash", "-c", text],
            cwd=self.work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )

    def close(self) -> None:
        servers.stop_all(self.servers)

    def _made(self, name: str) -> Path:
        (self._folder / name).mkdir(exist_ok=True)
        return self._folder / name


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Newcomer]:
    newcomer = Newcomer(tmp_path_factory.mktemp("together"), smollm2_path)
    yield newcomer
    newcomer.close()


@pytest.fixture
def alone(tmp_path: Path, smollm2_path: Path) -> Iterator[Newcomer]:
    newcomer = Newcomer(tmp_path, smollm2_path)
    yield newcomer
    newcomer.close()


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_every_command_runs(page: Path, request: pytest.FixtureRequest) -> None:
    newcomer: Newcomer = request.getfixturevalue("shared" if page.name in TOGETHER else "alone")
    done = newcomer.run(page)
    assert done.returncode == 0, done.stdout[-4_000:]


def test_what_is_not_run_says_why_and_is_little() -> None:
    found = [(page.name, block) for page in pages() for block in blocks(page)]
    reasons = [block.reason for _, block in found if block.reason]
    assert len(reasons) <= NOT_RUN_AT_MOST
    assert len(found) >= 3 * len(reasons)
    assert all(len(reason) > 10 for reason in reasons)


def test_a_command_that_fails_fails_its_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\ntrue\n```\n\n*Not run in the test of this page: a reason.*\n\n```sh\nexit 9\n```\n")
    assert [block.reason for block in blocks(page)] == ["", "a reason."]
    run = subprocess.run(["bash", "-c", script(page, ("1", "2"))], capture_output=True)
    assert run.returncode == 0
    page.write_text("```sh\nfalse\necho never\n```\n")
    run = subprocess.run(["bash", "-c", script(page, ("1", "2"))], capture_output=True)
    assert (run.returncode, run.stdout) == (1, b"")
    assert b"page.md, line 1" in run.stderr
