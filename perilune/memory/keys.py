"""Tenants and API keys. Keys are stored as HMACs; the pepper that makes them lies in a file beside the database.

Knows roles and tenants, not HTTP. While no key was ever made, every caller is the local admin; once one was,
only keys open the door, even after all are revoked.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import sqlalchemy as sa

from perilune.core import DEFAULT_TENANT, KeyLimits
from perilune.errors import ConfigError, InvalidRequest, NotFound, Unauthenticated
from perilune.memory import audit
from perilune.memory.schema import KEYS, TENANTS
from perilune.memory.store import Store

ROLES = ("admin", "user", "read-only")
KEY_PREFIX = "pl-"
_KEY_BYTES = 32
_PEPPER_FILE = "pepper"
_TENANT = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_MAX_KEY_CHARS = 200
_MAX_NAME_CHARS = 128
_LAST_USED_STEP_S = 60.0
_MOST_KNOWN = 4096
NO_LIMITS = KeyLimits()
"""A key's that is held to the configured limits only."""


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """Whom a key speaks for."""

    tenant: str
    role: str
    deadline_s: float | None = None
    key_id: str | None = None
    limits: KeyLimits = NO_LIMITS


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """A stored key, without the key. Times are seconds since the epoch."""

    key_id: str
    tenant: str
    name: str
    role: str
    deadline_s: float | None
    created_at: float
    last_used_at: float | None
    revoked_at: float | None
    limits: KeyLimits = NO_LIMITS


class Keyring:
    """Makes, lists, revokes and checks keys. Thread-safe."""

    def __init__(self, store: Store, home: Path, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._home = home
        self._clock = clock
        self._secrets: dict[str, bytes] = {}
        self._known: dict[bytes, KeyOwner] = {}  # valid while the database's change counter is `_seen`
        self._seen: int | None = None

    def create(
        self,
        tenant: str = DEFAULT_TENANT,
        name: str = "",
        role: str = "user",
        deadline_s: float | None = None,
        limits: KeyLimits = NO_LIMITS,
    ) -> tuple[str, KeyInfo]:
        """Make a key. Returns the key itself, which nobody can show again, and its record.

        Raises `InvalidRequest` for a bad tenant, role, name, deadline or limit.
        """
        check_limits(limits)
        if role not in ROLES:
            raise InvalidRequest(f"Unknown role {role!r}.", hint=f"Use one of {', '.join(ROLES)}.", param="role")
        if len(name) > _MAX_NAME_CHARS or not name.isprintable():
            raise InvalidRequest(f"A key's name has at most {_MAX_NAME_CHARS} printable characters.", param="name")
        if deadline_s is not None and not 0 < deadline_s < float("inf"):
            raise InvalidRequest("A key's deadline is a positive number of seconds.", param="deadline_s")
        self.tenant_secret(tenant)
        key = KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
        key_id, now = f"key-{secrets.token_hex(6)}", self._clock()
        info = KeyInfo(key_id, tenant, name, role, deadline_s, now, None, None, limits)
        mac = self._mac(key, self._pepper(create=True))
        with self._store.write() as connection:
            connection.execute(
                KEYS.insert().values(
                    id=info.key_id,
                    mac=mac,
                    tenant=tenant,
                    name=name,
                    role=role,
                    deadline_s=deadline_s,
                    created_at=info.created_at,
                    **asdict(limits),
                )
            )
            audit.write(connection, info.created_at, "key.create", tenant, info.key_id)
        return key, info

    def list(self) -> list[KeyInfo]:
        """Every key ever made, oldest first."""
        query = sa.select(KEYS).order_by(KEYS.c.created_at, KEYS.c.id)
        with self._store.read() as connection:
            return [_info(row) for row in connection.execute(query)]

    def set_limits(self, key_id: str, changes: Mapping[str, float | None]) -> KeyInfo:
        """Change some limits, by the names of `KeyLimits`; None lifts one. A running server follows at once.

        Raises `NotFound`, and `InvalidRequest` for a bad limit."""
        with self._store.write() as connection:
            row = connection.execute(sa.select(KEYS).where(KEYS.c.id == key_id)).first()
            if row is not None:
                limits = replace(_limits(row), **changes)  # type: ignore[arg-type]
                check_limits(limits)
                connection.execute(KEYS.update().where(KEYS.c.id == key_id).values(**asdict(limits)))
                audit.write(connection, self._clock(), "key.limits", row.tenant, key_id)
        if row is None:
            raise NotFound(f"There is no key {key_id!r}.", hint="`perilune keys ls` shows every key.")
        return replace(_info(row), limits=limits)

    def revoke(self, key_id: str) -> None:
        """End a key at once; revoking twice changes nothing. Raises `NotFound`."""
        with self._store.write() as connection:
            query = sa.select(KEYS.c.tenant, KEYS.c.revoked_at).where(KEYS.c.id == key_id)
            known, now = connection.execute(query).first(), self._clock()
            outcome: audit.Outcome = "not_found" if known is None else "unchanged" if known.revoked_at else "done"
            if outcome == "done":
                connection.execute(KEYS.update().where(KEYS.c.id == key_id).values(revoked_at=now))
            audit.write(connection, now, "key.revoke", known.tenant if known else "", key_id, outcome)
        if known is None:
            raise NotFound(f"There is no key {key_id!r}.", hint="`perilune keys ls` shows every key.")

    def exist(self) -> bool:
        """Whether a key was ever made."""
        with self._store.read() as connection:
            return connection.execute(sa.select(KEYS.c.id).limit(1)).first() is not None

    def owner(self, key_id: str) -> KeyOwner | None:
        """Whom the key of that id speaks for now; None where it is unknown or revoked."""
        with self._store.read() as connection:
            row = connection.execute(sa.select(KEYS).where(KEYS.c.id == key_id)).first()
        if row is None or row.revoked_at is not None:
            return None
        return _owner(row)

    def known(self, key: str | None) -> KeyOwner | None:
        """Whom the key speaks for, in microseconds, where nothing at all was written to the database since it was
        looked up; None: ask `authenticate`. Call it from one thread."""
        seen = self._store.change_counter()
        if seen != self._seen or len(self._known) > _MOST_KNOWN:
            self._known, self._seen = {}, seen
        return self._known.get(_digest(key)) if key else None

    def authenticate(self, key: str | None) -> KeyOwner:
        """Whom the key speaks for. Raises `Unauthenticated` for a missing, unknown or revoked key."""
        known, seen = self._known, self._seen
        owner = self._looked_up(key)
        if key and owner.key_id is not None and seen is not None:
            known[_digest(key)] = owner  # into the dictionary of then: a change meanwhile has replaced it
        return owner

    def _looked_up(self, key: str | None) -> KeyOwner:
        if not self.exist():
            return KeyOwner(DEFAULT_TENANT, "admin")
        if not key:
            raise Unauthenticated(
                "This server needs an API key.", hint="Send `Authorization: Bearer pl-…`; an admin makes keys."
            )
        row = self._find(key)
        if row is None or row.revoked_at is not None:
            raise Unauthenticated(
                "The API key is unknown or revoked.", hint="Check it, or ask an admin for a new one."
            )
        now = self._clock()
        if row.last_used_at is None or abs(now - row.last_used_at) >= _LAST_USED_STEP_S:
            with self._store.write() as connection:
                connection.execute(KEYS.update().where(KEYS.c.id == row.id).values(last_used_at=now))
        return _owner(row)

    def tenant_secret(self, tenant: str) -> bytes:
        """The tenant's 32 random bytes that seed its KV hashes; made on first use and never changed.

        Raises `InvalidRequest` for a bad tenant id.
        """
        known = self._secrets.get(tenant)
        if known is not None:
            return known
        validate_tenant(tenant)
        query = sa.select(TENANTS.c.secret).where(TENANTS.c.id == tenant)
        with self._store.read() as connection:
            secret: bytes | None = connection.execute(query).scalar()
        if secret is None:
            with self._store.write() as connection:  # serialised: look again before making one
                secret = connection.execute(query).scalar()
                if secret is None:
                    secret = secrets.token_bytes(32)
                    connection.execute(TENANTS.insert().values(id=tenant, secret=secret, created_at=self._clock()))
        self._secrets[tenant] = secret
        return secret

    def _find(self, key: str) -> sa.Row[tuple[object, ...]] | None:
        """The key's row. The HMAC hides from the index's timing how much of a guess was right."""
        if len(key) > _MAX_KEY_CHARS:
            return None
        mac = self._mac(key, self._pepper(create=False))
        with self._store.read() as connection:
            row = connection.execute(sa.select(KEYS).where(KEYS.c.mac == mac)).first()
        return row if row is not None and hmac.compare_digest(row.mac, mac) else None

    @staticmethod
    def _mac(key: str, pepper: bytes) -> bytes:
        return hmac.new(pepper, key.encode(errors="replace"), hashlib.sha256).digest()

    def _pepper(self, create: bool) -> bytes:
        """The pepper; a new one only while no key depends on it. Raises `ConfigError` where it is lost."""
        path = self._home / _PEPPER_FILE
        needed = not create or self.exist()  # asked first: whoever made a key had written the file before
        if not path.exists():
            if needed:
                raise ConfigError(
                    "The file that makes API keys verifiable (`pepper` in the home folder) is missing.",
                    hint="Restore it from a backup, or copy it from the home folder of another server of this"
                    " database, or delete every key and make new ones.",
                )
            _write_once(path, secrets.token_bytes(32))
        pepper = path.read_bytes()
        if len(pepper) != 32:
            raise ConfigError("The `pepper` file in the home folder is damaged.", hint="Restore it from a backup.")
        return pepper


def validate_tenant(tenant: str) -> None:
    """Raises `InvalidRequest` unless the id is 1-64 of a-z 0-9 _ . - and begins with a letter or digit."""
    if not _TENANT.fullmatch(tenant):
        raise InvalidRequest(
            "A tenant id has 1 to 64 characters of a-z, 0-9, `_`, `.` and `-`, and begins with a letter or digit.",
            param="tenant",
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def check_limits(limits: KeyLimits) -> None:
    """Raises `InvalidRequest` for a limit that isn't positive and finite (a budget of 0: nothing that costs)."""
    for name, value in asdict(limits).items():
        if value is not None and not (0 < value < float("inf") or (name == "budget" and value == 0)):
            raise InvalidRequest(
                f"A key's {name} is a positive number, not {value}.", hint="Leave it out for no limit.", param=name
            )


def _owner(row: sa.Row[tuple[object, ...]]) -> KeyOwner:
    return KeyOwner(row.tenant, row.role, row.deadline_s, row.id, _limits(row))


def _limits(row: sa.Row[tuple[object, ...]]) -> KeyLimits:
    return KeyLimits(**{field.name: getattr(row, field.name) for field in fields(KeyLimits)})


def _write_once(path: Path, data: bytes) -> None:
    """Create a private file atomically; of two writers the first wins."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return
    finally:
        temporary.unlink()


def _info(row: sa.Row[tuple[object, ...]]) -> KeyInfo:
    return KeyInfo(
        row.id,
        row.tenant,
        row.name,
        row.role,
        row.deadline_s,
        row.created_at,
        row.last_used_at,
        row.revoked_at,
        _limits(row),
    )
