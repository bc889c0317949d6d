"""Segment files: the bytes of several KV blocks, end to end, without header or padding.

Knows files and checksums. Knows nothing of hashes, owners or quotas: the manifest does. Reads go straight into the
caller's memory, and both directions release the GIL for the length of a system call.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

SEGMENT_BLOCKS = 64
"""Most blocks in one file: 2,048 tokens."""

TEMPORARY = ".tmp"
_MODE = 0o600  # KV can be turned back into text


def checksum(data: memoryview) -> bytes:
    """xxh3-128 of a block. 17 GB/s on the reference machine; damage, not attack, is what it finds."""
    return xxhash.xxh3_128_digest(data)


def write_segment(path: Path, blocks: Sequence[memoryview]) -> None:
    """Write `blocks` end to end so that the file is either whole under its name, or absent, also after a power cut.

    Raises OSError (disk full, no permission); nothing is left behind then.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _MODE)
        try:
            _write_all(descriptor, blocks)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _write_all(descriptor: int, blocks: Sequence[memoryview]) -> None:
    pending = [view.cast("B") for view in blocks]
    first = 0
    while first < len(pending):
        written = os.writev(descriptor, pending[first:])
        while first < len(pending) and written >= len(pending[first]):
            written -= len(pending[first])
            first += 1
        if written:
            pending[first] = pending[first][written:]


def sync_folder(folder: Path) -> None:
    """Make renames and removals in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_run(descriptor: int, start: int, into: Sequence[memoryview]) -> None:
    """Fill consecutive views from byte `start`. Raises OSError; EOFError where the file ends early."""
    pending = [view.cast("B") for view in into]
    first = 0
    while first < len(pending):
        count = os.preadv(descriptor, pending[first : first + SEGMENT_BLOCKS], start)
        if count == 0:
            raise EOFError
        start += count
        while first < len(pending) and count >= len(pending[first]):
            count -= len(pending[first])
            first += 1
        if count:
            pending[first] = pending[first][count:]
