"""The memory's evaluation data: its invariants hold, its check sees each kind of damage, its sources give it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from bench.memory_sets import __main__ as builder
from bench.memory_sets import checks, script

Records = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def records() -> Records:
    return checks.read(builder.FOLDER)


def faults(records: Records) -> list[str]:
    return checks.Sets(records).faults()


def test_the_sets_hold_their_invariants(records: Records) -> None:
    assert faults(records) == []


def test_the_files_are_what_the_sources_give(records: Records) -> None:
    assert builder.build(builder.FOLDER / "source") == records


def test_there_is_enough_of_each_kind(records: Records) -> None:
    kinds = {name: {record["kind"] for record in records[name]} for name in ("paired", "timeline", "abstain")}
    assert kinds["paired"] >= {"single", "paraphrase", "number", "date", "id", "update", "multi", "negation"}
    assert kinds["timeline"] >= {"first", "last", "sequence", "before_after", "between", "count"}
    assert kinds["abstain"] == {"attribute", "person", "date", "never"}
    assert sum(record["kind"] == "count" for record in records["timeline"]) >= 80
    assert len({record["history"] for record in records["paired"]}) >= 6
    assert sum(path.stat().st_size for path in builder.FOLDER.rglob("*") if path.is_file()) < 3_000_000


def test_the_right_choice_is_as_often_named_last_as_first(records: Records) -> None:
    names = {(event["history"], event["event"]): event["name"] for event in records["events"]}
    firsts = [record for record in records["timeline"] if record["kind"] == "first"]
    for lang in checks.LANGUAGES:
        places = []
        for record in firsts:
            right, wrong = (names[record["history"], key][lang].casefold() for key in record["op"]["events"])
            asked = record["question"][lang].casefold()
            places.append(asked.index(right) < asked.index(wrong))
        assert 0.4 <= sum(places) / len(places) <= 0.6


def damage_evidence(records: Records) -> None:
    records["paired"][0]["evidence"] = ["c1.9999"]


def damage_answer(records: Records) -> None:
    records["paired"][3]["answer"]["zh"] = "别的"


def damage_count(records: Records) -> None:
    event = next(event for event in records["events"] if event["name"] is None)
    records["events"].remove(event)


def damage_order(records: Records) -> None:
    once = [event for event in records["events"] if event["name"]]
    once[0]["day"], once[8]["day"] = once[8]["day"], once[0]["day"]


def damage_leak(records: Records) -> None:
    record = records["paired"][0]
    record["question"]["en"] += f" Is it {record['answer']['en']}?"


def damage_double(records: Records) -> None:
    records["abstain"][1]["question"] = records["abstain"][0]["question"]


def damage_language(records: Records) -> None:
    records["timeline"][0]["question"]["zh"] = records["timeline"][0]["question"]["en"]


def damage_answerable(records: Records) -> None:
    records["abstain"][0]["question"] = records["abstain"][0]["twin"]["question"]


def damage_length(records: Records) -> None:
    del records["histories"][-60:]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (damage_evidence, "don't exist"),
        (damage_answer, "isn't in its evidence"),
        (damage_count, "the events say"),
        (damage_order, "the events say"),
        (damage_leak, "holds its answer"),
        (damage_double, "asks twice"),
        (damage_language, "isn't Chinese"),
        (damage_answerable, "both answerable and not"),
        (damage_length, "turns only"),
    ],
)
def test_damage_is_seen(records: Records, damage: Any, complaint: str) -> None:
    damaged = copy.deepcopy(records)
    damage(damaged)
    found = faults(damaged)
    assert any(complaint in fault for fault in found), found[:5]


@pytest.mark.parametrize("row", ["Q number no bar = 3", "m+ only one language", "x+ nobody | 没有这个人"])
def test_a_bad_source_line_is_refused(tmp_path: Any, row: str) -> None:
    path = tmp_path / "c9.txt"
    path.write_text(f"H c9 | 2026-01-01 | 30\nS m | Maya | 玛雅\nF pump\n{row}\n", encoding="utf-8")
    with pytest.raises(script.ScriptError):
        script.conversation(path)
