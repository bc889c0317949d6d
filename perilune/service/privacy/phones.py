"""Telephone numbers by their shape: Chinese, North American, British, continental and international ones.

Knows folded text. Numbers that only the words around make a phone number are found in `cues`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from perilune.service.privacy.anchors import Anchored
from perilune.service.privacy.fold import Folded
from perilune.service.privacy.kinds import Found, Kind

_GAP = r"(?:[ \t]{0,2}[\-–—‑.·/][ \t]{0,2}|[ \t]{1,2}|[ \t]?\n[ \t]?|[()]{1,2}[ ]?|[ ]\()"
EXTENSION = (
    r"(?:[ ]{0,2},?[ ]{0,2}(?:ext(?:ension|n)?\.?|x|#|转|轉|分机|分機|内线)[ ]{0,2}(?:号|no\.?)?["
    r" :：#]{0,2}[0-9]{1,6}(?![0-9]))?"
)
_BEFORE = r"(?<![0-9A-Za-z_])"
_AFTER = r"(?![0-9])"


def _digits(count: int) -> str:
    """So many digits with at most one gap between two of them."""
    return rf"[0-9](?:{_GAP}?[0-9]){{{count - 1}}}"


_PATTERNS = tuple(
    re.compile(r"(?:tel:[ ]?|callto:)?" + pattern + EXTENSION, re.IGNORECASE)
    for pattern in (
        # International: + or 00, country, subscriber.
        rf"(?<![0-9+])(?:\+|(?<![0-9.])00(?=[1-9])){_GAP}?[1-9](?:{_GAP}?[0-9]){{6,14}}(?![0-9])",
        rf"(?<![0-9])\(\+?[1-9][0-9]{{0,2}}\){_GAP}?[0-9](?:{_GAP}?[0-9]){{6,12}}{_AFTER}",
        # Chinese mobile, with or without 86; letters may touch it ("tel13…"), digits not.
        rf"(?<![0-9])(?:86{_GAP}?)?1{_GAP}?[3-9]{_GAP}?{_digits(9)}{_AFTER}",
        # Chinese landline: area code 0xx or 0xxx in brackets or not.
        rf"(?<![0-9])\(?0{_GAP}?[1-9][0-9]{{1,2}}\)?{_GAP}?[1-9](?:{_GAP}?[0-9]){{6,7}}{_AFTER}",
        # Service lines.
        rf"(?<![0-9])[48]00{_GAP}?{_digits(7)}{_AFTER}",
        # North America.
        rf"(?<![0-9])(?:1{_GAP}?)?\([2-9][0-9]{{2}}\){_GAP}?[2-9][0-9]{{2}}{_GAP}?[0-9]{{4}}{_AFTER}",
        r"(?<![0-9])(?<![0-9][.\-])(?:1[ .\-])?[2-9][0-9]{2}([.\- \n])[2-9][0-9]{2}[.\- \n][0-9]{4}(?![0-9\-])",
        r"(?<![0-9.\-/$€£¥])[2-9][0-9]{2}[\-‑–][0-9]{4}(?![0-9\-]|\.[0-9])",
        r"(?<![0-9A-Za-z.\-])[2-9][0-9]{2}[2-9][0-9]{6}(?![0-9A-Za-z]|[.\-][0-9])",
        # Britain and the continent: a trunk 0.
        rf"{_BEFORE}\(?0[1-9](?:{_GAP}?[0-9]\)?){{7,10}}{_AFTER}",
    )
)


def find(folded: Folded) -> Iterator[Found]:
    """In any order; findings may overlap. Linear in the text."""
    text = folded.text
    for pattern in _PATTERNS:
        for match in folded.matches(pattern):
            if not _is_something_else(text, match):
                yield Found(match.start(), match.end(), Kind.PHONE)


_DATE = re.compile(
    r"(?:19|20)[0-9]{2}[\-/.][01]?[0-9][\-/.][0-3]?[0-9]|[0-3]?[0-9][\-/.][01]?[0-9][\-/.](?:19|20)?[0-9]{2}"
)


def _is_something_else(text: str, match: re.Match[str]) -> bool:
    """A date with a trunk-like zero, or digits inside a longer code."""
    start = match.start()
    if _DATE.match(match[0]) and not match[0].startswith(("+", "00", "(")):
        return True
    left = text[max(0, start - 24) : start]
    tail = re.search(r"[A-Za-z0-9]*\Z", left)
    token = tail[0] if tail else ""
    if any(char.isdigit() for char in token):
        return True
    return start > 1 and text[start - 1] == "." and text[start - 2].isdigit()


ANCHORED = tuple(
    Anchored(pattern, r"[0-9](?:[ \t\n\-–—‑.·/()]{0,6}[0-9]){6}", left=80, right=48) for pattern in _PATTERNS
)
"""Seven digits, with what may stand between them."""
