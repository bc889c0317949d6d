"""A full disk refuses what is new, in words, and loses nothing; two processes write side by side."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from perilune.errors import Overloaded
from perilune.memory.memory import Memory, Turn
from perilune.memory.scope import Scope
from perilune.memory.store import Store
from perilune.memory.vectors.lance import LanceIndex

LONG = "The harbour office keeps the spare key of boat {number}. " + "wind " * 2_000


@contextmanager
def full(store: Store) -> Iterator[None]:
    """SQLite finds no room for another page, as on a full disk."""

    def bound(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA max_page_count = 1").close()  # never below what is there

    sa.event.listen(store._engine, "connect", bound)
    store._engine.dispose()
    try:
        yield
    finally:
        sa.event.remove(store._engine, "connect", bound)
        store._engine.dispose()


def test_a_full_disk_refuses_a_turn_and_keeps_what_is_there(tmp_path: Path) -> None:
    store = Store(tmp_path)
    memory = Memory(store, LanceIndex(tmp_path / "index", "none", 1), None)
    memory.add_turns("acme", "s", [Turn("user", LONG.format(number=0))])

    def fill() -> None:
        for number in range(1, 50):  # pages that are free take some
            memory.add_turns("acme", "s", [Turn("user", LONG.format(number=number))])

    with full(store):
        with pytest.raises(Overloaded, match="disk is full") as refused:
            fill()
        assert refused.value.hint
        assert memory.search("key of boat 0", Scope("acme"), 60).hits
    before = len(memory.search("harbour", Scope("acme"), 60).hits)
    assert memory.add_turns("acme", "s", [Turn("user", LONG.format(number=99))]) == before
    assert len(memory.search("harbour", Scope("acme"), 60).hits) == before + 1
    memory.close()
    store.close()


def test_two_processes_write_one_session_and_both_are_found(tmp_path: Path) -> None:
    Store(tmp_path).close()
    code = (
        "import sys; from pathlib import Path\n"
        "from perilune.memory.memory import Memory, Turn\n"
        "from perilune.memory.store import Store\n"
        "from perilune.memory.vectors.lance import LanceIndex\n"
        "home, who = Path(sys.argv[1]), sys.argv[2]\n"
        "store = Store(home); memory = Memory(store, LanceIndex(home / 'index', 'none', 1), None)\n"
        "memory.start()\n"
        "for number in range(30):\n"
        "    memory.add_turns('acme', 's', [Turn(who, f'{who} tells of {who}word{number}.')])\n"
        "assert memory.settled(60)\n"
        "memory.close(); store.close()\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), who]) for who in ("ann", "bob")]
    assert [writer.wait(100) for writer in writers] == [0, 0]
    store = Store(tmp_path)
    memory = Memory(store, LanceIndex(tmp_path / "index", "none", 1), None)
    for who in ("ann", "bob"):
        for number in (0, 29):
            assert (
                memory.search(f"{who}word{number}", Scope("acme"), 1).hits[0].text.endswith(f"{who}word{number}.")
            )
    turns = memory.search("tells", Scope("acme"), 100).hits
    assert sorted(hit.number for hit in turns) == list(range(60))
    memory.close()
    store.close()
