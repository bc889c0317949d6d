"""Languages of questions and documents."""

from __future__ import annotations

import pytest

from perilune.memory.language import _COMMON_WORDS, _SCRIPTS, detect
from perilune.service.languages import NAMES


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("How do I save a plot?", "en"),
        ("octave version", "en"),
        ("May I keep a cat?", "en"),
        ("I keep a cat", "en"),
        ("Czy mogę mieć kota?", "pl"),
        ("Kiedy i gdzie jest spotkanie?", "pl"),
        ("Was kostet das?", "de"),
        ("什么是命名管道？", "zh"),
        ("怎样用 apt-get 升级整个 Debian 系统？", "zh"),
        ("名前付きパイプとは何ですか？", "ja"),
        ("명명된 파이프란 무엇입니까?", "ko"),
        ("Что такое именованный канал?", "ru"),
        ("Was ist eine benannte Pipe und wie wird sie benutzt?", "de"),
        ("Qu'est-ce que le tube nommé et comment est-il utilisé dans un script ?", "fr"),
        ("¿Qué es una tubería y cómo se usa?", "es"),
        ("ما هو الأنبوب المسمى؟", "ar"),
        ("The function 复数 returns the complex conjugate of its argument", "en"),
        ("1234 + 5678", None),
        ("", None),
    ],
)
def test_detect(text: str, language: str | None) -> None:
    assert detect(text) == language


def test_every_language_that_is_found_has_a_name() -> None:
    """People are told in words which language a model doesn't speak."""
    codes = {code for code, _ in _SCRIPTS} | set(_COMMON_WORDS)
    assert codes <= set(NAMES)
