"""Whether two questions ask the same thing, as far as words tell: what stands between likeness and a wrong answer.

Knows English and Chinese words; no model. It says no where it isn't sure: numbers, names, quoted words, question
words, negations and words of direction must agree, and most of the other words.
"""

from __future__ import annotations

import re
import unicodedata

_NUMBER = re.compile(r"[0-9]+(?:[.,][0-9]+)*|[〇零一二三四五六七八九十百千万亿两]+")
_WORD = re.compile(r"[a-z0-9À-ɏ]+(?:'[a-z]+)?|[\u3400-\u9fff]")
_NAME = re.compile(r"(?<=[\w,;:] )[A-Z][\w'’-]*")
_QUOTED = re.compile("[\"“《「『'‘]([^\"”》」』'’]{1,80})[\"”》」』'’]")
_TELLING = frozenset(
    word
    for line in (
        "above accept add after allow before begin below best buy cannot cheapest close dearest decrease",
        "disable down earlier east enable end except exclude fall false first forbid from future he her",
        "highest his how in include increase last later least left less lowest many max maximum min minimum",
        "more most much my neither never new next no nor north not old only open our out over past previous",
        "receive reject remove right rise sell send she since south start their to true under until up west",
        "what when where which who whom whose why without worst yes your",
    )
    for word in line.split()
)
_SHORT_IS = re.compile(r"(?<=what|that|when)['’]s\b|(?<=where)['’]s\b|(?<=who|how)['’]s\b")
_CONTRACTED = re.compile(r"n['’]t\b")
_TELLING_HANZI = (
    "不没无非未别莫谁哪何几多少怎为否前后上下左右东南西北大小高低早晚先后始终开关进出买卖收支"
    "增减加删升降快慢新旧男女他她我你首末最只除内外"
)
_FILLING = frozenset(
    word
    for line in (
        "a about an and are at be been by can could did do does find for give i is it me of on or please said",
        "say says show tell that the the's there this was we were with would you",
    )
    for word in line.split()
)
_FILLING_HANZI = frozenset("一下与个之也了及吗吧呢和啊在就把是有的被请这那都")
_LEAST_OVERLAP = 0.6


def same_question(one: str, other: str) -> bool:
    """Whether an answer to the one surely answers the other."""
    first, second = _plain(one), _plain(other)
    if first == second:
        return True
    if _found(_NUMBER, first) != _found(_NUMBER, second) or _telling(first) != _telling(second):
        return False
    if set(_NAME.findall(one)) != set(_NAME.findall(other)) or _found(_QUOTED, one) != _found(_QUOTED, other):
        return False
    left, right = _content(first), _content(second)
    return bool(left) and len(left & right) >= _LEAST_OVERLAP * len(left | right)


def plain(text: str) -> str:
    """A question without case, width, punctuation and blanks that don't matter."""
    return " ".join(_WORD.findall(_plain(text)))


def _plain(text: str) -> str:
    return _CONTRACTED.sub(" not", _SHORT_IS.sub(" is", unicodedata.normalize("NFKC", text).casefold()))


def _found(pattern: re.Pattern[str], text: str) -> list[str]:
    return sorted(pattern.findall(text))


def _telling(text: str) -> list[str]:
    words = _WORD.findall(text)
    return sorted(word for word in words if word in _TELLING or word in _TELLING_HANZI)


def _content(text: str) -> frozenset[str]:
    words = (word for word in _WORD.findall(text) if word not in _FILLING and word not in _FILLING_HANZI)
    return frozenset(word[:-1] if len(word) > 3 and word.endswith("s") else word for word in words)
