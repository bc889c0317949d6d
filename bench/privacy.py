"""What de-identification lets through (M12), over `bench/data/privacy`: caught by kind, lost by mistake, put back.

An item is caught when every letter and digit of it is replaced. Needs no model and no network. What is missed
stands in the JSON file, one entry an item, with the message's id.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.machine import describe
from bench.report import Bar, Result, finish, parse_options
from perilune.service.privacy.detect import Detector
from perilune.service.privacy.kinds import DEFAULT_TREATMENTS, Found, Kind, Treatment
from perilune.service.privacy.placeholders import Vault, replaced

MESSAGES = Path(__file__).resolve().parent / "data" / "privacy" / "messages.jsonl"
GATED = ("rule", "cue", "list")
BARS = {f"leaves_{need}": Bar(at_most=0, unit="") for need in GATED} | {"restored": Bar(at_least=1, unit="")}
QUICK_EVERY = 4


@dataclass(slots=True)
class Tally:
    """What was seen so far. Keys of `planted` and `missed` are (need, kind)."""

    planted: Counter[tuple[str, str]] = field(default_factory=Counter)
    missed: Counter[tuple[str, str]] = field(default_factory=Counter)
    misses: list[dict[str, object]] = field(default_factory=list)
    other_chars: int = 0
    other_masked: int = 0
    restored: int = 0
    messages: int = 0
    entities: int = 0
    entities_kept: int = 0
    chars: int = 0


def masked_chars(text: str, found: list[Found]) -> list[bool]:
    """For every character whether it is replaced."""
    flags = [False] * len(text)
    for item in found:
        flags[item.start : item.end] = [True] * (item.end - item.start)
    return flags


def score(message: dict[str, Any], detector: Detector, tally: Tally) -> None:
    text: str = message["text"]
    found = detector.find(text)
    masked = masked_chars(text, found)
    planted = [False] * len(text)
    stand_ins: defaultdict[str, set[str]] = defaultdict(set)
    vault = Vault()
    left = replaced(text, found, vault.stand_in)
    for item in message["planted"]:
        span = range(item["start"], item["end"])
        letters = [at for at in span if text[at].isalnum()]
        keep = item["kind"] == "keep"
        key = ("keep" if keep else item["need"], item["kind"])
        tally.planted[key] += 1
        lost = any(masked[at] for at in span) if keep else not all(masked[at] for at in letters)
        if lost:
            tally.missed[key] += 1
            tally.misses.append({"id": message["id"], "need": key[0], "kind": key[1], "value": item["value"]})
        if not keep:
            planted[span.start : span.stop] = [True] * len(span)
            if item.get("entity") and not lost:
                stand_ins[item["entity"]] |= set(_numbers(item, found, text, vault))
    tally.entities += len(stand_ins)
    tally.entities_kept += sum(len(numbers) == 1 for numbers in stand_ins.values())
    others = [at for at, char in enumerate(text) if char.isalnum() and not planted[at]]
    tally.other_chars += len(others)
    tally.other_masked += sum(masked[at] for at in others)
    tally.restored += vault.restore(left) == text
    tally.messages += 1
    tally.chars += len(text)


def _numbers(item: dict[str, Any], found: list[Found], text: str, vault: Vault) -> Iterator[str]:
    """The stand-ins of one item without the letter of its form."""
    for each in found:
        if each.start < item["end"] and item["start"] < each.end:
            yield vault.stand_in(each.kind, text[each.start : each.end]).rstrip("]abcdefghijklmnopqrstuvwxyz")


def figures(tally: Tally, seconds: float) -> dict[str, float | bool | None]:
    found: dict[str, float | bool | None] = {}
    for need in (*GATED, "context"):
        planted = sum(count for key, count in tally.planted.items() if key[0] == need)
        missed = sum(count for key, count in tally.missed.items() if key[0] == need)
        found[f"planted_{need}"] = planted
        if need in GATED:
            found[f"leaves_{need}"] = missed
        found[f"caught_{need}"] = round(1 - missed / planted, 4) if planted else None
    for need, kind in sorted(tally.planted):
        count = tally.planted[need, kind]
        if need != "keep":
            found[f"caught_{need}_{kind}"] = round(1 - tally.missed[need, kind] / count, 4)
    keeps = tally.planted["keep", "keep"]
    found["keep_lost"] = round(tally.missed["keep", "keep"] / keeps, 4) if keeps else None
    found["over_masked"] = round(tally.other_masked / tally.other_chars, 4)
    found["same_stand_in"] = round(tally.entities_kept / tally.entities, 4) if tally.entities else None
    found["restored"] = round(tally.restored / tally.messages, 4)
    found["ms_per_1000_chars"] = round(seconds * 1e6 / tally.chars, 2)
    return found


def main() -> None:
    options = parse_options("What de-identification lets through.", rounds=1)
    kinds = [kind for kind in Kind if DEFAULT_TREATMENTS.get(kind) is not Treatment.KEEP]
    detector, tally = Detector(kinds=kinds), Tally()
    lines = MESSAGES.read_text(encoding="utf-8").splitlines()
    detector.find("Read the lists. 读一遍词表。")
    start = time.process_time()
    for line in lines[:: QUICK_EVERY if options.quick else 1]:
        score(json.loads(line), detector, tally)
    seconds = time.process_time() - start
    result = Result("privacy", figures(tally, seconds), describe(), tally.misses, quick=options.quick)
    result.machine["foreign_share"] = 0.0  # nothing here depends on who else computes, but the milliseconds
    result.notes.append(f"{tally.messages:,} messages, {sum(tally.planted.values()):,} items")
    finish(result, BARS, options)


if __name__ == "__main__":
    main()
