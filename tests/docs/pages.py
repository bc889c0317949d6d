"""What the documentation holds: its pages and their fenced blocks. Which are run, and why the others aren't.

A block of a language in `RUN` is run, unless its opening fence says `no-run:` and one of `REASONS`:

    ```sh no-run: takes minutes

Knows Markdown's fences; doesn't know how a command is run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = ("sh", "python", "js")
DATA = ("json", "yaml", "nginx", "ini", "text")
"""Settings, replies and drawings: nothing that a reader types into a shell."""

REASONS = (
    "CI runs it by itself",
    "needs the administrator",
    "needs systemd",
    "needs another machine",
    "downloads",
    "takes minutes",
)

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NO_RUN = re.compile(r"(\w+) no-run: (.+)")


@dataclass(frozen=True, slots=True)
class Block:
    """`reason`: why it isn't run, empty where it is. `line` counts from 1."""

    page: str
    language: str
    text: str
    line: int
    reason: str

    @property
    def place(self) -> str:
        return f"{self.page}, line {self.line}"


def pages() -> list[Path]:
    """The README and every page of the documentation, in the order of reading."""
    docs = ROOT / "docs"
    first = [ROOT / "README.md", docs / "README.md", docs / "quick-start.md", docs / "concepts.md"]
    rest = [*sorted((docs / "how-to").glob("*.md")), *sorted(docs.rglob("*.md"))]
    return list(dict.fromkeys([*first, *rest]))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        marked = _NO_RUN.fullmatch(match[1])
        language, reason = (marked[1], marked[2]) if marked else (match[1], "")
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(name_of(page), language, match[2], line, reason))
    return found


def run_blocks(page: Path) -> list[Block]:
    """Those that a test runs."""
    return [block for block in blocks(page) if block.language in RUN and not block.reason]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))
