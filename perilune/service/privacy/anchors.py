"""Where a text may hold what a pattern finds: one pass over all patterns' anchors, by a multi-pattern automaton.

An anchor is a piece that every match of its pattern holds: digits, an @, a word. The automaton (Vectorscan, through
the hyperscan package; some hundred anchors, a gigabyte a second) finds them all at once, and the patterns read only
the windows around theirs. Knows patterns and offsets; doesn't know identifiers.
"""

from __future__ import annotations

import re
import string
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import hyperscan
import numpy as np

Windows = Mapping[int, Sequence[tuple[int, int]]]
"""Characters to read by the `id` of the pattern; patterns without a window match nowhere."""

_LETTERS = frozenset(string.ascii_letters.encode())
_SMALL = ord("a")
_SLACK = 16
"""Characters that a pattern may look at behind its match."""


@dataclass(frozen=True, slots=True, eq=False)
class Anchored:
    """`pattern` matches only within `left` characters before and `right` behind the end of one of `anchors` (in the
    automaton's syntax: PCRE without look-around) or of `words`.

    Words are plain: those of ASCII stand between other characters than ASCII letters. A match that is longer to the
    left goes on over characters of `widen`. `near`: a match of it is in the window, too, or up to
    `near_chars` before and behind it. Of `words` those that are in `capital` too begin with a capital.
    """

    pattern: re.Pattern[str]
    anchors: str | tuple[str, ...] = ()
    left: int = 64
    right: int = 64
    caseless: bool = True
    widen: frozenset[str] = frozenset()
    near: re.Pattern[str] | None = None
    near_chars: int = 0
    words: frozenset[str] = frozenset()
    capital: frozenset[str] = frozenset()

    def widened_left(self, text: str, at: int) -> int:
        while at > 0 and text[at - 1] in self.widen:
            at -= 1
        return at

    def widened_right(self, text: str, at: int) -> int:
        while self.widen and at < len(text) and text[at] in self.widen:
            at += 1
        return at

    def holds(self, text: str, low: int, high: int) -> bool:
        if self.near is None:
            return True
        return self.near.search(text, max(0, low - self.near_chars), high + self.near_chars) is not None


@dataclass(slots=True)
class Scanner:
    """The automaton over the anchors of many patterns. One scan at a time; threads wait for each other (a
    millisecond for a megabyte)."""

    anchored: Sequence[Anchored]
    _owners: list[list[int]] = field(init=False)
    _words: dict[int, tuple[int, bool]] = field(init=False)
    _database: hyperscan.Database = field(init=False)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        owners: dict[tuple[str, int], list[int]] = {}  # equal anchors are looked for once
        words: dict[int, tuple[str, bool]] = {}
        for number, each in enumerate(self.anchored):
            for anchor in (each.anchors,) if isinstance(each.anchors, str) else each.anchors:
                owners.setdefault((anchor, _flags(anchor, each.caseless)), []).append(number)
        for number, each in enumerate(self.anchored):
            for word in sorted(each.words):
                # A comment tells words apart that are equal but for the capital.
                key = re.escape(word) + ("(?#C)" if word in each.capital else ""), hyperscan.HS_FLAG_CASELESS
                if key not in owners:
                    words[len(owners)] = word, word in each.capital
                owners.setdefault(key, []).append(number)
        self._owners = list(owners.values())
        self._words = {at: (len(word), capital) for at, (word, capital) in words.items() if word.isascii()}
        self._database = hyperscan.Database()
        self._database.compile(
            expressions=[anchor.encode() for anchor, _ in owners],
            ids=list(range(len(owners))),
            elements=len(owners),
            flags=[flags for _, flags in owners],
        )

    def windows(self, text: str) -> Windows:
        """The windows of every pattern that may match somewhere, in order and apart from each other."""
        ends = self._ends(text)
        found: dict[int, Sequence[tuple[int, int]]] = {}
        for each, places in zip(self.anchored, ends, strict=True):
            if places and (windows := list(_merged(each, text, places))):
                found[id(each.pattern)] = windows
        return found

    def _ends(self, text: str) -> list[list[int]]:
        """Where anchors end, by pattern, in characters, ascending."""
        data = text.encode("utf-8", "replace")  # a lone surrogate becomes one "?": the automaton wants valid text
        ends: list[list[int]] = [[] for _ in self.anchored]

        def seen(number: int, start: int, end: int, flags: int, context: object) -> None:
            if number in self._words and not _stands(data, end, *self._words[number]):
                return
            for owner in self._owners[number]:
                ends[owner].append(end)

        with self._lock:
            self._database.scan(data, match_event_handler=seen)
        if len(data) != len(text):
            begins = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80
            chars = np.concatenate(([0], np.cumsum(begins)))
            ends = [chars[places].tolist() if places else places for places in ends]
        return ends


def _stands(data: bytes, end: int, size: int, capital: bool) -> bool:
    """Whether a word stands by itself, and begins with a capital if it must."""
    if (end < len(data) and data[end] in _LETTERS) or (end > size and data[end - size - 1] in _LETTERS):
        return False
    return not capital or data[end - size] < _SMALL


def _flags(anchor: str, caseless: bool) -> int:
    """Plain bytes where that says the same: they compile and run much faster."""
    flags = hyperscan.HS_FLAG_MULTILINE
    if caseless:
        flags |= hyperscan.HS_FLAG_CASELESS
    return flags if anchor.isascii() and "\\x" not in anchor else flags | hyperscan.HS_FLAG_UTF8


def _merged(each: Anchored, text: str, ends: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Windows around the ends, those that touch joined."""
    low, high = 0, -1
    for end in sorted(ends):
        begin, until = max(0, end - each.left), end + each.right + _SLACK
        if begin > high:
            if high >= 0 and each.holds(text, low, high):
                yield low, high
            low = each.widened_left(text, begin)
        if until > high:
            high = each.widened_right(text, until)
    if high >= 0 and each.holds(text, low, high):
        yield low, high
