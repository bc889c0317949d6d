"""Starts a parser process, reads its frames, and turns every way it can fail into a sentence for people.

Knows processes, not documents. The process is exec'd, never forked from this one's state (`subprocess` without
`preexec_fn`); it gets a bare environment, no inherited descriptors, and is killed when the caller stops reading.
"""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from perilune.errors import UnsupportedDocument
from perilune.memory.ingest.protocol import (
    LENGTHS,
    Done,
    Failed,
    Frame,
    Job,
    ProtocolError,
    decode,
    lengths,
)

WORKER = (sys.executable, "-P", "-m", "perilune.memory.ingest.worker")
POLL_S = 0.1
"""How often a silent parser's caller is asked whether the work is still wanted."""

STALL_S = 1_200.0
"""A parser silent for this long hangs. Generous: at nice 19 beside a busy engine it gets about 2 % of a core, and a
scanned page takes ten seconds of one."""

LAST_WORD_S = 10.0
"""How long a parser that closed its output may take to end; an exit at nice 19 that frees gigabytes is slow."""

_READ_BYTES = 1024**2
_LOG_BYTES = 4_000
_ENVIRONMENT = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OPENCV_FOR_THREADS_NUM": "1"}
_FRAME = re.compile(r"[^\s:]+\.py:\d+ [\w<>]+|[A-Z]\w*(?:Error|Exception|Exit|Interrupt)")
_REPORT = "Try to export it again from its source; if it opens elsewhere, please report it."

log = logging.getLogger(__name__)


class ParseStopped(Exception):
    """The caller no longer wants the document; nobody is told."""


def run(
    job: Job,
    *,
    worker: Sequence[str] = WORKER,
    stall_s: float = STALL_S,
    stopped: Callable[[], bool] = lambda: False,
) -> Generator[Frame, None, None]:
    """The parser's frames, ended by `Done`. Closing the iterator kills the parser.

    Raises `UnsupportedDocument`, and `ParseStopped` soon after `stopped` turns true, however silent the parser is.
    """
    with tempfile.TemporaryFile() as errors, _process(worker, errors) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(job.encode())
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died already; its exit status below says why
        for message in _frames(_Reader(process.stdout.fileno(), stall_s, stopped)):
            if isinstance(message, Failed):
                raise UnsupportedDocument(message.message, hint=message.hint)
            yield message
            if isinstance(message, Done):
                return
        raise _death(_status(process, stopped), job, errors)


@contextmanager
def _process(worker: Sequence[str], errors: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    environment |= _ONE_THREAD | {"PYTHONUTF8": "1"}
    process = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
        worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
    )
    try:
        yield process
    finally:
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.wait()


def _status(process: subprocess.Popen[bytes], stopped: Callable[[], bool]) -> int:
    """The exit status of a parser that has closed its output. Raises when it lives on: `run` then kills it."""
    end_s = time.monotonic() + LAST_WORD_S
    while time.monotonic() < end_s:
        if stopped():
            raise ParseStopped
        try:
            return process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            continue
    log.warning("a parser closed its output and did not end within %g s", LAST_WORD_S)
    raise _broken("The parser stopped in the middle of this file; it is probably damaged.")


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
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN | select.POLLHUP)

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
        while True:
            if self._stopped():
                raise ParseStopped
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise _broken(
                    f"The parser made no progress for {self._stall_s:,.0f} s on this file and was stopped."
                )
            if self._poll.poll(min(left_s, POLL_S) * 1000):
                return


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
        )
    if -status == signal.SIGXCPU:
        return UnsupportedDocument(
            f"Reading the document took more than {job.cpu_s:,} s of computing and was stopped.",
            hint="Split it, or raise documents.parser_cpu_s.",
        )
    if status < 0:
        return _broken(f"The parser crashed on this file ({signal.Signals(-status).name}); it is probably damaged.")
    return _broken("The parser failed on this file; it is probably damaged.")


def _broken(message: str) -> UnsupportedDocument:
    return UnsupportedDocument(message, hint=_REPORT)
