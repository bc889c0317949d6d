"""The batch router: order, limits and windows hold whatever engines, sources and consumers do; no deadlock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.errors import InternalError
from perilune.service.batch.router import BatchRouter, LimitedEngine

WITHIN_S = 20.0


@dataclass
class Recorder:
    """An engine that doubles numbers after some turns of the loop, watches its limits, and may break."""

    most_items: int
    most_calls: int
    turns: Sequence[int] = (0,)
    breaks_at: int | None = None
    running: int = 0
    calls: list[list[int]] = field(default_factory=list)

    async def run(self, items: Sequence[int]) -> list[int]:
        assert 0 < len(items) <= self.most_items
        self.running += 1
        assert self.running <= self.most_calls
        number = len(self.calls)
        self.calls.append(list(items))
        try:
            for _ in range(self.turns[number % len(self.turns)]):
                await asyncio.sleep(0)
            if self.breaks_at is not None and number >= self.breaks_at:
                raise InternalError("broken")
            return [2 * item for item in items]
        finally:
            self.running -= 1

    @property
    def engine(self) -> LimitedEngine[int, int]:
        return LimitedEngine(self.run, self.most_items, self.most_calls)


turns = st.lists(st.integers(0, 7), min_size=1, max_size=5)
recorders = st.builds(
    Recorder, most_items=st.integers(1, 5), most_calls=st.integers(1, 3), turns=turns, breaks_at=st.none()
)
breaking = st.builds(
    Recorder,
    most_items=st.integers(1, 5),
    most_calls=st.integers(1, 3),
    turns=turns,
    breaks_at=st.one_of(st.none(), st.integers(0, 4)),
)


@given(
    engines=st.lists(recorders, min_size=1, max_size=4),
    count=st.integers(0, 60),
    window=st.one_of(st.none(), st.integers(1, 40)),
    producer=turns,
    consumer=turns,
)
@settings(max_examples=150, deadline=None)
def test_order_limits_and_window(
    engines: list[Recorder], count: int, window: int | None, producer: list[int], consumer: list[int]
) -> None:
    at_once = sum(each.most_items * each.most_calls for each in engines)
    allowed = max(window or 2 * at_once, at_once)
    taken = 0

    async def source() -> AsyncGenerator[int]:
        for number in range(count):
            assert number - taken <= allowed + 1, "the producer outran the window"
            yield number
            for _ in range(producer[number % len(producer)]):
                await asyncio.sleep(0)

    async def consume() -> list[int]:
        nonlocal taken
        found = []
        async with aclosing(BatchRouter([e.engine for e in engines], window).stream(source())) as results:
            async for result in results:
                taken += 1
                found.append(result)
                for _ in range(consumer[taken % len(consumer)]):
                    await asyncio.sleep(0)
        return found

    found = asyncio.run(asyncio.wait_for(consume(), WITHIN_S))
    assert found == [2 * number for number in range(count)]
    assert sorted(item for engine in engines for call in engine.calls for item in call) == list(range(count))


@given(engines=st.lists(breaking, min_size=1, max_size=4), count=st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_engines_that_break_are_stood_in_for(engines: list[Recorder], count: int) -> None:
    router = BatchRouter([each.engine for each in engines])
    work = asyncio.wait_for(router.run(list(range(count))), WITHIN_S)
    broken = [each.breaks_at is not None and len(each.calls) > each.breaks_at for each in engines]
    try:
        found = asyncio.run(work)
    except InternalError:
        broken = [each.breaks_at is not None and len(each.calls) > each.breaks_at for each in engines]
        assert all(broken), "an engine was left that could have gone on"
    else:
        assert found == [2 * number for number in range(count)]


async def test_a_list_is_split_by_the_limit_of_the_engine() -> None:
    engine = Recorder(16, 1)
    assert await BatchRouter([engine.engine]).run(list(range(40))) == [2 * item for item in range(40)]
    assert [len(call) for call in engine.calls] == [16, 16, 8]


async def test_what_the_source_raises_comes_behind_the_results_of_what_it_gave() -> None:
    async def source() -> AsyncGenerator[int]:
        yield 1
        yield 2
        raise OSError("the disk is gone")

    results = BatchRouter([Recorder(1, 1, (3,)).engine]).stream(source())
    assert [await anext(results), await anext(results)] == [2, 4]
    with pytest.raises(OSError, match="gone"):
        await anext(results)


async def test_leaving_cancels_what_runs() -> None:
    ended: list[str] = []

    async def run(items: Sequence[int]) -> list[int]:
        if items[0] == 0:
            return [0]
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")
        return []

    async def source() -> AsyncGenerator[int]:
        for number in range(100):
            yield number

    router = BatchRouter([LimitedEngine(run, 1, 4)])
    before = len(asyncio.all_tasks())
    async with aclosing(router.stream(source())) as results:
        assert await anext(results) == 0
        await asyncio.sleep(0.01)
    assert ended == ["cancelled"] * 4
    assert len(asyncio.all_tasks()) == before


async def test_too_few_results_are_the_engines_fault() -> None:
    async def short(items: Sequence[int]) -> list[int]:
        return [2 * item for item in items[1:]]

    sound = Recorder(4, 1)
    assert await BatchRouter([LimitedEngine(short, 4), sound.engine]).run(list(range(9))) == list(range(0, 18, 2))
    with pytest.raises(InternalError, match="another number"):
        await BatchRouter([LimitedEngine(short, 4)]).run([1, 2])


def test_engines_that_take_nothing_are_refused() -> None:
    for engines in ([], [Recorder(0, 1).engine], [Recorder(1, 0).engine]):
        with pytest.raises(ValueError, match="take something"):
            BatchRouter(engines)
