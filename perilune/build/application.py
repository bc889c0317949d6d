"""Settings in, a running application out.

Heavy imports happen inside, so that importing this module costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perilune.build.engine import engine_gauges, engine_loop
from perilune.build.models import rates_file, served_model
from perilune.build.opened import Opened, open_all
from perilune.build.rooms import Rooms
from perilune.build.services import service_of
from perilune.config import Settings
from perilune.service.model import ServedModel
from perilune.telemetry import Telemetry

if TYPE_CHECKING:
    from perilune.engine.loop import EngineLoop
    from perilune.memory.keys import Keyring
    from perilune.memory.library import Library
    from perilune.memory.memory import Memory
    from perilune.ops.metrics import PrometheusSink
    from perilune.service.service import Service


@dataclass(frozen=True, slots=True)
class Application:
    """Everything that runs, and how it starts and stops. `start` and `close` belong to the event loop."""

    settings: Settings
    telemetry: Telemetry
    metrics: PrometheusSink
    service: Service
    library: Library
    keys: Keyring
    engine: EngineLoop
    model: ServedModel
    kernels: str  # which ones compute, in words
    closers: contextlib.ExitStack
    memory: Memory | None = None

    async def start(self) -> None:
        """Start the engine, warm it up, resume unfinished ingests and indexing."""
        self.engine.start()
        if self.memory:
            self.memory.start()
        await self.service.start(self.settings.runtime.cache_warmup)

    async def close(self) -> None:
        """Stop ingests, the engine and the stores, in that order. Idempotent."""
        await self.service.close()
        await asyncio.to_thread(self.closers.close)


def build(settings: Settings, *, indexed: bool = False) -> Application:
    """Load the model and open the home folder; `Application.start` runs it. `indexed` runs the index of meaning
    beside it, for a process that lives on; without, documents are searched by words.

    Raises `ModelNotFound`, `UnsupportedModel`, `Overloaded` (it doesn't fit), `Conflict` (another process owns the
    KV folder) and `ConfigError`; whatever was opened before is closed again.
    """
    from perilune.ops.metrics import PrometheusSink
    from perilune.runtime.hub.pull import resolve

    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = resolve(settings.model.path, settings.home)
    metrics = PrometheusSink(files.card.name)
    telemetry = Telemetry(metrics)
    with contextlib.ExitStack() as closers:
        opened = open_all(settings, files, telemetry, closers, indexed)
        rooms = _rooms(opened)
        closers.callback(rooms.engine.close)
        service = service_of(rooms)
        metrics.before_render(lambda: engine_gauges(rooms.engine, telemetry))
        return Application(
            settings,
            telemetry,
            metrics,
            service,
            rooms.library,
            rooms.keys,
            rooms.engine,
            rooms.model,
            opened.loaded.info.kernels,
            closers.pop_all(),
            opened.memory,
        )


def _rooms(opened: Opened) -> Rooms:
    from perilune.memory.keys import Keyring
    from perilune.memory.library import Library
    from perilune.service.predictor import Predictor

    settings, telemetry, loaded = opened.settings, opened.telemetry, opened.loaded
    spec, home = loaded.runtime.kv_spec, settings.home
    predictor = Predictor(rates_file(home, loaded.info, settings.runtime.threads), telemetry, spec.token_bytes)
    return Rooms(
        opened,
        served_model(settings, opened.files, loaded),
        Keyring(opened.store, home),
        Library(opened.store, home, settings.documents, counted_by=spec.fingerprint, memory=opened.memory),
        predictor,
        engine_loop(settings, loaded, opened.kv, opened.segments, predictor, telemetry),
    )
