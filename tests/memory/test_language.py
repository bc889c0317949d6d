"""Languages of questions and documents."""

from __future__ import annotations

import pytest

from perilune.memory.language import detect


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("How do I save a plot?", "en"),
        ("octave version", "en"),
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
