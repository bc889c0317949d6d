"""Rolling summaries: sentences are copied with their places, levels grow, corrections stay, deletion leaves
nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core import SummarySentence
from perilune.errors import InvalidRequest, NotFound
from perilune.memory.indexer import Indexer
from perilune.memory.memory import Memory
from perilune.memory.schema import CORRECTIONS, FACTS, SUMMARIES, SUMMARY_WORK
from perilune.memory.sentences import sentences
from perilune.memory.sessions import Sessions
from perilune.memory.store import Store
from perilune.memory.summaries import FAN_OUT, LEAF_ENTRIES, NODE_LETTERS, _cover_places
from perilune.memory.vectors.lance import LanceIndex

FIGURE = re.compile(r"\d[\d.:-]*\d|\d")
TALK = ("The weather is fair.", "I like tea.", "Is it far?", "今天天气不错。", "The soup was hot.")


class Kept:
    """Sessions over a store, with nothing in the background."""

    def __init__(self, home: Path) -> None:
        self.store = Store(home)
        index = LanceIndex(home / "index", "none", 1)
        self.memory = Memory(self.store, index, None, indexer=Indexer(self.store, index, None))
        self.sessions = Sessions(self.store, self.memory)

    def say(self, session: str, *texts: str) -> None:
        said = [("user" if at % 2 == 0 else "assistant", text, 1e9 + at) for at, text in enumerate(texts)]
        self.sessions.add("local", session, said)

    def summarise(self) -> None:
        while self.memory.summaries.advance():
            pass

    def exact(self, session: str) -> list[SummarySentence]:
        """The summary, after a look whether each sentence is its source's."""
        turns = {turn.turn: turn.text for turn in self.sessions.turns("local", session, 0, 100_000)}
        shown = self.sessions.summary("local", session)
        for each in shown:
            assert each.corrected or turns[each.number][each.start : each.end] == each.text
        return shown


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path)
    yield made
    made.memory.close()
    made.store.close()


def fact(number: int) -> str:
    due = f"{1 + number % 28}.12.2026, 08:{number % 60:02}"
    return f"Parcel {number} has the code QX-{7000 + number} and is due on {due}."


def script(turns: int, every: int = 8) -> list[str]:
    return [fact(at) if at % every == 0 else f"{TALK[at % 5]}" for at in range(turns)]


def test_ten_rounds_keep_figures_exact_and_most_facts(kept: Kept) -> None:
    """After each of ten rounds of 128 turns every figure of the summary is its source's, digit for digit."""
    claimed = 0
    for lap in range(10):
        kept.say("trip", *script(1280)[128 * lap : 128 * (lap + 1)])
        kept.summarise()
        text = " ".join(turn.text for turn in kept.sessions.turns("local", "trip", 0, 100_000))
        known = set(FIGURE.findall(text))
        figures = [found for each in kept.exact("trip") for found in FIGURE.findall(each.text)]
        claimed += len(figures)
        assert set(figures) <= known
    assert claimed > 500
    shown = kept.sessions.summary("local", "trip")
    assert sum(each.text.startswith("Parcel") for each in shown) > 0.85 * len(shown)
    with kept.store.read() as connection:
        levels = dict(
            connection.execute(sa.select(SUMMARIES.c.level, sa.func.count()).group_by(SUMMARIES.c.level)).all()
        )
    assert levels == {0: 80, 1: 10, 2: 1}
    budget = NODE_LETTERS * (2 + 2)  # a node of level 2, two of level 1, and the tail
    assert sum(len(each.text) for each in shown) <= budget


def test_a_short_session_is_read_as_it_is(kept: Kept) -> None:
    kept.say("short", "My train leaves at 8.15 from Brill. Fine?", "Noted.")
    assert [each.text for each in kept.exact("short")] == ["My train leaves at 8.15 from Brill."]
    assert kept.sessions.brief("local", "short") == []
    with pytest.raises(NotFound):
        kept.sessions.summary("local", "none")
    assert kept.sessions.brief("local", "none") == []


def test_the_brief_changes_only_with_a_whole_leaf(kept: Kept) -> None:
    kept.say("s", *script(LEAF_ENTRIES))
    kept.summarise()
    first = kept.sessions.brief("local", "s")
    assert any("QX-7000" in each.text for each in first)
    kept.say("s", *script(LEAF_ENTRIES - 1))
    kept.summarise()
    assert kept.sessions.brief("local", "s") == first
    kept.say("s", "One more.")
    kept.summarise()
    assert kept.sessions.brief("local", "s") != first


def test_a_correction_stays_over_later_rounds(kept: Kept) -> None:
    turns = FAN_OUT * LEAF_ENTRIES
    kept.say("s", *script(turns))
    kept.summarise()
    wrong, struck = kept.exact("s")[:2]
    kept.sessions.correct_summary("local", "s", wrong.number, wrong.start, "Parcel 0 has the code ZZ-1.")
    kept.sessions.correct_summary("local", "s", struck.number, struck.start, "")
    for _ in range(FAN_OUT):
        kept.say("s", *script(turns, every=2))
        kept.summarise()
        texts = [each.text for each in kept.exact("s")]
        assert "Parcel 0 has the code ZZ-1." in texts
        assert wrong.text not in texts[: texts.index("Parcel 0 has the code ZZ-1.") + 1]
        brief = kept.sessions.brief("local", "s")
        assert (brief[0].text, brief[0].corrected) == ("Parcel 0 has the code ZZ-1.", True)
        assert not [each for each in brief if (each.number, each.start) == (struck.number, struck.start)]
    kept.sessions.correct_summary("local", "s", wrong.number, wrong.start, None)
    assert "Parcel 0 has the code ZZ-1." not in [each.text for each in kept.exact("s")]


def test_what_can_not_be_corrected(kept: Kept) -> None:
    kept.say("s", "My train leaves at 8.15. It is late.", "Noted.")
    for number, start in ((1, 3), (3, 0), (1, 9999)):
        with pytest.raises(NotFound):
            kept.sessions.correct_summary("local", "s", number, start, "x")
    with pytest.raises(NotFound):
        kept.sessions.correct_summary("acme", "s", 1, 0, "x")
    for text in ("a\nb", "x" * 401):
        with pytest.raises(InvalidRequest):
            kept.sessions.correct_summary("local", "s", 1, 0, text)
    kept.sessions.correct_summary("local", "s", 1, 25, "It is on time.")
    assert [each.text for each in kept.exact("s") if each.corrected] == ["It is on time."]


def test_deletion_takes_everything_made_of_a_session(kept: Kept) -> None:
    kept.say("s", *script(40))
    kept.sessions.add("local", "s", [("user", "I live in Bonn.", 2e9)], learn=True)
    kept.sessions.add("local", "t", [("user", "My name is Anna.", 2e9)], learn=True)
    kept.summarise()
    kept.sessions.correct_summary("local", "s", 1, 0, "Other.")
    kept.sessions.delete("local", "s")
    with kept.store.read() as connection:
        left = {
            table.name: connection.execute(sa.select(table.c.source_id)).scalars().all()
            for table in (FACTS, SUMMARIES, SUMMARY_WORK, CORRECTIONS)
        }
    assert left == {"facts": ["t"], "summaries": [], "summary_work": ["t"], "corrections": []}


def test_in_the_background_and_across_tenants(kept: Kept) -> None:
    kept.memory.start()
    kept.sessions.add("acme", "s", [("user", fact(at), 1e9) for at in range(LEAF_ENTRIES)])
    kept.say("s", *script(LEAF_ENTRIES))
    for _ in range(600):
        with kept.store.read() as connection:
            done = connection.execute(sa.select(SUMMARY_WORK.c.done)).scalars().all()
        if done == [LEAF_ENTRIES] * 2:
            break
        kept.memory._summariser._stop.wait(0.05)
    assert done == [LEAF_ENTRIES] * 2
    assert len(kept.sessions.brief("acme", "s")) > len(kept.sessions.brief("local", "s")) > 0
    assert kept.sessions.brief("other", "s") == []


@given(st.integers(0, 5000))
def test_the_cover_is_whole_and_small(leaves: int) -> None:
    covered: list[int] = []
    places = list(_cover_places(leaves))
    for level, number in places:
        size = FAN_OUT**level
        covered += range(number * size, (number + 1) * size)
    assert covered == list(range(leaves))
    assert len(places) <= (FAN_OUT - 1) * 5


@settings(max_examples=200)
@given(st.text(alphabet="ab1. 。!?\n`>，\"'“”", max_size=200))
def test_sentences_are_ranges_in_order(text: str) -> None:
    last = 0
    for start, end in sentences(text):
        assert last <= start < end <= len(text)
        assert text[start:end].strip() == text[start:end]
        last = end


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Hi Dr. Smith. I paid 3.14 EUR on 12 May 2024. It was No. 5 of 7! Really? In 2019. Then it ended.",
            [
                "Hi Dr. Smith.",
                "I paid 3.14 EUR on 12 May 2024.",
                "It was No. 5 of 7!",
                "Really?",
                "In 2019.",
                "Then it ended.",
            ],
        ),
        (
            "我住在北京。电话是138-0013-8000，3.5元！真的吗？",
            ["我住在北京。", "电话是138-0013-8000，3.5元！", "真的吗？"],
        ),
        ("1. Buy milk\n2. Go home. Then sleep.\n> quoted.", ["1. Buy milk", "2. Go home.", "Then sleep."]),
        ("```\ncode. here.\n```\nSee https://a.b/c.d?e=1 now.", ["See https://a.b/c.d?e=1 now."]),
        ("He said “I live in Rome.” Then he left.", ["He said “I live in Rome.”", "Then he left."]),
    ],
)
def test_where_sentences_end(text: str, expected: list[str]) -> None:
    assert [text[start:end] for start, end in sentences(text)] == expected
