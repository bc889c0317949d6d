"""Questions about a document as a whole ("summarise this", "这篇文章讲了什么"): which passages answer them.

Such a question names nothing that could be looked up. It gets the opening passages, where a document says what
it is, then passages spread evenly, in an order whose every prefix is spread evenly too, so that a small token
budget still sees the whole document and not its first chapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from perilune.memory.analyse import QUESTION_WORDS
from perilune.memory.writing import UNSPACED

OPENING_PASSAGES = 3

_ABOUT_THE_WHOLE = frozenset(
    word
    for line in (
        "summarise summarize summary summarized summarised summaries overview outline abstract gist tldr tl dr",
        "main key major central important point points idea ideas topic topics theme themes subject title contents",
        "content document documents doc docs file files text pdf paper article book manual report guide",
        "purpose brief briefly short whole entire full general overall talk talks cover covers deal deals discuss",
        "discusses discussed sentence sentences paragraph word words bullet bullets one two three four five few",
    )
    for word in line.split()
)
_ZH_ABOUT_THE_WHOLE = re.compile(
    "总结|概括|概述|摘要|归纳|简述|简介|介绍|主要|内容|大意|主旨|中心思想|重点|要点|主题|讲了|讲的|讲述|讲|说了|说的|关于|"
    "这篇|这本|这份|这个|该|本文|全文|整篇|文章|文档|文件|文本|资料|手册|报告|论文|书|"
    "请问|请|帮我|给我|用|几句话|一句话|简单|简要|一下|什么|哪些|的|了|是|吗|呢|有|我|你|对|进行|告诉|做"
)
_WORD = re.compile(rf"[^\W{UNSPACED}]+|[{UNSPACED}]+")


def asks_about_whole(question: str) -> bool:
    """Whether a question holds only question words and words for documents. False for one without any word."""
    words = _WORD.findall(_ZH_ABOUT_THE_WHOLE.sub(" ", question))
    rest = [word for word in words if word.lower() not in QUESTION_WORDS | _ABOUT_THE_WHOLE and len(word) > 1]
    return not rest and bool(_WORD.search(question))


def overview(passages: int, limit: int) -> list[int]:
    """Numbers of at most `limit` passages of a document that has `passages`: the opening ones, then spread."""
    order = dict.fromkeys(range(min(passages, OPENING_PASSAGES)))
    if passages <= limit:
        return list(range(passages))
    for share in _van_der_corput():
        if len(order) >= limit:
            break
        order[int(share * passages)] = None
    return list(order)[:limit]


def _van_der_corput() -> Iterator[float]:
    """1/2, 1/4, 3/4, 1/8, 5/8, …: every prefix covers [0, 1) evenly."""
    number = 0
    while True:
        number += 1
        share, step, rest = 0.0, 0.5, number
        while rest:
            share += step * (rest & 1)
            rest >>= 1
            step /= 2
        yield share
