"""A page's commands as one bash script: every `sh` and `python` block in order, but those that say why not.

A block isn't run where the paragraph before it begins with *Not run in the test of this page:* and a reason, which
readers see, too. `perilune serve` is started beside the script, as a second terminal would, and one that serves the
same home already is used again; `# Stop the server` stops it.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PORTS = ("8642", "8643")
"""What pages write; a test takes free ones."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"\*Not run in the test of this page: (.+?)\*\s*\Z", re.DOTALL)
_SERVE = re.compile(r"^perilune (?:.* )?serve(?: .*)?$")


@dataclass(frozen=True, slots=True)
class Block:
    """`reason`: why it isn't run, empty where it is. `line` counts from 1."""

    language: str
    text: str
    line: int
    reason: str


def pages() -> list[Path]:
    """The pages whose commands are run, in the order of reading."""
    docs = ROOT / "docs"
    return [docs / "quick-start.md", *sorted((docs / "how-to").glob("*.md")), docs / "tuning.md"]


def blocks(page: Path) -> list[Block]:
    """Fenced blocks of commands."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        if match[1] in ("sh", "bash", "python"):
            reason = _NOT_RUN.search(text, max(0, match.start() - 400), match.start())
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(match[1], match[2], line, reason[1] if reason else ""))
    return found


def script(page: Path, ports: tuple[str, ...]) -> str:
    """What bash runs; stops at the first command that fails, and says where on the page its block begins."""
    parts = ["set -euo pipefail"]
    for block in blocks(page):
        if block.reason:
            continue
        parts.append(f"echo '### {page.name}, line {block.line}' >&2")
        parts.append(_python(block.text) if block.language == "python" else _shell(block.text))
    whole = "\n".join(parts) + "\n"
    for written, taken in zip(PORTS, ports, strict=True):
        whole = whole.replace(written, taken)
    return whole


def _python(text: str) -> str:
    return f"python <<'PYTHON_BLOCK'\n{text}PYTHON_BLOCK"


def _shell(text: str) -> str:
    lines = []
    for line in text.splitlines():
        if _SERVE.match(line):
            lines.append("serve_beside " + line.removeprefix("perilune "))
        elif line.startswith("# Stop the server"):
            lines.append("stop_servers")
        else:
            lines.append(line)
    return "\n".join(lines)


def preamble(helper: list[str]) -> str:
    """Functions that a script's lines were turned into; `helper` is the command of `tests.docs.servers`."""
    command = shlex.join(helper)
    return f'serve_beside() {{ {command} start "$@"; }}\nstop_servers() {{ {command} stop; }}\n'
