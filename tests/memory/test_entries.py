"""Rows of entries: what is loaded by id is the tenant's, and found without reading the tenant's whole index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from perilune.memory import entries
from perilune.memory.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = Store(tmp_path)
    for tenant in ("acme", "other"):
        with opened.write() as connection:
            new = [entries.NewEntry("s", number, {1: 1}, 1, text="a") for number in range(5)]
            entries.add(connection, tenant, new)
    return opened


def test_ids_of_another_tenant_are_left_out(store: Store) -> None:
    with store.read() as connection:
        every = entries.load(connection, "acme", range(1, 11), "")
        assert [entry.id for entry in every] == [1, 2, 3, 4, 5]
        assert entries.load(connection, "nobody", range(1, 11), "") == []


def test_loading_looks_up_ids_only(store: Store) -> None:
    asked: list[tuple[str, Any]] = []
    with store.read() as connection:
        sa.event.listen(
            connection, "before_cursor_execute", lambda *told: asked.append((told[2], told[3])), named=False
        )
        entries.load(connection, "acme", range(1, 500), "")  # as a search does
        statement, parameters = asked[0]
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
    assert any("SEARCH entries USING INTEGER PRIMARY KEY" in step.detail for step in plan), plan
