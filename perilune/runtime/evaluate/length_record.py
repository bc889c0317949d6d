"""What was measured of a model's effective length, and its file in the home folder. Loads without torch.

A model is known by its content (files and adapter), whatever precision or kernels run it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = "evaluations"
STILL_ANSWERS = 0.85
"""Share of the shortest length's accuracy that a length must keep to count as answered."""

LEAST_ACCURACY = 0.5
"""A task counts only if the model can do it at the shortest length at all."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Answers of one task at one length and depth (0 is the beginning of the text, 1 its end)."""

    task: str
    length: int
    depth: float
    right: int
    asked: int


@dataclass(frozen=True, slots=True)
class EffectiveLength:
    """The grid, and what follows. `tokens`: the longest measured length at which, as at every shorter one, the
    model still answers; 0 if it can't do the tasks at all. `fails_at`: the next measured length, if any."""

    model: str
    cells: tuple[Cell, ...]
    tokens: int
    fails_at: int | None

    def accuracy(self, length: int) -> float:
        """Over every depth of the tasks that count."""
        return _share([cell for cell in self.cells if cell.length == length and cell.task in counted(self.cells)])


def judge(model: str, cells: Sequence[Cell]) -> EffectiveLength:
    """Draw the line. `cells` hold at least one length."""
    lengths = sorted({cell.length for cell in cells})
    tasks = counted(cells)
    if not tasks:
        return EffectiveLength(model, tuple(cells), 0, None)
    shares = [
        _share([cell for cell in cells if cell.length == length and cell.task in tasks]) for length in lengths
    ]
    for index, share in enumerate(shares):
        if share < STILL_ANSWERS * shares[0]:
            return EffectiveLength(model, tuple(cells), lengths[index - 1], lengths[index])
    return EffectiveLength(model, tuple(cells), lengths[-1], None)


def counted(cells: Sequence[Cell]) -> set[str]:
    """Tasks that the model can do at the shortest length."""
    shortest = min((cell.length for cell in cells), default=0)
    at_start = [cell for cell in cells if cell.length == shortest]
    return {
        task
        for task in {cell.task for cell in at_start}
        if _share([cell for cell in at_start if cell.task == task]) >= LEAST_ACCURACY
    }


def _share(cells: Sequence[Cell]) -> float:
    asked = sum(cell.asked for cell in cells)
    return sum(cell.right for cell in cells) / asked if asked else 0.0


def record_file(home: Path, content: str) -> Path:
    return home / FOLDER / f"length-{content[:16]}.json"


def save(home: Path, content: str, found: EffectiveLength) -> Path:
    """Write atomically; returns the file."""
    file = record_file(home, content)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as handle:
        json.dump(asdict(found), handle, indent=1)
    os.replace(handle.name, file)
    return file


def read(home: Path, content: str) -> EffectiveLength | None:
    """What was measured of a model; None where nothing was, or the file is damaged (measuring replaces it)."""
    try:
        data = json.loads(record_file(home, content).read_text(encoding="utf-8"))
        cells = [Cell(**cell) for cell in data["cells"]]
        return judge(str(data["model"]), cells)
    except (OSError, ValueError, KeyError, TypeError):
        return None
