"""Claims against their sources: what is there is supported, a changed figure or name never is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.memory.claims import ClaimJudge, Verdict

HANDBOOK = (
    "The locker of the harbour master has the number 417. It is opened with the green key. "
    "The ferry to Brill leaves at 9:40 from pier 3, on Sundays at 10:15. "
    "Captain Maria Jansen commands the tug Zeehond. Dogs are not allowed on the ferry. "
    "A berth costs 1,250 euros a season. The harbour office closes at noon."
)
MANUAL = "系统默认的端口号是8642。数据保存在主目录中。管理员王芳负责备份，每周三进行一次。不支持远程登录。"


@pytest.mark.parametrize(
    ("claim", "source", "verdict"),
    [
        ("The harbour master's locker has the number 417.", HANDBOOK, Verdict.SUPPORTED),
        ("The harbour master's locker has the number 471.", HANDBOOK, Verdict.UNSUPPORTED),
        ("The ferry to Brill leaves from pier 3 at 9:40.", HANDBOOK, Verdict.SUPPORTED),
        ("The ferry to Brill leaves from pier 4 at 9:40.", HANDBOOK, Verdict.UNSUPPORTED),
        ("The tug Zeehond is commanded by Maria Jansen.", HANDBOOK, Verdict.SUPPORTED),
        ("The tug Zeehond is commanded by Peter Jansen.", HANDBOOK, Verdict.UNSUPPORTED),
        ("A berth costs 1250 euros a season.", HANDBOOK, Verdict.SUPPORTED),
        ("Dogs are allowed on the ferry.", HANDBOOK, Verdict.UNCLEAR),
        ("Dogs aren't allowed on the ferry.", HANDBOOK, Verdict.SUPPORTED),
        ("The moon is made of cheese and rotates slowly.", HANDBOOK, Verdict.UNSUPPORTED),
        ("默认端口号是8642。", MANUAL, Verdict.SUPPORTED),
        ("默认端口号是8643。", MANUAL, Verdict.UNSUPPORTED),
        ("支持远程登录。", MANUAL, Verdict.UNCLEAR),
        ("天气很好，适合出海钓鱼。", MANUAL, Verdict.UNSUPPORTED),
    ],
)
def test_a_claim_is_judged_by_its_source(claim: str, source: str, verdict: Verdict) -> None:
    assert ClaimJudge().judge(claim, ["Nothing of it.", source]).verdict is verdict


def test_the_nearest_source_is_named() -> None:
    assert ClaimJudge().judge("The office closes at noon.", ["Tides turn.", HANDBOOK, "Noon."]).source == 1
    assert ClaimJudge().judge("Zebras graze.", ["Tides turn."]).source is None
    assert ClaimJudge().judge("Zebras graze.", []).verdict is Verdict.UNSUPPORTED


def test_questions_and_filler_claim_nothing() -> None:
    text = "Yes. The locker has the number 417. Shall I go on? 端口号是8642。"
    assert [text[start:end] for start, end in ClaimJudge().claims(text)] == [
        "The locker has the number 417.",
        "端口号是8642。",
    ]


@settings(max_examples=60, deadline=None)
@given(number=st.integers(10, 10**9), other=st.integers(10, 10**9), seed=st.integers(0, 9))
def test_no_changed_figure_is_supported(number: int, other: int, seed: int) -> None:
    things = ["pump", "valve", "crane", "buoy", "winch", "anchor"]
    random.Random(seed).shuffle(things)
    source = " ".join(f"The {thing} of pier {at} weighs {number + at} kg." for at, thing in enumerate(things))
    claim = "The {} of pier 0 weighs {} kg."
    assert ClaimJudge().judge(claim.format(things[0], number), [source]).verdict is Verdict.SUPPORTED
    if not number <= other < number + len(things):
        assert ClaimJudge().judge(claim.format(things[0], other), [source]).verdict is Verdict.UNSUPPORTED
    neighbour = ClaimJudge().judge(claim.format(things[0], number + 1), [source])
    assert neighbour.verdict is not Verdict.SUPPORTED, "the figure of the thing beside it"
