"""Passages cover a page exactly, in order, and break where text breaks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perilune.memory.chunk import is_listing, passages

PROSE = st.text(alphabet=st.sampled_from("abc de.\n,。中文字 \t"), max_size=6_000)


@given(PROSE | st.text(max_size=3_000), st.integers(1, 10_000), st.integers(0, 10**9))
def test_passages_cover_everything_but_white_space(text: str, page: int, offset: int) -> None:
    at, rest = 0, []
    for span in passages(page, text, offset):
        start, end = span.start - offset, span.end - offset
        assert span.page == page
        assert at <= start < end <= len(text)
        assert text[start:end] == text[start:end].strip()
        assert end - start <= 1_200
        rest.append(text[at:start])
        at = end
    rest.append(text[at:])
    assert not "".join(rest).strip()


def test_sizes_and_borders() -> None:
    sentence = "The quick brown fox jumps over the lazy dog and runs away. "
    text = "\n\n".join((sentence * 6).strip() for _ in range(20))
    spans = list(passages(1, text, 0))
    sizes = [span.end - span.start for span in spans]
    assert all(600 <= size <= 1_200 for size in sizes)
    assert all(text[span.end : span.end + 2] in ("\n\n", "") for span in spans)


def test_chinese_passages_are_shorter() -> None:
    text = "这是一个关于命名管道的句子。" * 200
    sizes = [span.end - span.start for span in passages(1, text, 0)]
    assert all(250 <= size <= 480 for size in sizes)
    assert all(text[span.end - 1] == "。" for span in passages(1, text, 0))


def test_one_endless_word_is_cut_too() -> None:
    spans = list(passages(1, "x" * 10_000, 0))
    assert [span.start for span in spans[1:]] == [span.end for span in spans[:-1]]
    assert all(span.end - span.start <= 1_200 for span in spans)


def test_tables_of_contents_are_recognised() -> None:
    assert is_listing("\n".join(f"{i}.1 Something ... {i * 7}" for i in range(9)))
    assert not is_listing("It went on... and on.\nThen 7 more.\n" * 9)
