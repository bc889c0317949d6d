"""The profile across sessions: who may teach it, what supersedes what, edits, forgetting, export."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from perilune.core import ProfileFact
from perilune.errors import InvalidRequest, NotFound
from perilune.memory import audit
from tests.memory.test_summaries import Kept

DAY_S = 86_400.0
NOW = datetime(2026, 11, 30, tzinfo=UTC).timestamp()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path)
    yield made
    made.memory.close()
    made.store.close()


def say(kept: Kept, session: str, text: str, at: float = NOW, speaker: str = "user", learn: bool = True) -> None:
    kept.sessions.add("local", session, [(speaker, text, at)], learn)


def shown(kept: Kept, tenant: str = "local") -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in kept.sessions.profile(tenant, history=False):
        found.setdefault(each.key, []).append(each.value)
    return found


def test_a_fact_tells_where_and_when_it_was_said(kept: Kept) -> None:
    say(kept, "a", "Good morning.")
    say(kept, "a", "Well. I have lived in Bonn since 2019.", NOW + 60)
    assert kept.sessions.profile("local", False) == [
        ProfileFact(
            key="residence",
            value="Bonn",
            since=datetime(2019, 1, 1, tzinfo=UTC).timestamp(),
            written_at=NOW + 60,
            until=None,
            session_id="a",
            turn=2,
            start=6,
            end=38,
        )
    ]
    assert shown(kept, "acme") == {}


def test_the_newest_wins_and_the_old_keeps_its_time(kept: Kept) -> None:
    say(kept, "a", "I live in Bonn.")
    say(kept, "b", "我上个月搬到了柏林。", NOW + 90 * DAY_S)
    assert shown(kept) == {"residence": ["柏林"]}
    old, new = kept.sessions.profile("local", True)
    assert (old.value, old.since, old.until) == ("Bonn", NOW, new.since)
    assert new.since == datetime(2027, 1, 1, tzinfo=UTC).timestamp()
    say(kept, "c", "I no longer live in 柏林.")  # not how a place is written in English
    say(kept, "c", "我已经不住在柏林了。", NOW + 100 * DAY_S)
    assert shown(kept) == {}
    assert [each.until for each in kept.sessions.profile("local", True)] == [new.since, NOW + 100 * DAY_S]


def test_several_values_of_what_may_have_several(kept: Kept) -> None:
    for text in ("I'm allergic to peanuts.", "I'm allergic to penicillin.", "I'm allergic to peanuts."):
        say(kept, "a", text)
    assert shown(kept) == {"allergy": ["peanuts", "penicillin"]}
    assert len(kept.sessions.profile("local", True)) == 2


def test_only_what_users_say_themselves_is_learnt(kept: Kept) -> None:
    say(kept, "a", "I live in Rome. My name is Bot.", speaker="assistant")
    say(kept, "a", "I live in Rome.")  # the assistant's words
    say(kept, "a", "I live in Oslo.", learn=False)
    assert shown(kept) == {}
    say(kept, "b", "I live in Rome.")  # another conversation, in which nobody said it before
    assert shown(kept) == {"residence": ["Rome"]}


def test_forgetting_a_session_forgets_what_was_learnt_there(kept: Kept) -> None:
    say(kept, "a", "I live in Bonn.")
    say(kept, "b", "I live in Oslo.")
    say(kept, "c", "I live in Bonn.")
    assert shown(kept) == {"residence": ["Bonn"]}
    kept.sessions.delete("local", "c")
    assert shown(kept) == {"residence": ["Oslo"]}
    kept.sessions.delete("local", "b")
    assert shown(kept) == {"residence": ["Bonn"]}


def test_what_two_sessions_say_survives_one_of_them(kept: Kept) -> None:
    say(kept, "a", "I live in Bonn.")
    say(kept, "b", "I live in Bonn.")
    kept.sessions.delete("local", "a")
    (fact,) = kept.sessions.profile("local", True)
    assert (fact.value, fact.session_id) == ("Bonn", "b")


def test_edits(kept: Kept) -> None:
    say(kept, "a", "I live in Bonn. I'm allergic to peanuts.")
    kept.sessions.edit_profile("local", {" Residence ": " Oslo ", "allergy": "nuts", "team": "Blue"})
    assert shown(kept) == {"residence": ["Oslo"], "allergy": ["nuts"], "team": ["Blue"]}
    assert {each.session_id for each in kept.sessions.profile("local", False)} == {None}
    say(kept, "a", "I live in Rome.", NOW * 2)
    assert shown(kept)["residence"] == ["Rome"]
    kept.sessions.edit_profile("local", {"residence": None})
    assert "residence" not in {each.key for each in kept.sessions.profile("local", True)}
    for bad in ({"": "x"}, {"x" * 65: "x"}, {"k": ""}, {"k": "x" * 201}, {"k": "a\nb"}, {"a\tb": "x"}):
        with pytest.raises(InvalidRequest):
            kept.sessions.edit_profile("local", {"team": "Red", **bad})
    assert shown(kept)["team"] == ["Blue"]


def test_erasing(kept: Kept) -> None:
    say(kept, "a", "I live in Bonn. My name is Anna.")
    say(kept, "a", "I live in Oslo.")
    with pytest.raises(NotFound):
        kept.sessions.erase_profile("local", "age")
    assert kept.sessions.erase_profile("local", "Residence") == 2
    assert shown(kept) == {"name": ["Anna"]}
    assert kept.sessions.erase_profile("acme", None) == 0
    assert kept.sessions.erase_profile("local", None) == 1
    assert kept.sessions.profile("local", True) == []
    acts = [(each.action, each.subject) for each in audit.read(kept.store, 10)]
    assert acts == [("profile.erase", "residence"), ("profile.erase", ""), ("profile.erase", "")]


def test_export_holds_everything_and_nothing_of_others(kept: Kept) -> None:
    say(kept, "b", "I live in Bonn.")
    say(kept, "b", "I live in Oslo.", NOW + 1)
    for number in range(600):
        say(kept, "a", f"Line {number}.", learn=False)
    kept.sessions.correct_summary("local", "b", 1, 0, "I live in Ulm.")
    kept.sessions.add("acme", "z", [("user", "I live in Rome.", NOW)], learn=True)
    records = list(kept.sessions.export("local"))
    assert [each["value"] for each in records if each["type"] == "profile.fact"] == ["Bonn", "Oslo"]
    assert [each["text"] for each in records if each["type"] == "summary.correction"] == ["I live in Ulm."]
    turns = [(each["session"], each["turn"], each["text"]) for each in records if each["type"] == "turn"]
    assert turns[:600] == [("a", at + 1, f"Line {at}.") for at in range(600)]
    assert turns[600:] == [("b", 1, "I live in Bonn."), ("b", 2, "I live in Oslo.")]
    assert "Rome" not in str(records)
