"""Finds personal identifiers in a text, and everywhere else what was found once.

Knows the rules of this folder, in which order they win, and the user's own terms; doesn't know placeholders or
where text goes. Time is linear in the text: nothing looks farther than a few dozen characters ahead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

from perilune.service.privacy import (
    cues,
    dates,
    names_en,
    names_zh,
    network,
    numbers,
    phones,
    places,
    secrets,
)
from perilune.service.privacy import (
    fold as folding,
)
from perilune.service.privacy.anchors import Scanner
from perilune.service.privacy.blocks import VARIANTS, Begun, Block, Memo, blocks
from perilune.service.privacy.fold import Folded, fold
from perilune.service.privacy.kinds import STRENGTH, Found, Kind
from perilune.service.privacy.known import Known, Seen, filter_of, occurrences, place_of
from perilune.service.privacy.placeholders import literals, with_literals

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


@cache
def scanner() -> Scanner:
    """The automaton over what all rules look for; made once, when somebody first needs it."""
    modules = (folding, network, numbers, phones, secrets, dates, places, cues)
    return Scanner((*(each for module in modules for each in module.ANCHORED), *names_en.anchored()))


class Detector:
    """Finds identifiers. Immutable; `terms` are the user's own words, found whole and in any case. Without
    `anchored` every rule reads everything: the same findings, more slowly (the tests' oracle)."""

    def __init__(
        self, terms: Iterable[str] = (), kinds: Iterable[Kind] = tuple(Kind), anchored: bool = True
    ) -> None:
        self._scanner = scanner() if anchored else None
        known = sorted({term.strip() for term in terms if term.strip()}, key=len, reverse=True)
        joined = "|".join(_term(term) for term in known)
        self._terms = re.compile(joined, re.IGNORECASE) if joined else None
        self._kinds = frozenset(kinds)

    def find(self, text: str) -> list[Found]:
        """What one text holds, in order, without overlaps."""
        return self.find_all([text])[0]

    def find_all(self, texts: Sequence[str], memo: Memo | None = None, tenant: str = "") -> list[list[Found]]:
        """What each of several texts of one conversation holds. What is found in one is found in all of them.
        Blocks that `memo` knows of this tenant aren't read again. Text that looks like a stand-in is found, too."""
        begun = memo.begun(tenant, texts) if memo is not None else Begun()
        whole = self._going_on(begun, texts, memo, tenant)
        if whole is None:
            whole = self._going_on(Begun(), texts, memo, tenant)
            assert whole is not None
        if memo is not None and texts:
            memo.remember(tenant, texts, whole)
            last = len(texts) - 1
            if last and all(at < last for at, _ in whole.values):  # the question may come otherwise
                memo.remember(tenant, texts, Begun(last, whole.found[:last], whole.values, whole.places))
        return [list(found) for found in whole.found]

    def _going_on(self, begun: Begun, texts: Sequence[str], memo: Memo | None, tenant: str) -> Begun | None:
        """What all texts hold, where the beginning is known; None where later ones hold values that the beginning
        has to be searched for."""
        old = {(texts[at][item.start : item.end], item.kind): (at, item) for at, item in begun.values}
        more = texts[begun.size :]
        cut = [[(block, self._seen(block, memo, tenant)) for block in blocks(text)] for text in more]
        first = [_merged(_shifted(block, item) for block, seen in each for item in seen.found) for each in cut]
        values = dict(old)
        for at, (text, found) in enumerate(zip(more, first, strict=True), begun.size):
            for item in found:
                values.setdefault((text[item.start : item.end], item.kind), (at, item))
        if begun.size and len(values) > len(old):
            return None
        numbered = list(values)
        places = begun.places if begun.size else tuple(_places(numbered))
        known = None if begun.size else _known(numbered, places)
        result = list(begun.found)
        for each, found in zip(cut, first, strict=True):
            others = [
                _shifted(block, item)
                for block, seen in each
                for item in _others(known or _known(numbered, places, seen), block, seen)
            ]
            literals = [_shifted(block, item) for block, seen in each for item in seen.literals]
            result.append(tuple(with_literals(_merged([*found, *others]), literals)))
        return Begun(len(texts), tuple(result), tuple(values.values()), places)

    def _seen(self, block: Block, memo: Memo | None, tenant: str) -> Seen:
        """What a block holds by itself."""
        key = memo.key(block) if memo is not None else b""
        seen = memo.get(tenant, key) if memo is not None else None
        if seen is None:
            seen = self._read(block)
            if memo is not None:
                memo.put(tenant, key, seen)
        return seen

    def _read(self, block: Block) -> Seen:
        folded = fold(block.context, self._scanner)
        found = _merged(self._once(folded))
        known = Known()
        for item in found:
            start, end = folded.origin(item.start, item.end)
            known.add(fold(block.context[start:end]).text, item.kind)
        if found:
            found = _merged([*found, *occurrences(known.values, folded)])
        own = frozenset(hash(tokens) for values in known.values.values() for tokens in values)
        return Seen(
            _inside(block, (Found(*folded.origin(item.start, item.end), item.kind) for item in found)),
            _inside(block, literals(block.context)),
            filter_of(folded),
            own,
        )

    def _once(self, folded: Folded) -> Iterator[Found]:
        for rule in _RULES:
            for found in rule(folded):
                if found.kind in self._kinds and not _is_public(folded.text, found):
                    yield found
        if self._terms is not None:
            for match in self._terms.finditer(folded.text):
                yield Found(match.start(), match.end(), Kind.TERM)


def _inside(block: Block, found: Iterable[Found]) -> tuple[Found, ...]:
    """What begins in the block itself, from its start."""
    size = block.end - block.start
    moved = (Found(item.start - block.lead, item.end - block.lead, item.kind) for item in found)
    return tuple(item for item in moved if 0 <= item.start < size)


def _shifted(block: Block, item: Found) -> Found:
    return Found(item.start + block.start, item.end + block.start, item.kind)


def _places(values: Iterable[tuple[str, Kind]]) -> Iterator[tuple[int, int]]:
    """Where a filter tells which of the values a block may hold."""
    for number, (value, kind) in enumerate(values):
        known = Known()
        known.add(fold(value).text, kind)
        for first in known.values:
            yield place_of(first), number


def _known(
    values: Sequence[tuple[str, Kind]], places: Iterable[tuple[int, int]], seen: Seen | None = None
) -> Known:
    """The values, or those of them that a block may hold."""
    known = Known()
    for number in sorted({number for place, number in places if seen is None or seen.may_hold(place)}):
        value, kind = values[number]
        known.add(fold(value).text, kind)
    return known


def _others(known: Known, block: Block, seen: Seen) -> tuple[Found, ...]:
    """Values of the rest of the conversation in a block."""
    key = known.key
    if key not in seen.others:
        wanted = known.beyond(seen)
        folded = fold(block.context) if wanted else Folded("", "")
        found = (Found(*folded.origin(each.start, each.end), each.kind) for each in occurrences(wanted, folded))
        if len(seen.others) >= VARIANTS:
            seen.others.clear()
        seen.others[key] = _inside(block, found)
    return seen.others[key]


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
