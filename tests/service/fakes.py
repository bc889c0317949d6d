"""Small deterministic stand-ins for the layers below the service: an engine, a tokenizer, a template, a library.

The engine keeps the real one's promises: events in order on its own thread, whole-block prefix reuse by chained
hashes and salt, cancellation in every phase, and nothing left behind (`assert_clean`).
"""

from __future__ import annotations

import hashlib
import io
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from perilune.core import (
    BLOCK_TOKENS,
    CachedTokens,
    EngineEvent,
    EngineFinished,
    EngineProgress,
    EngineStats,
    EngineToken,
    FileRecord,
    FileStatus,
    FinishReason,
    Page,
    Passage,
    SearchResult,
    SequenceSpec,
    TokenLogprob,
)
from perilune.engine.observe import EngineObserver, NullObserver, StepObservation
from perilune.errors import InternalError, InvalidRequest, NotFound, Overloaded, TooLarge
from perilune.memory.usage import Used
from perilune.runtime.kv.spec import block_hashes
from perilune.service.ports import LineAnswers

MARKERS = ("<|im_start|>", "<|im_end|>")
FIRST_MARKER = 0x110000
EOS = FIRST_MARKER + 1
BOS = FIRST_MARKER + 2


class CharTokenizer:
    """One token per character; the template's markers are single tokens."""

    stop_ids = frozenset({EOS})

    def __init__(self, bos: bool = False) -> None:
        self.bos_ids: tuple[int, ...] = (BOS,) if bos else ()
        self.encoded_chars = 0
        self.longest_call_chars = 0

    def encode(self, text: str) -> list[int]:
        self.encoded_chars += len(text)
        self.longest_call_chars = max(self.longest_call_chars, len(text))
        return [ord(char) for char in text]

    def encode_template(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in re.split(r"(<\|im_start\|>|<\|im_end\|>)", text):
            ids += [FIRST_MARKER + MARKERS.index(part)] if part in MARKERS else self.encode(part)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.token_bytes(token).decode("utf-8") for token in token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id >= FIRST_MARKER:
            return (*MARKERS, "<s>")[token_id - FIRST_MARKER].encode()
        return chr(token_id).encode("utf-8")

    def stream(self) -> CharStream:
        return CharStream(self)


class SparseTokenizer(CharTokenizer):
    """A run of spaces is one token, as in real vocabularies."""

    def encode(self, text: str) -> list[int]:
        return super().encode(re.sub(" +", " ", text))


class CharStream:
    def __init__(self, tokenizer: CharTokenizer) -> None:
        self._tokenizer = tokenizer

    def push(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id])

    def flush(self) -> str:
        return ""


class Template:
    """ChatML. `refuse_system`, `drop_system` and `shout` are the bad habits of real templates."""

    def __init__(self, *, refuse_system: bool = False, drop_system: bool = False, shout: bool = False) -> None:
        self.refuse_system = refuse_system
        self.drop_system = drop_system
        self.shout = shout

    def render(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True, variables: object = None
    ) -> str:
        text = ""
        for message in messages:
            if message["role"] == "system" and self.refuse_system:
                raise InvalidRequest("System role not supported.")
            if message["role"] == "system" and self.drop_system:
                continue
            content = message["content"].upper() if self.shout else message["content"]
            text += f"<|im_start|>{message['role']}\n{content}<|im_end|>\n"
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


@dataclass
class _Running:
    spec: SequenceSpec
    emit: Callable[[EngineEvent], None]
    cancelled: threading.Event = field(default_factory=threading.Event)


class NoKV:
    """`KVView` of an engine that has none to show."""

    def view(self, steps: int = 0) -> dict[str, Any]:
        return {}

    def debug(self, on: bool) -> None:
        raise AssertionError("nobody asked to measure")


class NoUsage:
    """Rows in memory."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Used] = {}

    def add(self, used: Mapping[tuple[str, str], Used]) -> None:
        for at, more in used.items():
            self.rows[at] = self.rows.get(at, Used()) + more

    def day(self, key_id: str, day: str) -> Used:
        return self.rows.get((key_id, day), Used())

    def month(self, key_id: str, month: str) -> Used:
        found = (used for (key, day), used in self.rows.items() if key == key_id and day.startswith(month))
        return sum(found, Used())


class FakeEngine:
    """Runs one sequence at a time, P0 before P2, `chunk` tokens per step at `prefill_rate` tokens per second.

    `script` maps a spec to the text it answers; the end marker follows unless the text is cut by max_new_tokens.
    """

    def __init__(
        self,
        script: Callable[[SequenceSpec], str] = lambda spec: "The answer.",
        prefill_rate: float = 200_000.0,
        token_s: float = 0.0,
        chunk: int = 256,
        queue_limit: int = 64,
    ) -> None:
        self.script = script
        self.prefill_rate = prefill_rate
        self.token_s = token_s
        self.chunk = chunk
        self.queue_limit = queue_limit
        self.observer: EngineObserver = NullObserver()
        self.ram: dict[bytes, str | None] = {}
        self.disk: dict[bytes, set[str]] = {}
        self.specs: list[SequenceSpec] = []
        self.computed_tokens = 0
        self.fail: str | None = None
        self.broken = ""  # "fault" or "closed": takes nothing any more
        self.hold = threading.Event()
        self.hold.set()
        self.exact_share = 1.0
        self.queued_tokens = 0  # beside those of its own sequences
        self._waiting: list[_Running] = []
        self._active: dict[str, _Running] = {}
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    # ----------------------------------------------------------------------------------- the port

    @property
    def alive(self) -> bool:
        return not (self._closed or self.broken)

    def submit(self, spec: SequenceSpec, emit: Callable[[EngineEvent], None]) -> None:
        with self._wake:
            if self.broken:
                raise InternalError("The engine stopped.") if self.broken == "fault" else Overloaded("Closed.")
            if len(self._active) >= self.queue_limit:
                raise Overloaded("The engine's queue is full.")
            assert spec.seq_id not in self._active, "a sequence id was used twice"
            assert spec.shared_tokens <= len(spec.token_ids)
            running = _Running(spec, emit)
            self.specs.append(spec)
            self._active[spec.seq_id] = running
            self._waiting.append(running)
            self._wake.notify_all()

    def cancel(self, seq_id: str) -> None:
        with self._wake:
            running = self._active.get(seq_id)
            if running:
                running.cancelled.set()

    def cached(self, token_ids: Sequence[int], salt: bytes) -> CachedTokens:
        ram = disk = 0
        for name in block_hashes(token_ids, salt):
            if name in self.ram and not disk:
                ram += BLOCK_TOKENS
            elif name in self.disk:
                disk += BLOCK_TOKENS
            else:
                break
        return CachedTokens(ram, disk)

    def forget(self, owner: str) -> int:
        freed = 0
        for name in [name for name, kept in self.ram.items() if kept == owner]:
            del self.ram[name]
        for name, owners in list(self.disk.items()):
            owners.discard(owner)
            if not owners:
                del self.disk[name]
                freed += BLOCK_TOKENS
        return freed

    def stats(self) -> EngineStats:
        with self._wake:
            waiting = len(self._waiting)
            queued = self.queued_tokens + sum(
                len(r.spec.token_ids) for r in self._active.values() if r.spec.service_class == 0
            )
            return EngineStats(len(self._active) - waiting, waiting, queued, 0, 0)

    # ------------------------------------------------------------------------------- for the tests

    def owners(self) -> set[str]:
        return {owner for owners in self.disk.values() for owner in owners}

    def restart(self) -> None:
        """Lose the RAM tier, keep the disk."""
        self.ram.clear()

    def assert_clean(self, within_s: float = 1.0) -> None:
        """No sequence may be left."""
        end = time.monotonic() + within_s
        while self._active and time.monotonic() < end:
            time.sleep(0.002)
        assert not self._active, f"sequences left in the engine: {list(self._active)}"

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self.hold.set()
        self._thread.join(5)

    # -------------------------------------------------------------------------------- engine thread

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                running = min(self._waiting, key=lambda r: r.spec.service_class)
                self._waiting.remove(running)
            reason, error = self._run(running)
            with self._wake:
                del self._active[running.spec.seq_id]
            running.emit(EngineFinished(running.spec.seq_id, reason, error))

    def _run(self, running: _Running) -> tuple[FinishReason, str | None]:
        spec, emit = running.spec, running.emit
        found = self.cached(spec.token_ids, spec.salt)
        total, done = len(spec.token_ids), min(found.total, len(spec.token_ids) - 1)
        done = done // BLOCK_TOKENS * BLOCK_TOKENS
        ram = min(found.ram, done)
        disk = done - ram
        emit(EngineProgress(spec.seq_id, done, total, ram, disk))
        while done < total:
            step, start = min(self.chunk, total - done), time.monotonic()
            if not self._pause(running, step / self.prefill_rate):
                return FinishReason.CANCELLED, None
            self.observer.step(StepObservation(step, done, 0, time.monotonic() - start))
            done += step
            self.computed_tokens += step
            emit(EngineProgress(spec.seq_id, done, total, ram, disk))
        self._keep(spec)
        if self.fail:
            return FinishReason.ERROR, self.fail
        if spec.prefill_only:
            return FinishReason.STOP, None
        return self._answer(running)

    def _answer(self, running: _Running) -> tuple[FinishReason, str | None]:
        spec = running.spec
        ids = [*map(ord, self.script(spec)), EOS]
        for count, token in enumerate(ids):
            if count >= spec.max_new_tokens:
                return FinishReason.LENGTH, None
            if not self._pause(running, self.token_s):
                return FinishReason.CANCELLED, None
            logprob = None
            if spec.sampling.logprobs is not None:
                top = tuple((token + i, -0.5 - i) for i in range(spec.sampling.logprobs)) if token != EOS else ()
                logprob = TokenLogprob(token, -0.5, top)
            running.emit(EngineToken(spec.seq_id, token, logprob, self.exact_share))
            if token in spec.stop_token_ids:
                return FinishReason.STOP, None
        return FinishReason.LENGTH, None

    def _pause(self, running: _Running, seconds: float) -> bool:
        """Take `seconds`, or until cancelled; returns whether to go on."""
        end = time.monotonic() + seconds
        while not self.hold.is_set() or time.monotonic() < end:
            if running.cancelled.is_set():
                return False
            time.sleep(min(0.001, seconds) if self.hold.is_set() else 0.001)
        return not running.cancelled.is_set()

    def _keep(self, spec: SequenceSpec) -> None:
        shared = spec.token_ids[: spec.shared_tokens]
        limit = spec.shared_tokens if spec.persist_tokens is None else spec.persist_tokens
        for index, name in enumerate(block_hashes(shared, spec.salt)):
            self.ram.setdefault(name, spec.persist_owner)
            if spec.persist_owner and (index + 1) * BLOCK_TOKENS <= limit:
                self.disk.setdefault(name, set()).add(spec.persist_owner)


class NoBatches:
    """Of a process that runs none."""

    def serve(self, answers: LineAnswers) -> None: ...

    def start(self) -> None: ...

    async def close(self) -> None: ...

    async def forget_tenant(self, tenant: str) -> None: ...


class MemoryLibrary:
    """Files in memory. Pages are separated by form feeds; `page_s` is the time a page takes to parse.

    A file that begins with "BROKEN" can't be read.
    """

    def __init__(self, page_s: float = 0.0) -> None:
        self.page_s = page_s
        self.records: dict[str, FileRecord] = {}
        self.data: dict[str, bytes] = {}
        self.parsed: dict[str, list[Page]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.search_s = 0.0
        self.faults: list[str] = []

    def add_file(
        self,
        tenant: str,
        filename: str,
        purpose: str,
        data: BinaryIO,
        max_bytes: int,
        local_only: bool = False,
        *,
        lasts_s: float | None = None,
        file_id: str | None = None,
    ) -> FileRecord:
        content = data.read()
        if len(content) > max_bytes:
            raise TooLarge("The file is too large.")
        file_id = f"file-{len(self.records)}"
        digest = hashlib.sha256(content).hexdigest()
        record = FileRecord(file_id, tenant, filename, purpose, len(content), digest, 0.0, FileStatus.UPLOADED)
        self.records[file_id] = record
        self.data[file_id] = content
        self.parsed[file_id] = []
        return record

    def get_file(self, tenant: str, file_id: str) -> FileRecord:
        record = self.records.get(file_id)
        if record is None or record.tenant != tenant:
            raise NotFound(f"There is no file {file_id}.")
        return record

    def list_files(self, tenant: str) -> list[FileRecord]:
        return [record for record in self.records.values() if record.tenant == tenant]

    def all_files(self) -> list[FileRecord]:
        return list(reversed(self.records.values()))

    def due_files(self) -> list[FileRecord]:
        return []

    def unfinished_files(self) -> list[FileRecord]:
        final = (FileStatus.PROCESSED, FileStatus.ERROR)
        return [record for record in self.records.values() if record.status not in final]

    def delete_file(self, tenant: str, file_id: str) -> None:
        self.get_file(tenant, file_id)
        del self.records[file_id], self.data[file_id], self.parsed[file_id]

    def open_file(self, tenant: str, file_id: str) -> BinaryIO:
        self.get_file(tenant, file_id)
        return io.BytesIO(self.data[file_id])

    def pages(self, tenant: str, file_id: str) -> list[Page]:
        self.get_file(tenant, file_id)
        return list(self.parsed[file_id])

    def text(self, tenant: str, file_id: str) -> str:
        return "".join(page.text for page in self.pages(tenant, file_id))

    def text_chars(self, tenant: str, file_id: str) -> int:
        return len(self.text(tenant, file_id))

    def parse(self, tenant: str, file_id: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[FileRecord]:
        record = self.get_file(tenant, file_id)
        if self.data[file_id].startswith(b"BROKEN"):
            self.records[file_id] = replace(record, status=FileStatus.ERROR, error="The file is damaged.")
            yield self.records[file_id]
            return
        texts = self.data[file_id].decode().split("\f")
        while len(self.parsed[file_id]) < len(texts):
            while not self.gate.wait(0.02):
                if stopped():
                    return
            time.sleep(self.page_s)
            pages = self.parsed[file_id]
            start = pages[-1].end if pages else 0
            text = texts[len(pages)]
            pages.append(Page(len(pages) + 1, text, start, start + len(text)))
            record = replace(record, status=FileStatus.PARSING, pages_total=len(texts), pages_parsed=len(pages))
            self.records[file_id] = record
            yield record
        self.records[file_id] = replace(record, status=FileStatus.PREFILLING)
        yield self.records[file_id]

    def set_status(self, record: FileRecord) -> None:
        if record.file_id in self.records:
            self.records[record.file_id] = record

    def search_faults(self) -> list[str]:
        return list(self.faults)

    def search(self, tenant: str, file_ids: Sequence[str], query: str, limit: int) -> list[Passage]:
        time.sleep(self.search_s)
        words = set(re.findall(r"\w+", query.lower()))
        found = []
        for file_id in file_ids:
            for page in self.pages(tenant, file_id):
                for match in re.finditer(r"[^.]*\.", page.text):
                    common = words & set(re.findall(r"\w+", match[0].lower()))
                    score = sum(10 if any(map(str.isdigit, word)) else 1 for word in common)
                    if score:
                        start = page.start + match.start()
                        found.append(
                            Passage(file_id, page.number, start, start + len(match[0]), match[0], float(score))
                        )
        return sorted(found, key=lambda passage: -passage.score)[:limit]

    def find(self, tenant: str, file_ids: Sequence[str], query: str, limit: int) -> SearchResult:
        return SearchResult(tuple(self.search(tenant, file_ids, query, limit)))


def upload_bytes(text: str) -> BinaryIO:
    return io.BytesIO(text.encode())
