"""Where somebody lives or is: street addresses in English and Chinese writing, coordinates, number plates.

Knows folded text. A city by itself is no address; a house number or a room is what makes one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from perilune.service.privacy.anchors import Anchored
from perilune.service.privacy.fold import Folded
from perilune.service.privacy.kinds import Found, Kind

_STREET = (
    r"(?:street|str|st|road|rd|avenue|ave|lane|ln|drive|dr|court|ct|boulevard|blvd|way|place|pl|square|sq"
    r"|terrace|ter|close"
    r"|crescent|cres|parkway|pkwy|highway|hwy|circle|cir|row|gardens|gdns|grove|mews|walk|quay|alley|trail"
    r"|loop|rise|view|hill"
    r"|park|path|plaza|wharf|yard|green|bend|point|run|broadway|expressway|jie|lu|dao|xiang|hutong|nong"
    r"|avenida|rue)"
)
_UNIT = (
    r"(?:(?:flat|apt|apartment|unit|suite|ste|room|rm|floor|fl|level|building|bldg|block|blk|tower|villa"
    r"|house|no|lot|dorm|#)"
    r"\.?[ ]{0,2}#?[0-9a-z]{1,6}(?:-[0-9a-z]{1,6}){0,2}|[0-9]{1,3}(?:st|nd|rd|th)?/?[ ]?(?:f|floor)\.?)"
)
_SPACE = r"(?:[ ]{1,2}|,[ ]?|\n[ ]?|[ ]\n)"
_WORD = r"[A-Za-zÀ-ÿ0-9][A-Za-zÀ-ÿ0-9'’.\-]{0,24}"
_TAIL = (
    rf"(?:,?[ ]?\n?[ ]?(?:{_UNIT}))*"
    r"(?:(?:,[ ]?\n?|\n)[ ]?[A-Z][A-Za-z'’.\-]{1,20}(?:[ ][A-Z][A-Za-z'’.\-]{1,20}){0,2}){0,4}"
    r"(?:,?[ ]\n?[A-Z]{2})?(?:,?[ ]?\n?(?:[0-9]{5,6}(?:-[0-9]{4})?|[A-Z]{1,2}[0-9][0-9A-Z]?["
    r" ]?[0-9][A-Z]{2}))?(?![0-9])"
)
_ENGLISH = re.compile(
    rf"(?:(?i:{_UNIT}){_SPACE}){{0,4}}(?<![0-9A-Za-z.])(?:(?i:no\.?|number|#)["
    rf" ]?)?[0-9]{{1,5}}[A-Za-z]?(?:[\-/][0-9]{{1,5}}[A-Za-z]?)?"
    rf"{_SPACE}(?:{_WORD}(?:[ ]|\n)){{1,4}}?(?i:{_STREET})(?![A-Za-z])\.?(?:[ ](?:N|S|E|W|NE|NW|SE|SW|North"
    rf"|South|East|West))?(?![A-Za-z]){_TAIL}"
)
_UNITS = re.compile(
    rf"(?<![A-Za-z0-9])(?i:(?:{_UNIT})(?:,?[ ]?\n?[ ]?(?:{_UNIT})){{0,3}}),[ ]?\n?"
    rf"(?:[0-9A-Z]{_WORD}(?:[ ]{_WORD}){{0,3}})(?:,[ ]?\n?[0-9A-Z]{_WORD}(?:[ ]{_WORD}){{0,2}}){{0,5}}"
)
_PO_BOX = re.compile(r"(?<![A-Za-z])P\.?[ ]?O\.?[ ]?Box[ ]?[0-9]{1,7}", re.IGNORECASE)
_CONTINENTAL = re.compile(
    r"(?<![A-Za-zÀ-ÿ])(?:[A-ZÄÖÜ][A-Za-zäöüß\-]{2,30}(?:straße|strasse|str\.|weg|gasse|platz|allee|ring|ufer"
    r"|straat|gracht|laan|plein)"
    r"[ ]\n?[0-9]{1,4}[ ]?[a-zA-Z]?(?![A-Za-z0-9])"
    r"|(?:[0-9]{1,4}(?:[ ]?(?:bis|ter))?,?[ ])(?i:rue|avenue|boulevard|place|quai|chemin|impasse|allée)["
    r" ](?:[A-Za-zÀ-ÿ'’\-]{1,20}[ ]?){1,5}"
    r"|(?i:calle|c/|avenida|avda\.|paseo|plaza|via|viale|piazza|corso|rua|travessa|ulica|ul\.)["
    r" ](?:[A-Za-zÀ-ÿ'’.\-]{1,20}[ ]){1,5}?,?[ ]?(?:n[º°.]?[ ]?)?[0-9]{1,4}(?![0-9]))"
)

_N = (
    r"(?:[0-9]{1,5}(?:[\-~—–][0-9]{1,5}){0,3}|[一二三四五六七八九十百零〇两]{1,6}|[A-Za-z][0-9]{0,4}"
    r"|[甲乙丙丁东西南北])"
)
_H = r"[\u4e00-\u9fffA-Za-z]"
_INNER = (
    rf"(?>[ ,，]{{0,2}}\n?(?:{_H}{{0,8}}?)[ ]?\n?{_N}[ ]?\n?"
    r"(?:号楼|号院|号门|号|號|栋|棟|幢|座|单元|單元|室|层|層|楼|樓|户|房|期|区|排|弄|组|村民组|床|铺|门))"
)
_ROOM = r"(?:(?<=[楼栋棟幢座单元元層层])[ ]?[0-9]{2,5}(?![0-9]))?"
_ROAD = r"(?:大街|大道|公路|胡同|[街路道巷弄里段村屯庄组坊条径围寨湾桥]|社区)"
_ESTATE = (
    r"(?:小区|花园|公寓|大厦|大楼|家园|花苑|新城|新村|广场|中心|宿舍|大院|校区|名邸|别墅|科技园|产业园|写字楼|"
    r"庄园|新居|家属院|公馆|山庄"
    r"|[苑城府园庭轩阁里居邸湾楼])"
)
_CORE = re.compile(
    rf"{_ROAD}[ ]?\n?(?:[东西南北中]{{1,2}}(?:段|路|街|里)?|[一二三四五六七八九十]{{1,2}}(?:段|路|街|巷))?[ ]?\n?"
    rf"{_N}[ ]?\n?(?:号楼|号院|号|號|弄|巷|栋|幢|座|室|组)(?:附[0-9]{{1,4}}号)?{_INNER}{{0,6}}+{_ROOM}"
    rf"|{_ESTATE}{_INNER}{{1,6}}+{_ROOM}"
    rf"|{_N}[ ]?(?:号楼|栋|棟|幢|座)[ ]?\n?{_INNER}{{1,5}}+{_ROOM}"
)
_LEFT = re.compile(r"[\u4e00-\u9fffA-Za-z0-9 ]{0,28}\Z")
_LEADS = re.compile(
    r"地址|住址|住在|家住|住的是|寄到|寄往|送到|发到|发往|搬到|搬去|收货|位于|就在|人在|赶到|来到|回到|租在|租"
    r"了|前往|跑到|约在|放在"
    r"|改成|改为|我家|[是在到去往给从住为]"
)
_ADMIN = re.compile(
    r"[\u4e00-\u9fff]{2,3}(?:省|自治区|市)|[\u4e00-\u9fff]{1,4}[区县镇乡旗]|(?:北京|上海|天津|重庆|香港|澳门"
    r"|台北|广州|深圳)"
)
_UNLED_CHARS = 8
"""Characters taken to the left of a street's last syllable where nothing says where its name begins."""

_LAT = r"[\-+]?[0-9]{1,3}\.[0-9]{2,}[ ]?°?[ ]?[NSEWnsew]?"
_GEO = re.compile(
    rf"(?<![0-9.A-Za-z])(?:[\-+]?[0-9]{{1,3}}\.[0-9]{{3,}}[ ]?°?[ ]?[NSns]?(?:[ ]?[,，;/|、][ ]?|[ ]{{1,2}}"
    rf"|\n)[\-+]?[0-9]{{1,3}}\.[0-9]{{3,}}[ ]?°?[ ]?[EWew]?(?![0-9]|\.[0-9])"
    rf"|{_LAT}[ ]?[,，、和 ]{{0,3}}\n?{_LAT}(?<=[NSEWnsew])"
    r"|[0-9]{1,3}[ ]?°[ ]?[0-9]{1,2}(?:\.[0-9]{1,4})?[ ]?['′’分][ ]?(?:[0-9]{1,2}(?:\.[0-9]{1,4})?["
    r" ]?(?:[\"″”秒]|''))?[ ]?[NSEWnsew北南东西]?"
    r"(?:[ ,，、]{0,3}\n?[0-9]{1,3}[ ]?°[ ]?[0-9]{1,2}(?:\.[0-9]{1,4})?[ ]?['′’分]["
    r" ]?(?:[0-9]{1,2}(?:\.[0-9]{1,4})?[ ]?(?:[\"″”秒]|''))?[ ]?[NSEWnsew北南东西]?)?)",
    re.IGNORECASE,
)
_GEO_NAMED = re.compile(
    r"(?:[北南东西][纬经]|(?<![A-Za-z])(?:lat(?:itude)?|lon(?:gitude)?|lng)|纬度|经度)[\"']?[ :：=是为约]{0,4}"
    r"(?P<one>[\-+]?[0-9]{1,3}(?:\.[0-9]{1,10})?[ ]?(?:°|度)?[ ]?(?:[0-9]{1,2}(?:\.[0-9]{1,4})?[ ]?['′’分])?["
    r" ]?(?:[0-9]{1,2}(?:\.[0-9]{1,4})?[ ]?(?:[\"″”秒]|''))?)",
    re.IGNORECASE,
)

_PLATE = re.compile(
    r"[京津沪滬渝冀遼蘇魯贛雲陝貴粵瓊豫云辽黑湘皖鲁新苏浙赣鄂桂甘晋蒙陕吉闽贵粤青藏川宁琼使領领][ ]?[A-HJ-NP-Z"
    r"][ ]?[·•・.\- ]{0,2}[A-HJ-NP-Z0-9](?:["
    r" ]?[A-HJ-NP-Z0-9]){3,5}[挂学警港澳领]?"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_ORGANISATION = re.compile(
    r"(?:[A-Z][A-Za-z0-9&'’\-]{0,30}[ ]){1,5}(?:Inc|Ltd|LLC|LLP|GmbH|Corp|Corporation|Limited|PLC|Co|S\.A|AG"
    r"|B\.V|Pty)\b\.?"
    r"|[\u4e00-\u9fff（）()]{2,20}?(?:有限责任公司|股份有限公司|有限公司|集团公司|分公司|合伙企业|事务所)"
)


def find(folded: Folded) -> Iterator[Found]:
    """In any order; findings may overlap. Linear in the text."""
    text = folded.text
    for pattern in (_ENGLISH, _UNITS, _PO_BOX, _CONTINENTAL):
        for match in folded.matches(pattern):
            yield Found(match.start(), match.end(), Kind.ADDRESS)
    for match in folded.matches(_CORE):
        yield Found(_begin(text, match.start()), match.end(), Kind.ADDRESS)
    for match in folded.matches(_GEO):
        yield Found(match.start(), match.end(), Kind.GEO)
    for match in folded.matches(_GEO_NAMED):
        yield Found(match.start(), match.end(), Kind.GEO)
    for match in folded.matches(_PLATE):
        if any(char.isdigit() for char in match[0]):
            yield Found(match.start(), match.end(), Kind.PLATE)
    for match in folded.matches(_ORGANISATION):
        yield Found(match.start(), match.end(), Kind.ORGANISATION)


def _begin(text: str, core: int) -> int:
    """Where a Chinese address begins whose street ends at `core`."""
    left = _LEFT.search(text, max(0, core - 28), core)
    start = left.start() if left else core
    place = _ADMIN.search(text, start, core)
    for lead in _LEADS.finditer(text, start, core):
        if lead.end() < core and (place is None or lead.end() <= place.end()):
            start = lead.end()
    if start >= core - _UNLED_CHARS:
        return start
    place = _ADMIN.search(text, start, core)
    return place.start() if place else core - _UNLED_CHARS


_DIGIT = re.compile("[0-9]")
ANCHORED = (
    Anchored(
        _ENGLISH,
        rf"[A-Za-zÀ-ÿ0-9'’.\-][ \n]{_STREET}(?:[^A-Za-z]|$)",
        left=300,
        right=420,
        near=re.compile(r"[0-9][A-Za-z]?[ ,\n]"),
    ),
    Anchored(
        _UNITS,
        (
            _UNIT.split("|[0-9]{1,3}(?:st", 1)[0].removesuffix(r"(?:-[0-9a-z]{1,6}){0,2}") + ")[,\\-]",
            r"[0-9][a-z]{0,2}/?[ ]?(?:f|floor)\.?,",
        ),
        left=180,
        right=800,
    ),
    Anchored(_PO_BOX, r"P\.?[ ]?O\.?[ ]?Box", left=16, right=16),
    Anchored(
        _CONTINENTAL,
        r"(?:straße|strasse|str\.|weg|gasse|platz|allee|ring|ufer|straat|gracht|laan|plein)[ ]\n?[0-9]"
        r"|[0-9](?:[ ]?(?:bis|ter))?,?[ ](?:rue|avenue|boulevard|place|quai|chemin|impasse|allée)[ ]"
        r"|(?:calle|c/|avenida|avda\.|paseo|plaza|via|viale|piazza|corso|rua|travessa|ulica|ul\.)[ ]",
        left=48,
        right=140,
        near=_DIGIT,
    ),
    Anchored(
        _CORE,
        r"[0-9A-Za-z一二三四五六七八九十百零〇两甲乙丙丁东西南北][ ]?\n?(?:号|號|弄|巷|栋|棟|幢|座|单元|單元|室|层"
        r"|層|楼|樓|户|房|期|区|排|组|村民组|床|铺|门)",
        left=80,
        right=200,
    ),
    Anchored(
        _GEO,
        r"\.[0-9]{2,}[ ]?°?[ ]?[NSEW]?[ ]?[,，;/|、和 \n]{0,4}\n?[ ]?[\-+]?[0-9]{1,3}\.[0-9]{2}"
        r"|[0-9][ ]?°[ ]?[0-9]{1,2}",
        left=48,
        right=80,
    ),
    Anchored(
        _GEO_NAMED,
        r"(?:[北南东西][纬经]|lat(?:itude)?|lon(?:gitude)?|lng|纬度|经度)[\"']?[ :：=是为约]{0,4}[\-+]?[0-9]",
        left=24,
        right=60,
    ),
    Anchored(_PLATE, _PLATE.pattern.split("[ ]?", 1)[0] + "[ ]?[A-HJ-NP-Z]", left=4, right=24),
    Anchored(
        _ORGANISATION,
        r"[ ](?:Inc|Ltd|LLC|LLP|GmbH|Corp|Corporation|Limited|PLC|Co|S\.A|AG|B\.V|Pty)[^A-Za-z0-9_]"
        r"|有限责任公司|有限公司|集团公司|分公司|合伙企业|事务所",
        left=200,
        right=4,
        caseless=False,
    ),
)
