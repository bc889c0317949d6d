"""Questions whose page is known, asked of two real manuals: 1,158 pages in English and 251 in Chinese."""

from __future__ import annotations

import time

import pytest

from perilune.core import FileStatus
from tests.memory.conftest import Manual

OCTAVE_FACTS = [
    ("What is the default value of max_recursion_depth?", {175}),
    ("Which function computes the singular value decomposition?", {623}),
    ("How can I read a CSV file into a matrix?", {301}),
    ("Which ODE solver should be used for stiff problems?", {746}),
    ("What does the unwind_protect statement do?", {204}),
    ("How do I declare a persistent variable?", {156, 157}),
    ("How can I install a package from Octave Forge?", {1015}),
    ("Which colormap is the default?", {887}),
    ("What is a block comment?", {55}),
    ("How do I save a plot to a PDF file?", {427}),
    ("How do I change the display precision of numbers in the output?", {70}),
    ("Whose professor was Octave named after?", {17}),
]
DEBIAN_FACTS = [
    ("什么是命名管道？", {41}),
    ("怎样用 apt 升级整个系统？", {80}),
    ("怎样设置 SSH 公钥登录？", {136}),
    ("如何备份系统数据？", {205, 206}),
    ("怎么查看磁盘分区？", {175, 176}),
    ("文件权限 umask 是什么", {38}),
    ("如何恢复被删除的文件？", {186}),
]


@pytest.mark.parametrize(("question", "pages"), OCTAVE_FACTS)
def test_octave_fact_is_on_a_top_page(octave: Manual, question: str, pages: set[int]) -> None:
    assert pages & set(octave.pages(question))


@pytest.mark.parametrize(("question", "pages"), DEBIAN_FACTS)
def test_debian_fact_is_on_a_top_page(debian_zh: Manual, question: str, pages: set[int]) -> None:
    assert pages & set(debian_zh.pages(question))


def test_whole_manual_is_read(octave: Manual, debian_zh: Manual) -> None:
    for document, pages, language in ((octave, 1158, "en"), (debian_zh, 251, "zh")):
        record = document.record
        assert (record.status, record.error) == (FileStatus.PREFILLING, None)
        assert (record.pages_total, record.pages_parsed, record.language) == (pages, pages, language)
        assert [p.number for p in document.library.pages("local", record.file_id)] == list(range(1, pages + 1))


def test_progress_comes_early_and_in_steps(octave: Manual) -> None:
    parsed = [record.pages_parsed for record in octave.progress]
    assert parsed == sorted(parsed)
    assert next(pages for pages in parsed if pages) <= 8
    assert len(set(parsed)) > 15
    assert octave.progress[1].pages_total == 1158


def test_offsets_point_into_the_whole_text(octave: Manual) -> None:
    library, file_id = octave.library, octave.record.file_id
    text = library.text("local", file_id)
    assert len(text) > 2_000_000
    for page in library.pages("local", file_id)[::97]:
        assert text[page.start : page.end] == page.text
    for passage in library.search("local", [file_id], "sparse matrix solver for a linear system", 40):
        assert text[passage.start : passage.end] == passage.text
        assert passage.text


def test_hyphens_and_contents_are_tidied(octave: Manual) -> None:
    text = octave.library.text("local", octave.record.file_id)
    assert "under the conditions for verbatim copying" in text
    assert "Department of Chemical and Biological" in text
    assert ". . . . . ." not in text


def test_search_stays_within_20_ms(octave: Manual) -> None:
    question = "function matrix return value of the array element string option argument variable default"
    octave.pages(question)
    times = []
    for _ in range(15):
        start = time.perf_counter()
        octave.pages(question, 20)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.020


def test_summary_question_sees_the_opening_and_the_rest(octave: Manual) -> None:
    found = octave.library.search("local", [octave.record.file_id], "Summarise this document.", 10)
    pages = [passage.page for passage in found]
    assert pages[0] == 1
    assert max(pages) > 1000
    assert {page // 290 for page in pages} == {0, 1, 2, 3}
