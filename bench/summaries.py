"""Ten rounds of rolling summaries over a growing conversation: how exact what they claim is, and what survives.

    python -m bench.summaries [--quick] [--json FILE]

Made conversations, English and Chinese in turn: one exchange in four states a fact with an id, a date, a time
and an amount, the others are small talk. After each round every number, date and id of the summary is looked up
in the turn that it names. `exact_share` are those that stand there. `facts_of_summary` is the share of the last
summary's sentences that are planted facts, `survival` the share of all facts that it still holds, as much as
has room.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.machine import describe
from bench.report import Bar, Result, finish, parse_options
from perilune.core import SummarySentence
from perilune.memory.indexer import Indexer
from perilune.memory.memory import Memory
from perilune.memory.sessions import Sessions
from perilune.memory.store import Store
from perilune.memory.vectors.lance import LanceIndex

ROUNDS = 10
BARS = {"exact_share": Bar(at_least=0.991, unit="of figures")}

_TENANT = "bench"
_EVERY = 4
_FIGURE = re.compile(r"[A-Z]{2}-\d+|\d+(?:[.:]\d+)*")
_TALK = (
    ("The weather was fair today.", "今天天气不错。"),
    ("I had soup for lunch, it was rather hot.", "午饭喝了汤，有点烫。"),
    ("My neighbour's geese are loud again.", "邻居家的鹅又吵了。"),
    ("Shall we take a walk by the river?", "要不要去河边走走？"),
    ("I read a chapter of the new novel.", "我读了一章新小说。"),
)
_FACT = (
    "The {thing} has the number {code}, costs {amount} EUR and comes on {day} at {time}.",
    "{thing}的单号是{code}，价格{amount}元，{day}{time}送到。",
)
_THINGS = (("bicycle", "自行车"), ("sofa", "沙发"), ("printer", "打印机"), ("kettle", "水壶"), ("tent", "帐篷"))


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options("Exactness of rolling summaries over ten rounds.", argv, rounds=1)
    result = Result("summaries", {}, {**describe(), "foreign_share": None}, [], quick=options.quick)
    exchanges = 32 if options.quick else 128  # of a round
    with tempfile.TemporaryDirectory() as home:
        store = Store(Path(home))
        index = LanceIndex(Path(home) / "index", "none", 1)
        memory = Memory(store, index, None, indexer=Indexer(store, index, None))
        _measure(Sessions(store, memory), memory, exchanges, result)
        memory.close()
        store.close()
    finish(result, BARS, options)


def _measure(sessions: Sessions, memory: Memory, exchanges: int, result: Result) -> None:
    rng = random.Random(7)
    claimed = exact = 0
    facts: list[str] = []
    shown: list[SummarySentence] = []
    for lap in range(ROUNDS):
        for number in range(exchanges):
            language = number % 2
            text = rng.choice(_TALK)[language]
            if number % _EVERY < 2 and number // 2 % (_EVERY // 2) == 0:
                text = _fact(rng, language)
                facts.append(text)
            reply = ("I see.", "明白了。")[language]
            sessions.add(_TENANT, "s", [("user", text, 1e9 + number), ("assistant", reply, 1e9 + number)])
        while memory.summaries.advance():
            pass
        shown = sessions.summary(_TENANT, "s")
        turns = {turn.turn: turn.text for turn in sessions.turns(_TENANT, "s", 0, 10**6)}
        for sentence in shown:
            figures = _FIGURE.findall(sentence.text)
            there = turns[sentence.number][sentence.start : sentence.end]
            claimed += len(figures)
            exact += sum(figure in _FIGURE.findall(there) for figure in figures)
        result.runs.append({"round": lap + 1, "turns": len(turns), "sentences": len(shown), "claimed": claimed})
    held = {sentence.text for sentence in shown}
    result.figures = {
        "exact_share": exact / claimed,
        "facts_of_summary": round(sum(fact in held for fact in facts) / len(shown), 3),
        "survival": round(sum(fact in held for fact in facts) / len(facts), 3),
    }
    result.notes.append(
        f"{claimed} figures claimed; {len(facts)} facts in {len(turns)} turns, {len(shown)} sentences"
    )


def _fact(rng: random.Random, language: int) -> str:
    month, day = rng.randint(1, 12), rng.randint(1, 28)
    return _FACT[language].format(
        thing=rng.choice(_THINGS)[language],
        code=f"{chr(65 + rng.randrange(26))}{chr(65 + rng.randrange(26))}-{rng.randint(1000, 9999)}",
        amount=f"{rng.randint(10, 999)}.{rng.randint(10, 99)}",
        day=(f"2027.{month}.{day}", f"{month}月{day}日")[language],
        time=f"{rng.randint(8, 19)}:{rng.randint(10, 59)}",
    )


if __name__ == "__main__":
    main()
