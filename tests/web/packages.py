"""Node and npm's packages for the page's sources and for axe: as the dev extras and package-lock.json pin them."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "web"
MODULES = WEB / "node_modules"


def run(*command: str) -> str:
    """A command in web/, with the Node of the dev extras first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(command, cwd=WEB, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def npm_packages() -> Path:
    """web/node_modules, installed once: two processes of one test run may want it at the same time."""
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    with (build / "npm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done, pinned = MODULES / ".package-lock.json", WEB / "package-lock.json"
        if not done.exists() or done.stat().st_mtime < pinned.stat().st_mtime:
            run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
    return MODULES
