"""A text as the rules read it: full-width forms made plain, invisible characters gone, digits in words as digits.

Knows characters and where each one came from; doesn't know identifiers. Only the finder reads folded text: what
leaves and what comes back keeps every character that wasn't replaced.
"""

from __future__ import annotations

import itertools
import re
import string
import unicodedata
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from perilune.service.privacy.anchors import Anchored, Scanner, Windows

_INVISIBLE = "\u00ad\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufe00-\ufe0f\ufeff"
_HANZI_DIGITS = "零〇○一二三四五六七八九两幺壹贰叁肆伍陆柒捌玖"
_HANZI_VALUES = "00012345678921123456789"
_WORDS = {"zero": "0", "oh": "0", "nought": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5"} | {
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
}
_WORD = "(?:" + "|".join(_WORDS) + ")"
_ESCAPE = re.compile(r"(?P<escape>\\u[0-9a-fA-F]{4}|\\[nrt\"/])")
_OTHER_DIGITS = (
    "".join(
        chr(code)
        for first, last in ((0x660, 0x669), (0x6F0, 0x6F9), (0x966, 0x96F), (0x2460, 0x2468), (0x2074, 0x2079))
        for code in range(first, last + 1)
    )
    + "\u2070\u00b9\u00b2\u00b3"
)
_CODES = 0x10000
_HANZI_NUMBER = re.compile(rf"[{_HANZI_DIGITS}](?:[ \-]?[{_HANZI_DIGITS}]){{5,40}}")
_HANZI_TABLE = str.maketrans(_HANZI_DIGITS, _HANZI_VALUES)
_SPECIAL = re.compile(
    r"(?P<quoted>\n[ \t]{0,3}>[> ]{0,8})"
    rf"|(?P<invisible>[{_INVISIBLE}])"
    rf"|(?P<words>(?<![A-Za-z]){_WORD}(?:[ ,\-]{{1,2}}(?:and )?{_WORD}(?![A-Za-z])){{2,40}})",
    re.IGNORECASE,
)
_ANY_WORD = re.compile(_WORD, re.IGNORECASE)
_TRADITIONAL = (
    "訂單編號碼歷車電話護帳賬戶員證學門診運遞發銀聯繫絡駕駛稅識別納機務會險職醫處區樓棟層縣鎮鄉廣號賓貨驗"
)
_SIMPLIFIED = "订单编号码历车电话护帐账户员证学门诊运递发银联系络驾驶税识别纳机务会险职医处区楼栋层县镇乡广号宾货验"
_SCRIPTS = dict(zip(_TRADITIONAL, _SIMPLIFIED, strict=True))


def spellings(word: str) -> Iterator[str]:
    """A word of the lists as it may be written: blanks as _, - or nothing, characters simplified or traditional."""
    choices = [
        (" ", "_", "-", "") if char == " " else (char, *(old for old in _SCRIPTS if _SCRIPTS[old] == char))
        for char in word
    ]
    return map("".join, itertools.product(*choices))


@dataclass(frozen=True, slots=True)
class Folded:
    """`text` is what the rules read; `lower` the same with ASCII capitals lowered and the traditional characters of
    cues made simplified, so that offsets agree.

    `starts` and `ends` map its characters to the original's; None: they are the same. `windows` are where patterns
    may match (`anchors.Scanner`); None: anywhere."""

    text: str
    lower: str
    starts: array[int] | None = None
    ends: array[int] | None = None
    windows: Windows | None = None

    def matches(self, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
        """The pattern's matches in `text`, read only where its anchors are."""
        return self._matches(pattern, self.text)

    def matches_lower(self, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
        """The same in `lower`."""
        return self._matches(pattern, self.lower)

    def _matches(self, pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
        if self.windows is None:
            yield from pattern.finditer(text)
            return
        for low, high in self.windows.get(id(pattern), ()):
            yield from pattern.finditer(text, low, high)

    def origin(self, start: int, end: int) -> tuple[int, int]:
        """The original characters that folded ones `start`:`end` (not empty) came from."""
        if self.starts is None or self.ends is None:
            return start, end
        return self.starts[start], self.ends[end - 1]


def fold(text: str, scanner: Scanner | None = None) -> Folded:
    """Linear in the text. Escapes of JSON strings come first: what they stand for may be special itself."""
    once = _pass(text, _ESCAPE) if "\\" in text else Folded(text, "")
    plain = _plain(once.text)
    windows = scanner.windows(plain) if scanner else None
    special = windows is None or id(_SPECIAL) in windows
    twice = _pass(plain, _SPECIAL, windows) if special else Folded(plain, "")
    starts, ends = once.starts, once.ends
    if twice.starts is not None and twice.ends is not None:
        if scanner:
            windows = scanner.windows(twice.text)
        if starts is None or ends is None:
            starts, ends = twice.starts, twice.ends
        else:
            starts, ends = (
                array("q", (starts[at] for at in twice.starts)),
                array("q", (ends[at - 1] for at in twice.ends)),
            )
    return Folded(twice.text, _lower(twice.text), starts, ends, windows)


@cache
def _narrow_table() -> npt.NDArray[np.uint32]:
    """Full-width forms and blanks and other scripts' digits as ASCII, by code point."""
    table = np.arange(_CODES, dtype=np.uint32)
    table[0xFF01:0xFF5F] = range(0x21, 0x7F)
    table[[0x3000, 0xA0, 0x202F, *range(0x2000, 0x200B)]] = ord(" ")
    for char in _OTHER_DIGITS:
        table[ord(char)] = ord("0") + unicodedata.digit(char)
    return table


@cache
def _lower_table() -> npt.NDArray[np.uint32]:
    table = np.arange(_CODES, dtype=np.uint32)
    table[ord("A") : ord("Z") + 1] += 32
    for old, new in _SCRIPTS.items():
        table[ord(old)] = ord(new)
    return table


def _mapped(text: str, table: npt.NDArray[np.uint32]) -> str:
    """Every character replaced by the table's. As long as the text."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    found = np.where(codes < _CODES, table[np.minimum(codes, _CODES - 1)], codes)
    return found.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


def _plain(text: str) -> str:
    """What other characters stand for plain ones, as these."""
    if text.isascii():
        return text
    return _HANZI_NUMBER.sub(lambda match: match[0].translate(_HANZI_TABLE), _mapped(text, _narrow_table()))


def _lower(text: str) -> str:
    return text.lower() if text.isascii() else _mapped(text, _lower_table())


def _pass(text: str, pattern: re.Pattern[str], windows: Windows | None = None) -> Folded:
    builder = _Builder(text)
    at = 0
    for match in Folded(text, "", windows=windows).matches(pattern):
        builder.copy(at, match.start())
        if pattern is _ESCAPE:
            _unescape(builder, match)
        else:
            _fold_one(builder, match)
        at = match.end()
    if at == 0:
        return Folded(text, "")
    builder.copy(at, len(text))
    return Folded("".join(builder.pieces), "", builder.starts, builder.ends)


class _Builder:
    def __init__(self, text: str) -> None:
        self.text = text
        self.pieces: list[str] = []
        self.starts: array[int] = array("q")
        self.ends: array[int] = array("q")

    def copy(self, start: int, end: int) -> None:
        self.pieces.append(self.text[start:end])
        self.starts.extend(range(start, end))
        self.ends.extend(range(start + 1, end + 1))

    def put(self, char: str, start: int, end: int) -> None:
        self.pieces.append(char)
        self.starts.append(start)
        self.ends.append(end)


def _unescape(builder: _Builder, match: re.Match[str]) -> None:
    found = match[0]
    plain = {"n": "\n", "r": "\n", "t": "\t"}.get(found[1], found[1])
    char = chr(int(found[2:], 16)) if found[1] == "u" else plain
    if not "\ud800" <= char <= "\udfff":
        builder.put(char, match.start(), match.end())


def _fold_one(builder: _Builder, match: re.Match[str]) -> None:
    start, end, found = match.start(), match.end(), match[0]
    if match["quoted"]:
        builder.put("\n", start, end)
    elif match["words"]:
        for word in _ANY_WORD.finditer(found):
            builder.put(_WORDS[word[0].lower()], start + word.start(), start + word.end())


ANCHORED = (
    Anchored(
        _SPECIAL,
        (
            r"\n[ \t]{0,3}>",
            f"[{_INVISIBLE}]",
            rf"{_WORD}[ ,\-]{{1,2}}(?:and )?{_WORD}[ ,\-]{{1,2}}(?:and )?{_WORD}",
        ),
        left=48,
        right=16,
        widen=frozenset(string.ascii_letters + " ,-"),
    ),
)

_SEPARATORS = re.compile(r"[^0-9A-Za-zÀ-ÿ\u3040-\u30ff\u3400-\u9fff]+")


def normal(value: str) -> str:
    """What two ways to write one value have in common."""
    return _SEPARATORS.sub("", fold(value).lower) or value
