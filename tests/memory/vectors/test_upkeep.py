"""Upkeep of an embedded index, in its own process: that it comes to an end."""

from __future__ import annotations

import subprocess
import sys
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
    assert upkeep.run(tmp_path, "m", 8, lambda: time.monotonic() > end_s)
    assert time.monotonic() < end_s
    index.close()


def test_upkeep_ends_with_whoever_started_it() -> None:
    code = "import time\nfrom perilune.memory.vectors import upkeep\nupkeep.end_with_parent()\n"
    code += "print()\ntime.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    assert process.poll() is None
    process.stdin.close()  # as the end of the other process does
    assert process.wait(60) == 1
    process.stdout.close()
