"""Words that mean the same in a trade: 滞纳金 and 罚金 find 违约金, "termination" finds "rescission".

Knows groups and how they are written in text, not entries. A group is a line `CONFIDENCE word | word | …`; words
may be of several languages and of several words. A question that holds one word of a group also looks for the
others, with a weight of the group's confidence times `SYNONYM_WEIGHT`, so that what was said outranks what it might
mean. Built in are `legal` and `support`; users add files of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from perilune.errors import ConfigError
from perilune.memory.analyse import Analyser
from perilune.memory.writing import UNSPACED

BUILT_IN = ("legal", "support")
SYNONYM_WEIGHT = 0.5
MAX_EXPANSIONS = 64
"""Terms that synonyms add to a question, at most."""

_LINE = re.compile(r"(0\.\d+|1(?:\.0)?)\s+(.+)")
_UNSPACED = re.compile(f"[{UNSPACED}]")
_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Group:
    """Words of one meaning; `confidence` is how often one stands for another (0 to 1)."""

    words: tuple[str, ...]
    confidence: float


class Synonyms:
    """Groups, found by any of their words. Immutable."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self._of_word: dict[str, list[Group]] = {}
        for group in groups:
            for word in group.words:
                self._of_word.setdefault(word.lower(), []).append(group)
        self._pattern = _any_of(self._of_word)

    @classmethod
    def none(cls) -> Synonyms:
        return cls(())

    @classmethod
    def load(cls, files: Sequence[Path] = (), built_in: Sequence[str] = BUILT_IN) -> Synonyms:
        """The built-in groups and those of `files`. Raises `ConfigError` for a file that can't be read."""
        paths = [*(_FOLDER / f"{name}.txt" for name in built_in), *files]
        return cls(group for path in paths for group in read(path))

    def expand(self, question: str, analyser: Analyser) -> dict[str, float]:
        """The question's terms with weight 1, then those of synonyms with less."""
        terms = dict.fromkeys(analyser.query_terms(question), 1.0)
        own = len(terms)
        for found in self._pattern.findall(question.lower()) if self._pattern else ():
            for group in self._of_word[found]:
                for word in group.words:
                    if word.lower() == found:
                        continue
                    for term in analyser.query_terms(word):
                        weight = SYNONYM_WEIGHT * group.confidence
                        if len(terms) < own + MAX_EXPANSIONS or term in terms:
                            terms[term] = max(terms.get(term, 0.0), weight)
        return terms


def read(path: Path) -> list[Group]:
    """A file's groups. Lines that begin with # are remarks. Raises `ConfigError` naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The synonym file {path.name} can't be read ({type(error).__name__}).",
            hint="Give a UTF-8 text file of lines like `0.8 违约金 | 滞纳金`.",
            param="memory.synonyms",
        ) from None
    groups = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        words = tuple(dict.fromkeys(word.strip() for word in match[2].split("|") if word.strip())) if match else ()
        if match is None or len(words) < 2:
            raise ConfigError(
                f"Line {number} of the synonym file {path.name} is no group.",
                hint="Write a confidence and at least two words: `0.8 违约金 | 滞纳金`.",
                param="memory.synonyms",
            )
        groups.append(Group(words, float(match[1])))
    return groups


def _any_of(words: Iterable[str]) -> re.Pattern[str] | None:
    """Matches the longest known word at each place; spaced scripts only at the borders of words."""
    parts = [
        re.escape(word) if _UNSPACED.search(word) else rf"\b{re.escape(word)}\b"
        for word in sorted(words, key=lambda word: (-len(word), word))
    ]
    return re.compile("|".join(parts)) if parts else None
