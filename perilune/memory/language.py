"""Which language a text is in, from its script and its most common words. Cheap, no model.

Knows letters only. Good for paragraphs and ordinary questions; short Latin text without a telling word counts
as English. Returns ISO 639-1 codes.
"""

from __future__ import annotations

import re
from collections import Counter

SAMPLE_CHARS = 20_000
_MIN_LETTERS = 1

_SCRIPTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("zh", re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")),
    ("ja", re.compile("[\u3040-\u30ff]")),
    ("ko", re.compile("[\uac00-\ud7af\u1100-\u11ff]")),
    ("ru", re.compile("[\u0400-\u04ff]")),
    ("ar", re.compile("[\u0600-\u06ff]")),
    ("he", re.compile("[\u0590-\u05ff]")),
    ("el", re.compile("[\u0370-\u03ff]")),
    ("th", re.compile("[\u0e00-\u0e7f]")),
    ("hi", re.compile("[\u0900-\u097f]")),
)
_LATIN = re.compile(r"[A-Za-z\u00c0-\u024f]+")
_IDEOGRAPH_WEIGHT = 3  # a Chinese character says about as much as three letters
_JAPANESE_KANA_SHARE = 0.1

_COMMON_WORDS = {
    "en": "the of and to in is that it for what how are which does this with be can who when where why do "
    "i my you your may have has not or from at if",
    "de": "der die das und ist nicht ein eine zu den mit von für auf was wie wer wo warum sind im dem wird kann",
    "fr": "le la les des et est une dans que qui pour pas sur avec quel quelle comment pourquoi où du sont ce",
    "es": "el los las que una por con para del qué cómo cuál dónde quién es son está en y se al",
    "it": "il lo gli che di un una per con sono come cosa quale dove perché è della nel del non",
    "pt": "o os as que um uma para com não do da em como qual onde quem é são por ao na no",
    "nl": "de het een van en is dat niet op te voor met wat hoe waarom wie waar zijn aan er",
    "pl": "jest nie się na co jak mogę można mam do że to czy który dlaczego gdzie kto są",
    "tr": "bir ve bu için ne nasıl neden nedir mı mi ile olan kim nerede",
    "vi": "là và của có không gì như thế nào cho được các một trong",
}
_COMMON = {language: frozenset(words.split()) for language, words in _COMMON_WORDS.items()}


def detect(text: str) -> str | None:
    """The dominant language, or None where the text holds no letters."""
    sample = text[:SAMPLE_CHARS]
    counts = Counter({code: len(pattern.findall(sample)) for code, pattern in _SCRIPTS})
    words = [word.lower() for word in _LATIN.findall(sample)]
    latin_letters = sum(map(len, words))
    if counts["ja"] > _JAPANESE_KANA_SHARE * (counts["zh"] + counts["ja"]):
        counts["ja"] += counts["zh"]
        counts["zh"] = 0
    for code in ("zh", "ja", "ko"):
        counts[code] *= _IDEOGRAPH_WEIGHT
    script, letters = counts.most_common(1)[0]
    if max(letters, latin_letters) < _MIN_LETTERS:
        return None
    return script if letters > latin_letters else _latin_language(words)


def _latin_language(words: list[str]) -> str:
    hits = Counter({code: sum(word in common for word in words) for code, common in _COMMON.items()})
    best, count = hits.most_common(1)[0]
    return best if count > hits["en"] else "en"
