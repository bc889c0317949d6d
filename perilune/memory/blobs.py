"""Uploaded bytes on disk: home/files/<hash of tenant>/<file id>. Knows files, not documents or SQL.

A file appears whole or not at all: temporary name, fsync, rename. Names that callers choose never reach a path.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO

from perilune.errors import IntegrityError, Overloaded, TooLarge, UnsupportedDocument

BLOCK_BYTES = 1024**2
_TEMPORARY = ".part"
_ORPHAN_AGE_S = 3600.0


class BlobStore:
    """Files of every tenant. Thread-safe: ids are unique, so no two callers touch one path."""

    def __init__(self, home: Path) -> None:
        self._root = home / "files"

    def path(self, tenant: str, file_id: str) -> Path:
        """Where a file lies. `file_id` must be one that we made."""
        return self._root / hashlib.sha256(tenant.encode()).hexdigest()[:32] / file_id

    def put(self, tenant: str, file_id: str, data: BinaryIO, max_bytes: int) -> tuple[int, str]:
        """Store a stream; returns its size in bytes and its SHA-256.

        Raises `TooLarge` (before writing, where the stream can tell its size), `UnsupportedDocument` for an
        empty one, `Overloaded` when the disk is full. Nothing stays behind then.
        """
        known = _size(data)
        if known is not None and known > max_bytes:
            raise _too_large(max_bytes)
        target = self.path(tenant, file_id)
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = target.with_name(target.name + _TEMPORARY)
        temporary.unlink(missing_ok=True)  # an earlier try with the same id may have been killed
        try:
            size, digest = _copy(data, temporary, max_bytes)
            temporary.rename(target)
            _sync_folder(target.parent)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise Overloaded(
                    "The disk is full; the file was not stored.", hint="Delete files or free disk space."
                ) from None
            raise
        finally:
            temporary.unlink(missing_ok=True)
        return size, digest

    def open(self, tenant: str, file_id: str) -> BinaryIO:
        """The stored bytes, for the caller to close. Raises `IntegrityError` where they are gone."""
        try:
            return self.path(tenant, file_id).open("rb")
        except FileNotFoundError:
            raise IntegrityError("The stored bytes of this file are missing.", hint="Upload it again.") from None

    def delete(self, tenant: str, file_id: str) -> None:
        self.path(tenant, file_id).unlink(missing_ok=True)

    def sweep(self, known: Collection[str], now: Callable[[], float] = time.time, prefix: str = "file-") -> int:
        """Remove files older than an hour that no row knows (a kill between rename and row); returns how many."""
        removed = 0
        for path in self._root.glob(f"*/{prefix}*"):
            if path.name not in known and now() - path.stat().st_mtime > _ORPHAN_AGE_S:
                path.unlink(missing_ok=True)
                removed += 1
        return removed


def _size(data: BinaryIO) -> int | None:
    """Bytes left in the stream; None where it can't tell."""
    if not data.seekable():
        return None
    here = data.tell()
    size = data.seek(0, os.SEEK_END) - here
    data.seek(here)
    return size


def _copy(data: BinaryIO, target: Path, max_bytes: int) -> tuple[int, str]:
    size, digest = 0, hashlib.sha256()
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        while block := data.read(BLOCK_BYTES):
            size += len(block)
            if size > max_bytes:
                raise _too_large(max_bytes)
            digest.update(block)
            file.write(block)
        if size == 0:
            raise UnsupportedDocument("The file is empty.", hint="Upload a file that holds text.")
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(
        f"The file is larger than {max_bytes / 1024**2:,.0f} MB.", hint="Split it, or raise server.max_upload."
    )
