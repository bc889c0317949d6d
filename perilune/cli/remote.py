"""A running server over HTTP: our own dialect with progress, read back into `core` events.

Knows the wire form that api.completion and api.files write. Errors come back as the exceptions they were.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from perilune import errors
from perilune.cli.client import KeptTurn, Question
from perilune.core import (
    CachedTokens,
    ChoiceFinished,
    Citation,
    CitationAdded,
    Completed,
    Degradation,
    Event,
    FileRecord,
    FileStatus,
    FinishReason,
    MemoryUse,
    Message,
    Plan,
    PlanKind,
    Planned,
    PrefillProgress,
    ProfileFact,
    Report,
    StageStarted,
    SummarySentence,
    TextDelta,
    TextPart,
    TokenReport,
    TurnCitation,
    Usage,
)

_SILENCE_S = 60.0
"""The server sends a heartbeat every second; after this long it is gone."""


class RemoteClient:
    """Talks to one server."""

    def __init__(self, url: str, model: str, key: str | None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=_SILENCE_S)
        self._http = aiohttp.ClientSession(url, headers=headers, timeout=timeout, read_bufsize=1 << 20)
        self._url = url
        self._model = model

    @property
    def model(self) -> str:
        return self._model

    @property
    def in_process(self) -> bool:
        return False

    async def upload(
        self, path: Path, filename: str, local_only: bool = False, purpose: str = "user_data"
    ) -> FileRecord:
        with path.open("rb") as data:
            form = aiohttp.FormData()
            form.add_field("purpose", purpose)
            form.add_field("local_only", str(local_only).lower())
            form.add_field("file", data, filename=filename, content_type="application/octet-stream")
            return file_record(await self._json("POST", "/v1/files", data=form))

    async def files(self) -> list[FileRecord]:
        listing = await self._json("GET", "/v1/files")
        return [file_record(item) for item in listing["data"]]

    async def file(self, file_id: str) -> FileRecord:
        return file_record(await self._json("GET", f"/v1/files/{file_id}"))

    async def delete(self, file_id: str) -> None:
        await self._json("DELETE", f"/v1/files/{file_id}")

    async def kv_health(self, steps: int) -> dict[str, Any]:
        """The health view; for the local administrator or a key with the role admin."""
        return await self._json("GET", f"/v1/kv/health?steps={steps}")

    async def debug_attention(self, on: bool) -> None:
        await self._json("PUT", "/v1/kv/attention_debug", data=aiohttp.JsonPayload({"on": on}))

    async def sessions(self, limit: int) -> dict[str, Any]:
        """Kept conversations, the one with the newest turn first."""
        return await self._json("GET", f"/v1/sessions?limit={limit}")

    async def session(self, session_id: str, after: int, limit: int) -> dict[str, Any]:
        """A session and its turns behind number `after`. Raises `NotFound`."""
        return await self._json("GET", f"{_session_path(session_id)}?after={after}&limit={limit}")

    async def turns(self, session_id: str, most: int) -> list[KeptTurn]:
        """The last turns of a session, at most so many; none of one that isn't there yet."""
        try:
            turns = (await self.session(session_id, 0, 1))["turns"]
            found = await self.session(session_id, max(0, turns - most), most)
        except errors.NotFound:
            return []
        return [KeptTurn(each["speaker"], each["text"], tuple(each["files"])) for each in found["data"]]

    async def export_session(self, session_id: str, form: str) -> AsyncIterator[bytes]:
        """A whole session as `markdown` or `json`, in pieces. Raises `NotFound`."""
        async for data in self._pieces(f"{_session_path(session_id)}?format={form}"):
            yield data

    async def forget_session(self, session_id: str) -> None:
        """Raises `NotFound`."""
        await self._json("DELETE", _session_path(session_id))

    async def profile(self, history: bool) -> dict[str, Any]:
        """What is known about the user, with `history` what was true before, too."""
        return await self._json("GET", f"/v1/memory/profile?history={str(history).lower()}")

    async def edit_profile(self, facts: Mapping[str, str | None]) -> dict[str, Any]:
        """Set keys; None erases one."""
        return await self._json("PATCH", "/v1/memory/profile", data=aiohttp.JsonPayload({"facts": dict(facts)}))

    async def erase_profile(self, key: str | None) -> dict[str, Any]:
        """A key with its history, or everything. Raises `NotFound`."""
        query = "" if key is None else f"?key={urllib.parse.quote(key, safe='')}"
        return await self._json("DELETE", f"/v1/memory/profile{query}")

    async def summary(self, source: Mapping[str, str]) -> dict[str, Any]:
        """Of `{"session": id}` or `{"file_id": id}`. Raises `NotFound`."""
        return await self._json("GET", f"/v1/memory/summary?{urllib.parse.urlencode(source)}")

    async def correct_summary(self, correction: Mapping[str, Any]) -> dict[str, Any]:
        return await self._json("PATCH", "/v1/memory/summary", data=aiohttp.JsonPayload(dict(correction)))

    async def export_memory(self) -> AsyncIterator[bytes]:
        """Everything kept about the user, as JSON Lines in pieces."""
        async for data in self._pieces("/v1/memory/export"):
            yield data

    async def export_feedback(self) -> AsyncIterator[bytes]:
        """Ratings of answers, as JSON Lines in pieces."""
        async for data in self._pieces("/v1/feedback/export"):
            yield data

    async def content(self, file_id: str) -> AsyncIterator[bytes]:
        """A file's bytes, in pieces. Raises `NotFound`."""
        async for data in self._pieces(f"/v1/files/{file_id}/content?format=raw"):
            yield data

    async def create_batch(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        return await self._json("POST", "/v1/batches", data=aiohttp.JsonPayload(dict(wanted)))

    async def batch(self, batch_id: str) -> dict[str, Any]:
        """Raises `NotFound`."""
        return await self._json("GET", f"/v1/batches/{urllib.parse.quote(batch_id, safe='')}")

    async def batches(self, limit: int) -> dict[str, Any]:
        """The newest first."""
        return await self._json("GET", f"/v1/batches?limit={limit}")

    async def cancel_batch(self, batch_id: str) -> dict[str, Any]:
        """Raises `NotFound`, and `Conflict` for one that has ended."""
        return await self._json("POST", f"/v1/batches/{urllib.parse.quote(batch_id, safe='')}/cancel")

    async def forget_everything(self) -> None:
        """All documents and sessions of this key's tenant."""
        await self._json("DELETE", "/v1/memory")

    async def search_memory(
        self, query: str, session_ids: Sequence[str], limit: int, since: str | None, until: str | None
    ) -> dict[str, Any]:
        """The best turns of these sessions; without any, of everything that is kept."""
        body: dict[str, Any] = {"query": query, "limit": limit, "since": since, "until": until}
        if session_ids:
            body["sessions"] = list(session_ids)
        return await self._json("POST", "/v1/memory/search", data=aiohttp.JsonPayload(body))

    async def ask(self, question: Question) -> AsyncIterator[Event]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [_message(message) for message in question.messages],
            "stream": True,
            "stream_options": {"include_usage": True, "include_progress": True},
            "context_policy": question.policy.value,
        }
        if question.deadline_s is not None:
            body["deadline_s"] = question.deadline_s
        if question.max_tokens is not None:
            body["max_completion_tokens"] = question.max_tokens
        if question.session_id is not None:
            body["session"] = question.session_id
        reader = ChunkReader()
        try:
            async with self._http.post("/v1/chat/completions", json=body) as reply:
                if reply.status != 200:
                    raise _refused(reply.status, await reply.read())
                async for line in reply.content:
                    for event in reader.line(line):
                        yield event
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._lost(error) from error
        reader.check_complete()

    async def close(self) -> None:
        await self._http.close()

    async def _pieces(self, path: str) -> AsyncIterator[bytes]:
        try:
            async with self._http.get(path) as reply:
                if reply.status != 200:
                    raise _refused(reply.status, await reply.read())
                async for data in reply.content.iter_any():
                    yield data
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._lost(error) from error

    async def _json(
        self, method: str, path: str, data: aiohttp.FormData | aiohttp.JsonPayload | None = None
    ) -> dict[str, Any]:
        try:
            async with self._http.request(method, path, data=data) as reply:
                body = await reply.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._lost(error) from error
        if reply.status >= 400:
            raise _refused(reply.status, body)
        parsed: dict[str, Any] = orjson.loads(body)
        return parsed

    def _lost(self, error: Exception) -> errors.Unreachable:
        return errors.Unreachable(
            f"The server at {self._url} does not answer ({type(error).__name__}).",
            hint="If it was stopped, run the command again: it then works without a server.",
        )


def _session_path(session_id: str) -> str:
    return f"/v1/sessions/{urllib.parse.quote(session_id, safe='')}"


class ChunkReader:
    """Lines of an event stream -> events."""

    def __init__(self) -> None:
        self._report: Report | None = None
        self._usage: Usage | None = None
        self._done = False

    def line(self, line: bytes) -> list[Event]:
        """The events of one line. Raises what the server reports as an error."""
        if not line.startswith(b"data: "):
            return []
        payload = line[6:].strip()
        if payload == b"[DONE]":
            self._done = True
            if self._report is None:
                return []
            return [Completed(self._usage or Usage(0, 0, 0), self._report)]
        chunk = orjson.loads(payload)
        if "error" in chunk:
            raise _error(chunk["error"], 500)
        return self._chunk(chunk)

    def check_complete(self) -> None:
        if not self._done:
            raise errors.Unreachable(
                "The server closed the connection before the answer was complete.",
                hint="Run the command again.",
            )

    def _chunk(self, chunk: dict[str, Any]) -> list[Event]:
        events: list[Event] = []
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                events.append(TextDelta(choice["index"], text))
            if reason := choice.get("finish_reason"):
                events.append(ChoiceFinished(choice["index"], FinishReason(reason)))
        ours = chunk.get("perilune")
        if ours is not None and "stage" in ours:
            events.append(_progress(ours))
        elif ours is not None:
            self._report = _report(ours)
        if chunk.get("usage"):
            usage = chunk["usage"]
            self._usage = Usage(usage["prompt_tokens"], usage["completion_tokens"], usage["cached_tokens"])
        return events


def file_record(item: dict[str, Any]) -> FileRecord:
    """A file object of the wire. The tenant isn't on it: the server knows whose key this is."""
    ours = item["perilune"]
    return FileRecord(
        file_id=item["id"],
        tenant="",
        filename=item["filename"],
        purpose=item["purpose"],
        size_bytes=item["bytes"],
        sha256=ours["sha256"],
        created_at=item["created_at"],
        status=FileStatus(ours["status"]),
        pages_total=ours["pages_total"],
        pages_parsed=ours["pages_parsed"],
        tokens=ours["tokens"],
        language=ours["language"],
        error=item["status_details"],
        local_only=ours.get("local_only", False),
        error_code=ours.get("error_code"),
    )


def _message(message: Message) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    for part in message.parts:
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.text})
        else:
            parts.append({"type": "file", "file": {"file_id": part.file_id}})
    return {"role": message.role, "content": parts}


def _progress(ours: dict[str, Any]) -> Event:
    match ours["stage"]:
        case "planned":
            return Planned(
                Plan(
                    kind=PlanKind(ours["plan"]),
                    deadline_s=ours["deadline_s"],
                    predicted_ttft_s=ours["predicted_ttft_s"],
                    fidelity=ours["fidelity"],
                    context_tokens=ours["context_tokens"],
                    uncached_tokens=ours["uncached_tokens"],
                    degradations=_degradations(ours),
                )
            )
        case "prefilling" if "processed" in ours:
            return PrefillProgress(ours["processed"], ours["total"], ours["cached"], ours["eta_s"])
        case "citation":
            return CitationAdded(_citation(ours["citation"]))
        case stage:
            return StageStarted(stage)


def _report(ours: dict[str, Any]) -> Report:
    tokens = ours["tokens"]
    return Report(
        plan=PlanKind(ours["plan"]),
        deadline_s=ours["deadline_s"],
        predicted_ttft_s=ours["predicted_ttft_s"],
        measured_ttft_s=ours["measured_ttft_s"],
        tokens=TokenReport(**{**tokens, "cached": CachedTokens(**tokens["cached"])}),
        model=ours["model"],
        backend=ours["backend"],
        citations=tuple(_citation(item) for item in ours["citations"]),
        degradations=_degradations(ours),
        memory=_memory(ours["memory"]),
    )


def _memory(ours: dict[str, Any]) -> MemoryUse:
    """What was used; the wire doesn't tell times."""
    facts = [
        ProfileFact(item["key"], item["value"], 0.0, 0.0, session_id=item["session"], turn=item["turn"])
        for item in ours["profile"]
    ]
    sentences = [
        SummarySentence(
            item["session"], item["turn"], item["start"], item["end"], item["quote"], corrected=item["corrected"]
        )
        for item in ours["summary"]
    ]
    return MemoryUse(tuple(facts), tuple(sentences))


def _citation(item: dict[str, Any]) -> Citation | TurnCitation:
    if "turn" in item:
        return TurnCitation(item["session"], item["turn"], item["speaker"], item["at"], item["quote"])
    return Citation(**item)


def _degradations(ours: dict[str, Any]) -> tuple[Degradation, ...]:
    return tuple(Degradation(item["code"], item["reason"]) for item in ours["degradations"])


def _refused(status: int, body: bytes) -> errors.PeriluneError:
    try:
        return _error(orjson.loads(body)["error"], status)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return errors.Unreachable(
            f"The server answered HTTP {status} with something else than an error of ours.",
            hint="Check what listens on that port.",
        )


def _error(wire: dict[str, Any], status: int) -> errors.PeriluneError:
    """The exception that the server raised: by its code, else by its status."""
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.PeriluneError)
    ]
    by_code = [kind for kind in kinds if kind.code == wire["code"]]
    by_status = [kind for kind in kinds if kind.status == status]
    kind = (by_code or by_status or [errors.InternalError])[0]
    return kind(wire["message"], param=wire.get("param"))
