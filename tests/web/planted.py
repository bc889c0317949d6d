"""Conversations that a server keeps before it starts: long ones, hostile ones, answers with any card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from perilune.config import Settings
from perilune.core import KeptAnswer
from perilune.memory.memory import Memory
from perilune.memory.sessions import Sessions
from perilune.memory.store import Store

TURNS = 1_000
TENANT = "local"

ANSWER = """A paragraph about **turn {n}**, long enough to take two lines on a wide screen, with `code` and a [link](https://example.com).

- the first of three points
- the second one, number {n}
- the third

```python
def answer(n):
    return {n}
```
"""

Exchange = tuple[str, str, Mapping[str, Any] | None]
"""A question, its answer, and the report that is kept with it."""


def long_thread() -> list[Exchange]:
    """A thousand turns: questions of a line, answers with a list and code."""
    return [(f"Question {n}?", ANSWER.format(n=n), None) for n in range(0, TURNS, 2)]


def plant(home: Path, **threads: Iterable[Exchange]) -> None:
    """Into a home folder that no server uses, by the name of each conversation."""
    store = Store(home)
    memory = Memory.open(store, home, Settings().memory.model_copy(update={"embedder": "off"}))
    kept = Sessions(store, memory)
    for name, exchanges in threads.items():
        for n, (asked, said, report) in enumerate(exchanges):
            answer = None
            if report is not None:
                usage = {"prompt_tokens": 712, "completion_tokens": 31, "total_tokens": 743}
                details = {"finish_reason": "stop", "total_s": 9.5, "files": [], "usage": usage, "perilune": report}
                answer = KeptAnswer(f"req_{name}_{n}", "smollm2-135m-instruct", details)
            at_s = 1_764_000_000.0 + 60 * n
            kept.add(TENANT, name, [("user", asked, at_s), ("assistant", said, at_s + 5)], answer=answer)
    memory.close()
    store.close()
