"""`make demo`: the whole promise on a fresh clone. Pulls the default model, asks Perilune's own handbook a question
twice, each time in a process of its own: cold (reads everything) and warm (finds the KV on disk).

Everything but the model lives in a temporary home. Ends with 1 when the warm answer starts later than five seconds
after its process did. The network is needed for the pull only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.cli.console import pull_display, say, show_error
from perilune.cli.main import INTERRUPTED
from perilune.cli.pull import prepare
from perilune.config import load
from perilune.errors import PeriluneError
from perilune.runtime.hub.catalogue import load_catalogue
from perilune.runtime.hub.pull import models_folder, pull

WARM_LIMIT_S = 5.0
HANDBOOK = ("README.md", "docs/cli.md", "docs/architecture.md", "docs/perilune-object.md", "docs/api.md")
HANDBOOK_CHARS = 24_000
"""About 7,000 tokens: fits the default model's window of 8,192 with room for a question."""

QUESTION = "How many tokens does a block hold?"
ANSWER_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """What one `perilune ask` reported."""

    name: str
    result: dict[str, Any]

    @property
    def elapsed_s(self) -> dict[str, float]:
        return dict(self.result["elapsed"])

    @property
    def answer_starts_s(self) -> float:
        return self.elapsed_s["first_token_s"]


def main() -> int:
    """Run the demonstration; returns the exit code."""
    try:
        return _demo()
    except PeriluneError as error:
        show_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED


def _demo() -> int:
    home = load()[0].home
    name = load_catalogue().default
    _title(f"1. perilune pull {name}")
    with pull_display() as display:
        files = pull(name, home, display, finish=prepare)
    say(f"{files.card.title}, {files.card.licence}, sha256 {(files.card.sha256 or '')[:16]}…")
    with tempfile.TemporaryDirectory(prefix="perilune-demo-") as folder:
        fresh = Path(folder)
        models_folder(fresh).symlink_to(models_folder(home))
        document = fresh / "handbook.md"
        document.write_text(handbook(Path(__file__).parents[2]), encoding="utf-8")
        _title("2. cold: a new process reads the document and answers")
        cold = _ask("cold", fresh, document, "--wait")
        _title("3. warm: another process finds the document's KV on disk")
        warm = _ask("warm", fresh, document)
    _title("4. timings, in seconds since each process was started")
    _timings(cold, warm)
    if warm.answer_starts_s > WARM_LIMIT_S:
        say(f"error: the warm answer started after {warm.answer_starts_s:.2f} s, not within {WARM_LIMIT_S:g} s.")
        say("hint: run `perilune doctor`; a machine that is busy with other work is slower, too.")
        return 1
    say(f"The warm answer started within {WARM_LIMIT_S:g} s. Now try your own:")
    say('    . .venv/bin/activate && perilune ask FILE.pdf "your question"')
    return 0


def handbook(root: Path) -> str:
    """Perilune's own documentation as one text of at most `HANDBOOK_CHARS`, cut between paragraphs."""
    texts = [path.read_text(encoding="utf-8").strip() for name in HANDBOOK if (path := root / name).is_file()]
    whole = "\n\n".join(texts)
    if len(whole) <= HANDBOOK_CHARS:
        return whole + "\n"
    return whole[: whole.rfind("\n\n", 0, HANDBOOK_CHARS)] + "\n"


def _title(text: str) -> None:
    say(f"\n=== {text}")


def _ask(name: str, home: Path, document: Path, *options: str) -> Turn:
    report = home / f"{name}.json"
    words = ["ask", str(document), QUESTION, "--max-tokens", str(ANSWER_TOKENS), "--report", str(report), *options]
    say(f'$ perilune ask {document.name} "{QUESTION}"')
    done = subprocess.run([sys.executable, "-m", "perilune.cli.main", "--home", str(home), *words], check=False)  # noqa: S603
    if done.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    if done.returncode != 0:
        raise PeriluneError(f"The {name} question failed with code {done.returncode}.", hint="See the lines above.")
    return Turn(name, json.loads(report.read_text(encoding="utf-8")))


def _timings(*turns: Turn) -> None:
    rows: dict[str, Callable[[Turn], float]] = {
        "program ready": lambda turn: turn.elapsed_s["ready_s"],
        "document ready": lambda turn: turn.elapsed_s["documents_s"],
        "answer starts": lambda turn: turn.answer_starts_s,
        "answer complete": lambda turn: turn.elapsed_s["answered_s"],
        "question to answer": lambda turn: turn.result["perilune"]["measured_ttft_s"],
    }
    print(f"{'':22}" + "".join(f"{turn.name:>10}" for turn in turns))
    for label, value in rows.items():
        print(f"{label:22}" + "".join(f"{value(turn):10.2f}" for turn in turns))
    told = [turn.result["perilune"] for turn in turns]
    print(f"{'plan':22}" + "".join(f"{item['plan']:>10}" for item in told))
    print(f"{'tokens read exactly':22}" + "".join(f"{item['tokens']['exact']:>10,}" for item in told))
    cached = [sum(item["tokens"]["cached"].values()) for item in told]
    print(f"{'tokens found in cache':22}" + "".join(f"{count:>10,}" for count in cached), flush=True)


if __name__ == "__main__":
    sys.exit(main())
