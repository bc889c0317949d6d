"""From readings to figures: ratios within a run, recorded peers, the JSON file and the table a person reads.

A ratio is taken round by round and its median is the figure, so that a slow minute hits both sides. A recorded
reading of a peer is scaled by what the machine gives now over what it gave then; it is marked and never counts as
acceptance.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from bench import peers
from bench.driver import OURS, Reading
from bench.machine import Calibration, describe

RECORDED = Path(__file__).resolve().parent / "recorded"
QUIET_SHARE = 0.05
"""Others' share of the cores up to which a reading is worth keeping and a run counts as quiet."""

Scale = Literal["gemm_gflops", "read_gb_s"]


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure has to reach. `at_least` or `at_most` is set, never both."""

    at_least: float | None = None
    at_most: float | None = None
    unit: str = "×"

    def met(self, value: float) -> bool:
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is None or value <= self.at_most

    def __str__(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g} {self.unit}"
        return f"≤ {self.at_most:g} {self.unit}" if self.at_most is not None else "-"


@dataclass(slots=True)
class Result:
    """One bench's outcome, as it is written to JSON."""

    name: str
    figures: dict[str, float | bool | None]
    machine: dict[str, object]
    runs: list[dict[str, object]]
    recorded: bool = False
    quick: bool = False
    notes: list[str] = field(default_factory=list)
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))


@dataclass(frozen=True, slots=True)
class Options:
    """The command line every bench shares."""

    quick: bool
    json_file: Path | None
    rounds: int
    record: bool
    engines: tuple[str, ...]


def parse_options(
    description: str,
    argv: Sequence[str] | None = None,
    *,
    rounds: int = 5,
    engines: Sequence[str] = (),
) -> Options:
    """Read the command line. `engines` are those that can take part; empty where a bench has no peers.

    From here on SIGTERM ends the bench like Ctrl-C does, so that no worker or server stays behind.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="end within 45 s; peers may be recorded readings")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds of a full run (default %(default)s)")
    parser.add_argument(
        "--record", action="store_true", help="keep the peers' readings (or budgets) for later runs"
    )
    parser.add_argument("--engines", help="only these, comma-separated (default: all)")
    given = parser.parse_args(argv)
    chosen = given.engines.split(",") if given.engines else list(engines)
    if unknown := set(chosen) - set(engines):
        parser.error(f"unknown engines {sorted(unknown)}; known are {', '.join(engines)}")
    return Options(given.quick, given.json, given.rounds, given.record, tuple(chosen))


def rates(readings: Sequence[Reading], engine: str, what: str) -> dict[int, float]:
    """Tokens per second by round."""
    return {r.round: r.rate for r in readings if r.engine == engine and r.what == what}


def ratios(readings: Sequence[Reading], peer: str, what: str, ours: str = OURS) -> list[float]:
    """Ours over the peer's, for each round in which both ran."""
    mine, theirs = rates(readings, ours, what), rates(readings, peer, what)
    return [mine[number] / theirs[number] for number in sorted(mine.keys() & theirs.keys())]


def compare(result: Result, key: str, values: Sequence[float]) -> None:
    """Enter a ratio: the median as figure, least and greatest as spread; None where nothing was measured."""
    result.figures[key] = round(median(values), 3) if values else None
    if values:
        result.spread[key] = (round(min(values), 3), round(max(values), 3))


def recorded_readings(peer: str, what: str, scale: Scale, now: Calibration, rounds: int) -> list[Reading]:
    """A peer's recorded rate, scaled to the machine as it is now; one reading per round. Empty if none is kept."""
    file = RECORDED / f"{peer}.json"
    if not file.is_file():
        return []
    kept = json.loads(file.read_text(encoding="utf-8"))
    entry = kept["readings"].get(what)
    if entry is None:
        return []
    factor = getattr(now, scale) / entry["calibration"][scale]
    seconds = entry["tokens"] / (entry["tokens_per_s"] * factor)
    return [Reading(number, peer, what, entry["tokens"], seconds, 0.0, recorded=True) for number in range(rounds)]


def record(readings: Sequence[Reading], calibration: Calibration) -> None:
    """Keep the median rate of every peer in the quiet readings, with the calibration it was measured under.

    `X_long` is engine X at long contexts, with a file of its own.
    """
    RECORDED.mkdir(exist_ok=True)
    readings = [r for r in readings if not r.recorded and r.foreign_share <= QUIET_SHARE]
    for peer in sorted(name for name in {r.engine for r in readings} if not name.startswith(OURS)):
        file = RECORDED / f"{peer}.json"
        kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"readings": {}}
        kept |= {
            "engine": peers.PEERS[peer.removesuffix("_long")].label,
            "date": time.strftime("%Y-%m-%d"),
            "machine": describe(),
        }
        for what in sorted({r.what for r in readings if r.engine == peer}):
            mine = [r for r in readings if r.engine == peer and r.what == what]
            kept["readings"][what] = {
                "tokens": mine[0].tokens,
                "tokens_per_s": round(median(r.rate for r in mine), 2),
                "rounds": len(mine),
                "foreign_share": round(median(r.foreign_share for r in mine), 3),
                "calibration": {key: round(value, 2) for key, value in asdict(calibration).items()},
            }
        file.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def begin(
    name: str, readings: Sequence[Reading], calibration: Calibration, options: Options, *, recorded: bool
) -> Result:
    """A result of these readings, still without figures. With --record the peers' are kept, too."""
    if options.record:
        record(readings, calibration)
    machine = summarise(calibration, foreign_share(readings))
    return Result(name, {}, machine, runs(readings), recorded=recorded, quick=options.quick)


def runs(readings: Sequence[Reading]) -> list[dict[str, object]]:
    return [
        {**asdict(reading), "seconds": round(reading.seconds, 4), "tokens_per_s": round(reading.rate, 2)}
        for reading in readings
    ]


def summarise(calibration: Calibration, foreign_share: float) -> dict[str, object]:
    """The machine's description with this run's calibration and how busy others kept it."""
    return {
        **describe(),
        "calibration": {key: round(value, 2) for key, value in asdict(calibration).items()},
        "foreign_share": round(foreign_share, 3),
    }


def foreign_share(readings: Sequence[Reading]) -> float:
    """The worst turn's: one is enough to spoil a ratio."""
    return max((r.foreign_share for r in readings if not r.recorded), default=0.0)


def finish(result: Result, bars: Mapping[str, Bar], options: Options) -> None:
    """Write the JSON file and print the table."""
    share = result.machine["foreign_share"]
    if isinstance(share, float) and share > QUIET_SHARE:
        result.notes.append(f"others used up to {share:.0%} of the cores: not a quiet run")
    if options.json_file is not None:
        options.json_file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(result), indent=1, ensure_ascii=False)
        options.json_file.write_text(text + "\n", encoding="utf-8")
    print(f"{result.name}{' (quick)' if result.quick else ''} on {result.machine['cpu']}")
    for key, value in result.figures.items():
        print(_row(key, value, bars.get(key), result))
    for note in result.notes:
        print(f"note: {note}")
    sys.stdout.flush()


def _row(key: str, value: Any, bar: Bar | None, result: Result) -> str:
    if value is None:
        return f"  {key:24} not measured"
    shown = f"{value:.3g}" if isinstance(value, float) else str(value)
    spread = "{:.3g} to {:.3g}".format(*result.spread[key]) if key in result.spread else ""
    if bar is None:
        return f"  {key:24} {shown:>8}  {spread}"
    verdict = "met" if bar.met(value) else "NOT met"
    if result.recorded:
        verdict += " (recorded peer: not an acceptance)"
    return f"  {key:24} {shown:>8}  {spread:18} bar {bar}: {verdict}"
