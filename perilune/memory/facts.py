"""Facts that users state about themselves, read from one turn by rules: where they live, their deadline, a name.

Knows writing in English and Chinese, nothing that is stored. Precise rather than greedy, because a wrong fact
enters every later prompt: a clause must begin like such a statement (`fact_rules`), and nothing is read of
questions, suppositions, reported speech, quotations, code, long pasted texts, or turns that ask to translate,
write or play.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from perilune.memory.fact_rules import CHINESE, ENGLISH, SECRET, Rule
from perilune.memory.sentences import sentences
from perilune.memory.timespan import spans

MAX_TURN_CHARS = 2_000
"""A longer turn is taken to be a pasted text, in which `I` may be anybody."""

MAX_FACTS = 8
"""Of one turn."""

MAX_KEY_CHARS = 64
MAX_VALUE_CHARS = 200

_ABOUT_TEXT = re.compile(
    r"\b(?:translate|rewrite|rephrase|paraphrase|proofread|summari[sz]e|role.?play|pretend|act as|"
    r"continue (?:this|the)|"
    r"complete (?:this|the)|write (?:me |us )?(?:an?|the|this|some)|draft|dear (?:sir|madam|mr|ms|mrs|all|team)\b|"
    r"you are (?:now )?(?:an?|the)|the following|lyrics|correct (?:this|my|the))\b|"
    r"翻译|译成|译为|改写|润色|改错|总结|续写|扮演|假装|造句|写一|帮我写|以下|下面这|如下|尊敬的|亲爱的|你是一",
    re.I,
)
_UNREAL = re.compile(
    r"\b(?:if|suppos\w*|imagin\w*|pretend\w*|assum\w*|unless|would|could|might|may be|maybe|perhaps|wish\w*|"
    r"dream\w*|"
    r"said|says?|told|tells?|wrote|writes?|claims?|example|e\.g\.|when|until|before|whether|used to|song|novel|"
    r"character|asked?|think|thought)\b|如果|假如|假设|要是|假使|想象|比如|例如|据说|说过|他说|她说|说：|说:|"
    r"告诉|也许|可能|大概|"
    r"希望|要不是|除非|梦见|曾经|以前|小时候|当时|是不是|是否",
    re.I,
)
_QUESTION = re.compile(
    r"[?？]\s*[\"'”’)）]*$|[吗呢么][。！!]?$|^(?:is|was|do|does|did|am|are|can|should|what|where|who|how)\b", re.I
)
_QUOTATION = re.compile(
    r"“[^”]*”|\"[^\"]*\"|「[^」]*」|『[^』]*』|《[^》]*》|`[^`]*`|(?<!\w)'[^']*'(?!\w)|‘[^’]*’(?!\w)"
)
_CLAUSE = re.compile(
    r"(?:^|[,;:，；：、]\s*|\s-+\s|—+|\b(?:and|but|so|because|that)\s+)"
    r"(?:(?:by the way|btw|also|and|but|well|ok(?:ay)?|hi|hello|hey|actually|so|just so you know|fyi|please|note|"
    r"remember|that|yes|no|oh|for the record|besides)\b[,:!]?\s*)*"
    r"(?=I\b|[Mm]y\b|[Oo]ur\b|[Tt]he deadline|[Cc]all me|[Yy]ou can call me|[Pp]lease call me)"
    r"|(?:^|[,;:，；：、。！!]\s*)(?:对了|另外|顺便说一下|顺便|其实|嗯|哦|你好|您好|请记住|记住|请记一下|记一下|"
    r"而且|还有|因为|所以|但是|不过|那个|[，,：:！!\s])*(?=我)",
    re.I,
)
_REPORTED = re.compile(r"\b(?:says|said|wrote|sings|sang|quote)\b|[他她]说")
_COMMA = re.compile("[,，;；]")
_ZH_STOP = re.compile(r"[，,。；;！!？?]")
_TAIL = re.compile(
    r"\s+(?:(?:and|but|so) (?:I|my|we|our|it|the|that|am|have|she|he|they|you|will|need|want|work|live|speak)\b|"
    r"(?:because|since|with|where|which|who|when|while|although|though|until|after|before|now|right now|"
    r"at the moment|"
    r"currently|these days|any ?more|again|too|as well|for now|by the way|last|this|in order|together)\b).*$"
)
_GOES_ON = re.compile(
    r",? and (?:now |currently )?(?=(?:live|work|speak|study|moved) )|"
    r"[，,]\s*(?=(?:现在|目前)?(?:住在|居住在|来自|在\w{2,12}(?:工作|上班)|老家|是一[名个位]|今年\w{1,3}岁|"
    r"生日是|母语是|会说))"
)
"""A clause that goes on with the subject of the one before."""

_OF_ONESELF = frozenset(
    (
        "name",
        "residence",
        "origin",
        "employer",
        "workplace",
        "occupation",
        "age",
        "studies",
        "native language",
        "speaks",
    )
)
"""Keys whose statements have the user as their subject: "my daughter is called Mei, is five" goes on with hers."""

_TRIM = " \t.,;:!?。，；：！？-–—\"'"


@dataclass(frozen=True, slots=True)
class Fact:
    """A statement. `start` and `end` are its sentence's characters in the turn; `since_s` the time that it
    names as its beginning, in seconds since the epoch; `ends` says that the value is no longer true."""

    key: str
    value: str
    start: int
    end: int
    since_s: float | None = None
    ends: bool = False


def read(text: str, at_s: float) -> list[Fact]:
    """What the speaker of a turn says about themselves, each key and value once, at most `MAX_FACTS`."""
    if len(text) > MAX_TURN_CHARS or _ABOUT_TEXT.search(text):
        return []
    found: dict[tuple[str, str], Fact] = {}
    for start, end in sentences(text):
        sentence = _QUOTATION.sub(lambda match: "\0" * len(match[0]), text[start:end])
        if SECRET.search(sentence):
            continue
        for fact in _of_sentence(sentence, start, end, at_s):
            found.setdefault((fact.key, fact.value.casefold()), fact)
    return list(found.values())[:MAX_FACTS]


def _of_sentence(sentence: str, start: int, end: int, at_s: float) -> Iterator[Fact]:
    if _REPORTED.search(sentence):
        return
    asks = _QUESTION.search(sentence) is not None
    for clause in _CLAUSE.finditer(sentence):
        at, subject = clause.end(), ""
        if _UNREAL.search(sentence, 0, at):
            return
        while (found := _stated(sentence, at, subject)) is not None:
            rule, key, value, at = found
            if asks and not _COMMA.search(sentence, at):  # "I live in Bonn, who collects taxes?" states something
                return
            since_s = _since(sentence, at_s) if rule.dated else None
            yield Fact(key, value, start, end, since_s, rule.ends)
            goes_on = _GOES_ON.match(sentence, at) if rule.key in _OF_ONESELF else None
            if goes_on is None:
                break
            at, subject = (
                goes_on.end(),
                "我" if sentence.startswith("我", clause.end()) or subject == "我" else "I ",
            )


def _stated(sentence: str, begin: int, subject: str) -> tuple[Rule, str, str, int] | None:
    """(rule, key, value, end) of the statement that begins here, behind a `subject` which it leaves out."""
    clause = subject + sentence[begin:]
    chinese = clause.startswith("我")
    if chinese:
        clause = _ZH_STOP.split(clause, maxsplit=1)[0]
    for rule in CHINESE if chinese else ENGLISH:
        match = rule.pattern.match(clause)
        if match is not None and (value := _value(match, chinese)):
            taken = len(clause) if chinese else match.start("value") + len(value)
            return rule, _key(rule, match), value, begin + taken - len(subject)
    return None


def _value(match: re.Match[str], chinese: bool) -> str:
    value = match["value"]
    if "\0" in match[0]:
        return ""
    if not chinese:
        value = _TAIL.sub("", value)
        rest = match.string[match.end() : match.end() + 12].lower()
        if rest.startswith((" if ", "-", "'s ", "’s ", "?")):
            return ""
    return unicodedata.normalize("NFC", value).strip(_TRIM)[:MAX_VALUE_CHARS]


def _key(rule: Rule, match: re.Match[str]) -> str:
    if "{what}" not in rule.key:
        return rule.key
    return normal_key(rule.key.format(what=match["what"]))


def normal_key(key: str) -> str:
    """A key as it is stored: lower case, one space between words."""
    return " ".join(unicodedata.normalize("NFKC", key).casefold().split())[:MAX_KEY_CHARS]


def _since(sentence: str, at_s: float) -> float | None:
    """The time that a sentence names, where it isn't in the future."""
    named = spans(sentence, datetime.fromtimestamp(at_s, UTC))
    return named[0].since_s if named and named[0].since_s <= at_s else None
