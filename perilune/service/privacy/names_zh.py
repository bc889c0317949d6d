"""Names of people in Chinese text: a surname and the characters behind it, weighed against the words they may be.

Knows lists of words and of given names' characters; no model. Around every surname the likeliest way to cut
the text into words is sought, once with and once without a name there, so that 高兴 stays and 高兴国 goes. A
surname with a title (王总, 老王, 李医生) is a name too; so is what follows a word such as 姓名 or 我叫.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from perilune.service.privacy.fold import Folded
from perilune.service.privacy.kinds import Found, Kind
from perilune.service.privacy.lists import weights, words

COMMON = (
    "王李张刘陈杨黄赵吴周徐孙马朱胡郭何林高罗郑梁谢宋唐许韩冯邓曹彭曾肖田董袁潘于蒋蔡余杜叶程苏魏吕丁任沈姚卢"
    "姜崔钟谭陆汪范金石"
    "廖贾夏韦付方白邹孟熊秦邱江尹薛闫段雷侯龙史陶黎贺顾毛郝龚邵万钱严覃武戴莫孔向汤傅阎贝詹"
)
_TRADITIONAL = "張劉陳楊黃趙吳孫馬羅鄭謝許韓馮鄧蕭蔣餘葉蘇呂盧鍾譚陸範賈韋鄒閻雷龍賀顧龔萬錢嚴覃湯閆"
_RARER = (
    "温康施文牛樊葛邢安齐易乔伍庞颜倪庄聂章鲁岳翟殷詹申欧耿关兰焦俞左柳甘祝包宁尚符舒阮柯纪梅童凌毕单裴霍涂成"
    "苗谷曲盛冉翁蓝骆路游辛靳管柴蒙鲍华喻祁蒲房滕屈饶解牟艾尤阳时穆农司卓古吉缪简车项连芦麦褚娄窦戚岑景党宫费"
    "卜"
    "冷晏席卫米柏宗瞿桂全佟应臧闵苟邬边卞姬师和仇栾隋商刁沙荣巫寇桑郎甄丛仲虞敖巩明佘池查麻苑迟邝"
)
_COMPOUND = (
    "欧阳 上官 司马 诸葛 东方 皇甫 尉迟 公孙 慕容 令狐 司徒 轩辕 夏侯 长孙 宇文 端木 南宫 西门 独孤 百里 呼延 "
    "东郭 闻人 澹台 钟离 司空 太史 申屠 公羊 歐陽 司馬 諸葛 東方 尉遲 公孫"
    " 司徒 夏侯 長孫"
)
_RANK = {char: index for index, char in enumerate(COMMON)}

_TITLES = (
    "先生|女士|小姐|太太|夫人|老师|教授|医生|医师|大夫|护士长|护士|律师|总经理|总监|经理|主任|局长|处长|科长|"
    "董事长|书记|市长|院长|校长|会计|师傅|阿姨"
    "|叔叔|爷爷|奶奶|大爷|大妈|大姐|大哥|大叔|伯伯|同学|同志|主管|主席|警官|法官|博士|导师|班长|部长|厂长|所长"
    "|村长|教练|秘书|助理|老板|老板娘|组长"
    "|队长|店长|行长|站长|馆长|工程师|工|总|董|导|姨|叔|姐|哥|嫂|婶|妈妈|爸爸|妈|爸|某某|某|氏|老|公|先|生"
    "|師傅|老師|醫生|經理|總"
)
_SURNAME = f"(?:{'|'.join(_COMPOUND.split())}|[{COMMON}{_TRADITIONAL}])"
TITLE = re.compile(_TITLES)
_WEAK_TITLES = frozenset("工总董导公先生老氏某姐哥妈爸總嫂婶姨叔")
_SPACED = re.compile(
    rf"(?<![\u4e00-\u9fff][ ])(?<![\u4e00-\u9fff])(?P<name>{_SURNAME}[ \n·]{{1,2}}[\u4e00-\u9fff](?:["
    rf" \n]?[\u4e00-\u9fff])?)(?![\u4e00-\u9fff])"
)
_CUED = re.compile(
    r"(?:(?:姓名|名字|联系人|收件人|收货人|寄件人|负责人|经办人|申请人|投保人|被保险人|持卡人|户主|法人|患者|"
    r"病人|客户|家长|监护人|紧急联系人|签名|署名|开户名|户名|真实姓名|本人|昵称|曾用名)"
    r"(?:叫|是|为)?[\"” ]{0,2}[:：=＝|\t]?[ \"“]{0,3}|(?:我|他|她|名|就|也)叫(?:做)?[ “\"]{0,2}|名叫["
    r" “\"]{0,2}|名字(?:叫|是)["
    r" “\"]{0,2}|本人姓名[ ]?)"
    r"(?P<name>[\u4e00-\u9fff]{2,4}(?:·[\u4e00-\u9fff]{1,6}){0,2})(?![\u4e00-\u9fff])"
)
_HANZI = re.compile("[\u4e00-\u9fff]")
_FOREIGN = re.compile(r"[\u4e00-\u9fff]{2,5}·[\u4e00-\u9fff]{1,6}(?:·[\u4e00-\u9fff]{1,6})?")
_TOTAL_LOG2 = 25.84  # of all the words that were counted (60.1 million)
_UNKNOWN = -_TOTAL_LOG2 - 1.0
_NAME_LOG2 = -6.5
"""How likely a name is where a word begins: about one word in ninety, as in messages about people."""
_ONE_CHAR_LOG2 = -1.5
"""Of names with a surname of one character, how many have a given name of one."""
_GIVEN_TOTAL_LOG2 = 16.2
_RARE_GIVEN_LOG2 = -16.0
_TITLED_LOG2, _WEAKLY_TITLED_LOG2, _CALLED_LOG2 = -14.0, -17.0, -16.0
"""How likely a surname with a title is, with one that is a word of its own, and one behind 老, 小 or 阿."""
_COMPOUND_LOG2 = -15.0
_USUAL = 5
"""Log2 of the count from which on a character is usual in given names."""
_LEFT, _RIGHT = 4, 8


def find(folded: Folded) -> Iterator[Found]:
    """In any order; findings may overlap. Linear in the text: around every surname a dozen characters are cut."""
    text = folded.text
    if text.isascii() or _HANZI.search(text) is None:
        return
    figures = words("figures.txt")
    cutter = _Cutter(text)
    spans = [span for low, high in _windows(text) for span in cutter.names(low, high)]
    seen = Counter(text[start:end] for start, end in spans)
    for start, end in spans:
        name = text[start:end]
        if name in figures or (name[:-1] in figures and (len(name) > 3 or cutter.known.get(name[-1], 0) >= 13)):
            continue
        if len(name) > 2 and name in cutter.known:
            continue
        if cutter.two_names(start, end):
            yield Found(start, start + 2, Kind.PERSON)
            yield Found(start + 2, start + 5, Kind.PERSON)
            continue
        if len(name) == 2 and seen[name] == 1 and cutter.goes_on(start):
            end += 1
        yield Found(start, end, Kind.PERSON)
    for pattern in (_SPACED, _CUED, _FOREIGN):
        for match in pattern.finditer(text):
            start, end = match.span("name") if pattern is not _FOREIGN else match.span()
            joined = "".join(text[start:end].split())
            if joined not in figures and joined not in cutter.known:
                yield Found(start, end, Kind.PERSON)


def ordinary_words() -> Mapping[str, int]:
    """Words that aren't names even where they stand for a part of one."""
    return weights("words_zh.txt")


_SURNAMES = frozenset(COMMON + _TRADITIONAL + _RARER) | {name[0] for name in _COMPOUND.split()}
_FIRST = re.compile("[阿" + "".join(sorted(_SURNAMES)) + "]")
COMPOUNDS = frozenset(_COMPOUND.split())
_WORDS_TOO = frozenset({"东方", "東方", "西门", "百里", "南宫", "长孙", "宇文"})
_COMMON_SET = frozenset(COMMON + _TRADITIONAL)
_CALLED = frozenset("老小阿大")


def _windows(text: str) -> Iterator[tuple[int, int]]:
    """Stretches of Chinese characters that hold surnames, with some characters around them."""
    low, high = 0, -1
    for match in _FIRST.finditer(text):
        begin = max(0, match.start() - _LEFT)
        if begin > high:
            if high > 0:
                yield low, min(high, len(text))
            low = begin
        high = match.start() + _RIGHT
    if high > 0:
        yield low, min(high, len(text))


def compound_alone(name: str) -> bool:
    """A surname of two characters that is nothing else."""
    return name in COMPOUNDS and name not in _WORDS_TOO


class _Cutter:
    """Cuts stretches of Chinese text into words and names."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.known = weights("words_zh.txt")
        self._given = weights("given_zh.txt")

    def names(self, low: int, high: int) -> list[tuple[int, int]]:
        """Where names stand in the likeliest way to cut `low`:`high` (Viterbi over words and names)."""
        text, size = self._text, high - low
        scores = [0.0] + [-1e9] * size
        steps: list[tuple[int, bool]] = [(0, False)] * (size + 1)
        for start in range(size):
            score = scores[start]
            if not "\u4e00" <= text[low + start] <= "\u9fff":
                if score > scores[start + 1]:
                    scores[start + 1], steps[start + 1] = score, (start, False)
                continue
            for length, value, is_name in self._tokens(low + start, high):
                end = start + length
                if score + value > scores[end]:
                    scores[end], steps[end] = score + value, (start, is_name)
        found, at = [], size
        while at > 0:
            start, is_name = steps[at]
            if is_name:
                found.append((low + start, low + at))
            at = start
        return found

    def goes_on(self, start: int) -> bool:
        """A name of two characters whose next one is usual in names, though it begins a word: 马建|国家.
        One character too many does less harm than one that leaves."""
        name = self._text[start : start + 3]
        return (
            len(name) == 3
            and name[0] in _COMMON_SET
            and all(self._given.get(char, 0) >= _USUAL for char in name[1:])
        )

    def two_names(self, start: int, end: int) -> bool:
        """杨敏王|建国 is rather 杨敏|王建国."""
        name = self._text[start + 2 : start + 5]
        return (
            end - start == 3
            and len(name) == 3
            and name[0] in _COMMON_SET
            and all(self._given.get(char, 0) >= _USUAL for char in name[1:])
        )

    def _tokens(self, at: int, high: int) -> Iterator[tuple[int, float, bool]]:
        """(characters, log2 of the probability, whether it is a name) of what could stand at `at`."""
        text, first = self._text, self._text[at]
        called = first in _CALLED and at + 1 < high and text[at + 1] in _COMMON_SET
        for length in range(1, min(4, high - at) + 1):
            weight = self.known.get(text[at : at + length])
            if weight is not None:
                if not (called and length == 2):
                    yield length, weight - _TOTAL_LOG2, False
            elif length == 1:
                yield 1, _UNKNOWN, False
        if first == "阿" and at + 1 < high and self._given.get(text[at + 1], 0) >= _USUAL:
            yield 2, _CALLED_LOG2, True
        if compound_alone(text[at : at + 2]):
            yield 2, _COMPOUND_LOG2, True
        if called:
            yield 2, _CALLED_LOG2 if text[at : at + 2] not in self.known else _CALLED_LOG2 + 1, True
        if first in _SURNAMES:
            for length, score in self._names(at, high):
                yield length, score, True

    def _names(self, at: int, high: int) -> Iterator[tuple[int, float]]:
        text = self._text
        compound = text[at : at + 2] in COMPOUNDS
        size = 2 if compound else 1
        surname = -3.0 if compound else self._surname_score(text[at])
        behind = at + size
        if behind >= high:
            return
        title = TITLE.match(text, behind, high)
        if title and (surname > -8 or compound):
            yield size + len(title[0]), _WEAKLY_TITLED_LOG2 if title[0] in _WEAK_TITLES else _TITLED_LOG2
        if not "\u4e00" <= text[behind] <= "\u9fff":
            return
        surname += _NAME_LOG2
        one = self._given_score(text[behind])
        yield size + 1, surname + _ONE_CHAR_LOG2 + one
        if behind + 1 < high and "\u4e00" <= text[behind + 1] <= "\u9fff":
            yield size + 2, surname + one + self._given_score(text[behind + 1]) + 2.0

    def _surname_score(self, char: str) -> float:
        rank = _RANK.get(char)
        if rank is not None:
            return -3.8 - rank / 28
        return -7.5 if char in _COMMON_SET else -11.0

    def _given_score(self, char: str) -> float:
        weight = self._given.get(char)
        return _RARE_GIVEN_LOG2 if weight is None else max(weight - _GIVEN_TOTAL_LOG2, _RARE_GIVEN_LOG2)
