"""Synonyms: the built-in groups are many and well formed, and a question looks for what is called otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from perilune.errors import ConfigError
from perilune.memory import synonyms
from perilune.memory.analyse import Analyser
from perilune.memory.synonyms import SYNONYM_WEIGHT, Group, Synonyms, read

FOLDER = Path(synonyms.__file__).parent


def test_there_are_237_legal_groups_in_two_languages() -> None:
    groups = read(FOLDER / "legal.txt")
    assert len(groups) >= 237
    assert sum(any(not word.isascii() for word in group.words) for group in groups) >= 237
    assert sum(any(word.isascii() for word in group.words) for group in groups) >= 237
    assert len({frozenset(group.words) for group in groups}) == len(groups)
    assert len(read(FOLDER / "support.txt")) >= 40


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("滞纳金怎么算", "违约"),
        ("罚金是多少", "约金"),
        ("When does the landlord have to return the deposit?", "lessor"),
        ("怎么退钱", "退款"),
        ("What is the statute of limitations?", "诉讼"),
    ],
)
def test_what_is_called_otherwise_is_looked_for(question: str, expected: str) -> None:
    terms = Synonyms.load().expand(question, Analyser())
    assert 0 < terms[expected] < 1
    own = Analyser().query_terms(question)
    assert [term for term, weight in terms.items() if weight == 1.0] == own


def test_weights_follow_confidence_and_words_have_borders() -> None:
    known = Synonyms([Group(("car", "automobile"), 0.8), Group(("art", "picture"), 1.0)])
    terms = known.expand("My car started", Analyser())
    assert terms["automobil"] == SYNONYM_WEIGHT * 0.8
    assert "pictur" not in terms


def test_a_users_file_is_added(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("# ours\n\n0.7 flumph | grozzle\n", encoding="utf-8")
    assert "grozzl" in Synonyms.load([path]).expand("the flumph", Analyser())


@pytest.mark.parametrize("text", ["flumph | grozzle", "0.7 flumph", "2 a | b", "0.5 | |"])
def test_a_bad_file_is_a_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(f"0.5 a | b\n{text}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="Line 2"):
        read(path)
    with pytest.raises(ConfigError, match="can't be read"):
        read(tmp_path / "absent.txt")
