"""Chooses retrieved passages for a refined prompt within a budget of tokens, and turns them into citations.

Pure functions over passages and a counting function; doesn't know where passages come from or how prompts look.
Order in the prompt is document order: it reads naturally and is the same whatever the scores were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from perilune.core import Citation, Passage

JOIN_GAP_CHARS = 2
"""Passages of one page whose ranges are at most this far apart become one."""

QUOTE_CHARS = 600
"""Citations quote at most this much; the range still covers the whole passage."""

Count = Callable[[Passage], int]
"""Tokens that a passage takes in the prompt, label included."""


def choose_passages(
    found: Sequence[Passage], budget_tokens: int, count: Count, file_order: Sequence[str]
) -> list[Passage]:
    """The best passages that fit, without duplicates, neighbours joined, in document order.

    Goes from best to worst and leaves out what no longer fits; if not even the best fits, it is cut to size.
    """
    chosen: list[Passage] = []
    left = budget_tokens
    for passage in found:
        if any(_covers(other, passage) for other in chosen):
            continue
        cost = count(passage)
        if cost <= left:
            chosen.append(passage)
            left -= cost
        elif not chosen:
            cut = _cut_to(passage, left, count)
            return [cut] if cut else []
    return joined(chosen, file_order)


def joined(passages: Iterable[Passage], file_order: Sequence[str]) -> list[Passage]:
    """Document order, with overlapping and touching passages of a page made one."""
    place = {file_id: index for index, file_id in enumerate(file_order)}
    ordered = sorted(passages, key=lambda p: (place.get(p.file_id, len(place)), p.start, p.end))
    result: list[Passage] = []
    for passage in ordered:
        last = result[-1] if result else None
        if last and (last.file_id, last.page) == (passage.file_id, passage.page):
            gap = passage.start - last.end
            if gap <= JOIN_GAP_CHARS:
                result[-1] = _join(last, passage, gap)
                continue
        result.append(passage)
    return result


def citation(passage: Passage, filenames: Mapping[str, str]) -> Citation:
    quote = passage.text.strip()
    if len(quote) > QUOTE_CHARS:
        quote = quote[:QUOTE_CHARS].rstrip() + "…"
    return Citation(
        file_id=passage.file_id,
        filename=filenames.get(passage.file_id, passage.file_id),
        page=passage.page,
        start=passage.start,
        end=passage.end,
        quote=quote,
        anchor=passage.anchor,
    )


def _covers(outer: Passage, inner: Passage) -> bool:
    same = outer.file_id == inner.file_id
    return same and outer.start <= inner.start and inner.end <= outer.end


def _join(first: Passage, second: Passage, gap: int) -> Passage:
    if second.end <= first.end:
        return replace(first, score=max(first.score, second.score))
    text = first.text + ("\n" * gap if gap > 0 else "") + second.text[max(0, -gap) :]
    return replace(first, end=second.end, text=text, score=max(first.score, second.score))


def _cut_to(passage: Passage, budget_tokens: int, count: Count) -> Passage | None:
    """The longest beginning of a passage that fits, by bisection over characters."""
    low, high = 0, len(passage.text)
    while low < high:
        middle = (low + high + 1) // 2
        if count(replace(passage, text=passage.text[:middle])) <= budget_tokens:
            low = middle
        else:
            high = middle - 1
    if low == 0:
        return None
    return replace(passage, text=passage.text[:low], end=passage.start + low)
