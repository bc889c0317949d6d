"""Which ways to write a name may mean one person: 高俊杰, 俊杰 and 高总; Robert Nguyen, Robert and Ms. Nguyen.

Knows the parts of names in two scripts; a model is not asked. Two names mean one person where the parts of one are
among the parts of the other and nobody else fits.
"""

from __future__ import annotations

import re

from perilune.service.privacy.lists import words
from perilune.service.privacy.names_zh import COMPOUNDS, TITLE

_LATIN = re.compile(r"[A-Za-zÀ-ÿ][A-Za-zÀ-ÿ'’\-]+")
_HANZI = re.compile("[\u4e00-\u9fff]+")


def parts(name: str) -> frozenset[str]:
    """Given name and surname as far as they are there, without titles; empty where nothing is left."""
    hanzi = "".join(_HANZI.findall(name))
    if hanzi:
        return frozenset(_chinese(hanzi))
    latin = (word.lower().removesuffix("'s").removesuffix("’s") for word in _LATIN.findall(name))
    return frozenset(word for word in latin if word not in words("titles_en.txt"))


def _chinese(name: str) -> list[str]:
    if name[0] in "老小阿大" and len(name) <= 3:
        return ["surname " + name[1:]] if name[0] != "阿" else ["given " + name[1:]]
    size = 2 if name[:2] in COMPOUNDS else 1
    rest = name[size:]
    if not rest or TITLE.fullmatch(rest):
        return ["surname " + name[:size]]
    if len(name) == 2 and size == 1:
        return ["surname " + name[0], "given " + rest, "either " + name]
    title = TITLE.search(rest)
    given = rest[: title.start()] if title and title.start() and title.end() == len(rest) else rest
    return ["surname " + name[:size], "given " + given, "either " + given]


class Persons:
    """Numbers of the people of one conversation, found by the parts of their names."""

    def __init__(self) -> None:
        self._parts: dict[int, frozenset[str]] = {}
        self._with: dict[str, set[int]] = {}

    def number_of(self, name: str) -> int | None:
        """Who that is, if exactly one known person fits."""
        wanted = parts(name)
        near = {number for part in wanted for number in self._with.get(part, ())}
        fits = [number for number in near if wanted <= self._parts[number] or self._parts[number] <= wanted]
        if not fits and len(name) == 2:  # 俊杰 by itself looks like a surname and a given name
            fits = list(self._with.get("either " + name, ()))
        return fits[0] if len(fits) == 1 else None

    def add(self, number: int, name: str) -> None:
        """Remember the parts; those of a longer way to write the name join the others."""
        known = self._parts.get(number, frozenset()) | parts(name)
        self._parts[number] = known
        for part in known:
            self._with.setdefault(part, set()).add(number)
