"""Whether a search knows that the sources don't contain what was asked, set by set, at the product's own threshold.

    python -m bench.abstention --data FOLDER [--sets cmrc,locomo,lifebench] [--quick] [--json FILE]

Nothing here was fitted on these sets (`memory/confidence.py` was, on one half of `data/memory`). Unanswerable are:
a question of CMRC without its passage among the others; one of LoCoMo or LifeBench asked of another conversation
or person (`foreign`); and LoCoMo's adversarial ones, where what one speaker did is asked of the other (`near`).
Each is told beside the false abstention among the answerable questions of the same set, and beside the share that
would abstain if exactly 5 % of those did (`at_5`): that needs labels, and says what the order of confidences could
give. The same of the held-out half of `data/memory` is in bench.memory_questions.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench.driver import say
from bench.embedding_cache import CachedEmbedder
from bench.machine import CpuClock, describe
from bench.memory_questions import calibration_error
from bench.report import Bar, Options, Result, finish, parse_options
from bench.retrieval import DATA_VARIABLE
from bench.sets import Corpus, Question, cmrc, lifebench, locomo
from perilune.memory.confidence import ABSTAIN_BELOW, BEST
from perilune.memory.embed.process import ProcessEmbedder
from perilune.memory.indexer import Indexer
from perilune.memory.memory import Memory, Turn
from perilune.memory.retrieve import Found
from perilune.memory.scope import Scope
from perilune.memory.store import Store
from perilune.memory.synonyms import Synonyms
from perilune.memory.vectors.lance import LanceIndex

SETS = {"cmrc": cmrc, "locomo": locomo, "lifebench": lifebench}
KINDS = ("cmrc_foreign", "locomo_foreign", "locomo_near", "lifebench_foreign")
BARS = {
    **{f"{kind}_abstained": Bar(at_least=0.8, unit="") for kind in KINDS},
    **{f"{name}_falsely": Bar(at_most=0.05, unit="") for name in SETS},
}
FALSE_SHARE = 0.05
_WAIT_S = 1_200.0
_QUICK_QUESTIONS = 60


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--data", type=Path, default=os.environ.get(DATA_VARIABLE))
    parser.add_argument("--sets", default=",".join(SETS))
    given, rest = parser.parse_known_args(argv)
    options = parse_options("What a search doesn't find, and knows it. Also: --data FOLDER, --sets NAMES.", rest)
    if given.data is None:
        parser.error(f"name the folder of the sets with --data or {DATA_VARIABLE}")
    clock = CpuClock.now([os.getpid()])
    result = Result("abstention", dict.fromkeys(BARS), describe(), [], quick=options.quick)
    process = ProcessEmbedder(query_s=60.0)
    embedder = CachedEmbedder(process)
    try:
        for name in given.sets.split(","):
            corpora = list(itertools.islice(SETS[name](given.data), 2 if options.quick else None))
            _tell(result, name, _sure_of(name, corpora, embedder, options))
            say(f"{name}: { ({key: figure for key, figure in result.figures.items() if key.startswith(name)}) }")
    finally:
        embedder.close()
        process.close()
    result.machine["foreign_share"] = round(CpuClock.now([os.getpid()]).foreign_share(clock), 3)
    finish(result, BARS, options)


Sure = dict[str, list[float]]
"""Confidences of each kind of question; `answered`: that the source answers; `held`: whether it was found."""


def _sure_of(name: str, corpora: list[Corpus], embedder: CachedEmbedder, options: Options) -> Sure:
    sure: Sure = {"answered": [], "held": [], "foreign": [], "near": []}
    for at, corpus in enumerate(corpora):
        others = corpora[(at + 1) % len(corpora)].questions if len(corpora) > 1 else ()
        with tempfile.TemporaryDirectory() as home:
            for kind, question, found, keys in _asked(
                Path(home), corpus, others, embedder, options, name == "cmrc"
            ):
                if found.measured:  # else nothing is said
                    sure[kind].append(found.confidence)
                    if kind == "answered":
                        sure["held"].append(float(not set(question.evidence).isdisjoint(keys[:BEST])))
    return sure


def _asked(
    home: Path,
    corpus: Corpus,
    others: Sequence[Question],
    embedder: CachedEmbedder,
    options: Options,
    without: bool,
) -> Iterator[tuple[str, Question, Found, list[str]]]:
    """(kind, question, what was found, keys of the hits). `without`: each also without its own passage."""
    store = Store(home)
    index = LanceIndex(home / "index", embedder.model, embedder.width)
    memory = Memory(store, index, embedder, Synonyms.load(), Indexer(store, index, embedder))
    keys: dict[tuple[str, int], str] = {}
    sessions = list(dict.fromkeys(item.session for item in corpus.items))
    for session in sessions:
        mine = [item for item in corpus.items if item.session == session]
        memory.add_turns("bench", session, [Turn(item.speaker, item.text, item.at) for item in mine])
        keys |= {(session, number): item.key for number, item in enumerate(mine)}
    memory.start()
    memory.settled(_WAIT_S)
    most = _QUICK_QUESTIONS if options.quick else None
    try:
        for kind, question in [
            *(("answered" if each.answerable else "near", each) for each in corpus.questions[:most]),
            *(("foreign", each) for each in others[:most] if each.answerable),
            *(("foreign", each) for each in corpus.questions[:most] if without),
        ]:
            left_out = set(question.evidence) if without and kind == "foreign" else set()
            scope = Scope("bench", tuple(each for each in sessions if each not in left_out) if left_out else None)
            found = memory.search(question.text, scope, BEST, now=question.asked)
            yield kind, question, found, [keys[hit.source_id, hit.number] for hit in found.hits]
    finally:
        memory.close()
        store.close()


def _tell(result: Result, name: str, sure: Sure) -> None:
    answered = np.array(sure["answered"])
    result.figures[f"{name}_falsely"] = round(float((answered < ABSTAIN_BELOW).mean()), 4)
    result.figures[f"{name}_calibration_error"] = round(calibration_error(answered, np.array(sure["held"])), 4)
    for kind in ("foreign", "near"):
        if sure[kind]:
            values = np.array(sure[kind])
            result.figures[f"{name}_{kind}_abstained"] = round(float((values < ABSTAIN_BELOW).mean()), 4)
            result.figures[f"{name}_{kind}_at_5"] = round(
                float((values < np.quantile(answered, FALSE_SHARE)).mean()), 4
            )
            result.notes.append(f"{name}: {len(answered)} answerable, {len(values)} {kind}")


if __name__ == "__main__":
    main()
