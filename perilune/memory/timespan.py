"""Times that a question names ("在1月中旬", "last May", "2024-03-05"), as ranges to hold entries' times against.

Knows calendars and two languages, no entries. A month or day without a year is the last such one before the
question was asked. Times are local to the person who asks, so `now` is theirs; ranges are seconds since the epoch,
taken as UTC, like the naive times of chat logs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

_MONTHS = (
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
)
_MONTH = "|".join(f"{name}|{name[:3]}\\.?" if len(name) > 3 else name for name in _MONTHS) + r"|sept\.?"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_THIRDS = {
    "上旬": (1, 10),
    "中旬": (11, 20),
    "下旬": (21, 31),
    "初": (1, 10),
    "中": (11, 20),
    "底": (21, 31),
    "末": (21, 31),
}
_ZH_DIGITS = "一二三四五六七八九"
_ZH_NUMERAL = re.compile(
    r"(?<![零〇一二三四五六七八九十])(?:三?十[一二三四五六七八九]?|二十[一二三四五六七八九]?|[一二三四五六七八九])(?=[月日号])"
)
_DAY_S = 86_400
_MAX_TOLD_CHARS = 1_000
_MIN_YEAR, _MAX_YEAR = 1900, 2100
MAX_SPANS = 8
"""Times read from a question: each is a search of its own, and a pasted log names thousands."""

_Match = re.Match[str]


@dataclass(frozen=True, slots=True)
class Span:
    """From `since_s` to `until_s`, both included."""

    since_s: float
    until_s: float


def spans(question: str, now: datetime) -> list[Span]:
    """What the question names, each time once, without what lies inside an already read expression."""
    found: list[Span] = []
    rest = _ZH_NUMERAL.sub(lambda match: str(_zh_number(match[0])), question)
    for pattern, read in _PATTERNS:
        for match in pattern.finditer(rest):
            span = _safely(read, match, now)
            if span is not None:
                if span not in found:
                    found.append(span)
                if len(found) == MAX_SPANS:
                    return found
                rest = rest[: match.start()] + " " * (match.end() - match.start()) + rest[match.end() :]
    return found


def _safely(read: Callable[[_Match, datetime], Span | None], match: _Match, now: datetime) -> Span | None:
    """None for what looks like a date and is none (31 February, 99/99)."""
    try:
        return read(match, now)
    except (ValueError, OverflowError):
        return None


def _days(start: datetime, days: float) -> Span:
    return Span(start.timestamp(), (start + timedelta(days=days)).timestamp() - 1)


def _day(year: int, month: int, day: int) -> Span:
    if not _MIN_YEAR <= year <= _MAX_YEAR:
        raise ValueError(year)
    return _days(datetime(year, month, day, tzinfo=UTC), 1)


def _month(year: int, month: int) -> Span:
    if not _MIN_YEAR <= year <= _MAX_YEAR:
        raise ValueError(year)
    start = datetime(year, month, 1, tzinfo=UTC)
    return Span(start.timestamp(), _next_month(start).timestamp() - 1)


def _next_month(start: datetime) -> datetime:
    return start.replace(year=start.year + start.month // 12, month=start.month % 12 + 1, day=1)


def _year(year: int) -> Span:
    return Span(_month(year, 1).since_s, _month(year, 12).until_s)


def _last(month: int, now: datetime, day: int = 1) -> int:
    """The year in which this month (and day) last began."""
    return now.year - ((now.month, now.day) < (month, day))


def _number(word: str) -> int:
    """1 to 12 of an English month's name."""
    return next(at for at, name in enumerate(_MONTHS, 1) if name.startswith(word.lower().rstrip(".")[:3]))


def _zh_number(word: str) -> int:
    """一 to 三十一."""
    tens, ten, ones = word.rpartition("十")
    return (_ZH_DIGITS.find(tens) + 1 if tens else 1) * 10 * bool(ten) + (_ZH_DIGITS.find(ones) + 1 if ones else 0)


def _zh_date(match: _Match, now: datetime) -> Span:
    month = int(match["month"])
    day = int(match["day"]) if match["day"] else 0
    year = _zh_year(match["year"], now) if match["year"] else _last(month, now, day or 1)
    if day:
        return _day(year, month, day)
    whole = _month(year, month)
    if not match["third"]:
        return whole
    first, last = _THIRDS[match["third"]]
    start = datetime(year, month, first, tzinfo=UTC)
    return Span(start.timestamp(), min(_days(start, last - first + 1).until_s, whole.until_s))


def _zh_year(word: str, now: datetime) -> int:
    word = word.rstrip("年的")
    return now.year + {"今": 0, "去": -1, "前": -2, "明": 1}[word] if word in "今去前明" else int(word)


def _en_date(match: _Match, now: datetime) -> Span:
    month = _number(match["month"])
    day = int(match["day"]) if match["day"] else 0
    year = int(match["year"]) if match["year"] else _last(month, now, day or 1)
    return _day(year, month, day) if day else _month(year, month)


def _relative(match: _Match, now: datetime) -> Span | None:
    today = now.replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=UTC)
    monday = today - timedelta(days=today.weekday())
    word = re.sub(r"\s+", " ", match[0].lower())
    first = today.replace(day=1)
    for words, span in (
        (("今天", "today"), _days(today, 1)),
        (("昨天", "昨晚", "yesterday", "last night"), _days(today - timedelta(1), 1)),
        (("前天",), _days(today - timedelta(2), 1)),
        (("这周", "本周", "this week"), _days(monday, 7)),
        (("上周", "last week"), _days(monday - timedelta(7), 7)),
        (("这个月", "本月", "this month"), _month(first.year, first.month)),
        (("上个月", "上月", "last month"), _days_of_last_month(first)),
        (("今年", "this year"), _year(now.year)),
        (("去年", "last year"), _year(now.year - 1)),
    ):
        if word in words:
            return span
    return None


def _days_of_last_month(first: datetime) -> Span:
    before = first - timedelta(days=1)
    return _month(before.year, before.month)


_PATTERNS: tuple[tuple[re.Pattern[str], Callable[[_Match, datetime], Span | None]], ...] = (
    (
        re.compile(r"\b(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})\b"),
        lambda m, _: _day(int(m[1]), int(m[2]), int(m[3])),
    ),
    (
        re.compile(
            r"(?:(?P<year>\d{4}\s*年|[今去前明]年的?)\s*)?(?<!\d)(?P<month>1[0-2]|0?[1-9])\s*月(?!\s*前)"
            r"(?:\s*(?P<day>[12]\d|3[01]|0?[1-9])\s*[日号]|份?\s*(?P<third>上旬|中旬|下旬|初|中(?!午|心|国|秋|学)|底|末))?"
        ),
        _zh_date,
    ),
    (re.compile(r"(\d{4})\s*年"), lambda m, _: _year(int(m[1]))),
    (
        re.compile(rf"\b{_DAY}(?:\s+of)?\s+(?P<month>{_MONTH})\b,?(?:\s+(?P<year>\d{{4}})\b)?", re.I),
        _en_date,
    ),
    (
        re.compile(rf"\b(?P<month>{_MONTH})\s+(?:{_DAY}\b,?\s*(?P<year>\d{{4}})?\b|(?P<only>\d{{4}})\b)", re.I),
        lambda m, now: _month(int(m["only"]), _number(m["month"])) if m["only"] else _en_date(m, now),
    ),
    (
        re.compile(rf"\b(?:in|during|since|of|last|this|by)\s+(?P<month>{_MONTH})\b(?P<day>)(?P<year>)", re.I),
        _en_date,
    ),
    (re.compile(r"\b(?:in|during|since|of)\s+((?:19|20)\d{2})\b", re.I), lambda m, _: _year(int(m[1]))),
    (
        re.compile(
            r"今天|昨天|昨晚|前天|这周|本周|上周|这个月|本月|上个月|上月|今年|去年|"
            r"\b(?:today|yesterday|last\s+night|(?:this|last)\s+(?:week|month|year))\b",
            re.I,
        ),
        _relative,
    ),
)


def covered(at_s: float | None, named: Sequence[Span]) -> bool:
    """Whether a time lies in one of the ranges."""
    return at_s is not None and any(span.since_s <= at_s <= span.until_s for span in named)


def event_time(text: str, told_s: float | None) -> float | None:
    """When what a text tells happened: on the one past day that it names ("they did it on 19 April"), else when it
    was told. Texts with several days tell several things, and days to come are plans."""
    if told_s is None:
        return None
    named = spans(text[:_MAX_TOLD_CHARS], datetime.fromtimestamp(told_s, UTC))
    if len(named) == 1 and named[0].until_s - named[0].since_s < _DAY_S and named[0].since_s <= told_s:
        return min(named[0].since_s + _DAY_S / 2, told_s)
    return told_s
