"""What kind of question it is and which events it names, in English and Chinese."""

from __future__ import annotations

import time

import pytest

from perilune.memory.asked import MAX_EVENTS, Bound, Kind, Side, read


@pytest.mark.parametrize(
    ("question", "events"),
    [
        ("Which came first, the flood or moving to Oslo?", ("flood", "moving to Oslo")),
        ("Did the audit come before or after the merger?", ("audit", "merger")),
        ("In which order did these happen: the strike, the fire, hiring Ana?", ("strike", "fire", "hiring Ana")),
        ("How many days lie between the launch and the recall?", ("launch", "recall")),
        ("How long was it from signing the lease to moving out?", ("signing the lease", "moving out")),
        ("Of the exam and the concert, which one was earlier?", ("exam", "concert")),
        ("搬家和换工作，哪件事在前？", ("搬家", "换工作")),
        ("从签合同到交房过了多少天？", ("签合同", "交房")),
        ("发布会是在收购之前还是之后？", ("发布会", "收购")),
        ("请按时间先后排一下：裁员；融资；上市。", ("裁员", "融资", "上市")),
    ],
)
def test_events_to_put_in_order(question: str, events: tuple[str, ...]) -> None:
    asked = read(question)
    assert (asked.kind, asked.events) == (Kind.ORDER, events)


@pytest.mark.parametrize(
    ("question", "event", "bounds"),
    [
        ("How often did the lift break down?", "did the lift break down", ()),
        ("How many parcels went missing before the audit?", "parcels went missing", (("audit", Side.BEFORE),)),
        ("How many times after the move did Ben call?", "did Ben call", (("move", Side.AFTER),)),
        ("How often did it rain between the fair and the wedding?", "did it rain", (("fair", 0), ("wedding", 1))),
        ("电梯坏过几次？", "电梯坏过", ()),
        ("小李在搬家之后来过几回？", "小李来过", (("搬家", Side.AFTER),)),
    ],
)
def test_what_is_counted_and_what_bounds_it(
    question: str, event: str, bounds: tuple[tuple[str, Side | int], ...]
) -> None:
    asked = read(question)
    sides = {0: Side.AFTER, 1: Side.BEFORE}
    wanted = tuple(Bound(name, side if isinstance(side, Side) else sides[side]) for name, side in bounds)
    assert (asked.kind, asked.events, asked.bounds) == (Kind.COUNT, (event,), wanted)


@pytest.mark.parametrize(
    ("question", "events"),
    [
        ("List all repairs of the boat.", ("repairs of the boat",)),
        ("Summarise everything that we said about the budget", ("said about the budget",)),
        ("Summarise.", ()),
        ("总结一下", ()),
    ],
)
def test_wholes(question: str, events: tuple[str, ...]) -> None:
    asked = read(question)
    assert asked.kind is Kind.WHOLE
    assert bool(asked.events) == bool(events)


@pytest.mark.parametrize(
    "question",
    [
        "Where is the key?",
        "What was the last price?",
        "Who wrote the first chapter?",
        "钥匙在哪里？",
        "合同几号签的？",
        "今天几点开会？",
        "",
        "?",
        "first or last",
    ],
)
def test_lookups(question: str) -> None:
    assert read(question).kind is Kind.LOOKUP


def test_a_pasted_text_is_a_lookup_and_many_events_are_cut() -> None:
    assert read("How often? " * 200).kind is Kind.LOOKUP
    many = ", ".join(f"event number {n} of them" for n in range(20))
    assert len(read(f"In which order: {many}").events) == MAX_EVENTS


def test_reading_takes_linear_time() -> None:
    begun_s = time.process_time()
    for text in ("before " * 80, "在之前" * 190, "a and " * 90, "从到" * 290, "，" * 590):
        read(text)
    assert time.process_time() - begun_s < 2
