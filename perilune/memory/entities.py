"""Names in a text, for filters: people, titles, addresses and codes, found by how they are written.

Knows writing, no language model. Errs towards few names: a filter that misses one is better than one that fires on
every capital letter. Names are lower-cased, white space is one space; `names` of a question and of a text agree.
"""

from __future__ import annotations

import re
import unicodedata

MAX_NAMES = 32
_MAX_CHARS = 64

# What looks ahead or may fail is bounded: a text may be one run of a million letters.
_MAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+")
_CODE = re.compile(
    r"\b(?=[A-Za-z0-9-]{0,63}\d)(?=[A-Za-z0-9-]{0,63}[A-Za-z])[A-Za-z0-9]+(?:-[A-Za-z0-9]+)+\b|\b[A-Z]{2,}\d+\b"
)
_TITLE_ZH = re.compile("[《「『“]([^《》「」『』“”]{2,30})[》」』”]")
_NAME_EN = re.compile(
    r"\b[A-Z][a-z]+(?:[ -](?:(?:of|de|van|von|the) )?[A-Z][a-z]+)+\b|(?<=[a-z,;] )[A-Z][a-z]{2,}\b"
)
_COMMON = frozenset(
    word
    for line in (
        "monday tuesday wednesday thursday friday saturday sunday january february march april may june july",
        "august september october november december i i'm i'll the",
    )
    for word in line.split()
)


def names(text: str) -> tuple[str, ...]:
    """At most 32 names, in the order in which they first occur."""
    text = unicodedata.normalize("NFKC", text)
    found: dict[str, None] = {}
    for pattern in (_MAIL, _CODE, _TITLE_ZH, _NAME_EN):
        for match in pattern.finditer(text):
            name = normal(match[1] if pattern is _TITLE_ZH else match[0])
            if name and name not in _COMMON:
                found[name] = None
    return tuple(found)[:MAX_NAMES]


def normal(name: str) -> str:
    """A name as filters compare it."""
    return " ".join(unicodedata.normalize("NFKC", name).lower().split())[:_MAX_CHARS]
