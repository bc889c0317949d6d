"""Keys, tokens and passwords: by their issuers' prefixes, by their form, by a word that announces them.

Knows folded text. Prefixes are those that the issuers publish for secret scanners.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterator

from perilune.service.privacy.anchors import Anchored
from perilune.service.privacy.fold import Folded
from perilune.service.privacy.kinds import Found, Kind

_END = r"(?![A-Za-z0-9_\-])"
_PREFIXED = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:sk|pk|rk|whsec|sess|key|api|tok|token|secret|prod|test|live)[_\-][A-Za-z0-9_\-]{12,400}"
    r"|gh[pousr]_[A-Za-z0-9]{10,260}|github_pat_[A-Za-z0-9_]{10,260}|gl(?:pat|dt|rt|soat|ft"
    r"|cbt)-[A-Za-z0-9_\-.]{10,100}"
    r"|xox[abeoprs]-[A-Za-z0-9\-]{8,260}|xapp-[A-Za-z0-9\-]{8,260}|(?:AKIA|ASIA|AROA|AIDA|ABIA|ACCA)[A-Z0-9]{8,40}"
    r"|AIza[A-Za-z0-9_\-]{16,60}|ya29\.[A-Za-z0-9_\-]{10,400}|GOCSPX-[A-Za-z0-9_\-]{10,60}"
    r"|SG\.[A-Za-z0-9_\-]{6,60}\.[A-Za-z0-9_\-]{6,100}|hf_[A-Za-z0-9]{10,100}|npm_[A-Za-z0-9]{10,100}"
    r"|pypi-[A-Za-z0-9_\-]{10,300}"
    r"|do[oprt]_v1_[A-Za-z0-9]{10,100}|shp(?:at|ca|pa|ss)_[A-Za-z0-9]{10,100}|sq0[a-z]{3}-[A-Za-z0-9_\-]{10,100}"
    r"|LTAI[A-Za-z0-9]{8,40}|AKID[A-Za-z0-9]{8,60}|AGE-SECRET-KEY-1[A-Z0-9]{10,100}|hv[sb]\.[A-Za-z0-9_\-]{10,200}"
    r"|dapi[a-f0-9]{20,60}|lin_api_[A-Za-z0-9]{10,100}|ntn_[A-Za-z0-9]{10,100}|figd_[A-Za-z0-9_\-]{10,100}"
    r"|r8_[A-Za-z0-9]{10,60}"
    r"|PMAK-[A-Za-z0-9\-]{10,100}|NRAK-[A-Z0-9]{10,60}|EAA[A-Za-z0-9]{20,300}|[0-9]{8,10}:AA[A-Za-z0-9_\-]{30,40}"
    rf"){_END}"
)
_JWT = re.compile(r"(?<![A-Za-z0-9_\-])eyJ[A-Za-z0-9_\-=]{8,4000}(?:\.\n?[A-Za-z0-9_\-=]{2,8000}){1,4}")
_PEM = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----[^\-]{0,20000}(?:-----END [A-Z0-9 ]{0,40}PRIVATE"
    r" KEY(?: BLOCK)?-----)?"
)
_BEARER = re.compile(
    r"(?<![A-Za-z])(?:Bearer|Basic|Token|Digest)[ :]{1,3}(?P<value>[A-Za-z0-9_\-.~+/=]{12,4000})", re.IGNORECASE
)
_IN_LINK = re.compile(r"://[^\s/:@]{1,64}:(?P<value>[^\s@\"'`]{1,200})@")
_WEB_HOOK = re.compile(r"hooks\.slack\.com/services/(?P<value>[A-Za-z0-9/_\-]{8,200})")
_ENTROPIC = re.compile(r"(?<![A-Za-z0-9_+/=.\-])[A-Za-z0-9_+/\-]{22,4000}={0,2}(?![A-Za-z0-9_+/=])")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z", re.IGNORECASE)

_PASSWORD = re.compile(
    r"(?:(?<![a-z])(?:pass ?words?|passwd|pwd|pass ?phrase|pass ?code|pw|psw|pin(?: code)?|passkey"
    r"|credentials?|pass"
    r"|(?:one[ \-]time|verification|security|access|otp|recovery|backup|auth)[ \-]?codes?|otp"
    r"|(?:api|secret|access|private|signing|encryption|master|license|licence|app|client|auth|bot|webhook"
    r"|shared|session|refresh|deploy|hmac|aes|ssh)"
    r"[ _\-]?(?:key|token|secret|id)|(?:secret|token|key)s?|cookie)"
    r"|密码|口令|密匙|密钥|秘钥|提取码|验证码|校验码|动态码|支付码|令牌|私钥|访问码|访问密匙|暗号|pin码|解压码)"
    r"(?P<gap>[^\n]{0,3}?[\"'”’)\]】]{0,3}(?:[ ]{0,3}(?:[:：=＝>→]{1,2}|-{1,2}|is|was|are|ist|as|to|用的是|改成了?"
    r"|设成了?|设为|换成了?|还是|就是|是|为))"
    r"(?:[ ]{0,2}(?:now|still|just|currently|temporarily|probably|set to|reset to|changed to|这个|这串))?"
    r"[ ]{0,3}\n?[ ]{0,3}|[ ]{1,2})"
    r"(?P<value>[\"'“”‘’`「『(【\[<]{0,2}[^\s\"'“”‘’`「」『』,，。；;<>（）()【】\u4e00-\u9fff]{3,400})"
)
_NEXT_PARAMETER = re.compile(r"&[A-Za-z_]{1,20}=")
_CODE_CHARS = frozenset(string.ascii_letters + string.digits + "_+/-=")
_PLAIN_WORD = re.compile(r"[a-z]{1,14}[.!?]?\Z")


def find(folded: Folded) -> Iterator[Found]:
    """In any order; findings may overlap. Linear in the text."""
    for pattern in (_PREFIXED, _JWT, _PEM):
        for match in folded.matches(pattern):
            if pattern is not _PREFIXED or _mixed(match[0]):
                yield Found(match.start(), match.end(), Kind.SECRET)
    for pattern in (_BEARER, _WEB_HOOK):
        for match in folded.matches(pattern):
            if _mixed(match["value"]):
                yield Found(match.start("value"), match.end("value"), Kind.SECRET)
    for match in folded.matches(_IN_LINK):
        yield Found(*match.span("value"), Kind.SECRET)
    for match in folded.matches(_ENTROPIC):
        if _random(match[0]):
            yield Found(match.start(), match.end(), Kind.SECRET)
    yield from _announced(folded)


def _announced(folded: Folded) -> Iterator[Found]:
    for match in folded.matches_lower(_PASSWORD):
        start, end = match.span("value")
        while start < end and folded.text[start] in "\"'“”‘’`「『(【[<":
            start += 1
        while end > start and folded.text[end - 1] in ".,;:!?)]}>":
            end -= 1
        query = _NEXT_PARAMETER.search(folded.text, start, end)
        end = query.start() if query else end
        value = folded.text[start:end]
        loose = not match["gap"].strip()  # only a blank between the word and what follows it
        if len(value) < 3 or (loose and not (_mixed(value) and len(value) >= 6)):
            continue
        if _PLAIN_WORD.match(value) and not match["gap"].strip().endswith(("=", ":", "：", "＝")):
            continue
        yield Found(start, end, Kind.SECRET)


def _mixed(value: str) -> bool:
    return any(char.isdigit() for char in value) and any(char.isalpha() for char in value)


def _random(value: str) -> bool:
    """Capitals, small letters and digits in turn, as only a machine writes."""
    if _UUID.match(value):
        return False
    digits = sum(char.isdigit() for char in value)
    upper = sum("A" <= char <= "Z" for char in value)
    lower = sum("a" <= char <= "z" for char in value)
    if digits < 3 or upper < 3 or lower < 3 or value.count("/") > 3:
        return False
    changes = sum(_class(one) != _class(other) for one, other in itertools.pairwise(value))
    return changes >= len(value) / 4


def _class(char: str) -> int:
    return 0 if char.isdigit() else 1 if char.isupper() else 2


_PREFIX = re.sub(r"\{([0-9]+),[0-9]+\}", r"{\1}", _PREFIXED.pattern.split("(?:", 1)[1].rsplit(")(?!", 1)[0])
ANCHORED = (
    Anchored(_PREFIXED, _PREFIX, left=64, right=420, caseless=False),
    Anchored(_JWT, r"eyJ[A-Za-z0-9_\-=]{8}", left=16, right=40000, caseless=False),
    Anchored(_PEM, r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY", left=80, right=20200, caseless=False),
    Anchored(_BEARER, r"(?:Bearer|Basic|Token|Digest)[ :]{1,3}[A-Za-z0-9_\-.~+/=]{12}", left=32, right=4000),
    Anchored(_IN_LINK, r"://[^\s/:@]{1,64}:", left=72, right=220),
    Anchored(_WEB_HOOK, r"hooks\.slack\.com/services/", left=32, right=220),
    Anchored(_ENTROPIC, r"[A-Za-z0-9_+/\-]{22}", left=24, right=8, widen=_CODE_CHARS),
    Anchored(
        _PASSWORD,
        r"(?:^|[^a-z])(?:pass|pwd|pw|psw|pin|credential|otp|cookie|key|token|secret"
        r"|(?:one[ \-]time|verification|security|access|otp|recovery|backup|auth)[ \-]?code"
        r"|(?:api|secret|access|private|signing|encryption|master|license|licence|app|client|auth|bot|webhook"
        r"|shared|session|refresh|deploy|hmac|aes|ssh)[ _\-]?(?:key|token|secret|id))"
        r"|密码|密碼|口令|密匙|密钥|秘钥|提取码|提取碼|验证码|验证碼|驗证碼|驗证码|校验码|校验碼|校驗碼|校驗码|动态码|动态碼|支付码"
        r"|支付碼|令牌|私钥|访问码|访问碼|访问密匙|暗号|暗號|解压码|解压碼",
        left=40,
        right=520,
    ),
)
