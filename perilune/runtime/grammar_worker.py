"""The process that compiles a grammar first: one that wants minutes or gigabytes ends it, and not the server.

Reads JSON lines from stdin, the vocabulary and then grammars, and answers each with one on stdout, until stdin
ends. Started by grammar_trial.py. Each grammar may take `CPU_S` seconds and the whole process `MEMORY_BYTES`; what
takes more kills the process, which is the answer then.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import sys
from typing import Any

from perilune.core import Grammar, GrammarKind
from perilune.runtime.grammar_source import CannotFollow, Words, compiled, vocabulary

CPU_S = 3
MEMORY_BYTES = 1 << 30
_NICE = 10
"""Somebody waits for it, but decode must not feel a hostile grammar."""


def main() -> None:
    """Until stdin ends."""
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    known = vocabulary(_words(json.loads(sys.stdin.readline())))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    _say({"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        _allow_seconds(CPU_S)
        try:
            compiled(known, Grammar(GrammarKind(job["kind"]), job["source"]))
        except CannotFollow as error:
            _say({"error": str(error)})
        else:
            _say({"error": None})


def _allow_seconds(more_s: int) -> None:
    """The system ends the process where it uses more from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit_s = int(used.ru_utime + used.ru_stime) + 1 + more_s
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))


def _words(told: dict[str, Any]) -> Words:
    tokens = [base64.b64decode(token) for token in told["tokens"]]
    ids = {token: number for number, token in reversed(list(enumerate(tokens)))}
    longest = max(map(len, tokens))

    def encode(text: str) -> list[int]:
        """By the longest token each time: not as the model's tokenizer does, but as good to measure with."""
        data, found = text.encode(), []
        while data:
            size = next((size for size in range(min(longest, len(data)), 0, -1) if data[:size] in ids), 0)
            found += [ids[data[:size]]] if size else []
            data = data[size or 1 :]
        return found

    return Words(tokens, told["special"], told["stop"], encode)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
