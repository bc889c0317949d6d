"""Stand-ins for identifiers, and the way back: `[PERSON_1]` for every mention of one person, restored exactly.

Knows what was replaced by what in one conversation; doesn't know how identifiers are found. Two ways to write
one value share a number and differ by a letter: `[PHONE_1]`, `[PHONE_1b]`. Text that already looks like a
placeholder is replaced too, so that replacing and restoring is the identity for any text. A model may write a
placeholder a little otherwise (small letters, a blank, full-width brackets, no brackets, an escaped
underscore); it is found all the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from perilune.service.privacy.fold import normal
from perilune.service.privacy.kinds import LABELS, Found, Kind
from perilune.service.privacy.persons import Persons

_LABEL = "(?:" + "|".join(sorted(LABELS.values(), key=len, reverse=True)) + ")"
_CORE = (
    rf"(?i:(?P<label{{0}}>{_LABEL}))(?:\\?_|[ \-])[ ]?(?P<number{{0}}>[0-9]{{{{1,6}}}})(?P<form{{0}}>[a-zA-Z]"
    rf"{{{{0,2}}}})"
)
_BRACKETED = rf"[\[［【][ ]?{_CORE.format(1)}[ ]?[\]］】]|\\[\[［【][ ]?{_CORE.format(2)}[ ]?\\[\]］】]"
_BARE = (
    rf"(?<![A-Za-z0-9_])(?P<label3>{_LABEL})\\?_(?P<number3>[0-9]{{1,6}})(?P<form3>[a-z]{{0,2}})(?![A-Za-z0-9_])"
)
PLACEHOLDER = re.compile(f"{_BRACKETED}|{_BARE}")
"""Anything that is read as a placeholder."""

_LITERAL = re.compile(rf"{_BRACKETED}|{_LABEL}\\?_[0-9]{{1,6}}[a-z]{{0,2}}")
"""What might be read as one, whatever is put before and behind it."""

_MAY_BE_LITERAL = re.compile(r"[\[［【]|_[0-9]")

_PREFIXES = sorted(
    {label[:size] for label in LABELS.values() for size in range(1, len(label) + 1)}, key=len, reverse=True
)
_BEGINNING = re.compile(
    rf"(?:\\?[\[［【]?|\\)[ ]?(?:(?i:{'|'.join(_PREFIXES)})?\Z"
    rf"|(?i:{_LABEL})(?:\\?_|[ \-]|\\)?[ ]?(?:\Z|[0-9]{{1,6}}[a-zA-Z]{{0,2}}[ ]?\\?\Z))"
)
_LONGEST = 2 + 1 + max(map(len, LABELS.values())) + 3 + 6 + 2 + 3
_MAY_BEGIN = re.compile(r"[\\\[［【]|(?<![A-Za-z0-9_])[A-Z]")


class Vault:
    """What stands for what in one conversation. Not shared between threads; lives in memory only."""

    def __init__(self) -> None:
        self._persons = Persons()
        self._names: dict[tuple[Kind, str], str] = {}  # (kind, as written) -> placeholder
        self._numbers: dict[tuple[Kind, str], int] = {}  # (kind, normal form) -> number
        self._forms: dict[tuple[Kind, int], int] = {}  # ways to write it so far
        self._counts: dict[Kind, int] = {}
        self._values: dict[tuple[str, str, str], str] = {}

    def __len__(self) -> int:
        return len(self._names)

    def stand_in(self, kind: Kind, value: str) -> str:
        """The placeholder of a value, the same for the same value."""
        known = self._names.get((kind, value))
        if known is not None:
            return known
        number = self._number(kind, value)
        form = self._forms[kind, number] = self._forms.get((kind, number), -1) + 1
        letters = _letters(form)
        name = f"[{LABELS[kind]}_{number}{letters}]"
        self._names[kind, value] = name
        self._values[LABELS[kind], str(number), letters] = value
        return name

    def _number(self, kind: Kind, value: str) -> int:
        entity = (kind, normal(value))
        number = self._numbers.get(entity)
        if number is None and kind is Kind.PERSON:
            number = self._persons.number_of(value)
        if number is None:
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
        self._numbers[entity] = number
        if kind is Kind.PERSON:
            self._persons.add(number, value)
        return number

    def value_of(self, match: re.Match[str]) -> str | None:
        """What a match of `PLACEHOLDER` stands for; None if nothing."""
        group = next(group for group in "123" if match["label" + group])
        label, form = match["label" + group].upper(), match["form" + group].lower()
        return self._values.get((label, match["number" + group], form))

    def restore(self, text: str) -> str:
        """A whole text with its placeholders turned back. Unknown ones stay."""

        def back(match: re.Match[str]) -> str:
            value = self.value_of(match)
            return match[0] if value is None else value

        return PLACEHOLDER.sub(back, text) if self._names else text


def _letters(form: int) -> str:
    """'' for the first way to write a value, then b, c, … z, aa, ab, …"""
    if form == 0:
        return ""
    return chr(97 + form) if form < 26 else chr(97 + (form - 26) // 26 % 26) + chr(97 + form % 26)


def replaced(text: str, found: Sequence[Found], stand_in: Callable[[Kind, str], str]) -> str:
    """The text with every finding replaced. `with_literals` must have seen them."""
    pieces: list[str] = []
    at = 0
    for item in found:
        pieces += [text[at : item.start], stand_in(item.kind, text[item.start : item.end])]
        at = item.end
    pieces.append(text[at:])
    return "".join(pieces)


def literals(text: str) -> list[Found]:
    """Text that looks like a placeholder: it is replaced, too, so that the way back can't mistake it for one."""
    if not _MAY_BE_LITERAL.search(text):
        return []
    return [Found(*match.span(), Kind.TEXT) for match in _LITERAL.finditer(text)]


def with_literals(found: Sequence[Found], literals: Sequence[Found]) -> list[Found]:
    """The findings, widened over placeholders that they cut, and the placeholders besides."""
    if not literals:
        return list(found)
    result: list[Found] = []
    for item in sorted([*found, *literals], key=lambda each: (each.start, -each.end)):
        if result and item.start < result[-1].end:
            last = result[-1]
            kind = item.kind if last.kind is Kind.TEXT else last.kind
            result[-1] = Found(last.start, max(last.end, item.end), kind)
        else:
            result.append(item)
    return result


def as_it_is(value: str) -> str:
    return value


def in_json(value: str) -> str:
    """As it is written inside a string of JSON."""
    return json.dumps(value, ensure_ascii=False)[1:-1]


class Restorer:
    """Turns placeholders back in a text that arrives in pieces, cut anywhere. One per stream; `written` says how a
    value stands in it."""

    def __init__(self, vault: Vault, written: Callable[[str], str] = as_it_is) -> None:
        self._vault = vault
        self._written = written
        self._held = ""
        self._before = ""  # the last character that was given out, for word boundaries

    def push(self, piece: str) -> str:
        """What can be said now: all but an end that may still become a placeholder."""
        if not len(self._vault):
            return piece
        text = self._before + self._held + piece
        cut = self._safe(text, len(self._before))
        return self._give(text, cut)

    def flush(self) -> str:
        """The rest, when the stream has ended."""
        text = self._before + self._held
        return self._give(text, len(text))

    def _give(self, text: str, cut: int) -> str:
        skip = len(self._before)
        out: list[str] = []
        at = skip
        for match in PLACEHOLDER.finditer(text, skip):
            if match.end() > cut:
                break
            value = self._vault.value_of(match)
            if value is not None:
                out += [text[at : match.start()], self._written(value)]
                at = match.end()
        out.append(text[at:cut])
        self._held = text[cut:]
        if cut > skip:
            self._before = text[cut - 1]
        return "".join(out)

    def _safe(self, text: str, start: int) -> int:
        """Up to where nothing that follows can change the reading."""
        at = max(start, len(text) - _LONGEST)
        for match in _MAY_BEGIN.finditer(text, at):
            if _BEGINNING.match(text, match.start()):
                return match.start()
        return len(text)
