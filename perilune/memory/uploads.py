"""Files that arrive in parts: what was announced, which parts came, and their bytes until the file is made.

Knows rows and the folder of bytes, where a part lies beside the files under its own id. Every call is bound to a
tenant in SQL; parts of one upload are never another's.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import sqlalchemy as sa

from perilune.errors import Conflict, InvalidRequest, NotFound, TooLarge
from perilune.memory import sanitise
from perilune.memory.blobs import BLOCK_BYTES, BlobStore
from perilune.memory.keys import validate_tenant
from perilune.memory.library import new_file_id
from perilune.memory.schema import UPLOAD_PARTS, UPLOADS
from perilune.memory.store import Store
from perilune.memory.streams import Pieces

LASTS_S = 3_600.0
"""How long an upload may take from its creation on."""

MAX_PART_BYTES = 64 * 1024**2
MAX_PENDING = 100
"""Uploads of a tenant that haven't ended."""

SPARE = 2
"""Parts of an upload may hold so many times its size: a part that was sent again stands beside the first."""

_ID_BYTES = 18
_PART = "part_"


@dataclass(frozen=True, slots=True)
class UploadRecord:
    """`status` is pending, completed, cancelled or expired. `file_id` is the file that it becomes."""

    upload_id: str
    tenant: str
    filename: str
    purpose: str
    size_bytes: int
    created_at: float
    expires_at: float
    status: str
    file_id: str
    file_lasts_s: float | None


@dataclass(frozen=True, slots=True)
class UploadPart:
    part_id: str
    upload_id: str
    created_at: float
    size_bytes: int


class UploadStore:
    """Thread-safe."""

    def __init__(self, store: Store, home: Path, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._blobs = BlobStore(home)
        self._clock = clock

    def create(
        self, tenant: str, filename: str, purpose: str, size_bytes: int, file_lasts_s: float | None
    ) -> UploadRecord:
        """Raises `InvalidRequest` where `MAX_PENDING` of the tenant's are pending."""
        validate_tenant(tenant)
        now, upload_id = self._clock(), f"upload_{secrets.token_urlsafe(_ID_BYTES)}"
        row = {
            "id": upload_id,
            "tenant": tenant,
            "filename": sanitise.filename(filename),
            "purpose": sanitise.label(purpose),
            "size_bytes": size_bytes,
            "created_at": now,
            "expires_at": now + LASTS_S,
            "status": "pending",
            "file_id": new_file_id(),
            "file_lasts_s": file_lasts_s,
        }
        mine = (UPLOADS.c.tenant == tenant, UPLOADS.c.status == "pending", UPLOADS.c.expires_at > now)
        with self._store.write() as connection:
            if connection.execute(sa.select(sa.func.count()).where(*mine)).scalar_one() >= MAX_PENDING:
                raise InvalidRequest(
                    f"{MAX_PENDING} uploads are pending already.", hint="Complete or cancel some of them."
                )
            connection.execute(UPLOADS.insert().values(row))
            return self._get(connection, tenant, upload_id)

    def get(self, tenant: str, upload_id: str) -> UploadRecord:
        """Raises `NotFound`, for another tenant's upload too."""
        with self._store.read() as connection:
            return self._get(connection, tenant, upload_id)

    def add_part(self, tenant: str, upload_id: str, data: BinaryIO) -> UploadPart:
        """Raises `NotFound`, `Conflict` where the upload isn't pending, `TooLarge`, and what `BlobStore.put`
        raises."""
        part_id = f"{_PART}{secrets.token_urlsafe(_ID_BYTES)}"
        upload = self._pending(tenant, upload_id)
        size_bytes, _ = self._blobs.put(tenant, part_id, data, MAX_PART_BYTES)
        part = UploadPart(part_id, upload_id, self._clock(), size_bytes)
        try:
            with self._store.write() as connection:
                sizes = sa.select(sa.func.sum(UPLOAD_PARTS.c.size_bytes))
                held = connection.execute(sizes.where(UPLOAD_PARTS.c.upload_id == upload_id)).scalar() or 0
                _require_pending(self._get(connection, tenant, upload_id))
                if held + size_bytes > SPARE * upload.size_bytes:
                    raise TooLarge(
                        f"The parts hold more than {SPARE} times the {upload.size_bytes:,} bytes announced.",
                        hint="Create a new upload with the right number of bytes.",
                        param="data",
                    )
                connection.execute(
                    UPLOAD_PARTS.insert().values(
                        id=part_id,
                        upload_id=upload_id,
                        tenant=tenant,
                        size_bytes=size_bytes,
                        created_at=part.created_at,
                    )
                )
        except BaseException:
            self._blobs.delete(tenant, part_id)
            raise
        return part

    def joined(self, tenant: str, upload_id: str, part_ids: Sequence[str], md5: str | None) -> BinaryIO:
        """The parts in this order as one stream, for the caller to close. Raises `Conflict` where the upload isn't
        pending, `InvalidRequest` for unknown or repeated parts, another size than announced, and another `md5`."""
        upload = self._pending(tenant, upload_id)
        query = sa.select(UPLOAD_PARTS.c.id, UPLOAD_PARTS.c.size_bytes).where(
            UPLOAD_PARTS.c.upload_id == upload_id, UPLOAD_PARTS.c.tenant == tenant
        )
        with self._store.read() as connection:
            sizes = {row.id: row.size_bytes for row in connection.execute(query)}
        if not part_ids or len(set(part_ids)) < len(part_ids) or not sizes.keys() >= set(part_ids):
            raise InvalidRequest(
                "part_ids must name parts of this upload, each of them once.",
                hint="List them in the order in which the file is made of them.",
                param="part_ids",
            )
        found = sum(sizes[part_id] for part_id in part_ids)
        if found != upload.size_bytes:
            raise InvalidRequest(
                f"The parts hold {found:,} bytes, and {upload.size_bytes:,} were announced.",
                hint="Add the missing part, or create a new upload.",
                param="part_ids",
            )
        paths = [self._blobs.path(tenant, part_id) for part_id in part_ids]
        if md5 is not None and _md5(_joined(paths)) != md5.lower():
            raise InvalidRequest("The parts have another md5.", hint="Upload them again.", param="md5")
        return cast(BinaryIO, _joined(paths))

    def end(self, tenant: str, upload_id: str, status: str) -> UploadRecord:
        """The upload is completed, cancelled or expired: its parts go. Raises `Conflict` where it has ended. One
        whose time passed while its file was being made is completed all the same: the file is there."""
        mine = (UPLOADS.c.tenant == tenant, UPLOADS.c.id == upload_id)
        with self._store.write() as connection:
            upload = self._get(connection, tenant, upload_id)
            if upload.status != status:
                _require_pending(upload, lapsed=status != "cancelled")
            connection.execute(UPLOADS.update().where(*mine).values(status=status))
            ids = self._take_parts(connection, UPLOAD_PARTS.c.upload_id == upload_id)
            upload = self._get(connection, tenant, upload_id)
        self._delete(tenant, ids)
        return upload

    def expire(self) -> int:
        """End what has lapsed, and remove bytes of parts that no row knows; returns how many uploads that were."""
        late = (UPLOADS.c.status == "pending", UPLOADS.c.expires_at <= self._clock())
        with self._store.read() as connection:
            rows = connection.execute(sa.select(UPLOADS.c.id, UPLOADS.c.tenant).where(*late)).all()
            known = set(connection.execute(sa.select(UPLOAD_PARTS.c.id)).scalars())
        for row in rows:
            with suppress(Conflict, NotFound):  # completed or forgotten meanwhile
                self.end(row.tenant, row.id, "expired")
        self._blobs.sweep(known, self._clock, _PART)
        return len(rows)

    def forget_tenant(self, tenant: str) -> None:
        """Remove the tenant's uploads and their parts."""
        with self._store.write() as connection:
            ids = self._take_parts(connection, UPLOAD_PARTS.c.tenant == tenant)
            connection.execute(UPLOADS.delete().where(UPLOADS.c.tenant == tenant))
        self._delete(tenant, ids)

    # ---------------------------------------------------------------------------------------------- rows

    def _get(self, connection: sa.Connection, tenant: str, upload_id: str) -> UploadRecord:
        """As callers see it: one whose time has passed is expired, though nobody has ended it yet."""
        mine = (UPLOADS.c.tenant == tenant, UPLOADS.c.id == upload_id)
        row: Any = connection.execute(sa.select(UPLOADS).where(*mine)).first()
        if row is None:
            raise NotFound("There is no such upload.", hint="POST /v1/uploads begins one.", param="upload_id")
        lapsed = row.status == "pending" and row.expires_at <= self._clock()
        record = UploadRecord(*row)
        return replace(record, status="expired") if lapsed else record

    def _pending(self, tenant: str, upload_id: str) -> UploadRecord:
        upload = self.get(tenant, upload_id)
        _require_pending(upload)
        return upload

    @staticmethod
    def _take_parts(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> list[str]:
        ids = list(connection.execute(sa.select(UPLOAD_PARTS.c.id).where(condition)).scalars())
        connection.execute(UPLOAD_PARTS.delete().where(condition))
        return ids

    def _delete(self, tenant: str, part_ids: Sequence[str]) -> None:
        for part_id in part_ids:
            self._blobs.delete(tenant, part_id)


def _require_pending(upload: UploadRecord, lapsed: bool = False) -> None:
    if upload.status != "pending" and not (lapsed and upload.status == "expired"):
        raise Conflict(f"The upload is {upload.status}.", hint="Begin a new one.", param="upload_id")


def _joined(paths: Sequence[Path]) -> Pieces:
    """Files one behind the other."""

    def blocks() -> Generator[bytes]:
        for path in paths:
            with path.open("rb") as file:
                while block := file.read(BLOCK_BYTES):
                    yield block

    return Pieces(blocks())


def _md5(stream: Pieces) -> str:
    """Compares what was sent with what arrived, as the dialect has it; nothing is trusted for it."""
    digest = hashlib.md5(usedforsecurity=False)
    with stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
