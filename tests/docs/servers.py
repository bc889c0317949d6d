"""Servers beside a page's script: `start ARGUMENTS…` and `stop`, as a person with a second terminal would.

Keeps what it started in `$DOCS_SERVERS`, one JSON file a home. A server of the same home and arguments is used
again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

START_S = 240.0
STOP_S = 40.0


def home_of(arguments: list[str]) -> Path:
    given = arguments[arguments.index("--home") + 1] if "--home" in arguments else os.environ["PERILUNE_HOME"]
    return Path(given).resolve()


def start(arguments: list[str]) -> None:
    home = home_of(arguments)
    record = Path(os.environ["DOCS_SERVERS"]) / f"{hashlib.sha256(str(home).encode()).hexdigest()[:16]}.json"
    if record.exists():
        known = json.loads(record.read_text())
        if known["arguments"] == arguments and known["folder"] == os.getcwd():
            return
        stop_one(record)
    log = (record.with_suffix(".log")).open("wb")
    command = [sys.executable, "-m", "perilune.cli.main", *arguments]
    process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    record.write_text(json.dumps({"pid": process.pid, "arguments": arguments, "folder": os.getcwd()}))
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(record.with_suffix(".log").read_text())
        with contextlib.suppress(OSError, ValueError):
            if json.loads((home / "server.json").read_text())["pid"] == process.pid:
                return
        time.sleep(0.05)
    raise SystemExit("the server did not start")


def stop_all(folder: Path) -> None:
    for record in folder.glob("*.json"):
        stop_one(record)


def stop_one(record: Path) -> None:
    """End a server, and wait until it has."""
    pid = json.loads(record.read_text())["pid"]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + STOP_S
        while time.monotonic() < end and _lives(pid):
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
    record.unlink()


def _lives(pid: int) -> bool:
    """A process that ended may stay in the table until its parent asks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    if sys.argv[1] == "start":
        start(sys.argv[2:])
    else:
        stop_all(Path(os.environ["DOCS_SERVERS"]))
