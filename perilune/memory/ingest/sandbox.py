"""Starts a parser process, reads its frames, and turns every way it can fail into a sentence for people.

Knows processes, not documents. Nothing is forked from this process's state: a starter is exec'd (`subprocess`
without `preexec_fn`) with a bare environment and no inherited descriptors, and forks one parser a document, which
has only that document's pipes and is killed when the caller stops reading.
"""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import IO

from perilune.errors import Unreadable, UnsupportedDocument
from perilune.memory.ingest.protocol import (
    LENGTHS,
    START,
    STATUS,
    STOP,
    Done,
    Failed,
    Frame,
    Job,
    ProtocolError,
    decode,
    lengths,
)

STARTER = (sys.executable, "-P", "-m", "perilune.memory.ingest.starter")
POLL_S = 0.1
"""How often a silent parser's caller is asked whether the work is still wanted."""

STALL_S = 1_200.0
"""A parser silent for this long hangs. Generous: at nice 19 beside a busy engine it gets about 2 % of a core, and a
scanned page takes ten seconds of one."""

LAST_WORD_S = 10.0
"""How long a parser that closed its output may take to end; an exit at nice 19 that frees gigabytes is slow."""

_STARTER_END_S = 2.0
_READ_BYTES = 1024**2
_LOG_BYTES = 4_000
_ENVIRONMENT = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OPENCV_FOR_THREADS_NUM": "1"}
_FRAME = re.compile(r"[^\s:]+\.py:\d+ [\w<>]+|[A-Z]\w*(?:Error|Exception|Exit|Interrupt)")
_REPORT = "Try to export it again from its source; if it opens elsewhere, please report it."

log = logging.getLogger(__name__)


class ParseStopped(Exception):
    """The caller no longer wants the document; nobody is told."""


class Parsers:
    """Parser processes, one a document. Thread-safe; as many run at once as iterators are open.

    Starters are kept for the next document: what one costs (an interpreter and its imports) is ten times what a
    small document does. They end when idle, with this object, and with this process.
    """

    def __init__(self, command: Sequence[str] = STARTER, stall_s: float = STALL_S) -> None:
        self._command = command
        self._stall_s = stall_s
        self._idle: list[_Starter] = []

    def run(self, job: Job, stopped: Callable[[], bool] = lambda: False) -> Generator[Frame, None, None]:
        """The parser's frames, ended by `Done`. Closing the iterator kills the parser.

        Raises `UnsupportedDocument`, and `ParseStopped` soon after `stopped` turns true, however silent the parser
        is.
        """
        with tempfile.TemporaryFile() as errors:
            fresh = False
            while not fresh:
                try:
                    starter = self._idle.pop()  # atomic
                except IndexError:
                    fresh, starter = True, _Starter(self._command, errors)
                try:
                    yield from self._parse(starter, job, errors, stopped)
                    return
                except _StarterGone:
                    continue  # it ended before it had the document, or was killed before the first frame
            raise _death(starter.end(), job, errors)

    def _parse(
        self, starter: _Starter, job: Job, errors: IO[bytes], stopped: Callable[[], bool]
    ) -> Generator[Frame, None, None]:
        """Raises `_StarterGone` where nothing came of it."""
        begun = False
        with _Parser(starter, errors, self._idle.append) as parser:
            parser.send(job)
            for message in _frames(_Reader(parser.output, self._stall_s, stopped)):
                if isinstance(message, Failed):
                    raise UnsupportedDocument(message.message, hint=message.hint, why=message.why)
                yield message
                if isinstance(message, Done):
                    return
                begun = True
            status = parser.status(stopped)
        if status is None and not begun:
            raise _StarterGone
        raise _death(-signal.SIGKILL if status is None else status, job, errors)


class _StarterGone(Exception):
    """There is no starter any more, and its parser said nothing."""


class _Starter:
    """A starter process and the socket to it. Ends with this object, where `end` doesn't do it before."""

    def __init__(self, command: Sequence[str], errors: IO[bytes]) -> None:
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment |= _ONE_THREAD | {"PYTHONUTF8": "1"}
        self.control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=errors, env=environment
            )
        self._end = weakref.finalize(self, _end, self._process, self.control)

    def end(self) -> int:
        """End it and its parser. Returns its status, which is its own where it had ended already. Idempotent."""
        self._end()
        return self._process.wait()


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()  # it kills its parser and ends
    try:
        process.wait(_STARTER_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _Parser:
    """One parser process, which ends with the context. `output` is the descriptor of its frames.

    `keep` is called at the end with a starter that can serve another document.
    """

    def __init__(self, starter: _Starter, errors: IO[bytes], keep: Callable[[_Starter], None]) -> None:
        self._starter = starter
        self._control = starter.control
        self._keep = keep
        self._ended = False
        theirs_in, self._input = os.pipe()
        self.output, theirs_out = os.pipe()
        try:
            socket.send_fds(self._control, [START], [theirs_in, theirs_out, errors.fileno()])
        except (BrokenPipeError, ConnectionResetError):
            pass  # nobody has the other ends then: the output is at its end, and there is no status
        finally:
            os.close(theirs_in)
            os.close(theirs_out)

    def __enter__(self) -> _Parser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._input)
        os.close(self.output)
        if not self._ended and self._control.fileno() >= 0:  # closed where this process is at its end
            self._stop()
        if self._control.fileno() >= 0:
            self._keep(self._starter)

    def send(self, job: Job) -> None:
        left = memoryview(job.encode())
        try:
            while left:
                left = left[os.write(self._input, left) :]
        except BrokenPipeError:
            pass  # it died already; its exit status says why

    def status(self, stopped: Callable[[], bool]) -> int | None:
        """The exit status of a parser that has closed its output; None where its starter is gone.

        Raises `UnsupportedDocument` where it lives on, `ParseStopped`.
        """
        if not _readable(self._control.fileno(), LAST_WORD_S, stopped):
            log.warning("a parser closed its output and did not end within %g s", LAST_WORD_S)
            raise _broken("The parser stopped in the middle of this file; it is probably damaged.")
        return self._read_status()

    def _stop(self) -> None:
        """Kill it, and wait until it is gone."""
        try:
            self._control.sendall(STOP)
        except (BrokenPipeError, ConnectionResetError):
            self._starter.end()
            return
        if _readable(self._control.fileno(), LAST_WORD_S, lambda: False):
            self._read_status()
        else:
            log.warning("a parser did not end within %g s of being killed", LAST_WORD_S)
            self._starter.end()

    def _read_status(self) -> int | None:
        self._ended = True
        try:
            told = self._control.recv(STATUS.size, socket.MSG_WAITALL)
        except ConnectionResetError:
            told = b""
        if len(told) < STATUS.size:
            self._starter.end()
            return None
        (status,) = STATUS.unpack(told)
        return int(status)


def _frames(reader: _Reader) -> Iterator[Frame]:
    """Frames until the end of the stream."""
    while (head := reader.take(LENGTHS.size)) is not None:
        try:
            json_bytes, blob_bytes = lengths(head)
            body = reader.take(json_bytes + blob_bytes)
            if body is None:
                return
            message = decode(body[:json_bytes], body[json_bytes:])
        except ProtocolError:
            log.warning("a parser wrote something that is no frame")
            raise _broken("The parser failed on this file.") from None
        yield message


class _Reader:
    """Exact reads from a pipe, each with a deadline, given up when `stopped` says so."""

    def __init__(self, descriptor: int, stall_s: float, stopped: Callable[[], bool]) -> None:
        self._descriptor = descriptor
        self._stall_s = stall_s
        self._stopped = stopped

    def take(self, size: int) -> bytes | None:
        """`size` bytes, or None where the stream ends before them."""
        parts, missing = [], size
        deadline_s = time.monotonic() + self._stall_s
        while missing:
            self._wait(deadline_s)
            part = os.read(self._descriptor, min(missing, _READ_BYTES))
            if not part:
                return None
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _wait(self, deadline_s: float) -> None:
        """Until there is something to read."""
        if not _readable(self._descriptor, deadline_s - time.monotonic(), self._stopped):
            raise _broken(f"The parser made no progress for {self._stall_s:,.0f} s on this file and was stopped.")


def _readable(descriptor: int, within_s: float, stopped: Callable[[], bool]) -> bool:
    """Whether there is something to read, or the end of it, within so long. Raises `ParseStopped`."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    deadline_s = time.monotonic() + within_s
    while True:
        if stopped():
            raise ParseStopped
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        if poll.poll(min(left_s, POLL_S) * 1000):
            return True


def _death(status: int, job: Job, errors: IO[bytes]) -> UnsupportedDocument:
    """Why the process ended without a last word."""
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - _LOG_BYTES))
    told = errors.read().decode(errors="replace").splitlines()
    # Anything else there, from a library, may be the document's own text.
    kept = [line for line in told if _FRAME.fullmatch(line)]
    log.warning("a parser ended with status %d: %s", status, " ".join(kept) or "it said nothing that may be shown")
    if -status == signal.SIGKILL:
        return UnsupportedDocument(
            "The system stopped the parser, most likely because memory ran out.",
            hint="Free memory or split the document, and try again.",
            why=Unreadable.TOO_MUCH,
        )
    if -status == signal.SIGXCPU:
        return UnsupportedDocument(
            f"Reading the document took more than {job.cpu_s:,} s of computing and was stopped.",
            hint="Split it, or raise documents.parser_cpu_s.",
            why=Unreadable.TOO_MUCH,
        )
    if status < 0:
        return _broken(f"The parser crashed on this file ({signal.Signals(-status).name}); it is probably damaged.")
    return _broken("The parser failed on this file; it is probably damaged.")


def _broken(message: str) -> UnsupportedDocument:
    return UnsupportedDocument(message, hint=_REPORT, why=Unreadable.FAILED)
