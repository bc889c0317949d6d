"""Tries grammars in a process that may die of them (grammar_worker.py), and starts it anew when it did.

Knows processes and time; doesn't know grammars. One grammar at a time: an honest one takes milliseconds.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from perilune.core import Grammar
from perilune.errors import Overloaded
from perilune.runtime.grammar_source import CannotFollow, Words

WAIT_S = 15.0
"""From asking to the answer, others' trials included. The process itself stops after seconds of its own time."""

START_S = 60.0
KEPT_VERDICTS = 4096
_ENVIRONMENT = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
_COMMAND = (sys.executable, "-P", "-m", "perilune.runtime.grammar_worker")
_TOO_MUCH = "it takes too much time or memory to prepare"


class GrammarTrial:
    """Thread-safe. The process starts with the first grammar; `close` ends it. Verdicts are remembered."""

    def __init__(self, words: Words, command: Sequence[str] = _COMMAND, wait_s: float = WAIT_S) -> None:
        self._words = words
        self._command = tuple(command)
        self._wait_s = wait_s
        self._process: subprocess.Popen[bytes] | None = None
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: Grammar) -> None:
        """Return where it can be compiled here. Raises `CannotFollow`; `Overloaded` after `wait_s` in the queue."""
        end_s = time.monotonic() + self._wait_s
        name = hashlib.sha256(f"{grammar.kind.value} {grammar.source}".encode()).digest()
        if not self._lock.acquire(timeout=self._wait_s):
            raise Overloaded("Too many grammars wait to be prepared.", hint="Try again in a few seconds.")
        try:
            if name not in self._verdicts:
                self._verdicts[name] = self._asked(grammar, end_s)
                if len(self._verdicts) > KEPT_VERDICTS:
                    self._verdicts.popitem(last=False)
            verdict = self._verdicts[name]
        finally:
            self._lock.release()
        if verdict is not None:
            raise CannotFollow(verdict)

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                _end(process)

    def _asked(self, grammar: Grammar, end_s: float) -> str | None:
        """Why it can't be followed; None where it can."""
        process = self._process or self._started()
        job = {"kind": grammar.kind.value, "source": grammar.source}
        answer = _exchange(process, job, max(1.0, end_s - time.monotonic()))
        if answer is None:
            _end(process)
            self._process = None
            return _TOO_MUCH
        error = answer["error"]
        return None if error is None else str(error)

    def _started(self) -> subprocess.Popen[bytes]:
        kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=kept
        )
        words = self._words
        told = {
            "tokens": [base64.b64encode(token).decode() for token in words.tokens],
            "special": list(words.special_token_ids),
            "stop": list(words.stop_ids),
        }
        if _exchange(self._process, told, START_S) is None:
            _end(self._process)
            self._process = None
            raise Overloaded(
                "The process that prepares grammars doesn't start.", hint="Leave out the form, or try again later."
            )
        return self._process


def _exchange(process: subprocess.Popen[bytes], message: object, wait_s: float) -> dict[str, object] | None:
    """The answer to a message; None where the process died or took longer than `wait_s`."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    if not select.select([process.stdout], [], [], wait_s)[0]:
        return None
    line = process.stdout.readline()
    found: dict[str, object] | None = json.loads(line) if line else None
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:  # what it didn't read any more
                continue
