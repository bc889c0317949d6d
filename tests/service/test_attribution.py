"""A citation belongs behind the sentence that its source supports, however the text is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.service.attribution import Placer

RENT = "The rent of the mill is 940 crowns a month, due on the first day."
ROOF = "The roof of the barn was mended by Ole in May."
ANSWER = "I looked at it. The mill's rent is 940 crowns. Ole mended the barn's roof. Ask if you like."
ZH = "磨坊的租金是每月九百四十克朗。屋顶是奥勒修的。"


def placed(pieces: list[str]) -> dict[str, int]:
    placer = Placer[str]()
    placer.cite("rent", RENT)
    found = placer.say(pieces[0])
    placer.cite("roof", ROOF)
    for piece in pieces[1:]:
        found += placer.say(piece)
    return dict(found + placer.end())


WANTED = {"rent": ANSWER.index("crowns.") + 7, "roof": ANSWER.index("roof.") + 5}


@given(st.lists(st.integers(1, len(ANSWER) - 1), unique=True, max_size=30))
def test_behind_its_sentence(cuts: list[int]) -> None:
    at = [0, *sorted(cuts), len(ANSWER)]
    assert placed([ANSWER[start:end] for start, end in pairwise(at)]) == WANTED


@pytest.mark.parametrize("text", ["", "No.", "The weather is fair today and so is the sea."])
def test_what_no_sentence_says_belongs_to_the_end(text: str) -> None:
    assert placed([text]) == {"rent": len(text), "roof": len(text)}


def test_chinese() -> None:
    placer = Placer[str]()
    placer.cite("租金", "合同规定：磨坊的租金是每月九百四十克朗，首日到期。")
    assert placer.say(ZH + "还有别的问题吗？") == [("租金", ZH.index("。") + 1)]
