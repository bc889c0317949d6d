"""Values that only a word beside them tells: orders, accounts, staff numbers, passports, chat ids, user names, …

Knows folded text. Each value looks for the nearest word that says what it is, before it or behind it, in the same
line; the shape that the kind allows decides whether it counts. A value right behind its word may be short.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from perilune.service.privacy.anchors import Anchored
from perilune.service.privacy.fold import Folded, spellings
from perilune.service.privacy.kinds import Found, Kind
from perilune.service.privacy.lists import labelled, words

_SHAPES: dict[Kind, tuple[int, int, bool]] = {
    # least characters right behind the word, least characters farther away, letters without digits allowed
    Kind.ORDER: (4, 7, False),
    Kind.ACCOUNT: (4, 7, False),
    Kind.STAFF_ID: (3, 4, False),
    Kind.MEDICAL_RECORD: (3, 6, False),
    Kind.PASSPORT: (6, 7, False),
    Kind.LICENCE: (6, 8, False),
    Kind.NATIONAL_ID: (6, 8, False),
    Kind.TAX_ID: (7, 8, False),
    Kind.PLATE: (4, 5, False),
    Kind.MAC: (12, 12, False),
    Kind.SECRET: (6, 16, False),
    Kind.PHONE: (5, 7, False),
}
_LATIN = {word: Kind(kind) for word, kind in labelled("cues.txt") if word.isascii()}
_HANZI = {word: Kind(kind) for word, kind in labelled("cues.txt") if not word.isascii()}
_CUE = re.compile(
    r"(?<![a-z])(?:"
    + "|".join(sorted((re.escape(w).replace(r"\ ", "[ _-]?") for w in _LATIN), key=len, reverse=True))
    + r")(?![a-z])"
    r"|" + "|".join(sorted(_HANZI, key=len, reverse=True))
)

_VALUE = re.compile(
    r"(?<![A-Za-z0-9@._/\-])(?P<value>(?:[A-Z]{1,3}[ ](?=[0-9]{3}))?[A-Za-z0-9](?:[ \t]?[\-–]["
    r" \t]?(?=[A-Za-z0-9])|[_/.](?=[A-Za-z0-9])|(?<=[0-9])[ ](?=[0-9]{2,}(?![A-Za-z:]))"
    r"|(?<=[0-9])[ ](?=[A-Z]{1,3}(?![A-Za-z]))|(?<=[A-Za-z0-9])\n(?=[0-9]{2})|[A-Za-z0-9]){2,47})(?![A-Za-z0-9])"
)
_NOT_A_VALUE = re.compile(
    r"(?:(?:19|20)[0-9]{2}[\-/.][01]?[0-9][\-/.][0-3]?[0-9](?:[ T].*)?"
    r"|[0-3]?[0-9][\-/.][0-3]?[0-9][\-/.](?:19|20)?[0-9]{2}|(?:19|20)[0-9]{2}|[0-9]{1,3}(?:[.,][0-9]{1,2})?"
    r"|[0-9]{1,2}[\-–][0-9]{1,2}|[0-9]{1,2}(?:st|nd|rd|th|am|pm|h|km|kg|mb|gb|ms|px|%)"
    r"|v?[0-9]+(?:\.[0-9]+){1,3}(?:[\-+][a-z0-9.]+)?|[0-9]{1,3}/[0-9]{1,3}|(?:19|20)[0-9]{2}[\-–/](?:19"
    r"|20)?[0-9]{2}|[0-9]+[.,][0-9]{1,2}"
    r"|[0-9]{1,3}(?:[, ][0-9]{3})+(?:\.[0-9]+)?)\Z",
    re.IGNORECASE,
)
_MONEY_BEFORE = re.compile(r"(?:[$€£¥₹]|usd|rmb|cny|eur|gbp|hk\$|人民币|美元|金额|总价|共计)[ ]?\Z", re.IGNORECASE)
_MONEY_AFTER = re.compile(
    r"[ ]?(?:元|块|万|亿|美元|欧元|人民币|usd|rmb|cny|eur|dollars|euros|pounds|%|个|件|次|天|年|月(?![0-9])"
    r"|人|kg|km|gb|mb|rows|items|units|days|hours|minutes|percent)",
    re.IGNORECASE,
)
_FILL = re.compile(
    r"[^A-Za-z0-9\u4e00-\u9fff\n]{0,4}(?:(?:no|nr|num|number|id|code|ref|reference|is|was|are|to|of|the|our"
    r"|my|with|号码|号|编号|编码|尾号|证号|代码|是|为|叫|：|的|和|给|我|你|您|一下|打|ref)"
    r"[^A-Za-z0-9\u4e00-\u9fff\n]{0,4}){0,4}\n?[\"'“ #:(（]{0,3}\Z",
    re.IGNORECASE,
)
_REACH_BEFORE, _REACH_AFTER, _VALUE_CHARS = 48, 22, 100
_DIGITS_ONLY = re.compile(r"[0-9 \-./]+\Z")

_CHAT = re.compile(
    r"(?:(?<![a-z])(?:wechat|weixin|wx|vx|qq|skype|telegram|whatsapp|line|discord|signal|kakao|snapchat|viber"
    r"|icq)(?![a-z])|微信|威信|薇信|扣扣|企鹅号?|v信|飞书|钉钉|加v|加我v|(?<=[\u4e00-\u9fff])v(?=[ :：]))"
    r"(?:号码|号|账号|帐号|id|[ ]id|[ ]no\.?|[ ]number|[ ]account|群)?(?:(?:[ ]?(?:is|也?是|为|就是|：|同号"
    r"|还是|加|搜|改成了?|换成了?)[ ]?)|[^a-z0-9\u4e00-\u9fff\n]{0,4}){1,3}\n?"
    r"(?P<value>[a-z][a-z0-9_\-]{4,24}|[1-9][0-9](?:[ \-]?[0-9]){3,10})(?![a-z0-9@])"
)
_CHAT_AFTER = re.compile(
    r"(?<![a-z0-9@.])(?P<value>[a-z][a-z0-9_\-]{5,24}|[1-9][0-9]{4,10})[^a-z0-9\u4e00-\u9fff\n]{0,3}(?:is my"
    r"|是我的?|on|\()[ ]?(?:wechat|qq|微信|telegram|skype|discord|line)"
)
_WXID = re.compile(r"(?<![A-Za-z0-9_])wxid_[a-z0-9]{6,30}")
_USER = re.compile(
    r"(?:(?<![a-z])(?:user[ _\-]?name|user[ _\-]?id|user|login(?:[ _\-]?(?:name|id))?|log[ ]?in[ ](?:as|with)"
    r"|logged[ ]in[ ](?:as|by)|sign(?:ed)?[ ]in[ ]as|uid|handle|screen[ ]?name|nick(?:name)?|alias|account["
    r" ]name"
    r"|instagram|insta|ig|twitter|github|gitlab|reddit|tiktok|steam(?:[ ]id)?|gamertag|psn|xbox|twitch|x\.com"
    r"|owner|assignee|author|committer|acct|sudo[ ]-u|su[ ]-|samaccountname|principal)(?![a-z])"
    r"|用户名|用户|登录名|登陆名|登录账号|登录号|登录名称|账户名|账号名?|帐号|用户账号|昵称|网名|域账号|微博|"
    r"抖音号?|小红书号?|b站|知乎|用户id|登录)"
    r"(?P<gap>[\"'”]?(?:[ ]?(?:is|was|are|为|是|叫|改成|：)[ ]?|[ ]?[:=＝：→][ ]?|[ ]"
    r"|(?<=[\u4e00-\u9fff]))[\"'“@`]{0,2}\n?)"
    r"(?!user|login|name|handle|account|id[ :=])"
    r"(?P<value>[a-z][a-z0-9_.\-]{2,31})(?![a-z0-9@(])"
)
_AT_HANDLE = re.compile(
    r"(?<![A-Za-z0-9_@/.%+\-])@(?P<value>[A-Za-z_][A-Za-z0-9_.\-]{1,31}"
    r"|[\u4e00-\u9fff]{2,4})(?![A-Za-z0-9_@/(]|\.[a-z])"
)
_SSH = re.compile(
    r"(?<![A-Za-z])(?:ssh|scp|sftp|rsync|mosh|ftp)[ ](?:-[A-Za-z]+[ ](?:[0-9]{1,5}[ ]|[^\s@-][^\s@]{0,60}["
    r" ])?){0,4}(?P<value>[A-Za-z_][A-Za-z0-9_.\-]{1,31})@"
)
_PROMPT = re.compile(
    r"(?<![A-Za-z0-9_.\-])(?P<value>[a-z_][a-z0-9_.\-]{1,31})@[A-Za-z0-9\-]{1,40}(?:\.[A-Za-z0-9\-]{1,40}){0,4"
    r"}:[~/]"
)
_HOME = re.compile(
    r"(?:/home/|/Users/|[A-Za-z]:\\{1,2}Users\\{1,2}|/export/home/|~(?=[a-z]))(?P<value>[A-Za-z0-9_.\-]{2,32})"
)
_WORDS_IN_CAPITALS = frozenset(
    {"NO", "ID", "NR", "IS", "OF", "TO", "AT", "ON", "IN", "THE", "AND", "FOR", "REF", "NUM"}
)
_VAGUE = frozenset({"number", "号码", "contact", "联系"})
_DEPARTMENT = re.compile(
    r"(?:工号|员工编号|编号|工牌|胸牌|警号)(?:是|为)?[\"”]?[ :：=]{0,3}[\"“]?(?P<value>[\u4e00-\u9fff]{1,4}[\-"
    r"–][0-9]{3,8})(?![0-9])"
)
_GLUED = re.compile(
    r"(?:order|account|acct|tracking|parcel|ticket|invoice|单子|mrn)(?P<value>[a-z]{0,3}[0-9]{6,24})(?![a-z0-9])"
)
_PLATED = re.compile(
    r"(?:(?<![a-z])(?:plates?|registration|reg|rego)(?![a-z])|车牌|牌照|车号)(?:[ ]?(?:number|no\.?|num|mark"
    r"|号码|号|is|was|为|是|：)){0,3}[ :：=#(]{0,3}\n?[\"'“]?"
    r"(?P<value>(?=[a-z \-]{0,8}[0-9])[a-z0-9]{1,4}(?:[ \-·][a-z0-9]{1,4}(?![a-z0-9])){1,3}"
    r"|(?=[a-z]{0,4}[0-9])[a-z0-9]{5,8})(?![a-z0-9])"
)
_REDDIT = re.compile(r"(?<![A-Za-z0-9])/?u/(?P<value>[A-Za-z0-9_.\-]{3,32})")
_CARRIER = re.compile(
    r"(?<![A-Za-z0-9])(?:SF[0-9]{12,15}|1Z[A-Z0-9]{16}|YT[0-9]{13,15}|JD[A-Z]{0,2}[0-9]{10,15}|ZT[0-9]{12,14}"
    r"|STO?[0-9]{12,13}|[A-Z]{2}[0-9]{9}(?:CN|GB|US|DE|FR|HK|SG|JP|NL)|JJD[0-9]{12,20}"
    r"|TBA[0-9]{10,14})(?![A-Za-z0-9])"
)


@dataclass(frozen=True, slots=True)
class _Cue:
    start: int
    end: int
    kind: Kind
    vague: bool  # a word that stands behind others: "order number"


def find(folded: Folded) -> Iterator[Found]:
    """In any order; findings may overlap. Linear in the text."""
    yield from _numbers(folded)
    yield from _accounts(folded)
    for match in folded.matches(_CARRIER):
        yield Found(match.start(), match.end(), Kind.ORDER)
    for pattern, kind in (
        (_DEPARTMENT, Kind.STAFF_ID),
        (_GLUED, Kind.ORDER),
        (_PLATED, Kind.PLATE),
        (_REDDIT, Kind.USERNAME),
    ):
        for match in folded.matches_lower(pattern):
            yield Found(*match.span("value"), kind)


def _cues(folded: Folded) -> list[_Cue]:
    found = []
    for match in folded.matches_lower(_CUE):
        word = re.sub("[_-]", " ", match[0])
        kind = _HANZI.get(match[0]) or _LATIN.get(match[0]) or _LATIN.get(word) or _LATIN.get(word.replace(" ", ""))
        if kind is not None:
            found.append(_Cue(match.start(), match.end(), kind, match[0] in _VAGUE))
    return found


def _numbers(folded: Folded) -> Iterator[Found]:
    cues = _cues(folded)
    if not cues:
        return
    text = folded.text
    starts = [cue.start for cue in cues]
    for match in _values(text, cues):
        start, end = match.span("value")
        at = bisect_left(starts, start)
        near = cues[max(0, at - 6) : at + 4]
        if near and (found := _told(text, start, end, near)):
            yield found


def _values(text: str, cues: list[_Cue]) -> Iterator[re.Match[str]]:
    """Values that are near enough to a word to be told by it."""
    low, high = 0, -1
    for cue in cues:
        begin = cue.start - _REACH_AFTER - _VALUE_CHARS
        if begin > high:
            yield from _VALUE.finditer(text, low, max(high, 0))
            low = max(begin, 0)
        high = cue.end + _REACH_BEFORE + _VALUE_CHARS
    yield from _VALUE.finditer(text, low, max(high, 0))


def _told(text: str, start: int, end: int, near: list[_Cue]) -> Found | None:
    """The value with the kind that the nearest fitting word gives it."""
    head, _, rest = text[start:end].partition(" ")
    if rest and (head.lower() in _LATIN or head in _WORDS_IN_CAPITALS):  # the word itself, in capitals
        start += len(head) + 1
    value = text[start:end]
    digits = sum(char.isdigit() for char in value)
    if digits < 2 or _NOT_A_VALUE.match(value) or _MONEY_BEFORE.search(text, max(0, start - 6), start):
        return None
    if _MONEY_AFTER.match(text, end):
        return None
    best: tuple[int, Kind] | None = None
    for cue in near:
        before = cue.end <= start
        distance = start - cue.end if before else cue.start - end
        if distance < 0 or distance > (_REACH_BEFORE if before else _REACH_AFTER):
            continue
        between = text[cue.end : start] if before else text[end : cue.start]
        if "\n\n" in between or (between.count("\n") and distance > 16):
            continue
        behind = before and _FILL.fullmatch(between) is not None
        if cue.kind is Kind.PHONE and not _DIGITS_ONLY.match(value):
            continue
        if not before and digits < 5:
            continue
        least = _SHAPES[cue.kind][0 if behind else 1]
        if len(value) < least or digits < min(3, least - 1) or (not behind and digits < 4):
            continue
        rank = (
            distance
            if behind
            else distance
            + 12
            + (20 if not before else 0)
            + (25 if cue.kind is Kind.PHONE and (not behind or cue.vague) else 0)
        )
        if best is None or rank < best[0]:
            best = rank, cue.kind
    return None if best is None else Found(start, end, best[1])


def _accounts(folded: Folded) -> Iterator[Found]:
    text = folded.text
    for pattern in (_CHAT, _CHAT_AFTER):
        for match in folded.matches_lower(pattern):
            value = match["value"]
            if any(char.isdigit() or char in "_-" for char in value) or not _is_word(value):
                yield Found(match.start("value"), match.end("value"), Kind.CHAT_ID)
    for match in folded.matches_lower(_WXID):
        yield Found(match.start(), match.end(), Kind.CHAT_ID)
    for match in folded.matches_lower(_USER):
        value = match["value"].rstrip(".-")
        loose = not match["gap"].strip(" \"'“@`") and match["gap"] != ""
        if value in words("system_users.txt") or (loose and _is_word(value)) or value.startswith("http"):
            continue
        yield Found(match.start("value"), match.start("value") + len(value), Kind.USERNAME)
    for match in folded.matches(_AT_HANDLE):
        if (
            match["value"].lower().rstrip(".") not in words("decorators.txt")
            and text[match.end() : match.end() + 1] != "("
        ):
            yield Found(match.start(), match.end(), Kind.USERNAME)
    for pattern in (_SSH, _PROMPT, _HOME):
        for match in folded.matches(pattern):
            if match["value"].lower() not in words("system_users.txt"):
                yield Found(match.start("value"), match.end("value"), Kind.USERNAME)


def _is_word(value: str) -> bool:
    """Only letters, so perhaps an ordinary word."""
    return value.isalpha()


_CHATS = (
    r"(?:^|[^a-z])(?:wechat|weixin|wx|vx|qq|skype|telegram|whatsapp|line|discord|signal|kakao|snapchat|viber|icq)"
)
ANCHORED = (
    Anchored(
        _CUE,
        words=frozenset(written for word in (*_LATIN, *_HANZI) for written in spellings(word)),
        left=32,
        right=4,
        near=re.compile("[0-9]"),
        near_chars=_REACH_BEFORE + _VALUE_CHARS,
    ),
    Anchored(
        _CHAT,
        (_CHATS, r"微信|威信|薇信|扣扣|企鹅号?|企鵝|v信|飞书|飛書|钉钉|釘釘|加v|加我v|[^\x00-\x7f]v[ :：]"),
        left=16,
        right=80,
    ),
    Anchored(
        _CHAT_AFTER,
        r"(?:is my|是我的?|on|\()[ ]?(?:wechat|qq|微信|telegram|skype|discord|line)",
        left=48,
        right=8,
    ),
    Anchored(_WXID, r"wxid_", left=8, right=40),
    Anchored(
        _USER,
        (
            r"(?:^|[^a-z])(?:user|login|log[ ]?in[ ](?:as|with)|logged[ ]in[ ](?:as|by)|sign(?:ed)?[ ]in[ ]as|uid"
            r"|handle|screen[ ]?name|nick|alias|account[ ]name|instagram|insta|ig|twitter|github|gitlab|reddit"
            r"|tiktok|steam|gamertag|psn|xbox|twitch|x\.com|owner|assignee|author|committer|acct|sudo[ ]-u|su[ ]-"
            r"|samaccountname|principal)",
            "用户|用戶|登录|登錄|登陆|登陸|账户名|账戶名|賬戶名|帐户|账号|账號|賬號|帐号|帐號|帳號|昵称|网名|域账号|微博|抖音|小红书|b站|知乎",
        ),
        left=24,
        right=80,
    ),
    Anchored(_AT_HANDLE, "@", left=8, right=48),
    Anchored(_SSH, r"(?:^|[^A-Za-z])(?:ssh|scp|sftp|rsync|mosh|ftp)[ ]", left=16, right=420, caseless=False),
    Anchored(_PROMPT, "@", left=40, right=260),
    Anchored(_HOME, r"/home/|/Users/|[A-Za-z]:\\{1,2}Users\\|~[a-z]", left=16, right=48, caseless=False),
    Anchored(_DEPARTMENT, "工号|工號|编号|编號|編號|編号|工牌|胸牌|警号|警號", left=12, right=32),
    Anchored(
        _GLUED,
        r"(?:order|account|acct|tracking|parcel|ticket|invoice|单子|mrn)[a-z]{0,3}[0-9]{6}",
        left=32,
        right=32,
    ),
    Anchored(
        _PLATED,
        r"(?:^|[^a-z])(?:plates?|registration|reg|rego)(?:[^a-z]|$)|车牌|車牌|牌照|车号|车號|車号|車號",
        left=24,
        right=80,
        near=re.compile("[0-9]"),
    ),
    Anchored(_REDDIT, r"u/[A-Z0-9_.\-]{3}", left=8, right=40),
    Anchored(_CARRIER, _CARRIER.pattern.removeprefix("(?<![A-Za-z0-9])").removesuffix("(?![A-Za-z0-9])"), 32, 8),
)
