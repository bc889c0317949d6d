"""How people state facts about themselves, as patterns: English and Chinese.

Tables only; `facts` decides where a pattern may stand. A pattern begins at the beginning of a clause, names its
value `value`, and where the key depends on the words, `what`. Precise rather than greedy: what else could be
meant isn't here. Secrets (passwords, PINs, card numbers) have no pattern on purpose.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MANY = frozenset({"allergy", "pet", "speaks"})
"""Keys of which several values are true at once."""

SECRET = re.compile(
    r"password|passcode|passphrase|\bpin\b|\bcvv\b|credit|debit|\bcard\b|token|api.?key|secret|social security|"
    r"\bssn\b|"
    r"bank|account|密码|口令|验证码|信用卡|银行卡|卡号|身份证|账号|密钥",
    re.I,
)
"""A statement with one of these is never kept."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern and the key of what it finds; `{what}` is filled in. `dated`: a time in the sentence is since when.
    `ends`: the value is no longer true."""

    key: str
    pattern: re.Pattern[str]
    dated: bool = False
    ends: bool = False


_PROPER = (
    r"(?:the )?[A-Z][\w'’.&-]*(?:(?: (?:of|de|la|upon|am|an der|del|and|&))? (?!I\b|My\b)[A-Z][\w'’.&-]*|"
    r", (?!I\b|My\b)[A-Z][a-z]+\b(?! (?:is|was|has|lives|works|and I)\b))*"
)
_DATE_WORD = (
    r"(?:\d|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|mon|tue|wed|thu|fri|sat|sun|tomorrow|tonight|today|"
    r"next |"
    r"this |the end of|midnight|noon)"
)
_REST = r"[^.,;!?]{1,80}|[^,;!?\s]{1,80}"
_RELATIVE = (
    r"wife|husband|partner|girlfriend|boyfriend|fianc[eé]e?|son|daughter|brother|sister|mother|father|mum|mom|dad|"
    r"boss|manager|supervisor|advisor|adviser|doctor|dentist|lawyer|landlord|roommate|flatmate|colleague"
)
_PET = r"dog|cat|rabbit|parrot|hamster|horse|puppy|kitten"
_OCCUPATION = (
    r"(?:\w+ ){0,2}(?:nurse|teacher|doctor|engineer|developer|programmer|lawyer|student|designer|scientist|"
    r"researcher|"
    r"professor|accountant|architect|artist|baker|carpenter|chef|consultant|cook|dentist|driver|economist|editor|"
    r"electrician|farmer|firefighter|gardener|journalist|librarian|manager|mechanic|midwife|musician|painter|"
    r"paramedic|pharmacist|photographer|physician|physicist|pilot|plumber|police officer|postdoc|psychologist|"
    r"sailor|singer|surgeon|tailor|technician|therapist|translator|vet|veterinarian|waiter|waitress|writer)"
)
_LANGUAGE = (
    r"(?:English|Chinese|Mandarin|Cantonese|German|French|Spanish|Italian|Portuguese|Dutch|Polish|Russian|Japanese|"
    r"Korean|Arabic|Hebrew|Hindi|Turkish|Vietnamese|Thai|Greek|Swedish|Danish|Norwegian|Finnish|Czech)"
)
_THING = r"(?P<what>(?:[\w'’-]+ ){0,3}"


def _en(key: str, pattern: str, dated: bool = False, ends: bool = False) -> Rule:
    return Rule(key, re.compile(pattern.replace("I'm", r"I(?:'|’| a)m")), dated, ends)


ENGLISH: tuple[Rule, ...] = (
    _en("name", rf"[Mm]y (?:full |first )?name(?:'s|’s| is) (?P<value>{_PROPER})"),
    _en("name", r"(?:[Yy]ou can |[Pp]lease )?[Cc]all me (?P<value>(?!I\b)[A-Z][\w'’-]+)(?=[.,!]|$)"),
    _en("residence", rf"I (?:now |currently |still )?(?:live|reside) (?:in|at) (?P<value>{_PROPER})", dated=True),
    _en("residence", rf"I'm (?:now |currently )?(?:based|living) in (?P<value>{_PROPER})", dated=True),
    _en("residence", rf"I(?:'ve|’ve| have)(?: been)? (?:lived|living) in (?P<value>{_PROPER}) since\b", dated=True),
    _en(
        "residence",
        rf"I(?:'ve|’ve| have)? (?:just |recently |"
        rf"finally )?moved (?:here )?(?:from {_PROPER} )?to (?P<value>{_PROPER})",
        dated=True,
    ),
    _en("residence", rf"I (?:no longer|don'?t|don’t) live in (?P<value>{_PROPER})(?: any ?more)?", ends=True),
    _en("origin", rf"I'm originally from (?P<value>{_PROPER})"),
    _en("origin", rf"I (?:grew up|was born) in (?P<value>{_PROPER})"),
    _en("employer", rf"I (?:now |currently |still )?work (?:at|for) (?P<value>{_PROPER})", dated=True),
    _en(
        "employer",
        rf"I(?:'ve|’ve| have)? (?:just |recently )?(?:started (?:working |a (?:new )?job )?|joined )(?:at |for )?"
        rf"(?P<value>{_PROPER})",
        dated=True,
    ),
    _en(
        "employer", rf"I (?:no longer|don'?t|don’t) work (?:at|for) (?P<value>{_PROPER})(?: any ?more)?", ends=True
    ),
    _en(
        "employer",
        rf"I(?:'ve|’ve| have)? (?:just )?(?:quit|resigned from|left) my job at (?P<value>{_PROPER})",
        ends=True,
    ),
    _en("occupation", rf"I'm (?:now )?an? (?P<value>{_OCCUPATION})\b(?! of)"),
    _en("occupation", rf"I (?:now |currently )?work as an? (?P<value>{_OCCUPATION})\b"),
    _en(
        "birthday",
        rf"[Mm]y birthday(?:'s|’s|"
        rf" is)(?: on)? (?P<value>(?=(?i:the )?(?i:{_DATE_WORD}))[\w ]{{3,30}}(?:, \d{{4}})?)",
    ),
    _en("birthday", rf"I was born on (?P<value>(?=(?i:the )?(?i:{_DATE_WORD}))[\w ]{{3,30}}(?:, \d{{4}})?)"),
    _en("age", r"I'm (?P<value>\d{1,3}) years old"),
    _en(
        "deadline",
        rf"(?:[Mm]y|[Oo]ur) deadline is (?:on |"
        rf"by )?(?P<value>(?=(?i:the )?(?i:{_DATE_WORD}))(?:{_REST})(?:, \d[\w ]{{1,20}})*)",
    ),
    _en(
        "deadline: {what}",
        rf"(?:[Mm]y|[Oo]ur) {_THING}[\w'’-]+) deadline is (?:on |by )?"
        rf"(?P<value>(?=(?i:the )?(?i:{_DATE_WORD}))(?:{_REST})(?:, \d[\w ]{{1,20}})*)",
    ),
    _en(
        "deadline: {what}",
        rf"(?:[Mm]y|[Oo]ur|[Tt]he) deadline (?:for|of) (?:my|our) {_THING}[\w'’-]+) is (?:on |by )?"
        rf"(?P<value>(?=(?i:the )?(?i:{_DATE_WORD}))(?:{_REST})(?:, \d[\w ]{{1,20}})*)",
    ),
    _en(
        "email",
        r"[Mm]y (?:new |work )?e-?mail(?: address)? is (?P<value>[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+)",
    ),
    _en("phone", r"[Mm]y (?:new |mobile |cell |tele)?(?:phone)?(?: number)? is (?P<value>\+?\d[\d ()/-]{5,20}\d)"),
    _en("address", r"[Mm]y (?:new |home |postal )?address is (?P<value>(?=[^.;!?]*\d)[^.;!?]{5,100})"),
    _en("time zone", r"[Mm]y time ?zone is (?P<value>[A-Z][\w+:/-]{1,30})"),
    _en("{what}", rf"[Mm]y (?P<what>{_RELATIVE})(?:'s|’s)? (?:name is|is called|is named) (?P<value>{_PROPER})"),
    _en("pet", rf"[Mm]y (?:{_PET})(?:'s|’s)? (?:name is|is called|is named) (?P<value>{_PROPER})"),
    _en("pet", rf"I have an? (?:\w+ ){{0,2}}(?:{_PET}) (?:called|named) (?P<value>{_PROPER})"),
    _en(
        "children",
        r"I have (?P<value>(?:an? |one |two |three |four |five )(?:kids?|child|children|sons?|daughters?))\b",
    ),
    _en("spouse", rf"I'm married to (?P<value>{_PROPER})"),
    _en("allergy", r"I'm (?:very |severely |deadly )?allergic to (?P<value>[^.,;!?]{2,40}(?:,(?: and)? [a-z]+)*)"),
    _en("allergy", r"I have an? (?:severe )?(?P<value>[a-z]+(?: [a-z]+)?) allergy"),
    _en(
        "diet",
        r"I'm (?:an? )?(?:strict )?(?P<value>vegan|vegetarian|pescatarian|coeliac|celiac|lactose intolerant)\b",
    ),
    _en("native language", rf"[Mm]y (?:mother tongue|native language|first language) is (?P<value>{_LANGUAGE})"),
    _en("speaks", rf"I speak (?:fluent )?(?P<value>{_LANGUAGE}(?:(?:, | and |, and ){_LANGUAGE})*)"),
    _en("favourite {what}", r"[Mm]y favou?rite (?P<what>[\w'’-]+(?: [\w'’-]+)?) is (?P<value>[^.,;!?]{1,40})"),
    _en(
        "studies",
        r"I(?: study|'m studying|’m studying| am studying) (?P<value>[a-zA-Z ]{3,40}(?: at [A-Z][\w ]+)?)",
    ),
    _en(
        "{what}",
        r"[Mm]y (?P<what>(?:[\w'’-]+ ){1,4}(?:number|code|id|ID|reference)) is (?P<value>[\w/-]*\d[\w/ -]{0,30})",
    ),
)

_CJK = "\u3400-\u9fff"
_PLACE_ZH = rf"[{_CJK}A-Za-z0-9·]{{2,20}}"
_NO_PLACE_ZH = (
    rf"(?![哪这那一家新他她楼])(?![{_CJK}A-Za-z0-9·]{{0,20}}(?:酒店|宾馆|旅馆|民宿|医院|宿舍|房子|家里|里面|楼上|"
    rf"公寓))"
)
_RELATIVE_ZH = (
    "老婆|妻子|太太|丈夫|老公|先生|女朋友|男朋友|女友|男友|未婚妻|未婚夫|儿子|女儿|哥哥|弟弟|姐姐|妹妹|妈妈|爸爸|"
    "母亲|父亲|老板|导师|室友"
)
_EN_OF_ZH = (
    "老师|医生|护士|学生|研究生|博士生|律师|教授|教师|程序员|设计师|会计|厨师|记者|司机|翻译|作家|歌手|经理|工人|"
    "农民|警察|军人|画家"
)
_OCCUPATION_ZH = (
    rf"[{_CJK}]{{0,6}}(?:{_EN_OF_ZH}|工程师|研究员|分析师|建筑师|摄影师|药剂师|咨询师|架构师|科学家|公务员|"
    rf"售货员|服务员)"
)
_WHEN_ZH = (
    r"(?:现在|目前|一直|仍然|还|就|已经|刚刚?|最近|上个?月|去年|今年|前年|\d{4}年(?:\d{1,2}月)?(?:起|以来)?|"
    r"从\d{4}年(?:起|开始)?)?"
)
_DATE_ZH = (
    r"(?P<value>(?=[^，,。；;！!？?]*(?:\d|[一二三四五六七八九十]+[月号日]|周|星期|礼拜|明天|后天|月底|"
    r"年底))[^，,。；;！!？?]{2,24})"
)


def _zh(key: str, pattern: str, dated: bool = False, ends: bool = False) -> Rule:
    return Rule(key, re.compile(pattern + r"(?=[啊呀哦呢的]?$)"), dated, ends)


CHINESE: tuple[Rule, ...] = (
    _zh(
        "name",
        rf"我(?:的名字)?(?:叫|名叫)(?:做)?(?P<value>(?![{_CJK}]*[他她它你们了您着过])(?:[{_CJK}·]{{2,4}}|"
        rf"[A-Z][a-z]+))",
    ),
    _zh("name", rf"我的(?:名字|姓名)(?:是|叫)(?P<value>[{_CJK}·]{{2,8}}|[A-Z][A-Za-z ]+)"),
    _zh("residence", rf"我{_WHEN_ZH}(?:都)?(?:住|居住|定居)在(?P<value>{_NO_PLACE_ZH}{_PLACE_ZH}?)", dated=True),
    _zh(
        "residence",
        rf"我{_WHEN_ZH}(?:从{_PLACE_ZH}?)?搬(?:到|去|来)了?(?P<value>{_NO_PLACE_ZH}{_PLACE_ZH}?)了?",
        dated=True,
    ),
    _zh("residence", rf"我家住(?:在)?(?P<value>{_NO_PLACE_ZH}{_PLACE_ZH}?)", dated=True),
    _zh("residence", rf"我(?:已经)?不(?:再)?住在(?P<value>{_PLACE_ZH}?)了", ends=True),
    _zh("origin", rf"我(?:来自|是从)(?P<value>{_NO_PLACE_ZH}{_PLACE_ZH}?)(?:来的)?"),
    _zh("origin", rf"我(?:的)?老家(?:是|在)(?P<value>{_NO_PLACE_ZH}{_PLACE_ZH}?)"),
    _zh("residence", rf"我{_WHEN_ZH}住(?P<value>[{_CJK}]{{1,8}}[区市县镇路街村])", dated=True),
    _zh("workplace", rf"我{_WHEN_ZH}在(?P<value>{_NO_PLACE_ZH}{_PLACE_ZH}?)(?:工作|上班)", dated=True),
    _zh("employer", rf"我{_WHEN_ZH}(?:就职于|任职于)(?P<value>{_NO_PLACE_ZH}{_PLACE_ZH}?)", dated=True),
    _zh("workplace", rf"我(?:已经)?不(?:再)?在(?P<value>{_PLACE_ZH}?)(?:工作|上班)了", ends=True),
    _zh("employer", rf"我(?:已经|刚刚?)?从(?P<value>{_PLACE_ZH}?)(?:离职|辞职)了?", ends=True),
    _zh("occupation", rf"我{_WHEN_ZH}是(?:一名|一个|一位|名|个)?(?P<value>{_OCCUPATION_ZH})"),
    _zh(
        "occupation",
        rf"我{_WHEN_ZH}是一[名位](?P<value>[{_CJK}]{{0,10}}?(?!父亲|母亲|妈妈|爸爸|粉丝|用户|新手|"
        rf"爱好者)[{_CJK}]{{2,4}})",
    ),
    _zh("birthday", rf"我的?生日是{_DATE_ZH}"),
    _zh("birthday", rf"我(?:出)?生于{_DATE_ZH}"),
    _zh("age", r"我(?:今年)?(?:已经)?(?P<value>\d{1,3}|[一二三四五六七八九十]{1,3})岁了?"),
    _zh("deadline", rf"(?:我|我们)的?(?:截止日期|截止时间|最后期限|死线)(?:是|在|为){_DATE_ZH}"),
    _zh(
        "deadline: {what}",
        rf"(?:我|我们)的?(?P<what>[{_CJK}A-Za-z0-9]{{1,12}}?)的?(?:截止日期|截止时间|最后期限|死线)(?:是|在|"
        rf"为){_DATE_ZH}",
    ),
    _zh(
        "email",
        r"我的(?:工作|新)?(?:邮箱|电子邮箱|电子邮件|邮件地址|"
        r"电邮)(?:地址)?是(?P<value>[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+)",
    ),
    _zh("phone", r"我的(?:新)?(?:手机|电话|手机号|电话号)(?:号?码)?是(?P<value>\+?\d[\d -]{5,20}\d)"),
    _zh("address", r"我的(?:新|家庭|收货)?地址是(?P<value>(?=[^。；;！!？?]*\d)[^。；;！!？?]{4,60})"),
    _zh(
        "{what}",
        rf"我(?:的)?(?P<what>{_RELATIVE_ZH})(?:的名字)?(?:名?叫|"
        rf"是叫)(?P<value>(?![{_CJK}]*[他她它我你了])[{_CJK}·]{{2,4}}|[A-Z][a-z]+)",
    ),
    _zh(
        "pet",
        rf"我(?:家|养)?(?:的|有)?(?:一只|一条|只|条)?(?:狗|猫|兔子|鹦鹉|小狗|"
        rf"小猫)(?:的名字)?(?:名?叫)(?P<value>[{_CJK}]{{1,4}}|[A-Z][a-z]+)",
    ),
    _zh("children", r"我有(?P<value>[一二两三四五\d]个(?:孩子|小孩|儿子|女儿))"),
    _zh("allergy", rf"我对(?P<value>[{_CJK}A-Za-z、和]{{1,15}}?)(?:严重|会)?过敏"),
    _zh("diet", r"我(?:一直)?(?:是)?(?P<value>吃素|素食者|素食主义者|纯素食者|乳糖不耐受)"),
    _zh("native language", rf"我的?母语是(?P<value>[{_CJK}]{{1,4}}[语话文])"),
    _zh("speaks", rf"我会(?:说|讲)(?P<value>[{_CJK}、]{{1,12}}[语话文])"),
    _zh(
        "favourite {what}",
        rf"我最(?:喜欢|爱)的(?P<what>[{_CJK}]{{1,6}})是(?P<value>(?!什么)(?!哪)[{_CJK}A-Za-z0-9《》·]{{1,16}})",
    ),
    _zh("studies", rf"我{_WHEN_ZH}在(?P<value>[{_CJK}]{{2,10}}大学(?:读|学|念|攻读)[{_CJK}]{{2,10}})"),
    _zh(
        "{what}",
        rf"我的(?P<what>[{_CJK}A-Za-z]{{1,10}}(?:号码|编号|号|"
        rf"代码))是(?P<value>[A-Za-z0-9/-]*\d[A-Za-z0-9/ -]{{0,30}})",
    ),
)
