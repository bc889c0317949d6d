"""Why a grammar can't be followed, in our own words: what its writer can mend, and where.

Knows how llguidance and the parsers below it word their refusals; doesn't call them. Their texts name options and
types of a library that the caller never sees, and a fault in them prints a trace: so none is passed on. What isn't
known here becomes a sentence that fits every fault of the notation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from perilune.core import GrammarKind

_MOST_QUOTED = 60
"""Characters of the caller's own text that are repeated."""

_TOLD: Sequence[tuple[str, str]] = (
    # Of every notation
    (r"\ANoExtensionBias", "no text at all fits it"),
    # Regular expressions, also in the two others
    (
        r"look-?around",
        "it looks at what is around (lookahead, lookbehind, \\b, ^ or $ inside), which isn't supported",
    ),
    (r"backreferences", "it refers back to a group, which isn't supported"),
    (r"unclosed group", "a group of the regular expression isn't closed"),
    (r"unopened group", "a group of the regular expression is closed that wasn't opened"),
    (r"unclosed character class", "a class of characters isn't closed"),
    (r"character class range", "a range of characters ends before it begins"),
    (r"repetition operator missing", "there is nothing to repeat before *, +, ? or {}"),
    (r"hexadecimal", "a character's number is none"),
    (r"repetition count|decimal literal", "the numbers of a repetition are none that can be"),
    (r"Unicode property", "a class of characters isn't known"),
    (r"duplicate capture group", "two groups of the regular expression have the same name"),
    (r"nested", "its groups are nested too deeply"),
    (r"unrecognized flag", "a group of the regular expression begins in an unknown way"),
    (r"invalid UTF-8", "it would match bytes that are no text"),
    (r"Unknown common regex: (?P<it>[^;]*)", 'there is no "{it}" to import'),
    (r"regex parse error|in regex|parse %regex", "it has a regular expression that is none"),
    # JSON schemas, also in Lark
    (r"Unimplemented keys: \[\"(?P<it>[^\"]*)\"", 'it uses "{it}", which isn\'t supported'),
    (r"Invalid type: (?P<it>.*)", 'there is no type "{it}"'),
    (r"Unknown format: (?P<it>.*)", 'the format "{it}" isn\'t known'),
    (r"Pointer '(?P<it>[^']*)'", 'the reference "#{it}" leads nowhere'),
    (r"Resource '(?P<it>[^']*)'", 'it refers to "{it}", and other documents aren\'t fetched'),
    (r"(?P<it>minimum|minLength|minItems|minProperties) \(.* is greater", '"{it}" is greater than its counterpart'),
    (r"required property '(?P<it>[^']*)'", 'the required property "{it}" may have no value'),
    (r"Unsatisfiable", "no value fits it"),
    (r"oneOf", "the alternatives of its oneOf may overlap, which isn't supported: use anyOf"),
    (r"(?:Expected .* for '(?P<it>[^']*)')", 'the value of "{it}" isn\'t one that JSON Schema knows'),
    (r"schema must be", "a schema in it is neither an object nor true or false"),
    (r"(?P<it>\w+) must be an? ", 'the value of "{it}" isn\'t one that JSON Schema knows'),
    (r"Expecting object schema", "the schema must be an object"),
    (r"(?:EOF|expected|trailing|key must).* at line \d+ column \d+", "its JSON is none"),
    # Lark
    (r"unknown name: \"(?P<it>[^\"]*)\"", 'nothing is called "{it}"'),
    (r"circular reference in token \"(?P<it>[^\"]*)\"", 'the token "{it}" refers to itself'),
    (r"duplicate rule: \"(?P<it>[^\"]*)\"", 'two rules are called "{it}"'),
    (r"no start rule", "it has no rule that is called start"),
    (r"Unknown attribute: (?P<it>\w*)", 'the attribute "{it}" isn\'t known'),
    (r"range end (?:must be|too large)", "a range ends before it begins, or too late"),
    (r"only supported for tokens", "& and ~ are for tokens, whose names are in capitals"),
    (
        r"TooComplex|too (?:complex|big|many|deep)|limit(?: for|=)|fuel",
        "it takes too much time or memory to follow",
    ),
    (r"not supported|Unknown|unknown grammar", "it uses what isn't supported"),
)
_KNOWN = tuple((re.compile(pattern), sentence) for pattern, sentence in _TOLD)

_ELSE = {
    GrammarKind.JSON_SCHEMA: "it isn't a JSON Schema, or uses what isn't supported",
    GrammarKind.REGEX: "it isn't a regular expression, or uses what isn't supported",
    GrammarKind.LARK: "it isn't in Lark's notation, or uses what isn't supported",
}
_LINE = re.compile(r"\A(?:at )?(?P<line>\d+)\((?P<column>\d+)\):")
_CARETS = re.compile(r"^    .*\n    (?P<before> *)\^+", re.MULTILINE)


def reason(kind: GrammarKind, told: str) -> str:
    """A clause for `The … can't be followed: …`, where it is known with the place. `told` is the library's text."""
    return _what(kind, told) + _where(kind, told)


def _what(kind: GrammarKind, told: str) -> str:
    if told.startswith("panic"):
        return _ELSE[kind]
    own = _CARETS.sub("", told)  # without the caller's own text, which may hold any of our words
    own = re.sub(r"\n +\d+ \| .*", "", re.sub(r'invalid regex ".*" \(in regex\)', "regex", own))
    for pattern, sentence in _KNOWN:
        if found := pattern.search(own):
            quoted = {name: _shown(text) for name, text in found.groupdict().items() if text is not None}
            return sentence.format(**quoted) if quoted else sentence
    return _ELSE[kind]


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MOST_QUOTED else text[: _MOST_QUOTED - 1] + "…"


def _where(kind: GrammarKind, told: str) -> str:
    if kind is GrammarKind.LARK and (at := _LINE.match(told)):
        return f" (line {at['line']}, column {at['column']})"
    if kind is GrammarKind.REGEX and (at := _CARETS.search(told)):
        return f" (character {len(at['before']) + 1})"
    return ""
