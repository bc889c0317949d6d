"""A real uvicorn server on a free loopback port, in the test's own event loop, over a scripted service.

After every test nothing of the service may be left running and no request may be held.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import openai
import pytest
import uvicorn

from perilune.api.app import create_app, listen
from perilune.api.connection import Connection
from perilune.api.limits import MAX_HEADER_BYTES
from perilune.config import ServerSettings, Settings
from perilune.core import DEFAULT_TENANT
from perilune.memory.responses import ResponseStore
from perilune.memory.schema import FILES
from perilune.memory.store import Store
from perilune.ops.metrics import PrometheusSink
from perilune.service.archive import Archive
from perilune.telemetry import Telemetry
from tests.described import Described

from .fakes import CITATION, MODEL, FakeService


@dataclass
class Server:
    service: FakeService
    http: aiohttp.ClientSession
    client: openai.AsyncOpenAI
    host: str
    port: int
    metrics: PrometheusSink
    uvicorn: uvicorn.Server

    def shown_metrics(self) -> str:
        return self.metrics.render().decode()

    async def raw(self, data: bytes) -> bytes:
        """Send bytes as they are; what came back until the server closed or was silent for half a second."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(data)
        await writer.drain()
        got = b""
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while chunk := await asyncio.wait_for(reader.read(65536), 0.5):
                got += chunk
        writer.close()
        return got


Serve = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    """Kept answers in a real database that knows the file which the scripted answers quote."""
    store = Store(tmp_path / "database")
    row = {"id": CITATION.file_id, "tenant": DEFAULT_TENANT, "filename": CITATION.filename, "purpose": "user_data"}
    numbers = {"size_bytes": 1, "pages_parsed": 0, "passages": 0, "chars": 0, "created_at": 0.0}
    values = {**row, **numbers, "sha256": "", "status": "processed", "text_complete": True}
    with store.write() as connection:
        connection.execute(FILES.insert().values(values))
    yield Archive(ResponseStore(store))
    store.close()


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    @asynccontextmanager
    async def running(
        service: FakeService | None = None, key: str = "any", public: bool = False, **server_settings: object
    ) -> AsyncIterator[Server]:
        service = service or FakeService()
        settings = Settings(home=tmp_path, server=ServerSettings.model_validate(server_settings))
        metrics = PrometheusSink(MODEL)
        shown = settings
        if public:
            shown = Settings(home=tmp_path, server=settings.server.model_copy(update={"host": "0.0.0.0"}))
        app = create_app(service, shown, telemetry=Telemetry(metrics), metrics=metrics)
        listener: socket.socket = listen("127.0.0.1", 0)
        described = Described(app)
        config = uvicorn.Config(
            described,
            http=Connection,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        host, port = listener.getsockname()
        base = f"http://{host}:{port}"
        client = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0, timeout=20)
        try:
            async with aiohttp.ClientSession(base) as http, client:
                yield Server(service, http, client, host, port, metrics, server)
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, 10)
        await assert_nothing_left(service, metrics)
        assert not described.faults, "\n".join(described.faults)

    return running


async def assert_nothing_left(service: FakeService, metrics: PrometheusSink) -> None:
    await eventually(lambda: service.open == 0)
    await eventually(lambda: "perilune_http_requests_open 0.0" in metrics.render().decode())


async def eventually(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    """Wait until `condition` holds; fails when it doesn't in time, which no busy machine takes."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
