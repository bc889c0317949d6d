"""Names of people in English writing, and Chinese names in Latin letters.

Knows lists of given names, of surnames and of the ordinary words among them; no model. A given name and a
surname, a title and a name, a surname with initials, and what follows a greeting or "my name is" count; a
given name alone only with such a word beside it.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Iterator

from perilune.service.privacy.anchors import Anchored
from perilune.service.privacy.fold import Folded
from perilune.service.privacy.kinds import Found, Kind
from perilune.service.privacy.lists import words

_W = r"[A-Za-zÀ-ÖØ-öø-ÿ]"
_NAME = rf"(?:(?:[OD]['’]|Mc|Mac|al-|Al-)?{_W}{{1,20}}(?:[\-‐'’]{_W}{{2,20}})?)"
_CAPITAL = "[A-ZÀ-ÖØ-Þ]"
_WORDS = re.compile(
    rf"(?<!{_W})(?:[OoDd]['’](?={_CAPITAL}))?(?:{_CAPITAL}{_W}{{0,24}}+(?:[\-‐]{_CAPITAL}{_W}{{1,24}}+)?"
    rf"|{_W}{{1,24}}+)"
)
_GAP = re.compile(r"(?:[ \t\u00a0]{1,3}|[ ]?\n[ ]?)(?:(?:[A-Z]\.?|[\"“'(][A-Za-z]{2,15}[\"”')])[ ]{1,2}){0,2}")
_COMMA = re.compile(r",[ ]{0,2}\n?")
_PARTICLE = re.compile(
    r"(?:van der|van den|van de|van|von der|von|de la|de los|del|de|di|da|dos|du|la|le|el|al|bin|ben|ibn|mac"
    r"|st\.?)[ ]{1,2}",
    re.IGNORECASE,
)
_ROYAL = re.compile(r"(?:Queen|King|Prince|Princess|Saint|St\.?|Pope|Emperor|Lake|Port|Fort|Mount|Santa|San) \Z")
_SUFFIX = re.compile(r",?[ ](?:Jr|Sr|II|III|IV|PhD|MD|Esq)(?![A-Za-z])\.?")
_TITLES = (
    r"(?:Mr|Mrs|Ms|Mx|Dr|Prof|Rev|Hon|Capt|Lt|Sgt|Sr|Sra|Mme|Mlle|Messrs)\.?|MR|MRS|MS|DR|PROF|Miss|Missus"
    r"|Mister|Doctor|Professor|Sir|Dame|Madam|Lady|Lord|Reverend|Father|Sister|Brother|Captain|Sergeant|Officer"
    r"|Detective|Inspector|Judge|Justice|Nurse|Coach|Aunt|Auntie|Uncle|Grandma|Grandpa|Granny|Cousin|Senator"
    r"|Herr|Frau|Señora?|Monsieur|Madame|Signora?"
)
_TITLED = re.compile(
    rf"(?<!{_W})(?:(?:{_TITLES})(?:[ ]?\n?[ ]?|[ ]{{1,2}})){{1,3}}"
    rf"(?P<name>(?:[A-Z]\.?[ ]){{0,2}}(?:(?:van|von|de|del|di|da|la|le|bin|al|Ní|Ni|Nic|Ó|Mac|San|De|Van|Von"
    rf"|Di|Da|La|Le|Al)[ ]){{0,2}}(?:[OD]['’])?[A-ZÀ-Ö]{_W}{{1,20}}(?:[\-'’][A-ZÀ-Öa-z]{_W}{{1,20}})?)"
    rf"(?P<more>(?:[ ](?:[A-Z]\.[ ])?(?:[OD]['’])?[A-ZÀ-Ö]{_W}{{1,20}}(?:[\-'’][A-ZÀ-Ö]{_W}{{1,20}})?){{0,2}})"
)
_INITIALS = re.compile(
    rf"(?<![A-Za-z.])(?P<name>(?:[A-Z]\.[ \-]?){{1,3}}[ ]?\n?(?:[OD]['’]|Mc"
    rf"|Mac)?[A-Z]{_W}{{1,20}}(?:-[A-Z]{_W}{{1,20}})?|(?:[OD]['’])?[A-Z]{_W}{{2,20}},? [A-Z]\.(?:["
    rf" ]?[A-Z]\.)?)(?!{_W})"
)
_CUED = re.compile(
    rf"(?<!{_W})(?i:my name is|name's|name is|i am|i'm|this is|it's|call me|called|named|signed,?|yours,?"
    rf"|regards,?|cheers,?|thanks,?|sincerely,?|best,?|love,?"
    rf"|dear|hi|hello|hey|morning|ask for|speak to|talk to|contact|cc|attn|attention|from|to|by|with|and|"
    rf"(?:my|his|her|our|their)[ ](?:wife|husband|son|daughter|brother|sister|mother|father|mom|mum|dad|boss"
    rf"|manager|colleague|friend|neighbou?r|partner|boyfriend|girlfriend|uncle"
    rf"|aunt|cousin|fianc[ée]e?|ex|teacher|tutor|landlord|landlady|roommate|flatmate|client|patient|assistant"
    rf"|niece|nephew|grandson|granddaughter|grandmother|grandfather|kid|child|therapist|doctor|coach"
    rf"|supervisor|nanny)"
    rf"|patient|employee|customer|client|tenant|applicant|name|contact|recipient|attendee|assignee|author"
    rf"|reporter|owner|guardian|spouse)"
    rf"(?:[ ]is|[ ]was|'s)?[ ]?[,:=\-–—]?[\"']?[ ]{{0,3}}\n{{0,2}}[ ]{{0,3}}[\"'“]?(?P<name>[A-ZÀ-Ö]{_W}{{1,20"
    rf"}}(?:[\-'’]{_W}{{2,20}})?)(?P<more>(?:[ ]{{1,2}}[A-ZÀ-Ö]{_W}{{1,20}}(?:[\-'’]{_W}{{2,20}})?)?)(?!{_W})"
)
_SURE_CUE = re.compile(
    r"(?i:my name is|name's|name is|call me|named|signed|name|patient|employee|recipient|applicant|attendee"
    r"|assignee|guardian|spouse)[^A-Za-z]{0,8}\Z"
)

_SYLLABLE = (
    r"(?:(?:zh|ch|sh|[bpmfdtnlgkhjqxrzcsyw])?(?:iang|iong|uang|ang|eng|ing|ong|ian|iao|uai|uan|van|ai|ei|ao"
    r"|ou|an|en|in|un|vn|ia|ie|iu|ua|uo|ui|ue|ve|er|a|o|e|i|u|v|ü|üe))"
)
_PINYIN_GIVEN = re.compile(rf"{_SYLLABLE}(?:[\-'’]?{_SYLLABLE})?\Z", re.IGNORECASE)


def find(folded: Folded) -> Iterator[Found]:
    """In any order; findings may overlap. Linear in the text."""
    finder = _Finder(folded)
    yield from finder.pairs()
    yield from finder.alone()
    yield from finder.patterns()


class _Finder:
    def __init__(self, folded: Folded) -> None:
        self._folded = folded
        self._text = folded.text
        self._given = words("given_en.txt")
        self._surnames = words("surnames_en.txt")
        self._frequent = words("frequent_en.txt")
        self._ordinary = words("ordinary_en.txt")
        self._figures = words("figures.txt")
        self._public: list[tuple[int, int]] = []  # where people of history stand

    def pairs(self) -> Iterator[Found]:
        """Given name and surname, in either order, with initials or a particle between."""
        found = list(self._folded.matches(_WORDS))
        for at, first in enumerate(found):
            if _plain(first[0]) not in self._given and not first[0][0].isupper():
                continue
            for second in found[at + 1 : at + 4]:  # an initial or a particle may stand between
                if second.start() - first.end() > 24:
                    break
                if end := self._pair(first, second):
                    yield Found(first.start(), end, Kind.PERSON)
                    break

    def _pair(self, first: re.Match[str], second: re.Match[str]) -> int:
        """Where a name ends that consists of the two words, else 0."""
        between = self._text[first.end() : second.start()]
        one, two = _plain(first[0]), _plain(second[0])
        comma = bool(_COMMA.fullmatch(between))
        if not comma and not _GAP.fullmatch(between) and not self._particle(between):
            return 0
        if f"{one}_{two}" in self._figures or f"{one}_{between.strip().lower()}_{two}" in self._figures:
            self._public.append((first.start(), second.end()))
            return 0
        if comma:
            fits = one in self._surnames and two in self._given and two not in self._ordinary
            return second.end() if fits and first[0][0].isupper() and second[0][0].isupper() else 0
        if self._is_name(first[0], second[0], one, two) or self._pinyin(first[0], second[0], one, two):
            return self._through(second.end())
        return 0

    def _particle(self, between: str) -> bool:
        return between[:1].isspace() and bool(_PARTICLE.fullmatch(between.lstrip()))

    def _is_name(self, first: str, second: str, one: str, two: str) -> bool:
        given, surname = one in self._given, self._is_surname(two)
        if not given or one in words("never_given.txt") or len(one) < 2 or len(two) < 2:
            return False
        ordinary = (one in self._ordinary) + (two in self._ordinary)
        if first[0].islower() and second[0].islower():
            return surname and not ordinary and len(one) > 2 and len(two) > 3 and two not in self._given
        if not (first[0].isupper() and second[0].isupper()):
            return surname and not ordinary and len(one) > 3 and len(two) > 3
        if ordinary == 2:
            return False
        if surname:
            return True
        return one not in self._ordinary and two not in self._ordinary and len(two) > 2

    def _is_surname(self, word: str) -> bool:
        parts = re.split(r"[\-‐]", word)
        return word in self._surnames or (len(parts) > 1 and any(part in self._surnames for part in parts))

    def _pinyin(self, first: str, second: str, one: str, two: str) -> bool:
        if not (first[0].isupper() and second[0].isupper()):
            return False
        for surname, given in ((one, two), (two, one)):
            if (
                surname in words("pinyin_surnames.txt")
                and given not in self._ordinary
                and _PINYIN_GIVEN.match(given)
            ):
                return given not in words("short_pinyin.txt") or surname not in words("short_pinyin.txt")
        return False

    def _through(self, end: int) -> int:
        """With a second surname or a suffix."""
        suffix = _SUFFIX.match(self._text, end)
        return suffix.end() if suffix else end

    def alone(self) -> Iterator[Found]:
        """Given names by themselves that are nothing else in English."""
        for word in self._folded.matches(_WORDS):
            name = _plain(word[0])
            if not word[0][0].isupper() or len(word[0]) < 3 or name not in self._frequent or name in self._ordinary:
                continue
            royal = _ROYAL.search(self._text, max(0, word.start() - 12), word.start())
            if name in self._given and not royal and not self._is_public(word):
                yield Found(word.start(), word.end(), Kind.PERSON)

    def _is_public(self, word: re.Match[str]) -> bool:
        at = bisect_right(self._public, (word.start(), sys.maxsize)) - 1
        return at >= 0 and word.start() < self._public[at][1]

    def patterns(self) -> Iterator[Found]:
        for match in self._folded.matches(_TITLED):
            more = match["more"].split()
            end = match.end("name")
            if (
                more
                and _plain(more[0]) not in self._ordinary
                and (self._is_surname(_plain(more[-1])) or _plain(match["name"]) in self._given)
            ):
                end = match.end()
            name = _plain(match["name"])
            if name in self._ordinary and name not in self._surnames:
                continue
            yield Found(match.start(), end, Kind.PERSON)
        for match in self._folded.matches(_INITIALS):
            surname = max(re.findall(rf"{_W}+", match["name"]), key=len).lower()
            if surname in self._surnames and (surname not in self._ordinary or match["name"][1:2] == "."):
                yield Found(match.start(), match.end(), Kind.PERSON)
        for match in self._folded.matches(_CUED):
            yield from self._cued(match)

    def _cued(self, match: re.Match[str]) -> Iterator[Found]:
        name, more = match["name"], match["more"].strip()
        one, two = _plain(name), _plain(more)
        if f"{one}_{two}" in self._figures:
            return
        listed = one in self._given and one not in self._ordinary
        sure = bool(_SURE_CUE.search(self._text, max(0, match.start("name") - 24), match.start("name")))
        if not listed and not (sure and one not in self._ordinary and one in self._surnames):
            return
        whole = more and two not in self._ordinary and (self._is_surname(two) or sure)
        yield Found(match.start("name"), match.end("more") if whole else match.end("name"), Kind.PERSON)


def _plain(word: str) -> str:
    return word.lower().replace("’", "'").removesuffix("'s")


def ordinary_words() -> frozenset[str]:
    """Names that are words too, so that by themselves they say little."""
    return words("ordinary_en.txt")


def anchored() -> tuple[Anchored, ...]:
    """What stands where names may be."""
    given = words("given_en.txt")
    names = given | words("pinyin_surnames.txt")
    sure = _SURE_CUE.pattern.removesuffix(r"\Z") + "[A-ZÀ-Ö]"
    return (
        Anchored(_WORDS, words=names, capital=names - (given - ordinary_words()), left=90, right=90),
        Anchored(_CUED, sure, words=given - ordinary_words(), left=90, right=60, caseless=False),
        Anchored(_TITLED, rf"(?:^|[^A-Za-z])(?:{_TITLES})[ \n]{{0,3}}{_W}", 40, 120, caseless=False),
        Anchored(_INITIALS, (r"[A-Z]\.[ \-]{0,2}\n?[A-Z]", r"[^ ] [A-Z]\."), 48, 60, caseless=False),
    )
