"""Text -> search terms: what BM25 counts. English words, identifiers, numbers, and Chinese characters.

Knows writing, not documents. Deterministic, stdlib and a stemmer only, so that parser processes may import it.

- Words are lower-cased and stemmed (Snowball English). Stop words are never indexed; question words are
  dropped from questions while something else is left to look for.
- Identifiers, paths, versions and clause numbers (`apt-get`, `3.2.1`, `readCsvFile`, `max_pages`) are kept
  whole and also split into their parts.
- Scripts without spaces (Chinese, Japanese, Korean, Thai) become character bigrams, which measured better than
  words or single characters; single characters are indexed too, for questions of one character.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

import Stemmer

from perilune.memory.writing import UNSPACED

_WORD = rf"[^\W{UNSPACED}]+"
_TOKEN = re.compile(rf"{_WORD}(?:[.\-/:@+,'’]{_WORD})*|[{UNSPACED}]+")
_UNSPACED_START = re.compile(rf"[{UNSPACED}]")
_JOINTS = re.compile(r"[.\-/:@+,'’]")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_SUBWORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_A-Za-z]+")
_MAX_TERM_CHARS = 64
_MAX_CACHE = 200_000
_MAX_QUERY_TERMS = 256


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


STOPWORDS = _words(
    "a an and are as at be been being but by from had has have he her him his if in into is it its of on or our "
    "she so such than that the their them then there these they this those to was we were will with you your"
)
"""Never indexed."""

QUESTION_WORDS = STOPWORDS | _words(
    "about am any can could describe did do does doing explain find for get give how i just know let like list "
    "many me much my no not please say show should some tell us use used using want what when where which who "
    "whom whose why would"
)
"""Dropped from questions as long as another word is left."""

_ZH_QUESTION = re.compile(
    "请问|请|什么是|是什么|什么|怎么样|怎样|怎么|如何|为什么|为何|哪些|哪个|哪里|哪一|是否|多少|可以|能不能|"
    "能否|有没有|告诉我|解释|说明一下|一下|的|了|吗|呢|吧|是|在|和|与|我|你|个"
)
_IRREGULAR = {"matrices": "matrix", "vertices": "vertex", "indices": "index", "criteria": "criterion"}


class Analyser:
    """Cuts text into terms. Holds a stemmer and a cache, so it belongs to one thread."""

    def __init__(self) -> None:
        self._stemmer = Stemmer.Stemmer("english")
        self._cache: dict[str, tuple[str, ...]] = {}

    def terms(self, text: str) -> list[str]:
        """Every term of a passage, repeats included, in order."""
        cache = self._cache
        if len(cache) > _MAX_CACHE:
            cache.clear()
        found: list[str] = []
        for token in _TOKEN.findall(normalise(text)):
            known = cache.get(token)
            if known is None:
                known = tuple(self._split(token))
                if len(token) <= _MAX_TERM_CHARS:
                    cache[token] = known
            found.extend(known)
        return found

    def query_terms(self, text: str) -> list[str]:
        """The distinct terms a question looks for, in order; at most 256."""
        clean = normalise(text)
        for drop_questions in (True, False):
            terms = dict.fromkeys(self._query_terms(clean, drop_questions))
            if terms:
                return list(terms)[:_MAX_QUERY_TERMS]
        return []

    def _query_terms(self, text: str, drop_questions: bool) -> Iterator[str]:
        if drop_questions:
            text = _ZH_QUESTION.sub(" ", text)
        for token in _TOKEN.findall(text):
            if _UNSPACED_START.match(token):
                yield from bigrams(token) if len(token) > 1 else (token,)
            elif not (drop_questions and token.lower() in QUESTION_WORDS):
                yield from self._split(token)

    def _split(self, token: str) -> Iterator[str]:
        if _UNSPACED_START.match(token):
            yield from bigrams(token)
            yield from token
        elif _THOUSANDS.fullmatch(token):
            yield token.replace(",", "")
        else:
            parts = [part for part in _JOINTS.split(token) if part]
            if len(parts) > 1 and "'" not in token and "’" not in token:
                yield token.lower()[:_MAX_TERM_CHARS]
            for part in parts:
                yield from self._word(part, alone=len(parts) == 1)

    def _word(self, word: str, alone: bool) -> Iterator[str]:
        """One run of letters, digits and underscores, and its parts where it is an identifier."""
        lower = word.lower()
        if lower in STOPWORDS or (not alone and len(word) == 1):
            return
        if word.isalpha():
            yield self._stem(lower)
        elif alone or len(word) > 2:
            yield lower[:_MAX_TERM_CHARS]
        if len(word) <= _MAX_TERM_CHARS and not (word.islower() and word.isalpha()):
            pieces = _SUBWORD.findall(word)
            if len(pieces) > 1:
                for piece in pieces:
                    if len(piece) > 1 and piece.lower() not in STOPWORDS:
                        yield self._stem(piece.lower())

    def _stem(self, word: str) -> str:
        stem: str = self._stemmer.stemWord(_IRREGULAR.get(word, word[:_MAX_TERM_CHARS]))
        return stem


def bigrams(run: str) -> Iterator[str]:
    """Overlapping pairs of characters; nothing for a single one."""
    return (run[i : i + 2] for i in range(len(run) - 1))


def normalise(text: str) -> str:
    """Compatibility forms (full-width letters, ligatures) folded, so that both spellings match."""
    return text if text.isascii() else unicodedata.normalize("NFKC", text)
