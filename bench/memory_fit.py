"""Fits what memory is told by numbers: the confidence of a search, and which entries belong to a set.

    python -m bench.memory_fit

Uses the fitting half of the sources of `data/memory` only and prints the constants of `memory/confidence.py` and
`memory/gather.py`, to be copied there by hand, with what they give on the same half, source by source left out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.driver import say
from bench.embedding_cache import CachedEmbedder
from bench.memory_asking import Case, Sources, cases, halves
from bench.memory_questions import CACHE, calibration_error, f1, holds
from perilune.memory import telling
from perilune.memory.analyse import Analyser
from perilune.memory.asked import Kind, read
from perilune.memory.confidence import Signs
from perilune.memory.embed.process import ProcessEmbedder
from perilune.memory.gather import MAX_SET, TOLD, best_size

FALSE_SHARE = 0.05
_RIDGE = 0.01
_STEPS = 50
_SETTLE_S = 1_200.0

Numbers = npt.NDArray[np.float64]
Model = tuple[float, Numbers]


def main() -> None:
    process = ProcessEmbedder(query_s=60.0)
    embedder = CachedEmbedder(process, CACHE)
    fit, _ = halves()
    try:
        with tempfile.TemporaryDirectory() as home:
            stored = Sources(Path(home), embedder, fit)
            stored.settle(_SETTLE_S)
            say(f"{len(fit)} sources are stored")
            _confidence(stored, [case for case in cases() if case.source in fit and case.set != "timeline"])
            timeline = [case for case in cases() if case.source in fit and case.set == "timeline"]
            _events(stored, timeline)
            _sets(stored, timeline)
            stored.close()
            embedder.close()
    finally:
        process.close()


def logistic(signs: Numbers, true: Numbers) -> Model:
    """(bias, weights) of raw signs; the ridge is on standardised ones."""
    mean, spread = signs.mean(axis=0), signs.std(axis=0) + 1e-6
    rows = np.c_[(signs - mean) / spread, np.ones(len(signs))]
    ridge = _RIDGE * len(true) * np.diag([*([1.0] * signs.shape[1]), 0.0])
    weights = np.zeros(rows.shape[1])
    for _ in range(_STEPS):
        chance = 1 / (1 + np.exp(-rows @ weights))
        slope = rows.T @ (chance - true) + ridge @ weights
        curve = (rows * (chance * (1 - chance))[:, None]).T @ rows + ridge
        weights -= np.linalg.solve(curve, slope)
    raw = weights[:-1] / spread
    return float(weights[-1] - raw @ mean), raw


def chances(model: Model, signs: Numbers) -> Numbers:
    found: Numbers = 1 / (1 + np.exp(-(signs @ model[1] + model[0])))
    return found


def _left_out(groups: Sequence[str], signs: Numbers, true: Numbers) -> Numbers:
    """Chances of each source's rows by a model of the others'."""
    found = np.zeros(len(true))
    for group in sorted(set(groups)):
        mine = np.array([each == group for each in groups])
        found[mine] = chances(logistic(signs[~mine], true[~mine]), signs[mine])
    return found


def _confidence(stored: Sources, mine: Sequence[Case]) -> None:
    asked = [stored.ask(case) for case in mine]
    signs = np.array([astuple(each.found.signs) for each in asked])
    true = np.array([float(holds(each)) for each in asked])
    sets = np.array([case.set for case in mine])
    bias, weights = logistic(signs, true)
    print(f"BIAS = {bias:.3f}")
    print(
        "WEIGHTS = Signs("
        + ", ".join(f"{f.name}={w:.3f}" for f, w in zip(fields(Signs), weights, strict=True))
        + ")"
    )
    answered = np.isin(sets, ["twin", "paired"])
    print(f"ABSTAIN_BELOW = {np.quantile(chances((bias, weights), signs)[answered], FALSE_SHARE):.3f}")
    left = _left_out([case.source for case in mine], signs, true)
    below = left < np.quantile(left[answered], FALSE_SHARE)
    for name in ("abstain", "foreign"):
        print(
            f"left out: {below[sets == name].mean():.3f} of {name} abstained at {FALSE_SHARE:.0%} false abstention"
        )
    plain = sets != "foreign"
    print(f"left out: calibration error {calibration_error(left[plain], true[plain]):.4f}")


def _events(stored: Sources, mine: Sequence[Case]) -> None:
    """What it is told from that an entry tells an event: of the evidence the one that is nearest to it, against the
    others among the best."""
    signs, true = list[Numbers](), list[Numbers]()
    for case in mine:
        asked = read(case.text)
        if asked.kind is not Kind.ORDER:
            continue
        scope, _ = stored.scope(case)
        looked = stored.memory.retriever.gatherer.look(asked.events, scope, Analyser(), [])
        keys = stored.keys(scope.tenant, looked.pool)
        evidence = [at for at, key in enumerate(keys) if key in case.evidence]
        how = np.array([telling.signs(text) for text in stored.texts(looked.pool)], np.float32)
        for event in range(len(asked.events)):
            scores = looked.scores(event)
            right = max(evidence, key=lambda at: float(scores[at]))
            others = [int(at) for at in np.argsort(-scores)[:TOLD] if int(at) not in evidence]
            signs.append(looked.event_signs(event, how)[[right, *others]].astype(np.float64))
            true.append(np.array([1.0, *([0.0] * len(others))]))
    _, weights = logistic(np.concatenate(signs), np.concatenate(true))
    print(f"EVENT_WEIGHTS = ({', '.join(f'{weight:.3f}' for weight in weights)})")


def _sets(stored: Sources, mine: Sequence[Case]) -> None:
    rows = [row for case in mine if (row := _belonging(stored, case)) is not None]
    groups = [case.source for case, signs, _, _ in rows for _ in signs]
    signs, true = np.concatenate([row[1] for row in rows]), np.concatenate([row[2] for row in rows])
    bias, weights = logistic(signs, true)
    print(f"SET_BIAS = {bias:.3f}\nSET_WEIGHTS = ({', '.join(f'{weight:.3f}' for weight in weights)})")
    left, at, good = _left_out(groups, signs, true), 0, []
    for _, own, _, score in rows:
        good.append(score(left[at : at + len(own)]) >= 0.8)
        at += len(own)
    print(f"left out: F1 ≥ 0.8 for {np.mean(good):.3f} of {len(good)} counts")


Row = tuple[Case, Numbers, Numbers, Callable[[Numbers], float]]


def _belonging(stored: Sources, case: Case) -> Row | None:
    """The signs of the entries in the time in question, which of them belong, and the F1 of a set by chances."""
    asked = read(case.text)
    if asked.kind is not Kind.COUNT or not asked.events:
        return None
    scope, now = stored.scope(case)
    assert now is not None  # counts are asked of histories
    gatherer = stored.memory.retriever.gatherer
    looked, ends, inside = gatherer.bounded(asked, case.text, scope, now, Analyser(), [])
    keys = stored.keys(scope.tenant, looked.pool)
    places = np.flatnonzero(inside)
    true = np.array([float(keys[at] in case.evidence) for at in places])

    def score(found: Numbers) -> float:
        order = np.argsort(-found)[:MAX_SET]
        chosen = [*ends, *places[order[: best_size(found[order])]]]
        return f1([keys[at] for at in chosen], case.evidence)

    return case, looked.signs(0).astype(np.float64)[places], true, score


if __name__ == "__main__":
    main()
