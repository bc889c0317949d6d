"""Dates in English and Chinese writing, where a word beside them says that somebody was born then.

Knows folded text. Years before 1900 are history, not personal data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from perilune.service.privacy.anchors import Anchored
from perilune.service.privacy.fold import Folded
from perilune.service.privacy.kinds import Found, Kind

_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_DAY = r"[0-3]?[0-9](?:st|nd|rd|th)?"
_YEAR = r"(?:(?:19|20)[0-9]{2}|['’][0-9]{2})"
_HANZI = "零〇○一二三四五六七八九十廿卅"
_SEP = r"[ ]?\n?[\-/.–—][ ]?\n?"
DATE = (
    rf"(?:(?<![0-9])(?:19|20)[0-9]{{2}}{_SEP}[01]?[0-9]{_SEP}[0-3]?[0-9](?![0-9])"
    rf"|(?<![0-9])[0-3]?[0-9]{_SEP}[0-3]?[0-9]{_SEP}(?:(?:19|20)[0-9]{{2}}|[0-9]{{2}})(?![0-9])"
    rf"|(?<![0-9a-z]){_DAY}[ \-/,.]{{0,2}}\n?(?:of[ ])?{_MONTH}[ \-/,.]{{0,3}}\n?(?:{_YEAR}|[0-9]{{2}}(?![0-9]))"
    rf"|(?<![a-z]){_MONTH}[ \-/.]{{0,2}}\n?{_DAY}[ \-/,.]{{0,3}}\n?{_YEAR}"
    rf"|(?<![0-9]){_YEAR}[ \-/,.]{{1,2}}{_MONTH}[ \-/,.]{{1,2}}{_DAY}"
    rf"|(?<![0-9])(?:(?:19|20)?[0-9]{{2}}|[{_HANZI}]{{2,4}})[ ]?年[ ]?\n?(?:[农旧阴公阳][历曆])?[正腊闰]?[0-9"
    rf"{_HANZI}]{{0"
    rf",3}}[ ]?月"
    rf"[ ]?\n?(?:[初]?[0-9{_HANZI}]{{1,3}}[ ]?[日号號]?)?"
    rf"|(?<![0-9])(?:19|20)[0-9]{{2}}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])(?![0-9])"
    rf"|(?<![0-9])(?:[农旧阴公阳][历曆])?[正腊闰]?[0-9{_HANZI}]{{1,3}}[ ]?月[ ]?[初]?[0-9{_HANZI}]{{1,3}}["
    rf" ]?[日号號]?"
    rf"|(?<![0-9a-z]){_DAY}[ ](?:of[ ])?{_MONTH}(?![a-z])|(?<![a-z]){_MONTH}[ ]{_DAY}(?![0-9])"
    rf"|(?<![a-z]){_MONTH}[ ,]{{1,2}}(?:19|20)[0-9]{{2}}|(?<![0-9])(?:19|20)[0-9]{{2}}[\-/.][01]?[0-9](?![0-9])"
    rf"|(?<![0-9])(?:19|20)?[0-9]{{2}}[ ]?年(?:生|出生)|(?<![0-9])(?:0[1-9]|1[0-2])/(?:[0-2][0-9]|3[01])(?![0-9/])"
    r"|(?<![0-9])[0-3]?[0-9][ \n][01]?[0-9][ \n](?:19|20)[0-9]{2}(?![0-9])"
    r"|(?<![0-9])(?:19|20)[0-9]{2}[ \n][01]?[0-9][ \n][0-3]?[0-9](?![0-9])"
    r"|(?<=born in )(?:19|20)[0-9]{2}(?![0-9]))"
)
_DATE = re.compile(DATE)
_CUE = re.compile(
    r"(?<![a-z])(?:d\.?o\.?b\.?|date[ _\-]of[ _\-]birth|birth[ _\-]?(?:date|day|days)?|b-?day|born|né|née"
    r"|geboren|birthday|geb\."
    r"|b\.(?=[ ][0-9]))|出生|生日|生于|生於|生辰|诞辰|誕辰|岁生|年生|月生|日生|号生|破壳日|降生|birthdate|生年月日"
)
_BORN = re.compile(rf"(?P<date>{DATE})[ ]?(?:出?生|诞生)(?![产活效成日意态涯物])")
_REACH_BEFORE, _REACH_AFTER = 60, 30


def find(folded: Folded) -> Iterator[Found]:
    """Dates near a word for birth. Linear in the text."""
    text = folded.lower
    for match in folded.matches_lower(_BORN):
        yield Found(*match.span("date"), Kind.BIRTH_DATE)
    for cue in folded.matches_lower(_CUE):
        start = max(0, cue.start() - _REACH_AFTER)
        end = min(len(text), cue.end() + _REACH_BEFORE)
        for match in _DATE.finditer(text, start, end):
            yield Found(match.start(), match.end(), Kind.BIRTH_DATE)


ANCHORED = (
    Anchored(_BORN, r"[0-9日号號月年廿卅一二三四五六七八九十][ ]?(?:出?生|诞生|誕生)", left=48, right=4),
    Anchored(
        _CUE,
        r"d\.?o\.?b|birth|b-?day|born|né|geb|b\.[ ][0-9]|出生|生日|生于|生於|生辰|诞辰|誕辰|[岁年月日号歲號]生"
        r"|破壳日|破殼日|降生|生年月日",
        left=16,
        right=16,
    ),
)
