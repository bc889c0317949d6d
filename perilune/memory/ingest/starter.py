"""Starts parsers: an exec'd interpreter that has imported what they need, and forks a process for each document.

Started by `sandbox`. Knows processes, opens no document: every document has a process of its own, with its own
limits, descriptors and end, and costs a fork instead of an interpreter's start. It runs one parser at a time and no
thread, so that a fork copies nothing half done. On Linux it moves into an empty network namespace first, which its
parsers inherit.

It takes orders from the socket that is its stdin (`protocol`); the socket's end ends it and its parser.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from perilune.memory.ingest import worker
from perilune.memory.ingest.formats import PARSERS
from perilune.memory.ingest.protocol import START, STATUS, STOP

STREAMS = 3
IDLE_S = 30.0
"""A starter that gets no document for this long ends; the next document starts another."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h


def leave_network() -> bool:
    """Move this process into an empty network namespace of its own. Returns whether that was possible.

    Linux only. Root may do it at once, others inside a user namespace of their own, unless the system forbids it.
    Must run before the first thread is started.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    return any(libc.unshare(flags) == 0 for flags in (_CLONE_NEWNET, _CLONE_NEWNET | _CLONE_NEWUSER))


def main() -> None:
    """Serve the socket until it ends, or nothing comes for a while."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then closes the socket
    leave_network()
    importlib.import_module(PARSERS["text"])  # others are loaded by the parser that needs them
    gc.freeze()  # what all parsers share stays shared
    with socket.socket(fileno=os.dup(0)) as control, _ChildWatch() as watch, suppress(BrokenPipeError):
        while select.select([control], [], [], IDLE_S)[0]:
            order, streams, _, _ = socket.recv_fds(control, 1, STREAMS)
            if order == START and len(streams) == STREAMS:
                control.sendall(STATUS.pack(_parse(streams, control, watch)))
            elif order != STOP:  # a STOP may come when its parser has ended already
                return


class _ChildWatch:
    """A descriptor that can be read when a child may have ended, so that one wait is for that and for orders."""

    def __enter__(self) -> _ChildWatch:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._write)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        return self._read

    def clear(self) -> None:
        os.read(self._read, select.PIPE_BUF)


def _parse(streams: Sequence[int], control: socket.socket, watch: _ChildWatch) -> int:
    """Run one parser; the status it ended with. Kills it on STOP and at the socket's end."""
    starter = os.getpid()
    pid = os.fork()
    if pid == 0:
        control.close()
        watch.__exit__()
        _become_parser(streams, starter)
    for stream in streams:
        os.close(stream)
    heard: list[socket.socket | _ChildWatch] = [watch, control]
    while True:
        ready = select.select(heard, [], [])[0]
        if watch in ready:
            watch.clear()
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
        if control in ready:
            control.recv(1)  # a STOP or the end: one answer to both
            heard = [watch]
            os.kill(pid, signal.SIGKILL)


def _become_parser(streams: Sequence[int], starter: int) -> NoReturn:
    """In the forked process, which holds nothing of the starter's but memory."""
    status = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == starter:  # else it died before that
            status = worker.main()
        sys.stdout.flush()
    except BaseException as error:
        print(worker.where_it_failed(error), file=sys.stderr, flush=True)
    finally:
        os._exit(status)  # the watching thread sits in a read that an ordinary exit would wait for


if __name__ == "__main__":
    main()
