"""Numbers whose digits prove what they are: cards, resident and other national ids, tax codes, IBANs.

Knows folded text and check digits; needs no words around. A run of digit groups is looked at window by window, so
that two numbers side by side, or one with blanks or line breaks inside, are told apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from perilune.service.privacy import checks
from perilune.service.privacy.anchors import Anchored
from perilune.service.privacy.fold import Folded
from perilune.service.privacy.kinds import Found, Kind

_JOINT = r"(?:[ \t]?[\-–—‑.·][ \t]?|[_/]|[ \t]{1,2}|\n)"
_RUN = re.compile(rf"(?<![0-9])[0-9]++(?:{_JOINT}[0-9]++)*+[ \-]?[xX]?(?![0-9])")
_GROUP = re.compile(r"[0-9]++(?:[ \-]?[xX](?![A-Za-z0-9]))?")
_MAX_GROUPS = 20
_HEX_AROUND = re.compile(r"[A-Za-z0-9]{0,40}\Z")

_IBAN = re.compile(r"(?<![A-Z0-9])[A-Z]{2}[ \-]?[0-9]{2}(?:[ \-\n]{0,2}[A-Z0-9]){11,30}", re.IGNORECASE)
_CREDIT = re.compile(
    r"(?<![A-Z0-9])[0-9A-HJ-NPQRTUWXY](?:[ \-\n]?[0-9A-HJ-NPQRTUWXY]){17}(?![A-Z0-9])", re.IGNORECASE
)
_SPANISH = re.compile(
    r"(?<![A-Z0-9])[XYZ0-9][ \-.]?[0-9]{1,2}[.]?[0-9]{3}[.]?[0-9]{2,3}[ \-.]?[A-Z](?![A-Z0-9])", re.I
)
_HONG_KONG = re.compile(r"(?<![A-Z0-9])[A-Z]{1,2} ?[0-9]{3} ?[0-9]{3} ?\(?[0-9A]\)?(?![A-Z0-9])")
_UK_INSURANCE = re.compile(
    r"(?<![A-Z0-9])[A-Z]{2}[ \-]?[0-9]{2}[ \-]?[0-9]{2}[ \-]?[0-9]{2}[ \-]?[A-D](?![A-Z0-9])",
    re.IGNORECASE,
)
_UK_LICENCE = re.compile(r"(?<![A-Z0-9])[A-Z9]{5}[ ]?[0-9]{6}[ ]?[A-Z9]{2}[ ]?[0-9][A-Z]{2}(?![A-Z0-9])")
_CPF = re.compile(r"(?<![0-9])[0-9]{3}\.?[0-9]{3}\.?[0-9]{3}[\-/]?[0-9]{2}(?![0-9])")
_SSN = re.compile(r"(?<![0-9\-])[0-9]{3}(?P<joint>[ ]?[\-–—‑][ ]?|[ .\n])[0-9]{2}(?P=joint)[0-9]{4}(?![0-9\-])")
_VAT = re.compile(
    r"(?<![A-Z0-9])(?:ATU[ ]?[0-9]{8}|BE[ ]?[01][0-9]{3}\.?[0-9]{3}\.?[0-9]{3}|BG[0-9]{9,10}|CY[0-9]{8}[A-Z]"
    r"|CZ[0-9]{8,10}|DE[ ]?[0-9]{3}[ ]?[0-9]{3}[ ]?[0-9]{3}|DK[ ]?[0-9]{8}|E[EL][0-9]{9}|ES["
    r" \-]?[A-Z0-9][0-9]{7}[A-Z0-9]"
    r"|FI[0-9]{8}|FR[ ]?[A-Z0-9]{2}[ ]?[0-9]{3}[ ]?[0-9]{3}[ ]?[0-9]{3}|GB[ ]?[0-9]{3}[ ]?[0-9]{4}["
    r" ]?[0-9]{2}(?:[0-9]{3})?"
    r"|HR[0-9]{11}|HU[0-9]{8}|IE[0-9][A-Z0-9+*][0-9]{5}[A-Z]{1,2}|IT[ ]?[0-9]{11}|LT[0-9]{9,12}|LU[0-9]{8}"
    r"|LV[0-9]{11}"
    r"|MT[0-9]{8}|NL[ ]?[0-9]{9}B[0-9]{2}|PL[ ]?[0-9]{10}|PT[ ]?[0-9]{9}|RO[0-9]{6,10}|SE[0-9]{12}|SI[0-9]{8}"
    r"|SK[0-9]{10}"
    r"|CHE[\- ]?[0-9]{3}\.?[0-9]{3}\.?[0-9]{3})(?![A-Z0-9])"
)


def find(folded: Folded) -> Iterator[Found]:
    """In any order; findings may overlap. Linear in the text."""
    text = folded.text
    for run in folded.matches(_RUN):
        if run.end() - run.start() >= 10 and not _inside_code(text, run.start(), run.end()):
            yield from _in_run(run)
    yield from _lettered(folded)


def _inside_code(text: str, start: int, end: int) -> bool:
    """The digits are part of a longer mix of letters and digits, such as a hash."""
    before = _HEX_AROUND.search(text, max(0, start - 40), start)
    left = before[0] if before else ""
    right = text[end : end + 2]
    mixed = any(char.isdigit() for char in left) and any(char.isalpha() for char in left)
    return mixed or (len(right) == 2 and right.isascii() and right.isalnum() and right[1].isdigit())


def _in_run(run: re.Match[str]) -> Iterator[Found]:
    groups = [(match[0], match.start(), match.end()) for match in _GROUP.finditer(run[0])]
    base, at = run.start(), 0
    while at < len(groups):
        taken = 1
        digits = ""
        best: tuple[int, Kind] | None = None
        for count, (text, _, _) in enumerate(groups[at : at + _MAX_GROUPS], 1):
            digits += text
            if len(_plain(digits)) > 19:
                break
            kind = _kind_of(_plain(digits), [len(group) for group, _, _ in groups[at : at + count]])
            if kind is not None:
                best = (count, kind)
        if best is not None:
            taken = best[0]
            yield Found(base + groups[at][1], base + groups[at + taken - 1][2], best[1])
        at += taken


def _plain(digits: str) -> str:
    return "".join(char for char in digits if char.isalnum()).upper()


def _kind_of(value: str, sizes: list[int]) -> Kind | None:
    """What so many digits are, written in groups of these sizes."""
    if len(value) == 18 and value[:17].isdigit() and "11" <= value[:2] <= "91" and checks.resident_id(value):
        return Kind.NATIONAL_ID if checks.has_birthday(value, 6, 4) else None
    if not value.isdigit():
        return None
    if len(value) == 15 and len(sizes) <= 3 and "11" <= value[:2] <= "65" and checks.has_birthday(value, 6, 2):
        return Kind.NATIONAL_ID
    if 15 <= len(value) <= 19 and value[0] in "2345689" and _grouped_like_a_card(sizes) and checks.luhn(value):
        return Kind.BANK_CARD
    if len(value) == 14 and value[:2] in ("30", "36", "38") and sizes in ([14], [4, 6, 4]) and checks.luhn(value):
        return Kind.BANK_CARD
    if len(value) == 10 and sizes in ([3, 3, 4],) and checks.nhs(value) and value[0] in "4679":
        return Kind.MEDICAL_RECORD
    return None


def _grouped_like_a_card(sizes: list[int]) -> bool:
    """Whole, in fours or so, single digits, or broken once or twice anywhere: not a row of unlike numbers."""
    return len(sizes) <= 3 or all(size == 1 for size in sizes) or all(size >= 3 for size in sizes[:-1])


def _lettered(folded: Folded) -> Iterator[Found]:
    for match in folded.matches(_IBAN):
        yield from _iban(match)
    for pattern, kind, proves in _PROVEN:
        for match in folded.matches(pattern):
            if proves(match[0]):
                yield Found(match.start(), match.end(), kind)


def _digits(value: str) -> str:
    return "".join(filter(str.isdigit, value))


_PROVEN: tuple[tuple[re.Pattern[str], Kind, Callable[[str], bool]], ...] = (
    (_CREDIT, Kind.TAX_ID, lambda value: checks.credit_code(_plain(value))),
    (_SPANISH, Kind.NATIONAL_ID, lambda value: len(_plain(value)) == 9 and checks.spanish_id(_plain(value))),
    (
        _HONG_KONG,
        Kind.NATIONAL_ID,
        lambda value: ("(" in value or len(value) == 8) and checks.hong_kong_id(_plain(value)),
    ),
    (_CPF, Kind.NATIONAL_ID, lambda value: "." in value and checks.cpf(_digits(value))),
    (_SSN, Kind.NATIONAL_ID, lambda value: checks.us_social_security(_digits(value))),
    (_UK_INSURANCE, Kind.NATIONAL_ID, bool),
    (_UK_LICENCE, Kind.LICENCE, bool),
    (_VAT, Kind.TAX_ID, bool),
)
"""What letters and digits look like, and what proves it."""


def _iban(match: re.Match[str]) -> Iterator[Found]:
    """The country says how many places belong to it; what follows may be the next word."""
    value = _plain(match[0])
    length = checks.IBAN_LENGTHS.get(value[:2])
    if length is None or len(value) < length or not checks.iban(value[:length]):
        return
    places = 0
    for offset, char in enumerate(match[0]):
        places += char.isalnum()
        if places == length:
            yield Found(match.start(), match.start() + offset + 1, Kind.IBAN)
            return


_DIGITS = r"[0-9](?:[ \t\n\-–—‑.·_/]{0,3}[0-9])"
ANCHORED = (
    Anchored(_RUN, rf"{_DIGITS}{{9}}", left=48, right=8, widen=frozenset("0123456789 \t\n-–—‑.·_/xX")),
    Anchored(_IBAN, r"[A-Z]{2}[ \-]?[0-9]{2}(?:[ \-\n]{0,2}[A-Z0-9]){11}", left=44, right=80),
    Anchored(_CREDIT, r"[0-9A-HJ-NPQRTUWXY](?:[ \-\n]?[0-9A-HJ-NPQRTUWXY]){17}", left=48, right=8),
    Anchored(_SPANISH, r"[XYZ0-9][ \-.]?[0-9]{1,2}[.]?[0-9]{3}[.]?[0-9]{2,3}[ \-.]?[A-Z]", left=20, right=4),
    Anchored(_HONG_KONG, r"[A-Z] ?[0-9]{3} ?[0-9]{3} ?\(?[0-9A]", left=16, right=4, caseless=False),
    Anchored(_UK_INSURANCE, r"[A-Z]{2}[ \-]?[0-9]{2}[ \-]?[0-9]{2}[ \-]?[0-9]{2}[ \-]?[A-D]", left=20, right=4),
    Anchored(_UK_LICENCE, r"[A-Z9]{5}[ ]?[0-9]{6}[ ]?[A-Z9]{2}[ ]?[0-9][A-Z]{2}", left=24, right=4, caseless=False),
    Anchored(_CPF, r"[0-9]{3}\.?[0-9]{3}\.?[0-9]{3}[\-/]?[0-9]{2}", left=20, right=4),
    Anchored(
        _SSN, r"[0-9]{3}(?:[ ]?[\-–—‑][ ]?|[ .\n])[0-9]{2}(?:[ ]?[\-–—‑][ ]?|[ .\n])[0-9]{4}", left=24, right=4
    ),
    Anchored(
        _VAT,
        _VAT.pattern.removeprefix("(?<![A-Z0-9])").removesuffix("(?![A-Z0-9])"),
        left=32,
        right=8,
        caseless=False,
    ),
)
