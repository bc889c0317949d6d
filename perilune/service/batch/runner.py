"""Runs batches: reads the input, answers its lines, makes the output. Three steps, each of which can be done again.

Knows lines and their results; how a line is answered is its endpoint's to know (`ports.LineAnswers`), and what
happens after a kill the queue's (`queue.py`), which calls the steps again. What was stored stays: a line with a
result isn't run again, and a file that was made isn't made again.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

import orjson

from perilune.core import FileRecord, Usage
from perilune.errors import IntegrityError, InternalError, NotFound, PeriluneError, QuotaExceeded, Unreachable
from perilune.memory.batches import Batch, BatchStatus, BatchStore, Line, LineResult, LineState
from perilune.memory.streams import Pieces
from perilune.service.batch.lines import InputCheck, InputLimits, body_of
from perilune.service.batch.router import BatchRouter, LimitedEngine
from perilune.service.ports import Caller, Library, LineAnswer, LineAnswers
from perilune.telemetry import Telemetry

SHARD_LINES = 128
"""Lines of one durable step."""

OUTPUT_PURPOSE = "batch_output"
MAX_TRIES = 3
"""Of a line whose failure was the server's."""

_WAIT_S = (0.5, 30.0)
"""Before a line that had to be put off is tried again: at first, and at most."""

_RETRIED = frozenset({429, 503})
_INSERTED = 1_000
_GONE = {"code": "input_file_deleted", "line": None, "param": "input_file_id"}
_REVOKED = {"code": "key_revoked", "line": None, "message": "The API key was revoked.", "param": None}
_UNDONE = {
    BatchStatus.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    BatchStatus.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was executed."),
    BatchStatus.FAILED: ("batch_failed", "The batch failed before this request was executed."),
}

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _State:
    """Of a batch that is being worked on here. `stop` ends its lines at once."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class BatchRunner:
    """Used from the event loop. `caller_of` says whom a key speaks for, None where it is revoked; it blocks.
    `concurrency` lines run at once, of all batches together."""

    def __init__(
        self,
        store: BatchStore,
        library: Library,
        caller_of: Callable[[Batch], Caller | None],
        limits: InputLimits,
        concurrency: int,
        telemetry: Telemetry,
    ) -> None:
        self._store = store
        self._library = library
        self._caller_of = caller_of
        self._limits = limits
        self._concurrency = concurrency
        self._places = asyncio.Semaphore(concurrency)
        self._telemetry = telemetry
        self._states: dict[str, _State] = {}
        self._answers: LineAnswers | None = None
        self.served = asyncio.Event()

    def serve(self, answers: LineAnswers) -> None:
        self._answers = answers
        self.served.set()

    @property
    def endpoints(self) -> frozenset[str]:
        return self._answers.endpoints if self._answers is not None else frozenset()

    def stop(self, batch_id: str) -> None:
        """End the lines of a batch that run; what is to become of it stands in its row."""
        if batch_id in self._states:
            self._states[batch_id].stop.set()

    @contextlib.asynccontextmanager
    async def hold(self, batch_id: str) -> AsyncGenerator[asyncio.Event]:
        """Nobody else works on the batch meanwhile. Yields what tells to stop."""
        state = self._states.setdefault(batch_id, _State())
        async with state.lock:
            yield state.stop

    # --------------------------------------------------------------------------------------------- steps

    async def prepare(self, batch_id: str) -> int:
        """Read and check the input; returns how many lines are to be run, 0 where the batch has failed."""
        await self.served.wait()
        async with self.hold(batch_id):
            batch = await self._find(batch_id)
            if batch is None or batch.ended:
                return 0
            if batch.status is BatchStatus.VALIDATING:
                batch = await asyncio.to_thread(self._validate, batch)
            return batch.total

    async def work(self, batch_id: str, first: int) -> bool:
        """Run the lines of a shard that have no result yet; False where the batch is to end before all are done."""
        await self.served.wait()
        async with self.hold(batch_id) as stop:
            while (batch := await self._find(batch_id)) is not None:
                late = self._store.now() >= batch.expires_at
                if batch.status is not BatchStatus.IN_PROGRESS or batch.purge or late or stop.is_set():
                    return False
                lines = await asyncio.to_thread(self._store.waiting, batch, first, SHARD_LINES)
                if not lines:
                    return True
                await self._shard(batch, lines, stop)
        return False

    async def finish(self, batch_id: str) -> None:
        """Make the files of what was done, and end the batch."""
        async with self.hold(batch_id):
            batch = await self._find(batch_id)
            if batch is not None and not batch.ended:
                await asyncio.to_thread(self._end, batch)
        self._states.pop(batch_id, None)

    # ---------------------------------------------------------------------------------------- validation

    def _validate(self, batch: Batch) -> Batch:
        """In a thread. A batch that was cancelled meanwhile stays so."""
        check = InputCheck(batch.endpoint, self._limits)
        self._store.begin_lines(batch)
        try:
            if self._library.get_file(batch.tenant, batch.input_file_id).size_bytes > self._limits.max_bytes:
                why = f"An input file has at most {self._limits.max_bytes:,} bytes."
                check.errors.append({"code": "file_too_large", "line": None, "message": why, "param": None})
            else:
                self._read_lines(batch, check)
        except (NotFound, IntegrityError) as error:
            check.errors.append({**_GONE, "message": error.message})
        if check.errors:
            self._store.begin_lines(batch)
            self._telemetry.count("batches_ended", status=BatchStatus.FAILED.value)
            return self._store.move(batch, BatchStatus.FAILED, BatchStatus.VALIDATING, errors=check.errors)
        values = {"total": check.total, "model": check.model}
        batch = self._store.move(batch, BatchStatus.IN_PROGRESS, BatchStatus.VALIDATING, **values)
        if batch.status is not BatchStatus.IN_PROGRESS:
            self._store.begin_lines(batch)
        return batch

    def _read_lines(self, batch: Batch, check: InputCheck) -> None:
        chunk: list[Line] = []
        with self._library.open_file(batch.tenant, batch.input_file_id) as file:
            for line in check.read(file):
                chunk.append(line)
                if len(chunk) == _INSERTED and not check.errors:
                    self._store.add_lines(batch, chunk, check.session_ids)
                    chunk = []
        if chunk and not check.errors:
            self._store.add_lines(batch, chunk, check.session_ids)

    # -------------------------------------------------------------------------------------------- lines

    async def _shard(self, batch: Batch, lines: Sequence[Line], stop: asyncio.Event) -> None:
        """Run lines until they are done, the batch's time is over, or it is told to stop."""
        caller = await asyncio.to_thread(self._caller_of, batch)
        if caller is None:
            await self._fail(batch, _REVOKED)
            return
        try:
            file = await asyncio.to_thread(self._library.open_file, batch.tenant, batch.input_file_id)
        except (NotFound, IntegrityError) as error:
            await self._fail(batch, {**_GONE, "message": error.message})
            return
        with file:
            shard = _Shard(self, batch, caller, file)
            running = asyncio.create_task(shard.run(lines, self._concurrency))
            stopped = asyncio.create_task(stop.wait())
            left_s = max(0.0, batch.expires_at - self._store.now())
            try:
                await asyncio.wait({running, stopped}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (running, stopped):
                    task.cancel()
                await asyncio.wait({running, stopped})
            if not running.cancelled():
                running.result()

    async def _fail(self, batch: Batch, error: dict[str, Any]) -> None:
        await asyncio.to_thread(
            self._store.move, batch, BatchStatus.FINALIZING, BatchStatus.IN_PROGRESS, errors=[error]
        )

    async def answer(self, batch: Batch, caller: Caller, line: Line, body: bytes) -> LineResult:
        """Try a line until it has an answer or an error that is its own."""
        assert self._answers is not None
        tries, wait_s = 0, _WAIT_S[0]
        while True:
            async with self._places:
                answer = await self._answers.answer(batch.endpoint, caller, body)
            tries += 1
            pause_s = _pause_s(answer.error, tries, wait_s)
            if pause_s is None:
                self._telemetry.count("batch_lines", status=str(answer.status))
                return _result(batch, line, answer)
            self._telemetry.count("batch_lines_put_off", code=answer.error.code if answer.error else "")
            await asyncio.sleep(pause_s)
            wait_s = min(2 * wait_s, _WAIT_S[1])

    async def settle(self, batch: Batch, results: Sequence[LineResult]) -> None:
        await asyncio.to_thread(self._store.settle, batch, results)

    # --------------------------------------------------------------------------------------------- ends

    def _end(self, batch: Batch) -> None:
        """In a thread: files first, then the row that names them. Files have their batch's names, so that one that
        was made before a kill is found again."""
        batch = self._store.move(batch, BatchStatus.FINALIZING, BatchStatus.IN_PROGRESS)
        waiting = self._store.count(batch, LineState.WAITING)
        status = _terminal(batch, waiting)
        self._telemetry.count("batches_ended", status=status.value)
        _log.info("batch %s is %s: %d lines of %d done", batch.batch_id, status, batch.completed, batch.total)
        if batch.purge:
            self._store.forget_results(self._store.end(batch, status, None, None))
            return
        done, failed = (self._store.count(batch, state) for state in (LineState.DONE, LineState.FAILED))
        output = self._file(batch, "output", self._rows(batch, status, LineState.DONE)) if done else None
        error = None
        if failed or waiting:
            rows = self._rows(batch, status, LineState.FAILED, LineState.WAITING)
            error = self._file(batch, "error", rows)
        self._store.end(batch, status, output, error)

    def _file(self, batch: Batch, kind: str, rows: Generator[bytes]) -> str:
        """The id of the file that holds the rows."""
        file_id = result_file_id(batch.batch_id, kind)
        with contextlib.suppress(NotFound):
            return self._library.get_file(batch.tenant, file_id).file_id
        with cast(BinaryIO, Pieces(rows)) as data:
            self._library.add_file(
                batch.tenant,
                f"{batch.batch_id}_{kind}.jsonl",
                OUTPUT_PURPOSE,
                data,
                sys.maxsize,
                self._local_only(batch),
                lasts_s=batch.output_lasts_s,
                file_id=file_id,
            )
        return file_id

    def _local_only(self, batch: Batch) -> bool:
        try:
            record: FileRecord = self._library.get_file(batch.tenant, batch.input_file_id)
        except NotFound:
            return False
        return record.local_only

    def _rows(self, batch: Batch, status: BatchStatus, *states: LineState) -> Generator[bytes]:
        for custom_id, result in self._store.lines(batch, *states):
            if result is None:
                code, message = _UNDONE[status]
                error = {"code": code, "message": message}
                result = orjson.dumps(_row(batch, custom_id, None, error)).decode()
            yield result.encode() + b"\n"

    async def _find(self, batch_id: str) -> Batch | None:
        return await asyncio.to_thread(self._store.find, batch_id)


@dataclass(slots=True)
class _Shard:
    """Lines that run together. Results are stored as they come, all that came while others were being stored in
    one transaction."""

    runner: BatchRunner
    batch: Batch
    caller: Caller
    file: BinaryIO
    _unsaved: list[LineResult] = field(default_factory=list)
    _saving: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, lines: Sequence[Line], concurrency: int) -> None:
        router = BatchRouter([LimitedEngine(self._line, 1, concurrency)])
        async with aclosing(router.stream(self._bodies(lines))) as done:
            async for _ in done:
                pass

    async def _bodies(self, lines: Sequence[Line]) -> AsyncGenerator[tuple[Line, bytes]]:
        """Lines with their requests, read as they are wanted."""
        for line in lines:
            yield line, await asyncio.to_thread(self._body, line)

    def _body(self, line: Line) -> bytes:
        self.file.seek(line.start)
        return body_of(self.file.read(line.size_bytes))

    async def _line(self, part: Sequence[tuple[Line, bytes]]) -> list[int]:
        ((line, body),) = part
        result = await self.runner.answer(self.batch, self.caller, line, body)
        self._unsaved.append(result)  # not before the wait: the list is another one then
        async with self._saving:
            results, self._unsaved = self._unsaved, []
            if results:
                await _to_its_end(self.runner.settle(self.batch, results))
        return [line.number]


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """A thread can't be cancelled: whoever is, waits for it, so that nothing is stored behind its back."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def result_file_id(batch_id: str, kind: str) -> str:
    """Of the file that holds a batch's results: always the same, and no guess."""
    digest = hashlib.sha256(f"{batch_id} {kind}".encode()).digest()
    return f"file-{base64.urlsafe_b64encode(digest[:18]).decode()}"


def _pause_s(error: PeriluneError | None, tries: int, wait_s: float) -> float | None:
    """Seconds until a line is tried again; None: it has its answer. Limits and a busy engine are waited for, for as
    long as the batch may take; faults of the server's are tried a few times."""
    if error is None or (isinstance(error, QuotaExceeded) and error.retry_after_s is None):
        return None
    if error.status in _RETRIED:
        return min(max(wait_s, error.retry_after_s or 0.0), _WAIT_S[1])
    if isinstance(error, InternalError | Unreachable) and tries < MAX_TRIES:
        return wait_s
    return None


def _terminal(batch: Batch, waiting: int) -> BatchStatus:
    if BatchStatus.CANCELLING in batch.times:
        return BatchStatus.CANCELLED
    if batch.errors:
        return BatchStatus.FAILED
    return BatchStatus.EXPIRED if waiting or not batch.total else BatchStatus.COMPLETED


def _row(
    batch: Batch, custom_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> dict[str, Any]:
    """A line of an output or error file."""
    request_id = hashlib.sha256(f"{batch.batch_id} {custom_id}".encode()).hexdigest()[:24]
    return {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": error}


def _result(batch: Batch, line: Line, answer: LineAnswer) -> LineResult:
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
    text = orjson.dumps(_row(batch, line.custom_id, response, None)).decode()
    usage = usage_of(answer.body) if answer.status == 200 else Usage(0, 0, 0)
    return LineResult(line.number, answer.status == 200, text, usage)


def usage_of(body: dict[str, Any]) -> Usage:
    """In the spelling of chats and completions, or of responses."""
    given = body.get("usage")
    found: dict[str, Any] = given if isinstance(given, dict) else {}
    details = found.get("prompt_tokens_details") or found.get("input_tokens_details") or {}
    numbers = (
        found.get("prompt_tokens", found.get("input_tokens")),
        found.get("completion_tokens", found.get("output_tokens")),
        details.get("cached_tokens"),
    )
    return Usage(*(number if isinstance(number, int) else 0 for number in numbers))
