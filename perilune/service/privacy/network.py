"""What stands in networks: e-mail addresses, IP and MAC addresses, the secret parts of links.

Knows folded text. Of a link only the user, long or odd path segments, query values and the fragment are taken:
where it points may stay.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from perilune.service.privacy.anchors import Anchored
from perilune.service.privacy.fold import Folded
from perilune.service.privacy.kinds import Found, Kind
from perilune.service.privacy.lists import words

_LOCAL = r"[A-Za-z0-9_%+][A-Za-z0-9._%+'\-]{0,63}"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}\n?[A-Za-z0-9\-]{0,20})"
_AT = r"(?:[ \t]{0,2}\n?[ \t]{0,2}(?:@|%40|&#64;)[ \t]{0,2}\n?[ \t]{0,2})"
_DOT = r"(?:\.\n?|[ \t]\.[ \t]|\n\.)"
_MAIL = re.compile(rf"(?<![A-Za-z0-9._%+\-]){_LOCAL}{_AT}{_LABEL}(?:{_DOT}{_LABEL}){{0,5}}{_DOT}[A-Za-z]{{2,24}}")
_AT_WORD = (
    r"(?:[ ]{0,2}[\[({<【][ ]{0,2}(?:at|@|艾特)[ ]{0,2}[\])}>】][ ]{0,2}|[ ]{1,2}at[ ]{1,2}|[ ]{0,2}艾特[ ]{0,2})"
)
_DOT_WORD = (
    r"(?:[ ]{0,2}[\[({<【][ ]{0,2}(?:dot|\.|点|點)[ ]{0,2}[\])}>】][ ]{0,2}|[ ]{1,2}dot[ ]{1,2}|[ ]{0,2}[点點]["
    r" ]{0,2})"
)
_PART = r"[A-Za-z0-9][A-Za-z0-9_%+\-]{0,62}"
_MAIL_WORDS = re.compile(
    rf"(?<![A-Za-z0-9._%+\-]){_PART}(?:(?:{_DOT_WORD}|[._]){_PART}){{0,4}}{_AT_WORD}{_PART}"
    rf"(?:(?:{_DOT_WORD}|\.){_PART}){{0,4}}(?P<last>{_DOT_WORD}|\.)[A-Za-z]{{2,24}}",
    re.IGNORECASE,
)
_BRACKETED_AT = re.compile(r"[\[({<【][ ]{0,2}(?:at|@|艾特)|艾特|@", re.IGNORECASE)
_DOT_WORDED = re.compile(_DOT_WORD, re.IGNORECASE)
_MAIL_HASH = re.compile(
    r"(?<![A-Za-z0-9._%+\-])[A-Za-z0-9][A-Za-z0-9._%+\-]{1,63}[#＃][A-Za-z0-9\-]{1,63}(?:\.[A-Za-z0-9\-]{1,63}"
    r"){0,3}"
    r"\.(?:com|cn|net|org|edu|io|example|uk|de|gov)(?![A-Za-z0-9])"
)

_SEP4 = r"[ ]?(?:\.|\[[ ]?(?:\.|dot)[ ]?\]|\([ ]?(?:\.|dot)[ ]?\)|\{\.\}|[ ]dot[ ])[ ]?\n?"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IP4 = re.compile(rf"(?<![0-9.A-Za-z_\-]){_OCTET}(?:{_SEP4}{_OCTET}){{3}}(?![0-9]|\.[0-9])", re.IGNORECASE)
_IP4_TOUCHING = re.compile(rf"(?<=[A-Za-z_\-]){_OCTET}(?:\.{_OCTET}){{3}}(?![0-9]|\.[0-9])")
_VERSION = re.compile(
    r"(?:\bv|version|release|build|firmware|driver|版本|版|固件|升级到|update to|upgrade to|os|系统|android|miui"
    r"|windows|clause|section|article|§|第|条|条款|notes?;)[ :=]{0,3}v?\Z",
    re.IGNORECASE,
)
_HOST = re.compile(r"(?:ip|host|server|ping|addr|dns|地址|主机|服务器|from|@)[^A-Za-z]{0,6}\Z", re.IGNORECASE)
_IP6 = re.compile(
    r"(?<![0-9A-Za-z:.])(?:[0-9A-Fa-f]{0,4}(?:\[:\]|:)){2,7}[0-9A-Fa-f]{0,4}(?:%[A-Za-z0-9]{1,12})?(?![0-9A-Za-z:])"
)
_MAC = re.compile(
    r"(?<![^0-9A-Za-z][0-9A-F]{2}[:\-])(?<![0-9A-Za-z])(?:[0-9A-F]{2}([:\-])(?:[0-9A-F]{2}\1){4}[0-9A-F]{2}"
    r"|[0-9A-F]{4}\.[0-9A-F]{4}\.[0-9A-F]{4}"
    r"|(?:[0-9A-F]{2}[ :\-]\n?){5}[0-9A-F]{2}|[0-9A-F]{6}[\-:][0-9A-F]{6})(?![0-9A-Za-z:\-])",
    re.IGNORECASE,
)

_URL = re.compile(
    r"(?:[a-z][a-z0-9+.\-]{1,15}://|(?<![A-Za-z0-9@.])(?:[a-z0-9\-]{1,63}\.){1,5}[a-z]{2,12}(?::[0-9]{2,5})?(?"
    r"=[/?#]))"
    r"[^\s<>\"'`，。；、！？（）【】《》“”‘’\u4e00-\u9fff]{1,4000}",
    re.IGNORECASE,
)
_NEXT_LINE = re.compile(r"\n[ ]{0,4}(?P<rest>[A-Za-z0-9_\-%=&.~]{4,400})(?=[\s<>\"'`)，。]|\Z)")
_HARMLESS_VALUE = re.compile(
    r"(?:[0-9]{1,4}|[a-z]{1,12}|[A-Z]{1,3}|true|false|[a-z]{2}[_\-][A-Za-z]{2}|[0-9.]{1,6})\Z"
)
_WORDY = re.compile(
    r"(?:[A-Za-z]{1,20}|[0-9]{1,4}|v[0-9]{1,3})(?:[\-_.](?:[A-Za-z]{1,20}|[0-9]{1,4}))*(?:\.[a-z0-9]{1,5})?\Z"
)


def find(folded: Folded) -> Iterator[Found]:
    """In any order; findings may overlap. Linear in the text."""
    text = folded.text
    yield from _mails(folded)
    yield from _ips(folded)
    for match in folded.matches(_MAC):
        yield Found(match.start(), match.end(), Kind.MAC)
    if "." in text or "://" in text:
        for match in folded.matches(_URL):
            yield from _link(text, match)


def _mails(folded: Folded) -> Iterator[Found]:
    text = folded.text
    for match in folded.matches(_MAIL):
        yield Found(match.start(), match.end(), Kind.EMAIL)
    for match in folded.matches(_MAIL_WORDS):
        surely = _BRACKETED_AT.search(match[0]) or _DOT_WORDED.fullmatch(match["last"])
        if surely or "mail" in text[max(0, match.start() - 40) : match.start()].lower():
            yield Found(match.start(), match.end(), Kind.EMAIL)
    for match in folded.matches(_MAIL_HASH):
        yield Found(match.start(), match.end(), Kind.EMAIL)


def _ips(folded: Folded) -> Iterator[Found]:
    text = folded.text
    for pattern in (_IP4, _IP4_TOUCHING):
        for match in folded.matches(pattern):
            if _is_address(text, match):
                yield Found(match.start(), match.end(), Kind.IP)
    for match in folded.matches(_IP6):
        value = match[0].replace("[:]", ":").split("%")[0]
        try:
            address = ipaddress.IPv6Address(value)
        except ValueError:
            continue
        if any(char.isdigit() for char in value) and int(address) > 1:
            yield Found(match.start(), match.end(), Kind.IP)


def _is_address(text: str, match: re.Match[str]) -> bool:
    """No version, no clause, and none of the addresses that every machine has."""
    octets = [int(octet) for octet in re.findall("[0-9]+", match[0])]
    if octets[0] in (0, 127, 255):
        return False
    if _VERSION.search(text, max(0, match.start() - 16), match.start()):
        return False
    return octets[0] > 9 or max(octets) > 25 or bool(_HOST.search(text, max(0, match.start() - 24), match.start()))


def _link(text: str, match: re.Match[str]) -> Iterator[Found]:
    """The parts of a link that may let somebody in."""
    start, end = match.start(), match.end()
    while end > start and text[end - 1] in ".,;:!?)]}":
        end -= 1
    if end == match.end() and (more := _NEXT_LINE.match(text, end)) and _odd(more["rest"]):
        end = more.end("rest")
    link = text[start:end]
    scheme = link.find("://")
    host_start = scheme + 3 if scheme >= 0 else 0
    path_start = _first(link, "/?#", host_start)
    at = link.rfind("@", host_start, path_start)
    if at > host_start:
        yield Found(start + host_start, start + at, Kind.SECRET if ":" in link[host_start:at] else Kind.USERNAME)
    query_start = _first(link, "?#", path_start)
    before = ""
    for part in re.finditer(r"[^/;]+", link[path_start:query_start]):
        segment = part[0]
        if _odd(segment) or (before in words("link_words.txt") and len(segment) >= 5 and not segment.isalpha()):
            yield Found(start + path_start + part.start(), start + path_start + part.end(), Kind.URL_TOKEN)
        before = segment.lower()
    for part in re.finditer(r"[^?#&;=/]+(=)?", link[query_start:]):
        if part[1]:
            continue
        fragment = link[query_start + part.start() - 1] == "#"
        if not _HARMLESS_VALUE.match(part[0]) and not (fragment and _WORDY.match(part[0])):
            yield Found(start + query_start + part.start(), start + query_start + part.end(), Kind.URL_TOKEN)


def _first(text: str, chars: str, start: int) -> int:
    return min((at for char in chars if (at := text.find(char, start)) >= 0), default=len(text))


def _odd(segment: str) -> bool:
    """No words: digits mixed with letters, or very long."""
    if len(segment) < 8 or _WORDY.match(segment):
        return len(segment) >= 16 and segment.isalnum() and not segment.islower()
    digits = sum(char.isdigit() for char in segment)
    letters = sum(char.isalpha() for char in segment)
    return (digits >= 2 and letters >= 2) or len(segment) >= 24 or digits >= 8


_OPEN = r"[\[({<【][ ]{0,2}"
ANCHORED = (
    Anchored(_MAIL, r"@|%40|&#64;", left=80, right=800),
    Anchored(
        _MAIL_WORDS,
        rf"{_OPEN}(?:at|@|艾特)|艾特|{_OPEN}(?:dot|\.|点|點)|[ ]dot[ ]|点|點|mail",
        left=700,
        right=800,
        near=re.compile(r"[ \[({<【]at[ \])}>】]|@|艾特", re.IGNORECASE),
    ),
    Anchored(_MAIL_HASH, r"[A-Z0-9._%+\-][#＃][A-Z0-9\-]", left=70, right=340),
    Anchored(_IP4, rf"[0-9]{_SEP4}[0-9]{{1,3}}{_SEP4}[0-9]", left=40, right=40),
    Anchored(_IP4_TOUCHING, r"[A-Z_\-][0-9]{1,3}\.[0-9]{1,3}\.[0-9]", left=16, right=16),
    Anchored(_IP6, r"(?::|\[:\])[0-9A-F]{0,4}(?::|\[:\])", left=60, right=80),
    Anchored(
        _MAC,
        r"[0-9A-F]{2}[ :\-]\n?[0-9A-F]{2}[ :\-]\n?[0-9A-F]{2}[ :\-]\n?[0-9A-F]{2}"
        r"|[0-9A-F]{4}\.[0-9A-F]{4}\.[0-9A-F]{4}|[0-9A-F]{6}[\-:][0-9A-F]{6}",
        left=40,
        right=40,
    ),
    Anchored(_URL, r"://|[a-z0-9\-]\.[a-z]{2,12}(?::[0-9]{2,5})?[/?#]", left=400, right=4100),
)
"""The host of a link without a scheme may be long; what follows, too."""
