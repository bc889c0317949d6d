"""What is said when a question is in a language that the model was not trained to speak. Plain data."""

from __future__ import annotations

from collections.abc import Iterable

from perilune.core import Degradation

NAMES = {
    "ar": "Arabic",
    "de": "German",
    "el": "Greek",
    "en": "English",
    "es": "Spanish",
    "fr": "French",
    "he": "Hebrew",
    "hi": "Hindi",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "nl": "Dutch",
    "pl": "Polish",
    "pt": "Portuguese",
    "ru": "Russian",
    "th": "Thai",
    "tr": "Turkish",
    "vi": "Vietnamese",
    "zh": "Chinese",
}


def not_spoken(language: str, model_id: str, spoken: Iterable[str]) -> Degradation:
    names = ", ".join(sorted(NAMES.get(code, code) for code in spoken))
    return Degradation(
        "language",
        f"The question is in {NAMES.get(language, language)}; {model_id} speaks {names}. Quoted passages are "
        "found all the same, but the answer's own words are not reliable.",
    )
