"""Whole-document questions are told from others, and get an even spread."""

from __future__ import annotations

import pytest

from perilune.memory.overview import asks_about_whole, overview


@pytest.mark.parametrize(
    "question",
    [
        "Summarise this.",
        "summarize the document in three sentences",
        "What is this about?",
        "What are the main points of the paper?",
        "Give me an overview.",
        "总结一下这篇文章",
        "这个文件主要讲了什么？",
        "请概括全文的主要内容",
        "TL;DR",
    ],
)
def test_about_the_whole(question: str) -> None:
    assert asks_about_whole(question)


@pytest.mark.parametrize(
    "question",
    ["Summarise chapter 3", "What is a pipe?", "总结一下命名管道", "what does fzero do", "???", "", "42"],
)
def test_about_something(question: str) -> None:
    assert not asks_about_whole(question)


def test_spread() -> None:
    assert overview(5, 10) == [0, 1, 2, 3, 4]
    assert overview(0, 10) == []
    assert overview(1000, 2) == [0, 1]
    numbers = overview(1000, 7)
    assert numbers == [0, 1, 2, 500, 250, 750, 125]
    assert len(set(overview(12, 11))) == 11
