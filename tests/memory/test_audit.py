"""The audit table: who, what, when, how it ended; it only grows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command

from perilune.errors import NotFound
from perilune.memory import audit
from perilune.memory.keys import Keyring
from perilune.memory.library import Library
from perilune.memory.schema import AUDIT
from perilune.memory.store import DATABASE_FILE, Store, alembic_settings
from tests.memory.conftest import add


def test_keys_and_deletions_leave_a_trail(store: Store, library: Library, tmp_path: Path) -> None:
    keyring = Keyring(store, tmp_path, clock=lambda: 7.0)
    _, info = keyring.create("acme")
    record = add(library, b"text", tenant="acme")
    with audit.acting(f"key:{info.key_id}"):
        library.delete_file("acme", record.file_id)
        keyring.revoke(info.key_id)
    keyring.revoke(info.key_id)
    with pytest.raises(NotFound):
        keyring.revoke("key-none")
    entries = audit.read(store, 100)
    assert [(entry.action, entry.subject, entry.outcome) for entry in entries] == [
        ("key.create", info.key_id, "done"),
        ("file.delete", record.file_id, "done"),
        ("key.revoke", info.key_id, "done"),
        ("key.revoke", info.key_id, "unchanged"),
        ("key.revoke", "key-none", "not_found"),
    ]
    user, key = entries[0].actor, f"key:{info.key_id}"
    assert user.startswith("user:")
    assert [entry.actor for entry in entries] == [user, key, key, user, user]
    assert (entries[0].at, entries[0].tenant) == (7.0, "acme")
    assert audit.read(store, 1) == entries[-1:]


def test_what_did_not_happen_is_not_told(store: Store, library: Library) -> None:
    with pytest.raises(NotFound):
        library.delete_file("local", "file-none")
    assert audit.read(store, 10) == []


@pytest.mark.parametrize("change", [AUDIT.update().values(actor="nobody"), AUDIT.delete()])
def test_entries_stay_as_they_are(store: Store, tmp_path: Path, change: sa.Update | sa.Delete) -> None:
    Keyring(store, tmp_path).create()
    before = audit.read(store, 10)
    with pytest.raises(sa.exc.DatabaseError, match="only grows"), store.write() as connection:
        connection.execute(change)
    assert audit.read(store, 10) == before


async def test_the_actor_follows_a_request_into_threads(store: Store, tmp_path: Path) -> None:
    async def make(actor: str) -> None:
        with audit.acting(actor):
            await asyncio.sleep(0)
            await asyncio.to_thread(Keyring(store, tmp_path).create)

    await asyncio.gather(make("key:a"), make("key:b"))
    assert {entry.actor for entry in audit.read(store, 10)} == {"key:a", "key:b"}


def test_a_database_of_the_first_version_gets_the_table(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / DATABASE_FILE}")
    with engine.begin() as connection:
        settings = alembic_settings()
        settings.attributes["connection"] = connection
        command.upgrade(settings, "0001")
        assert not engine.dialect.has_table(connection, "audit")
    engine.dispose()
    upgraded = Store(tmp_path)
    Keyring(upgraded, tmp_path).create()
    assert len(audit.read(upgraded, 10)) == 1
    upgraded.close()
