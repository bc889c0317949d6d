"""Replacing and restoring: the identity for any text, whole and in pieces; what models do to placeholders."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.service.privacy.detect import Detector
from perilune.service.privacy.kinds import LABELS, Found, Kind
from perilune.service.privacy.placeholders import PLACEHOLDER, Restorer, Vault, literals, replaced, with_literals

DETECTOR = Detector()

PIECES = st.sampled_from(
    [
        *(
            "[",
            "]",
            "【",
            "［",
            "\\",
            "_",
            " ",
            "-",
            "\n",
            "1",
            "23",
            "b",
            "[PERSON_1]",
            "PERSON_1",
            "[phone 2]",
            "PHON",
            "[EMAIL_1b]",
        ),
        *(
            "王小明",
            "老王",
            "John Carter",
            "138 0013 8000",
            "jane.doe@example.com",
            "TERM",
            "[TEXT_1]",
            "１３８００１３８０００",
            "\u200b",
        ),
    ]
)
TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=14).map("".join)


@st.composite
def texts_with_findings(draw: st.DrawFn) -> tuple[str, list[Found]]:
    """A text and arbitrary findings in it, so that the way back doesn't lean on what the rules happen to find."""
    text = draw(TEXTS)
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8)))
    found = [Found(a, b, draw(st.sampled_from(list(Kind)))) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    return text, found


@given(texts_with_findings())
def test_replaced_and_restored_is_the_same(case: tuple[str, list[Found]]) -> None:
    text, found = case
    vault = Vault()
    assert vault.restore(replaced(text, with_literals(found, literals(text)), vault.stand_in)) == text


@settings(deadline=None, max_examples=60)
@given(TEXTS)
def test_so_it_is_with_what_the_rules_find(text: str) -> None:
    vault = Vault()
    left = replaced(text, DETECTOR.find(text), vault.stand_in)
    assert vault.restore(left) == text


@given(texts_with_findings(), st.data())
def test_a_stream_cut_anywhere_says_the_same(case: tuple[str, list[Found]], data: st.DataObject) -> None:
    text, found = case
    vault = Vault()
    left = replaced(text, with_literals(found, literals(text)), vault.stand_in)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(left)), max_size=12)))
    restorer = Restorer(vault)
    pieces = [left[a:b] for a, b in zip([0, *cuts], [*cuts, len(left)], strict=True)]
    assert "".join([*map(restorer.push, pieces), restorer.flush()]) == vault.restore(left) == text


@pytest.mark.parametrize(
    "written",
    [
        "[PERSON_1]",
        "[person_1]",
        "[ PERSON_1 ]",
        "【PERSON_1】",
        "[PERSON 1]",
        r"\[PERSON\_1\]",
        "PERSON_1",
        "[Person-1]",
        r"PERSON\_1",
    ],
)
def test_what_a_model_makes_of_a_placeholder_is_found(written: str) -> None:
    vault = Vault()
    vault.stand_in(Kind.PERSON, "王小明")
    assert vault.restore(f"Yes, {written}.") == "Yes, 王小明."
    restorer = Restorer(vault)
    assert "".join([*map(restorer.push, f"Yes, {written}."), restorer.flush()]) == "Yes, 王小明."


@pytest.mark.parametrize("written", ["person 1", "[PERSON_2]", "XPERSON_1", "PERSON_1x2", "[PERSON_1c]", "order 1"])
def test_and_nothing_else(written: str) -> None:
    vault = Vault()
    vault.stand_in(Kind.PERSON, "王小明")
    assert vault.restore(written) == written


def test_one_value_has_one_number_and_each_way_to_write_it_a_letter() -> None:
    vault = Vault()
    assert vault.stand_in(Kind.PHONE, "138 0013 8000") == "[PHONE_1]"
    assert vault.stand_in(Kind.PHONE, "13800138000") == "[PHONE_1b]"
    assert vault.stand_in(Kind.PHONE, "１３８００１３８０００") == "[PHONE_1c]"
    assert vault.stand_in(Kind.PHONE, "138 0013 8000") == "[PHONE_1]"
    assert vault.stand_in(Kind.PHONE, "139 0013 9000") == "[PHONE_2]"
    assert vault.restore("[PHONE_1b] [PHONE_2]") == "13800138000 139 0013 9000"


def test_a_hundred_ways_to_write_one_value_stay_apart() -> None:
    vault = Vault()
    values = ["1" + " " * blanks + "38" for blanks in range(100)]
    names = [vault.stand_in(Kind.TERM, value) for value in values]
    assert len(set(names)) == 100
    assert [vault.restore(name) for name in names] == values


def test_every_kind_has_a_label_that_is_read_back() -> None:
    assert len(set(LABELS.values())) == len(Kind)
    for label in LABELS.values():
        assert PLACEHOLDER.fullmatch(f"[{label}_1]")
        assert re.fullmatch("[A-Z_]+", label)


def test_a_stream_is_not_held_back_where_nothing_can_begin() -> None:
    vault = Vault()
    vault.stand_in(Kind.PERSON, "Ann")
    restorer = Restorer(vault)
    assert restorer.push("Hello there, ") == "Hello there, "
    assert restorer.push("[PER") == ""
    assert restorer.push("fect]") == "[PERfect]"
