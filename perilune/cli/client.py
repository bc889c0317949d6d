"""One way to ask, whoever answers: a running server that owns the home folder, or the service in this process.

Both give `core` events, so that what is shown doesn't depend on where it ran. Knows how a server is found; the HTTP
form is in remote.py. Imports neither torch nor aiohttp until one of them is needed.
"""

from __future__ import annotations

import json
import os
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from perilune.cli.ports import is_own_address
from perilune.config import Settings
from perilune.core import DEFAULT_TENANT, ContextPolicy, Event, FileRecord, Message, Request, SamplingParams
from perilune.errors import Conflict, NotFound

if TYPE_CHECKING:
    from perilune.build import Application

SERVER_FILE = "server.json"
_PROBE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, without saying of whom."""

    messages: tuple[Message, ...]
    policy: ContextPolicy = ContextPolicy.AUTO
    deadline_s: float | None = None
    max_tokens: int | None = None
    session_id: str | None = None
    """The session that keeps the last message and its answer."""


class Client(Protocol):
    """Documents and questions. Errors are `PeriluneError`s in both forms."""

    @property
    def model(self) -> str: ...

    @property
    def in_process(self) -> bool:
        """Whether unfinished ingest stops when this process ends."""
        ...

    async def upload(self, path: Path, filename: str, local_only: bool = False) -> FileRecord: ...
    async def files(self) -> list[FileRecord]: ...
    async def file(self, file_id: str) -> FileRecord: ...
    async def delete(self, file_id: str) -> None: ...

    async def turns(self, session_id: str, most: int) -> list[KeptTurn]:
        """The last turns of a session, at most so many; none of one that isn't there yet."""
        ...

    async def kv_health(self, steps: int) -> dict[str, Any]:
        """The health view, with the newest `steps` measured decode steps, layer by layer."""
        ...

    async def debug_attention(self, on: bool) -> None:
        """Measure every decode step from now on, or stop."""
        ...

    def ask(self, question: Question) -> AsyncIterator[Event]:
        """Closing the iterator cancels the work."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """A turn of a session, and the documents that were asked about."""

    speaker: str
    text: str
    file_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunningServer:
    url: str
    pid: int
    model: str


async def connect(settings: Settings, model_given: bool, keeps: bool = False) -> Client:
    """A client of the running server, else of a service started here; where it `keeps` sessions, with their index.

    Raises `Conflict` when `model_given` and the server has another model, and whatever starting the service raises.
    """
    server = find_server(settings.home)
    if server is None:
        return await LocalClient.start(settings, keeps)
    lora = settings.model.lora
    wanted = settings.model.path + (f"+{Path(lora).name}" if lora else "")
    if (model_given or lora) and server.model != wanted:
        raise Conflict(
            f"The running server (process {server.pid}) has {server.model}, not {wanted}.",
            hint=f"Leave out --model and --lora, or stop it with `kill {server.pid}`.",
        )
    from perilune.cli.remote import RemoteClient

    return RemoteClient(server.url, server.model, os.environ.get("PERILUNE_API_KEY"))


# --------------------------------------------------------------------------------------- finding a server


def find_server(home: Path) -> RunningServer | None:
    """The server that wrote `home/server.json`, if it is alive and answers as ours does."""
    try:
        data = json.loads((home / SERVER_FILE).read_text(encoding="utf-8"))
        server = RunningServer(str(data["url"]), int(data["pid"]), str(data["model"]))
        os.kill(server.pid, 0)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none was started, or it died without tidying up
    # A key goes to this address: it must be one of this machine's own, asked directly, whatever proxy is set.
    if not server.url.startswith("http://") or not is_own_address(urllib.parse.urlsplit(server.url).hostname or ""):
        return None
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{server.url}/version", timeout=_PROBE_TIMEOUT_S) as reply:
            return server if "version" in json.load(reply) else None
    except (OSError, ValueError):
        return None


def announce_server(home: Path, server: RunningServer) -> Path:
    """Write `home/server.json`, readable by its owner only, whole or not at all."""
    path = home / SERVER_FILE
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({"url": server.url, "pid": server.pid, "model": server.model}, file)
    os.replace(fresh, path)
    return path


# ----------------------------------------------------------------------------------------- in this process


class LocalClient:
    """The service in this process, as the local tenant."""

    def __init__(self, app: Application, model: str) -> None:
        self._app = app
        self._model = model

    @classmethod
    async def start(cls, settings: Settings, keeps: bool = False) -> LocalClient:
        from perilune.build import build
        from perilune.cli.doctor import warn_if_slow

        app = build(settings, indexed=keeps)
        try:
            warn_if_slow(settings, app.kernels)
            await app.start()
        except BaseException:
            await app.close()
            raise
        return cls(app, app.model.model_id)

    @property
    def model(self) -> str:
        return self._model

    @property
    def in_process(self) -> bool:
        return True

    async def kv_health(self, steps: int) -> dict[str, Any]:
        return self._app.service.kv.view(steps)

    async def debug_attention(self, on: bool) -> None:
        self._app.service.kv.debug(on)

    async def upload(self, path: Path, filename: str, local_only: bool = False) -> FileRecord:
        documents = self._app.service.documents
        with path.open("rb") as data:
            return await documents.upload(DEFAULT_TENANT, filename, "user_data", data, local_only)

    async def files(self) -> list[FileRecord]:
        return await self._app.service.documents.list(DEFAULT_TENANT)

    async def file(self, file_id: str) -> FileRecord:
        return await self._app.service.documents.get(DEFAULT_TENANT, file_id)

    async def delete(self, file_id: str) -> None:
        await self._app.service.documents.delete(DEFAULT_TENANT, file_id)

    async def turns(self, session_id: str, most: int) -> list[KeptTurn]:
        kept = self._app.service.conversations
        try:
            last = (await kept.get(DEFAULT_TENANT, session_id)).turns
        except NotFound:
            return []
        first = max(0, last - most)
        turns = await kept.turns(DEFAULT_TENANT, session_id, first, most)
        answers = await kept.answers(DEFAULT_TENANT, session_id, first + 1, last)
        files = {number: details.get("files", ()) for number, (_, details) in answers.items()}
        return [KeptTurn(each.speaker, each.text, tuple(files.get(each.turn, ()))) for each in turns]

    def ask(self, question: Question) -> AsyncIterator[Event]:
        return self._app.service.run(
            Request(
                request_id=f"req_{uuid.uuid4().hex}",
                tenant=DEFAULT_TENANT,
                model=self._model,
                messages=question.messages,
                arrival_s=time.monotonic(),
                sampling=SamplingParams(
                    temperature=self._app.settings.model.temperature, max_tokens=question.max_tokens
                ),
                deadline_s=question.deadline_s,
                context_policy=question.policy,
                session_id=question.session_id,
                recall=() if question.session_id is None else (question.session_id,),
            )
        )

    async def close(self) -> None:
        await self._app.close()
