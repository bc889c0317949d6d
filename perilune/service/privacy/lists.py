"""The lists of names and words, read from the package's data once, when somebody first needs them.

Sources and licences: data/README.md. Knows the files' form only.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files


@cache
def words(name: str) -> frozenset[str]:
    """Words of a list, white space between them; lines that begin with # are comments."""
    return frozenset(word for line in _lines(name) for word in line.split())


@cache
def weights(name: str) -> Mapping[str, int]:
    """Words with the logarithm to base 2 of how often they were counted, which begins each line."""
    found: dict[str, int] = {}
    for line in _lines(name):
        weight, *rest = line.split()
        for word in rest:
            found[word] = int(weight)
    return found


@cache
def labelled(name: str) -> tuple[tuple[str, str], ...]:
    """(word, label) of a list whose lines begin with a label; underscores are blanks."""
    pairs = []
    for line in _lines(name):
        label, *rest = line.split()
        pairs += [(word.replace("_", " "), label) for word in rest]
    return tuple(pairs)


def _lines(name: str) -> list[str]:
    text = (files("perilune.service.privacy") / "data" / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]
