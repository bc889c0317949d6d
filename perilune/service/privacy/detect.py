"""Finds personal identifiers in a text, and everywhere else what was found once.

Knows the rules of this folder, in which order they win, and the user's own terms; doesn't know placeholders or
where text goes. Time is linear in the text: nothing looks farther than a few dozen characters ahead.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from perilune.service.privacy import cues, dates, names_en, names_zh, network, numbers, phones, places, secrets
from perilune.service.privacy.fold import Folded, fold
from perilune.service.privacy.kinds import STRENGTH, Found, Kind
from perilune.service.privacy.lists import words

_RULES: tuple[Callable[[Folded], Iterator[Found]], ...] = (
    network.find,
    numbers.find,
    phones.find,
    secrets.find,
    dates.find,
    places.find,
    cues.find,
    names_zh.find,
    names_en.find,
)
_RANK = {kind: rank for rank, kind in enumerate(STRENGTH)}
_KEEP_LINES = re.compile(r"(?<![0-9])(?:110|112|119|120|122|911|999|12306|12315|12345|10086|10010|10000)(?![0-9])")
_PUBLISHED = re.compile(
    r"(?:isbn|issn|gb/?t?|iso(?:/iec)?|iec|rfc|doi|国药准字|ieee)(?:[\-: ]?1[03])?[:： ]{0,3}[A-Z]?[0-9"
    r" \-.]{0,16}\Z",
    re.IGNORECASE,
)
_KNOWN_PLACES = ("10 downing street", "221b baker street", "1600 pennsylvania ave")
_NUMBERED = frozenset(
    {
        Kind.PHONE,
        Kind.ORDER,
        Kind.ACCOUNT,
        Kind.BANK_CARD,
        Kind.ADDRESS,
        Kind.NATIONAL_ID,
        Kind.MEDICAL_RECORD,
        Kind.STAFF_ID,
        Kind.TAX_ID,
    }
)
_TOKEN = re.compile(r"[A-Za-z0-9À-ÿ]++|[\u3040-\u30ff\u3400-\u9fff]")
_REPEATED_AT_LEAST = 4
_LONGEST_TOKENS = 64
"""Words and characters of a value that is looked for elsewhere; a longer one would cost its length everywhere."""
_NAME_WORD = re.compile(r"[A-ZÀ-Ö][A-Za-zÀ-ÿ'’\-]{2,}")


class Detector:
    """Finds identifiers. Immutable; `terms` are the user's own words, found whole and in any case."""

    def __init__(self, terms: Iterable[str] = (), kinds: Iterable[Kind] = tuple(Kind)) -> None:
        known = sorted({term.strip() for term in terms if term.strip()}, key=len, reverse=True)
        joined = "|".join(_term(term) for term in known)
        self._terms = re.compile(joined, re.IGNORECASE) if joined else None
        self._kinds = frozenset(kinds)

    def find(self, text: str) -> list[Found]:
        """What one text holds, in order, without overlaps."""
        return self.find_all([text])[0]

    def find_all(self, texts: Sequence[str]) -> list[list[Found]]:
        """What each of several texts of one conversation holds. What is found in one is found in all of them."""
        folded = [fold(text) for text in texts]
        first = [_merged(self._once(each)) for each in folded]
        known = _Known()
        for each, found in zip(folded, first, strict=True):
            for item in found:
                known.add(each.text[item.start : item.end], item.kind)
        result = []
        for each, found in zip(folded, first, strict=True):
            everywhere = _merged([*found, *known.find(each)]) if known else found
            result.append([Found(*each.origin(item.start, item.end), item.kind) for item in everywhere])
        return result

    def _once(self, folded: Folded) -> Iterator[Found]:
        for rule in _RULES:
            for found in rule(folded):
                if found.kind in self._kinds and not _is_public(folded.text, found):
                    yield found
        if self._terms is not None:
            for match in self._terms.finditer(folded.text):
                yield Found(match.start(), match.end(), Kind.TERM)


def _is_public(text: str, found: Found) -> bool:
    """Emergency and service lines, numbers of books and of standards, addresses that everybody knows."""
    if found.kind not in _NUMBERED:
        return False
    value = text[found.start : found.end]
    if _KEEP_LINES.fullmatch(value) or value.lower().startswith(_KNOWN_PLACES):
        return True
    return _PUBLISHED.search(text, max(0, found.start - 24), found.start) is not None


def _term(term: str) -> str:
    left = r"(?<![A-Za-z0-9])" if term[0].isascii() and term[0].isalnum() else ""
    right = r"(?![A-Za-z0-9])" if term[-1].isascii() and term[-1].isalnum() else ""
    return left + r"\s+".join(re.escape(part) for part in term.split()) + right


def _merged(found: Iterable[Found]) -> list[Found]:
    """Overlapping findings become one, with the kind of the strongest; blanks at their ends stay outside."""
    result: list[Found] = []
    for item in sorted(found, key=lambda each: (each.start, -each.end)):
        if item.start >= item.end:
            continue
        if result and item.start < result[-1].end:
            last = result[-1]
            kind = min(last.kind, item.kind, key=_RANK.__getitem__)
            result[-1] = Found(last.start, max(last.end, item.end), kind)
        else:
            result.append(item)
    return result


class _Known:
    """Values of a conversation, to be found wherever they stand: digits and letters in order, separators free."""

    def __init__(self) -> None:
        self._by_first: dict[str, dict[tuple[str, ...], Kind]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_first)

    def add(self, value: str, kind: Kind) -> None:
        if kind is Kind.URL_TOKEN and len(value) < 6:
            return
        self._add(value, kind)
        if kind is Kind.PERSON:
            for part in _parts_of_name(value):
                self._add(part, kind)

    def _add(self, value: str, kind: Kind) -> None:
        tokens = tuple(token[0] for token in _TOKEN.finditer(value))
        if kind is not Kind.PERSON:
            tokens = tuple(token.lower() for token in tokens)
        if not 0 < len(tokens) <= _LONGEST_TOKENS or (
            kind is not Kind.PERSON and sum(map(len, tokens)) < _REPEATED_AT_LEAST
        ):
            return
        self._by_first.setdefault(tokens[0].lower(), {})[tokens] = kind
        if kind is not Kind.PERSON and len(tokens) > 1:  # the same without its separators
            joined = "".join(tokens)
            self._by_first.setdefault(joined, {})[joined,] = kind

    def find(self, folded: Folded) -> Iterator[Found]:
        tokens = [(match[0], match.start(), match.end()) for match in _TOKEN.finditer(folded.text)]
        for at, (first, start, _) in enumerate(tokens):
            for wanted, kind in self._by_first.get(first.lower(), _NOTHING).items():
                there = tokens[at : at + len(wanted)]
                exact = kind is Kind.PERSON
                if tuple(token if exact else token.lower() for token, _, _ in there) != wanted:
                    continue
                gaps = (after[1] - before[2] for before, after in itertools.pairwise(there))
                if all(gap <= 3 for gap in gaps):
                    yield Found(start, there[-1][2], kind)


_NOTHING: Mapping[tuple[str, ...], Kind] = {}


def _parts_of_name(name: str) -> Iterator[str]:
    """Given name and surname by themselves; of a Chinese name the given name of two characters."""
    chinese = "".join(char for char in name if "\u4e00" <= char <= "\u9fff")
    if len(chinese) == 3 and len(name) == 3:
        if chinese[1:] not in names_zh.ordinary_words():
            yield chinese[1:]
        return
    latin = [word for word in _NAME_WORD.findall(name) if word.lower().rstrip(".") not in words("titles_en.txt")]
    if len(latin) > 1 or len(name.split()) > 1:
        for word in latin:
            if word.lower() not in names_en.ordinary_words():
                yield word
                yield word.upper()
        given, _, family = name.partition(" ")
        if " " in family and given.rstrip(".").lower() not in words("titles_en.txt"):
            yield family
