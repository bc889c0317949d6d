"""The local engine as an asynchronous stream of events, measured while it runs.

Knows the engine port and asyncio; doesn't know prompts, plans or text. Leaving a stream in any way cancels its
sequence at once. Speeds are learnt here, on the engine thread, from chunks that ran alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from perilune.core import (
    CachedTokens,
    EngineEvent,
    EngineFinished,
    EngineProgress,
    EngineStats,
    SequenceSpec,
)
from perilune.service.ports import Engine
from perilune.service.predictor import Predictor


class Session:
    """The sequences of one request: submit any number, read their events in the order they came.

    Made by `LocalBackend.session`; leaving that context cancels whatever still runs.
    """

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[EngineEvent] = asyncio.Queue()
        self._open: set[str] = set()

    @property
    def running(self) -> bool:
        return bool(self._open)

    def submit(self, spec: SequenceSpec) -> None:
        """Raises what `Engine.submit` raises."""
        self._backend.submit(spec, self._put)
        self._open.add(spec.seq_id)

    def cancel(self, seq_id: str) -> None:
        """Stop one sequence; its EngineFinished still comes."""
        self._backend.cancel(seq_id)

    async def next(self, timeout_s: float | None = None) -> EngineEvent:
        """The next event; raises `TimeoutError` after `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            event = await self._queue.get()
        if isinstance(event, EngineFinished):
            self._open.discard(event.seq_id)
        return event

    def close(self) -> None:
        for seq_id in self._open:
            self._backend.cancel(seq_id)

    def _put(self, event: EngineEvent) -> None:
        """Called on the engine thread. Once the loop is closed nobody listens any more."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)


@dataclass(slots=True)
class _Meter:
    """What is needed to time one sequence's chunks."""

    last_s: float
    last_tokens: int = 0
    prefilled: bool = False
    alone: bool = True


class LocalBackend:
    """The engine's streams. `clock` is monotonic, in seconds."""

    name = "local"

    def __init__(self, engine: Engine, predictor: Predictor, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._predictor = predictor
        self._clock = clock
        self._lock = threading.Lock()
        self._meters: dict[str, _Meter] = {}

    def cached(self, token_ids: Sequence[int], salt: bytes) -> CachedTokens:
        return self._engine.cached(token_ids, salt)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def forget(self, owner: str) -> int:
        return self._engine.forget(owner)

    def submit(self, spec: SequenceSpec, put: Callable[[EngineEvent], None]) -> None:
        def emit(event: EngineEvent) -> None:
            self._measure(event)
            put(event)

        self._start_meter(spec.seq_id)
        try:
            self._engine.submit(spec, emit)
        except BaseException:
            self._stop_meter(spec.seq_id)
            raise

    def cancel(self, seq_id: str) -> None:
        self._engine.cancel(seq_id)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Streams that end with the block: leaving it in any way cancels what still runs, at once."""
        session = Session(self)
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

    def _start_meter(self, seq_id: str) -> None:
        with self._lock:
            alone = not self._meters
            for meter in self._meters.values():
                meter.alone = False
            self._meters[seq_id] = _Meter(self._clock(), alone=alone)

    def _stop_meter(self, seq_id: str) -> None:
        with self._lock:
            self._meters.pop(seq_id, None)
            if len(self._meters) == 1:
                for meter in self._meters.values():
                    # Alone again, but the chunk that runs now was shared: its end is the next starting point.
                    meter.alone, meter.last_tokens = True, -1

    def _measure(self, event: EngineEvent) -> None:
        if isinstance(event, EngineFinished):
            self._stop_meter(event.seq_id)
            return
        now = self._clock()
        with self._lock:
            meter = self._meters.get(event.seq_id)
            if meter is None:
                return
            elapsed, meter.last_s = now - meter.last_s, now
            before, usable = meter.last_tokens, meter.alone and meter.last_tokens >= 0
            if isinstance(event, EngineProgress):
                meter.last_tokens = event.computed_tokens
            else:
                decode, meter.prefilled = meter.prefilled, True
                meter.last_tokens = max(meter.last_tokens, 0)
        if not usable:
            return
        if isinstance(event, EngineProgress):
            self._measure_chunk(event, before, elapsed)
        elif decode:
            self._predictor.observe_decode(elapsed)

    def _measure_chunk(self, event: EngineProgress, before: int, elapsed_s: float) -> None:
        found = event.cached_ram_tokens + event.cached_disk_tokens
        if before == 0 and found:
            if event.computed_tokens == found and event.cached_disk_tokens:
                self._predictor.observe_load(event.cached_disk_tokens, elapsed_s)
            return  # a chunk mixed with a lookup or a load says nothing about prefill
        self._predictor.observe_prefill(event.computed_tokens - before, before, elapsed_s)
