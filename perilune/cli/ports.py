"""Whether a TCP port is free, and who has it. Reads /proc on Linux; elsewhere the owner stays unknown."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_LISTENING = "0A"


@dataclass(frozen=True, slots=True)
class PortOwner:
    pid: int
    name: str


def is_free(host: str, port: int) -> bool:
    """Whether a server could bind. Port 0 always is."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError:
        return False
    return True


def owner_of(port: int) -> PortOwner | None:
    """The process that listens on `port`, where this user may see it."""
    inodes = _listening_inodes(port)
    for folder in Path("/proc").glob("[0-9]*") if inodes else ():
        try:
            links = {os.readlink(link) for link in (folder / "fd").iterdir()}
            name = (folder / "comm").read_text(encoding="utf-8").strip()
        except OSError:
            continue  # gone, or another user's
        if links & {f"socket:[{inode}]" for inode in inodes}:
            return PortOwner(int(folder.name), name)
    return None


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="utf-8").splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found
