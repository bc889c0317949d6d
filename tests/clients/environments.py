"""The clients' environments: one folder each under build/clients, made from a committed lock and kept.

Knows pip, npm and locks; doesn't know what a client does. Every package is pinned, and installed as its registry
has it: an environment holds nothing of ours. A folder is named by its lock's hash, so that a changed lock makes a
new one. `python -m tests.clients.environments` makes all of them, side by side.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCKS = Path(__file__).parent / "locks"
INSTALL_S = 600
PYTHON_CLIENTS = ("openai", "anthropic", "litellm", "langchain", "pydantic_ai", "llm")
NODE = "node"


@dataclass(frozen=True, slots=True)
class Environment:
    """Where one client is installed."""

    folder: Path
    is_node: bool = False

    def command(self, program: Path) -> list[str]:
        """How a program of the client is started. Node looks for packages beside it, so it is copied there."""
        if not self.is_node:
            return [str(self.folder / "bin" / "python"), "-E", "-s", str(program)]
        for each in (program, *program.parent.glob("*.json"), *program.parent.glob("proof.mjs")):
            shutil.copy(each, self.folder)
        return [str(self.folder / "bin" / "node"), str(self.folder / program.name)]


def environment(name: str) -> Environment:
    """Make or find one. Several processes may ask at once; one makes it."""
    return _node() if name == NODE else _python(name)


def _python(name: str) -> Environment:
    folder = _made(name, (LOCKS / f"{name}.txt",), lambda place: _install(place, LOCKS / f"{name}.txt"))
    return Environment(folder)


def _node() -> Environment:
    """Node from its wheel, because distributions' are too old for today's clients, and both npm packages."""
    locks = (LOCKS / "node.txt", LOCKS / "package.json", LOCKS / "package-lock.json")

    def make(place: Path) -> None:
        _install(place, locks[0])
        for lock in locks[1:]:
            shutil.copy(lock, place)
        path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
        npm = [str(place / "bin" / "npm"), "ci", "--silent", "--ignore-scripts", "--no-audit", "--no-fund"]
        _run(npm, place, {"PATH": path})

    folder = _made(NODE, locks, make)
    return Environment(folder, is_node=True)


def _install(place: Path, lock: Path) -> None:
    venv.create(place, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install", "--quiet"]
    _run([*pip, "--no-deps", "--no-compile", "--disable-pip-version-check", "--requirement", str(lock)], place)


def _made(name: str, locks: Sequence[Path], make: Callable[[Path], None]) -> Path:
    digest = hashlib.sha256(b"\0".join([sys.version.encode(), *(lock.read_bytes() for lock in locks)])).hexdigest()
    folder = ROOT / "build" / "clients" / f"{name}-{digest[:12]}"
    with _alone(folder.with_suffix(".lock")):
        if not (folder / ".complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            (folder / ".complete").touch()
    return folder


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: Sequence[str], folder: Path, more: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **(more or {})}, capture_output=True, text=True, timeout=INSTALL_S
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} … failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def main() -> None:
    """All of them, as many at once as there are."""
    names = [*PYTHON_CLIENTS, NODE]
    with ThreadPoolExecutor(len(names)) as pool:
        for made in pool.map(environment, names):
            print(made.folder)


if __name__ == "__main__":
    main()
