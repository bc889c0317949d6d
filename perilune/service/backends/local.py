"""The local engine as an asynchronous stream of events.

Knows the engine port and asyncio; doesn't know prompts, plans or text. Leaving a session in any way cancels its
sequences at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from perilune.core import CachedTokens, EngineEvent, EngineFinished, EngineStats, SequenceSpec
from perilune.service.ports import Engine


class Session:
    """The sequences of one request: submit any number, read their events in the order they came.

    Made by `LocalBackend.session`; leaving that context cancels whatever still runs.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[EngineEvent] = asyncio.Queue()
        self._open: set[str] = set()

    @property
    def running(self) -> bool:
        return bool(self._open)

    def submit(self, spec: SequenceSpec) -> None:
        """Raises what `Engine.submit` raises."""
        self._engine.submit(spec, self._put)
        self._open.add(spec.seq_id)

    def cancel(self, seq_id: str) -> None:
        """Stop one sequence; its EngineFinished still comes."""
        self._engine.cancel(seq_id)

    async def next(self, timeout_s: float | None = None) -> EngineEvent:
        """The next event; raises `TimeoutError` after `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            event = await self._queue.get()
        if isinstance(event, EngineFinished):
            self._open.discard(event.seq_id)
        return event

    def close(self) -> None:
        for seq_id in self._open:
            self._engine.cancel(seq_id)

    def _put(self, event: EngineEvent) -> None:
        """Called on the engine thread. Once the loop is closed nobody listens any more."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)


class LocalBackend:
    """The engine of this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def alive(self) -> bool:
        """Whether the engine can still run something."""
        return self._engine.alive

    def cached(self, token_ids: Sequence[int], salt: bytes) -> CachedTokens:
        return self._engine.cached(token_ids, salt)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def forget(self, owner: str) -> int:
        return self._engine.forget(owner)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Streams that end with the block: leaving it in any way cancels what still runs, at once."""
        session = Session(self._engine)
        try:
            yield session
        finally:
            session.close()

    async def finish(self, spec: SequenceSpec) -> EngineFinished:
        """Run one sequence to its end and drop its tokens (ingest, warm-up)."""
        with self.session() as session:
            session.submit(spec)
            while True:
                event = await session.next()
                if isinstance(event, EngineFinished):
                    return event
