"""A batch router for engines that take so many items at once (spec E11): split, run, merge, keep the order.

Knows items, calls and their limits; not what an item is. Producers that outrun consumers wait: at most `window`
items are inside, counted from the first whose result isn't taken yet. That item is always waiting to be run, being
run, or done, and what waits is run in order, so some step is always possible: nothing deadlocks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

from perilune.errors import InternalError

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class LimitedEngine(Generic[T, R]):
    """`run` answers at most `most_items` items a call, in their order, and `most_calls` calls at once."""

    run: Callable[[Sequence[T]], Awaitable[Sequence[R]]]
    most_items: int = 1
    most_calls: int = 1


class BatchRouter(Generic[T, R]):
    """Spreads items over engines. An engine whose call fails gets nothing more of that batch, and the others take
    over what it had; when none is left, its error is raised. `window` is at least what the engines take at once."""

    def __init__(self, engines: Sequence[LimitedEngine[T, R]], window: int | None = None) -> None:
        if not engines or any(engine.most_items < 1 or engine.most_calls < 1 for engine in engines):
            raise ValueError("a batch router needs engines that take something")
        at_once = sum(engine.most_items * engine.most_calls for engine in engines)
        self._engines = tuple(engines)
        self._window = max(window or 2 * at_once, at_once)

    async def run(self, items: Sequence[T]) -> list[R]:
        """All results, in the order of the items."""

        async def given() -> AsyncGenerator[T]:
            for item in items:
                yield item

        async with aclosing(self.stream(given())) as results:
            return [result async for result in results]

    async def stream(self, source: AsyncIterable[T]) -> AsyncGenerator[R]:
        """Results in the order of the source, as soon as all before them are there. Closing it cancels the calls
        under way. What the source raises is raised behind the results of what it gave."""
        flow: _Flow[T, R] = _Flow(self._window, len(self._engines))
        tasks = [asyncio.create_task(flow.feed(source))]
        for engine in self._engines:
            state = _EngineState()
            tasks += [asyncio.create_task(flow.work(engine, state)) for _ in range(engine.most_calls)]
        try:
            while await flow.next_ready():
                yield await flow.take()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class _EngineState:
    failed: bool = False


class _Flow(Generic[T, R]):
    """One batch on its way: numbers of items, those that wait, and results that aren't taken yet."""

    def __init__(self, window: int, engines: int) -> None:
        self._window = window
        self._engines = engines
        self._waiting: deque[tuple[int, T]] = deque()
        self._results: dict[int, R] = {}
        self._given = 0
        self._taken = 0
        self._ended = False
        self._error: BaseException | None = None  # of the last engine
        self._source_error: BaseException | None = None
        self._changed = asyncio.Condition()

    async def feed(self, source: AsyncIterable[T]) -> None:
        try:
            async for item in source:
                if self._given - self._taken >= self._window:
                    async with self._changed:
                        await self._changed.wait_for(lambda: self._given - self._taken < self._window)
                self._waiting.append((self._given, item))
                self._given += 1
                await self._tell()
        except Exception as error:
            self._source_error = error
        self._ended = True
        await self._tell()

    async def work(self, engine: LimitedEngine[T, R], state: _EngineState) -> None:
        while not state.failed:
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting or state.failed)
            if state.failed:
                return
            size = min(engine.most_items, len(self._waiting))
            part = [self._waiting.popleft() for _ in range(size)]
            if part:
                await self._call(engine, state, part)

    async def _call(self, engine: LimitedEngine[T, R], state: _EngineState, part: list[tuple[int, T]]) -> None:
        try:
            found = await engine.run([item for _, item in part])
            if len(found) != len(part):
                raise InternalError("An engine gave another number of results than it was given items.")
        except Exception as error:
            self._waiting = deque(sorted([*part, *self._waiting], key=lambda each: each[0]))
            if not state.failed:
                state.failed = True
                self._engines -= 1
            if not self._engines:
                self._error = error
        else:
            self._results.update(zip((number for number, _ in part), found, strict=True))
        await self._tell()

    async def next_ready(self) -> bool:
        """Wait for the next result; False where there is none any more. Raises what ended the batch."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    self._taken in self._results
                    or self._error is not None
                    or (self._ended and self._taken == self._given)
                )
            )
        if self._taken in self._results:
            return True
        if (error := self._error or self._source_error) is not None:
            raise error
        return False

    async def take(self) -> R:
        result = self._results.pop(self._taken)
        self._taken += 1
        await self._tell()
        return result

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
