"""Upkeep of an embedded index, in its own process: that it comes to an end."""

from __future__ import annotations

import time
from pathlib import Path

from perilune.memory.vectors import upkeep
from perilune.memory.vectors.lance import LanceIndex
from perilune.memory.vectors.protocol import Row

BATCHES, ROWS, TERMS = 12, 200, 40
LIMIT_S = 30.0


def test_upkeep_of_many_small_writes_ends(tmp_path: Path) -> None:
    """Too few threads of LanceDB's make compaction wait for itself, and indexing waits for upkeep."""
    index = LanceIndex(tmp_path, "m", 8)
    for batch in range(BATCHES):
        first = batch * ROWS
        rows = [Row(first + at, "t", "s", at, None, None, None, ()) for at in range(ROWS)]
        index.put_texts(rows, [dict.fromkeys(range(7 * at, 7 * at + TERMS), 1) for at in range(ROWS)])
        if batch % 3 == 2:
            index.remove(range(first, first + ROWS // 4))
    end_s = time.monotonic() + LIMIT_S
    upkeep.run(tmp_path, "m", 8, lambda: time.monotonic() > end_s)
    assert time.monotonic() < end_s
    index.close()
