"""A text as the rules read it: full-width forms made plain, invisible characters gone, digits in words as digits.

Knows characters and where each one came from; doesn't know identifiers. Only the finder reads folded text: what
leaves and what comes back keeps every character that wasn't replaced.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass

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
_SPECIAL = re.compile(
    r"(?P<quoted>\n[ \t]{0,3}>[> ]{0,8})"
    rf"|(?P<invisible>[{_INVISIBLE}])"
    r"|(?P<wide>[\uff01-\uff5e\u3000\u00a0\u2000-\u200a\u202f])"
    rf"|(?P<hanzi>[{_HANZI_DIGITS}](?:[ \-]?[{_HANZI_DIGITS}]){{5,40}})"
    r"|(?P<other>[\u0660-\u0669\u06f0-\u06f9\u0966-\u096f\u2460-\u2468\u2070\u00b9\u00b2\u00b3\u2074-\u2079])"
    rf"|(?P<words>(?<![A-Za-z]){_WORD}(?:[ ,\-]{{1,2}}(?:and )?{_WORD}(?![A-Za-z])){{2,40}})",
    re.IGNORECASE,
)
_ANY_WORD = re.compile(_WORD, re.IGNORECASE)
_PLAIN = re.compile(r"[\x00-\x7f]*\Z")
_TRADITIONAL = (
    "訂單編號碼歷車電話護帳賬戶員證學門診運遞發銀聯繫絡駕駛稅識別納機務會險職醫處區樓棟層縣鎮鄉廣號賓貨驗"
)
_SIMPLIFIED = "订单编号码历车电话护帐账户员证学门诊运递发银联系络驾驶税识别纳机务会险职医处区楼栋层县镇乡广号宾货验"
_LOWER = str.maketrans({chr(code): chr(code + 32) for code in range(65, 91)}) | str.maketrans(
    _TRADITIONAL, _SIMPLIFIED
)


@dataclass(frozen=True, slots=True)
class Folded:
    """`text` is what the rules read; `lower` the same with ASCII capitals lowered and the traditional characters of
    cues made simplified, so that offsets agree.

    `starts` and `ends` map its characters to the original's; None: they are the same."""

    text: str
    lower: str
    starts: array[int] | None = None
    ends: array[int] | None = None

    def origin(self, start: int, end: int) -> tuple[int, int]:
        """The original characters that folded ones `start`:`end` (not empty) came from."""
        if self.starts is None or self.ends is None:
            return start, end
        return self.starts[start], self.ends[end - 1]


def fold(text: str) -> Folded:
    """Linear in the text. Escapes of JSON strings come first: what they stand for may be special itself."""
    if "\\" not in text:
        return _pass(text, _SPECIAL)
    once = _pass(text, _ESCAPE)
    twice = _pass(once.text, _SPECIAL)
    if once.starts is None or once.ends is None:
        return twice
    if twice.starts is None or twice.ends is None:
        return once
    starts = array("q", (once.starts[at] for at in twice.starts))
    ends = array("q", (once.ends[at - 1] for at in twice.ends))
    return Folded(twice.text, twice.lower, starts, ends)


def _pass(text: str, pattern: re.Pattern[str]) -> Folded:
    builder = _Builder(text)
    at = 0
    for match in pattern.finditer(text):
        builder.copy(at, match.start())
        if pattern is _ESCAPE:
            _unescape(builder, match)
        else:
            _fold_one(builder, match)
        at = match.end()
    if at == 0:
        return Folded(text, text.translate(_LOWER))
    builder.copy(at, len(text))
    folded = "".join(builder.pieces)
    return Folded(folded, folded.translate(_LOWER), builder.starts, builder.ends)


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
    elif match["wide"]:
        builder.put(chr(ord(found) - 0xFEE0) if "\uff01" <= found <= "\uff5e" else " ", start, end)
    elif match["other"]:
        builder.put(_digit(found), start, end)
    elif match["hanzi"]:
        for offset, char in enumerate(found):
            at = _HANZI_DIGITS.find(char)
            builder.put(_HANZI_VALUES[at] if at >= 0 else char, start + offset, start + offset + 1)
    elif match["words"]:
        for word in _ANY_WORD.finditer(found):
            builder.put(_WORDS[word[0].lower()], start + word.start(), start + word.end())


def _digit(char: str) -> str:
    import unicodedata

    return str(unicodedata.digit(char))


_SEPARATORS = re.compile(r"[^0-9A-Za-zÀ-ÿ\u3040-\u30ff\u3400-\u9fff]+")


def normal(value: str) -> str:
    """What two ways to write one value have in common."""
    return _SEPARATORS.sub("", fold(value).lower) or value
