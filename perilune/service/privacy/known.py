"""Values that were found once, to be found everywhere else in a conversation.

Knows values as tokens and where they stand; doesn't know rules. What a block is remembered by holds no value: only
offsets, and hashes that mean nothing outside this process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from perilune.service.privacy import names_en, names_zh
from perilune.service.privacy.fold import Folded
from perilune.service.privacy.kinds import Found, Kind
from perilune.service.privacy.lists import words

Values = Mapping[str, Mapping[tuple[str, ...], Kind]]
"""Values as tokens, by their first token in small letters."""

_TOKEN = re.compile(r"[A-Za-z0-9À-ÿ]++|[\u3040-\u30ff\u3400-\u9fff]")
_REPEATED_AT_LEAST = 4
_LONGEST_TOKENS = 64
"""Words and characters of a value that is looked for elsewhere; a longer one would cost its length everywhere."""
_NAME_WORD = re.compile(r"[A-ZÀ-Ö][A-Za-zÀ-ÿ'’\-]{2,}")
_LATIN = re.compile(r"[A-Za-z0-9À-ÿ]")
_FEW = 24
_FILTER_BITS = 1 << 14


@dataclass(slots=True)
class Seen:
    """What is known of one block of text: identifiers by offset, text that looks like a stand-in, which words it
    may hold (a Bloom filter of one hash, 2 KB), which values were looked for in all of it, and what else was found
    by the hash of the values that were looked for."""

    found: tuple[Found, ...]
    literals: tuple[Found, ...]
    filter: bytes
    own: frozenset[int]
    others: dict[int, tuple[Found, ...]] = field(default_factory=dict)

    def may_hold(self, place: int) -> bool:
        """Whether a token of this place may be in it."""
        return bool(self.filter[place >> 3] >> (place & 7) & 1)


def place_of(token: str) -> int:
    """Of a token in small letters, in filters."""
    return hash(token) % _FILTER_BITS


def filter_of(folded: Folded) -> bytes:
    """The filter of a block's tokens, in small letters."""
    bits = bytearray(_FILTER_BITS >> 3)
    for token in set(_TOKEN.findall(folded.text.lower())):
        place = place_of(token)
        bits[place >> 3] |= 1 << (place & 7)
    return bytes(bits)


class Known:
    """Values of a conversation, to be found wherever they stand: digits and letters in order, separators free."""

    def __init__(self) -> None:
        self._by_first: dict[str, dict[tuple[str, ...], Kind]] = {}
        self._key: int | None = None

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
        self._key = None
        self._by_first.setdefault(tokens[0].lower(), {})[tokens] = kind
        if kind is not Kind.PERSON and len(tokens) > 1:  # the same without its separators
            joined = "".join(tokens)
            self._by_first.setdefault(joined, {})[joined,] = kind

    def beyond(self, seen: Seen) -> Values:
        """Those that a block may hold and that weren't found in it already."""
        wanted: dict[str, dict[tuple[str, ...], Kind]] = {}
        for first, values in self._by_first.items():
            if seen.may_hold(place_of(first)):
                others = {tokens: kind for tokens, kind in values.items() if hash(tokens) not in seen.own}
                if others:
                    wanted[first] = others
        return wanted

    @property
    def key(self) -> int:
        """What stands for all the values together."""
        if self._key is None:
            self._key = hash(frozenset(tokens for values in self._by_first.values() for tokens in values))
        return self._key

    @property
    def values(self) -> Values:
        return self._by_first


def occurrences(values: Values, folded: Folded) -> Iterator[Found]:
    """Where values stand in a folded text."""
    for first, at in _begun(values, folded):
        for tokens, kind in values[first].items():
            if end := _end(folded.text, at, tokens, kind is Kind.PERSON):
                yield Found(at, end, kind)


def _begun(values: Values, folded: Folded) -> Iterator[tuple[str, int]]:
    """First tokens of values and where they stand. A few are looked for, many looked up."""
    few = len(values) <= _FEW and all(first.isascii() for first in values)
    if not few:
        for match in _TOKEN.finditer(folded.text):
            if (first := match[0].lower()) in values:
                yield first, match.start()
        return
    for first in values:
        at = folded.lower.find(first)
        while at >= 0:
            token = _TOKEN.match(folded.text, at)
            if token and token[0].lower() == first and not (at and _LATIN.match(folded.text, at - 1)):
                yield first, at
            at = folded.lower.find(first, at + 1)


def _end(text: str, at: int, wanted: tuple[str, ...], exact: bool) -> int:
    """Where the tokens that begin at `at` end; 0 if they are others or stand too far apart."""
    end = at
    for number, token in enumerate(wanted):
        there = _TOKEN.search(text, end)
        if there is None or (number and there.start() - end > 3):
            return 0
        if (there[0] if exact else there[0].lower()) != token:
            return 0
        end = there.end()
    return end


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
