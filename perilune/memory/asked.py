"""What kind of question it is, and which events it names: a lookup, an order, a count, or the whole of something.

Knows ordinary question words of English and Chinese, no entries and no scores. Whatever it doesn't recognise is a
lookup. An event is a piece of the question, as it was written; whether anything matches it, the search has to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from perilune.memory.writing import UNSPACED

MAX_EVENTS = 8
"""Events read from a question: each is a search of its own."""

MAX_CHARS = 600
"""A longer question is a lookup: it is a pasted text, not a question about one."""


class Kind(StrEnum):
    """LOOKUP: the best few hits answer it. The others need a set of entries: the events that are to be put in
    ORDER, every occurrence to COUNT, or everything there is about something (WHOLE)."""

    LOOKUP = "lookup"
    ORDER = "order"
    COUNT = "count"
    WHOLE = "whole"


class Side(StrEnum):
    BEFORE = "before"
    AFTER = "after"


@dataclass(frozen=True, slots=True)
class Bound:
    """An event that bounds the time in question; what counts lies on its `side`."""

    event: str
    side: Side


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, read. `events` are those to be put in order, or the one thing to be counted or gathered, which is
    empty where everything is asked for."""

    kind: Kind
    events: tuple[str, ...] = ()
    bounds: tuple[Bound, ...] = ()


LOOKUP = Asked(Kind.LOOKUP)

_COUNT = re.compile(
    r"\bhow\s+(?:often|many(?:\s+times)?)\b|\b(?:number|count)\s+of\s+(?:times|occasions)\b|"
    r"(?<![这那前后好十头])几(?![号点月日岁年级楼层乎天周])\S|多少(?:次|回|趟|遍)|多久(?:一|才)?(?:次|回)|次数",
    re.I,
)
_DURATION = re.compile(
    r"\bhow\s+(?:long|many\s+(?:days|weeks|months|years))\b|(?:几|多少)(?:天|周|个?星期|个?月|年)|多久|多长时间",
    re.I,
)
_ORDER = re.compile(
    r"\b(?:first|last|earli(?:er|est)|lat(?:er|est)|sooner|soonest|before|after|between|most\s+recent(?:ly)?)\b|"
    r"\b(?:order|sequence|chronolog\w+|timeline)\b|"
    r"先后|顺序|次序|最先|最早|最晚|最后|最近|更早|更晚|早于|晚于|在前|在后|先发生|后发生|[之以][前后]|之间|期间|"
    r"时间线|哪(?:个|件|一件|一个)?(?:事)?(?:先|早|晚)|谁(?:先|更?早|更?晚)",
    re.I,
)
_WHOLE = re.compile(
    r"\b(?:summari[sz]e|summary|recap|overview|timeline\s+of)\b|\beverything\s+(?:that|i|we|you|he|she|they|about|on)\b|"
    r"\b(?:list|show|name|give)\b[^.?!]{0,20}\b(?:all|every|everything)\b|\ball\s+(?:of\s+)?the\s+\w+s\b|"
    r"总结|概括|概述|回顾|所有的?|全部|列出|一一列|都有哪些|有过哪些|时间线",
    re.I,
)

_EN_CLAUSE_END = r"(?=\s*(?:\b(?:did|do|does|has|have|had|was|were|is|are|will|would)\b|[,?.;:!]|$))"
_EN_BOUND = re.compile(rf"\b(?P<side>before|after|since|until)\s+(?P<event>\S.*?){_EN_CLAUSE_END}", re.I)
_EN_BETWEEN = re.compile(rf"\bbetween\s+(?P<first>\S.*?)\s+and\s+(?P<second>\S.*?){_EN_CLAUSE_END}", re.I)
_ZH_EVENT = r"[^，。？！、；,?!;]"
_ZH_BETWEEN = re.compile(rf"(?:在|从)(?P<first>{_ZH_EVENT}+?)(?:和|与|到|至)(?P<second>{_ZH_EVENT}+?)(?:之间|期间)")
_ZH_SIDE = "(?P<side>[之以](?:前|后|来)|前(?=，|,))"
_ZH_BOUNDS = (
    re.compile(rf"(?:在|自从?|从|到)(?P<event>{_ZH_EVENT}{{2,}}?){_ZH_SIDE}"),
    re.compile(rf"(?P<event>{_ZH_EVENT}{{2,}}?){_ZH_SIDE}"),
)
_SIDES = {"before": Side.BEFORE, "until": Side.BEFORE, "after": Side.AFTER, "since": Side.AFTER}

_BORDER = re.compile(
    r"[,;:?!、，；：？！。\n]|\.(?:\s|$)|\b(?:or|before|after|between|until|since|than|versus|vs)\b|"
    r"还是|以及|或者|或是|[之以][前后]|早于|晚于|是在|之间|期间|该怎么|应该|哪一?[个件]",
    re.I,
)
_RANGE = re.compile(r"\bfrom\s+(?P<first>.+?)\s+(?:to|until|till)\s+(?P<second>.+)", re.I)
_ZH_RANGE = re.compile(r"从(?P<both>.{4,}?)(?=(?:一共|总共|中间|过|隔|经|相|有)*(?:几|多))")
_BETWEEN = re.compile(r"\bbetween\s+(?P<first>.+?)\s+and\s+(?P<second>.+?)(?=[:,;?]|$)", re.I)
_ASKS = re.compile(
    r"\b(?:which|what|who)\b.*\b(?:first|last|earlier|later|earliest|latest|sooner|recent|these)\b", re.I
)
_ZH_JOINTS = ("和", "与", "跟", "同", "及")
_UNSPACED = re.compile(f"[{UNSPACED}]")

_EN_FRAME = frozenset(
    word
    for line in (
        "a an the of in on at to by and or then there here it its me my us please now so as for with from",
        "which what who whom whose when where how why was were is are be been did do does has have had will would",
        "come comes came coming happen happened happening occur occurred take took taken taking place placed be",
        "these those this that they them two three four five following next other others one ones each both",
        "first last earlier later sooner earliest latest soonest before after between until since previously",
        "long many much days weeks months years day week month year time times often order ordered sequence",
        "chronological chronologically timeline event events thing things put sort arrange list tell name say",
        "into lie lies lay fall falls fell most recent recently looking look back stand stands at under went",
        "give show line seen measured counted starting counting relative compared relation number count",
    )
    for word in line.split()
)
_ZH_FRAMES = (
    *(
        "请问",
        "请",
        "告诉我",
        "说说",
        "列出",
        "列一下",
        "帮我",
        "按照",
        "按",
        "时间先后",
        "先后顺序",
        "先后",
        "顺序",
        "次序",
    ),
    *(
        "排一下",
        "一下",
        "排列",
        "排序",
        "怎么排",
        "该怎么排",
        "怎样排",
        "排个序",
        "时间线",
        "时间",
        "是怎样的",
        "怎样",
        "怎么样",
        "如何",
    ),
    *(
        "下面",
        "以下",
        "下列",
        "这几件事",
        "这些事",
        "这几件",
        "这两件",
        "两件事",
        "几件事",
        "哪一件",
        "哪件事",
        "哪件",
        "哪个",
        "哪些",
    ),
    *(
        "什么",
        "谁更早",
        "谁更晚",
        "谁先",
        "更早",
        "更晚",
        "最早",
        "最晚",
        "最先",
        "最后",
        "最近",
        "离现在",
        "回头看",
        "发生了",
        "发生",
        "发生的",
    ),
    *(
        "相隔",
        "隔了",
        "过了",
        "之间",
        "间隔",
        "多少天",
        "几天",
        "几周",
        "几个月",
        "多少个月",
        "多久",
        "多长时间",
        "为准",
        "来看",
    ),
    *(
        "在前",
        "在后",
        "之前",
        "之后",
        "以前",
        "以后",
        "其中",
        "当中",
        "里面",
        "的是",
        "是",
        "的",
        "了",
        "吗",
        "呢",
        "算",
        "在",
        "从",
        "以",
    ),
    *("到", "和", "与", "跟", "件事", "事", "：", "“", "”", "《", "》", "(", ")", "（", "）", " "),
)
_EDGE = "'’\"“”()（） .-–—…"


def read(question: str) -> Asked:
    """The kind of a question and what it names."""
    text = " ".join(question.split())
    if not text or len(text) > MAX_CHARS:
        return LOOKUP
    lasting = _DURATION.search(text) is not None
    if not lasting and (counted := _COUNT.search(text)):
        return _gathered(Kind.COUNT, text[: counted.start()] + " " + text[counted.end() :])
    if (lasting or _ORDER.search(text)) and len(events := _events(text, lasting)) > 1:
        return Asked(Kind.ORDER, events)
    if _WHOLE.search(text):
        return _gathered(Kind.WHOLE, _WHOLE.sub(" ", text))
    return LOOKUP


# ------------------------------------------------------------------------------------------- counts and wholes


def _gathered(kind: Kind, text: str) -> Asked:
    """One thing to gather, and the events that bound its time."""
    bounds: list[Bound] = []
    for pattern in (_EN_BETWEEN, _ZH_BETWEEN):
        if match := pattern.search(text):
            ends = ((match["first"], Side.AFTER), (match["second"], Side.BEFORE))
            bounds += [Bound(event, side) for piece, side in ends if (event := _stripped(piece))]
            text = _without(text, match)
    for pattern in (_EN_BOUND, *_ZH_BOUNDS):
        if not bounds and (match := pattern.search(text)) and (event := _stripped(match["event"])):
            side = _SIDES.get(match["side"].lower()) or (Side.BEFORE if "前" in match["side"] else Side.AFTER)
            bounds.append(Bound(event, side))
            text = _without(text, match)
    thing = " ".join(text.split()).strip(_EDGE + "?？。，,:：")
    return Asked(kind, (thing,) if _stripped(thing) else (), tuple(bounds))


def _without(text: str, match: re.Match[str]) -> str:
    space = "" if _UNSPACED.match(match[0][-1]) else " "
    return text[: match.start()] + space + text[match.end() :]


# ------------------------------------------------------------------------------------------------------ order


def _events(text: str, lasting: bool) -> tuple[str, ...]:
    """The events that a question about order names, in the order in which it names them. In one that asks how
    long it was (`lasting`), "from" and "to" name the two ends."""
    pieces = [text]
    if lasting and (match := _RANGE.search(text)):
        pieces = [text[: match.start()], match["first"], match["second"]]
    elif lasting and (match := _ZH_RANGE.search(text)):
        pieces = [text[: match.start()], *_halved(match["both"], ("到", "至"))]
    elif match := _BETWEEN.search(text):
        pieces = [text[: match.start()], match["first"], match["second"], text[match.end() :]]
    pieces = [part for piece in pieces for part in _BORDER.split(piece) if not _ASKS.search(part)]
    named = [piece for piece in map(_stripped, pieces) if piece]
    # A list is joined by "and" only before its last piece; an "and" inside one of several pieces is part of a name.
    parted = [*named[:-1], *_parted(named[-1])] if named else []
    return tuple(dict.fromkeys(piece for piece in map(_stripped, parted) if piece))[:MAX_EVENTS]


def _parted(piece: str) -> Sequence[str]:
    """The two sides of an "and"."""
    sides = re.split(r"\s+and\s+", piece, maxsplit=1, flags=re.I)
    return sides if len(sides) > 1 else _halved(piece, _ZH_JOINTS)


def _halved(text: str, joints: Iterable[str]) -> Sequence[str]:
    """Cut at the joint that leaves the most equal halves: Chinese has no spaces to tell a joint from a part of a
    word, and what is compared is mostly named at like length."""
    cuts = [at for joint in joints for at in range(2, len(text) - 2) if text.startswith(joint, at)]
    if not cuts or not _UNSPACED.search(text):
        return (text,)
    best = min(cuts, key=lambda at: abs(len(text) - 1 - 2 * at))
    return text[:best], text[best + 1 :]


def _stripped(piece: str) -> str:
    """Without question words at both ends; empty where nothing else is left."""
    piece = piece.strip(_EDGE)
    if not piece:
        return ""
    if _UNSPACED.search(piece):
        return _stripped_zh(piece)
    words = piece.split()
    if all(_plain(word) in _EN_FRAME for word in words):
        return ""
    first = next(at for at, word in enumerate(words) if _plain(word) not in _EN_FRAME)
    last = max(at for at, word in enumerate(words) if _plain(word) not in _EN_FRAME)
    return " ".join(words[first : last + 1]).strip(_EDGE)


def _plain(word: str) -> str:
    return word.lower().strip(_EDGE)


def _stripped_zh(piece: str) -> str:
    changed = True
    while changed and piece:
        changed = False
        for frame in _ZH_FRAMES:
            if piece.startswith(frame):
                piece, changed = piece[len(frame) :], True
            if piece.endswith(frame):
                piece, changed = piece[: len(piece) - len(frame)], True
    piece = piece.strip(_EDGE)
    return piece if len(piece) > 1 else ""
