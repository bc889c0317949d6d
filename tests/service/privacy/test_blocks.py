"""Reading only where anchors are finds what reading everything does; blocks that were seen aren't read again."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.service.privacy import blocks as blocks_module
from perilune.service.privacy.blocks import BLOCK_CHARS, MARGIN_CHARS, Memo, blocks
from perilune.service.privacy.detect import Detector
from perilune.service.privacy.kinds import Found

ROOT = Path(__file__).resolve().parents[3]
MESSAGES = [
    json.loads(line)
    for line in (ROOT / "bench" / "data" / "privacy" / "messages.jsonl").read_text(encoding="utf-8").splitlines()
]
DETECTOR = Detector()
ORACLE = Detector(anchored=False)
FILLER = "The moon is far away and the tide comes in twice a day. 月亮离我们很远，潮水一天来两次。\n"


def masked(text: str, found: list[Found]) -> list[bool]:
    flags = [False] * len(text)
    for item in found:
        flags[item.start : item.end] = [True] * (item.end - item.start)
    return flags


@pytest.mark.parametrize("part", range(4))
def test_anchors_lose_nothing(part: int) -> None:
    for message in MESSAGES[part::4]:
        assert DETECTOR.find(message["text"]) == ORACLE.find(message["text"])


PIECES = st.one_of(
    st.sampled_from(MESSAGES)
    .flatmap(lambda message: st.sampled_from(message["planted"]))
    .map(lambda i: i["value"]),
    st.sampled_from(
        ["\n", "\n\n", " ", ", ", "my name is ", "订单号", "password: ", "at ", "born ", "12 ", "@", "微信"]
    ),
    st.text(max_size=6),
)


@settings(deadline=None, max_examples=120)
@given(st.lists(PIECES, max_size=10).map("".join))
def test_anchors_lose_nothing_of_any_text(text: str) -> None:
    """Windows may begin elsewhere than matches of the whole text did, so that more can be found, never less."""
    ours, all_of_it = masked(text, DETECTOR.find(text)), masked(text, ORACLE.find(text))
    assert all(mine or not theirs for mine, theirs in zip(ours, all_of_it, strict=True))


def long_text(seed: int) -> tuple[str, list[tuple[int, int]]]:
    """Messages with filler between them, and where items of rule, cue and list stand."""
    rng = random.Random(seed)
    text, places = "", []
    for message in rng.sample(MESSAGES, 60):
        text += FILLER * rng.randrange(0, 30)
        places += [
            (item["start"] + len(text), item["end"] + len(text))
            for item in message["planted"]
            if item["kind"] != "keep" and item["need"] in ("rule", "cue", "list")
        ]
        text += message["text"] + "\n\n"
    return text, places


def test_nothing_leaves_where_a_text_is_cut() -> None:
    text, places = long_text(1)
    assert len(list(blocks(text))) > 5
    flags = masked(text, DETECTOR.find(text))
    assert all(flags[at] for low, high in places for at in range(low, high) if text[at].isalnum())


def test_nothing_leaves_where_a_cut_goes_through_it() -> None:
    card = "4111 1111 1111 1111"
    text = "a" * (BLOCK_CHARS - 12) + f" {card} " + "b" * 3000
    assert [text[item.start : item.end] for item in DETECTOR.find(text)] == [card]
    cut = next(blocks(text)).end
    assert text.index(card) < cut < text.index(card) + len(card)


@given(st.integers(0, 3 * BLOCK_CHARS), st.sampled_from(["a", "a ", "a\n", "a b\n\n", "月"]))
def test_blocks_make_up_the_text(size: int, unit: str) -> None:
    text = unit * (size // len(unit))
    parts = list(blocks(text))
    assert "".join(text[part.start : part.end] for part in parts) == text
    for part in parts:
        assert text[part.start - part.lead :].startswith(part.context)
        assert part.lead == min(part.start, MARGIN_CHARS)


def test_a_private_key_stays_in_one_piece() -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\n" + "QUJD\n" * 3000 + "-----END RSA PRIVATE KEY-----"
    text = FILLER * 100 + key + "\n" + FILLER * 100
    assert any(text[item.start : item.end] == key for item in DETECTOR.find(text))


class Counted(Detector):
    """A detector that counts the blocks that it reads."""

    read = 0

    def _read(self, block: blocks_module.Block) -> object:  # type: ignore[override]
        self.read += 1
        return super()._read(block)


def test_only_what_is_new_is_read() -> None:
    detector, memo = Counted(), Memo()
    history, _ = long_text(2)
    first = detector.find_all([history, "What does Anna Kowalski want?"], memo, "acme")
    before = detector.read
    again = detector.find_all([history, "What does Anna Kowalski want?"], memo, "acme")
    assert again == first
    assert detector.read == before
    detector.find_all([history, "And who is Peter Novak?"], memo, "acme")
    assert detector.read == before + 1
    detector.find_all([history + FILLER * 3], memo, "acme")
    assert detector.read <= before + 3  # the end of a text that grew
    detector.find_all([history], memo, "other")
    assert detector.read > before + 3  # nothing is shared between tenants


def test_a_value_of_a_new_message_is_found_in_what_was_seen() -> None:
    detector, memo = Detector(), Memo()
    history = FILLER * 200 + "Reference 77319920 is open.\n" + FILLER * 200
    assert detector.find_all([history], memo)[0] == []
    found, _ = detector.find_all([history, "My order number is 7731-9920."], memo)
    assert [history[item.start : item.end] for item in found] == ["77319920"]
    assert detector.find_all([history], memo)[0] == []


def test_a_conversation_that_goes_on_is_found_as_if_it_were_new() -> None:
    detector, memo = Detector(), Memo()
    texts: list[str] = []
    for seed, question in enumerate(
        [
            "Call Anna Kowalski.",
            "What does it mean?",
            "ANNA KOWALSKI or Kowalski?",
            "Ask Peter Novak, 7731-9920.",
            "Why?",
        ]
    ):
        texts += [long_text(seed)[0], question]
        assert detector.find_all(texts, memo, "acme") == detector.find_all(texts)
        assert detector.find_all([*texts[:-1], "Anew: [PERSON_1] and Kowalski"], memo, "acme") == detector.find_all(
            [*texts[:-1], "Anew: [PERSON_1] and Kowalski"]
        )
    assert memo.begun("acme", [*texts, "more"]).size == len(texts)
    assert memo.begun("acme", [*texts[:-1], "another"]).size == len(texts) - 1
    assert memo.begun("other", texts).size == 0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(PIECES, max_size=5).map(" ".join), min_size=2, max_size=6), st.data())
def test_what_is_remembered_changes_nothing(texts: list[str], data: st.DataObject) -> None:
    """Beginnings of the conversation, in any order, before the whole of it."""
    memo = Memo()
    for size in data.draw(st.lists(st.integers(1, len(texts)), max_size=4)):
        DETECTOR.find_all(texts[:size], memo, "acme")
    assert DETECTOR.find_all(texts, memo, "acme") == DETECTOR.find_all(texts)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "_BLOCKS_OF_TENANT", 3)
    monkeypatch.setattr(blocks_module, "_TENANTS", 2)
    monkeypatch.setattr(blocks_module, "_FINDINGS_OF_TENANT", 0)
    detector, memo = Counted(), Memo()
    for number in range(5):
        detector.find_all([f"message {number}"], memo, "a")
    detector.find_all(["message 4"], memo, "a")
    assert detector.read == 5
    detector.find_all(["message 0"], memo, "a")
    assert detector.read == 6
    for tenant in "bc":
        detector.find_all(["x"], memo, tenant)
    detector.find_all(["message 4"], memo, "a")
    assert detector.read == 9
    monkeypatch.setattr(blocks_module, "_FINDINGS_OF_TENANT", 40)
    for number in range(3):
        detector.find_all([f"talk {number}"], memo, "d")
    assert [memo.begun("d", [f"talk {number}"]).size for number in range(3)] == [0, 1, 1]
