"""The real API over a service, on a loopback port and in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn

from perilune.api.app import create_app, listen
from perilune.api.connection import Connection
from perilune.config import Settings
from perilune.ops.metrics import PrometheusSink
from perilune.service.ports import ServiceApi
from perilune.telemetry import Telemetry


@asynccontextmanager
async def served(service: ServiceApi, home: Path) -> AsyncIterator[str]:
    """Yields the base URL (`…/v1`)."""
    metrics = PrometheusSink("fake-1")
    app = create_app(service, Settings(home=home), telemetry=Telemetry(metrics), metrics=metrics)
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        app, http=Connection, ws="none", lifespan="on", log_config=None, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 10)
