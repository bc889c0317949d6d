"""Whether a TCP port is free, who has it, and under which address this machine reaches it.

Reads /proc on Linux; elsewhere the owner stays unknown.
"""

from __future__ import annotations

import contextlib
import ipaddress
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


def is_own_address(address: str) -> bool:
    """Whether an IP address (not a name) is one of this machine's own."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except (ValueError, OSError):
        return False
    return True


def local_url(host: str, port: int) -> str:
    """The URL by which this machine reaches a server bound to `host`: loopback where the bind includes it.

    Raises `OSError` for a name that doesn't resolve.
    """
    flags = socket.AI_PASSIVE
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)[
        0
    ]  # as the server resolves it
    address = ipaddress.ip_address(found[4][0])
    if address.is_unspecified:
        address = ipaddress.ip_address("::1" if address.version == 6 else "127.0.0.1")
    return f"http://[{address}]:{port}" if address.version == 6 else f"http://{address}:{port}"


def owner_of(port: int) -> PortOwner | None:
    """The process that listens on `port`, where this user may see it."""
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for folder in Path("/proc").glob("[0-9]*") if wanted else ():
        if wanted & _open_files(folder):
            try:
                name = (folder / "comm").read_text(encoding="utf-8").strip()
            except OSError:
                continue  # it has just ended
            return PortOwner(int(folder.name), name)
    return None


def _open_files(folder: Path) -> set[str]:
    """What a process has open; nothing for one that ended or belongs to another user."""
    found = set()
    try:
        for link in (folder / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found.add(os.readlink(link))
    except OSError:
        return set()
    return found


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
