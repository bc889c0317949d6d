"""What is found, kind by kind, in cases of this test's own; what stays; and that time is linear in the text."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.service.privacy.detect import Detector
from perilune.service.privacy.fold import fold
from perilune.service.privacy.kinds import Found, Kind
from perilune.service.privacy.persons import parts
from perilune.service.privacy.placeholders import Vault

DETECTOR = Detector()


def found(text: str) -> dict[str, str]:
    return {text[item.start : item.end]: item.kind.value for item in DETECTOR.find(text)}


CASES = [
    ("I'm John Carter.", "John Carter", "person"),
    ("SMITH, JOHN", "SMITH, JOHN", "person"),
    ("Ask Dr. Whitfield", "Dr. Whitfield", "person"),
    ("我叫王小明，", "王小明", "person"),
    ("周末王总要来", "王总", "person"),
    ("请欧阳娜娜来", "欧阳娜娜", "person"),
    ("和老王说", "老王", "person"),
    ("Zhang Wei called", "Zhang Wei", "person"),
    ("手机１３８ ００１３ 8000。", "１３８ ００１３ 8000", "phone"),
    ("打138-\u200b0013-8000", "138-\u200b0013-8000", "phone"),
    ("电话0755-8812 3456转801", "0755-8812 3456转801", "phone"),
    ("call (415) 555-0132 now", "(415) 555-0132", "phone"),
    ("电话一三八零零一三八零零零", "一三八零零一三八零零零", "phone"),
    ("ring one three eight zero zero one three 8000", "one three eight zero zero one three 8000", "phone"),
    ("to j.carter+x@example.com.", "j.carter+x@example.com", "email"),
    ("alice at example dot com", "alice at example dot com", "email"),
    ("bob ＠ example．cn", "bob ＠ example．cn", "email"),
    ("身份证11010519491231002X", "11010519491231002X", "national_id"),
    ("SSN 123-45-6789", "123-45-6789", "national_id"),
    ("card 4111 1111 1111 1111 ok", "4111 1111 1111 1111", "bank_card"),
    ("DE89 3704 0044 0532 0130 00 and more", "DE89 3704 0044 0532 0130 00", "iban"),
    ("from 192[.]0[.]2[.]44:80", "192[.]0[.]2[.]44", "ip"),
    ("at 2001:db8::8a2e:370:7334 now", "2001:db8::8a2e:370:7334", "ip"),
    ("MAC：00:00:5E:00:53:01", "00:00:5E:00:53:01", "mac"),
    ("see https://x.example/reset?token=a8f9d8e7aa&lang=en", "a8f9d8e7aa", "secret"),
    ("https://x.example/invite/AbC9d8e7F6", "AbC9d8e7F6", "url_token"),
    ("key ghp_abcdefghij0123456789", "ghp_abcdefghij0123456789", "secret"),
    ("密码是abc12345，", "abc12345", "secret"),
    ("京A·12345到了", "京A·12345", "plate"),
    ("born on 3 March 1988", "3 March 1988", "birth_date"),
    ("1988-03-04生", "1988-03-04", "birth_date"),
    ("微信号 wx_abc123", "wx_abc123", "chat_id"),
    ("order number A-99812-33", "A-99812-33", "order"),
    ("訂單編號 DD2024888133", "DD2024888133", "order"),
    ("工号E10293", "E10293", "staff_id"),
    ("MRN 0042311", "0042311", "medical_record"),
    ("passport no: K1234567", "K1234567", "passport"),
    ("licence plate AB12 CDE", "AB12 CDE", "plate"),
    ("12 Baker Street, London NW1 6XE", "12 Baker Street, London NW1 6XE", "address"),
    ("住在上海市浦东新区张杨路500号3楼", "上海市浦东新区张杨路500号3楼", "address"),
    ("39.9042, 116.4074.", "39.9042, 116.4074", "geo"),
    ("ssh jdoe@192.0.2.4", "jdoe", "username"),
]


@pytest.mark.parametrize(("text", "value", "kind"), CASES)
def test_found(text: str, value: str, kind: str) -> None:
    assert found(text).get(value) == kind, found(text)


@pytest.mark.parametrize(("text", "value", "kind"), CASES)
def test_found_inside_json_and_in_a_quoted_reply(text: str, value: str, kind: str) -> None:
    inside = json.dumps({"role": "user", "content": f"Hi,\n{text}"}, ensure_ascii=True)
    left = "".join(
        char
        for at, char in enumerate(inside)
        if not any(item.start <= at < item.end for item in DETECTOR.find(inside))
    )
    assert json.dumps(value)[1:-1] not in left
    assert any(value in name for name in found(f"On Monday you wrote:\n> {text}"))


@pytest.mark.parametrize(
    "text",
    [
        "Version 4.15.2 of Python 3.11.4, RFC 2616, ISO 9001:2015.",
        "ISBN 978-3-16-148410-0, clause 12.3 and 7.8.9.1, in 1998.",
        "When did Abraham Lincoln speak? And Marie Curie?",
        "高兴的周末，方法很严格，任何人都可以，许多金属。",
        "孔子和李白都说过，司马光砸缸。",
        "127.0.0.1:8080 and 0.0.0.0",
        "报警打110，急救120。",
        "@property def total(self): return self.items[0:10]",
        "BP 120/80, 12,345 rows, 99.5 %, 10:30 on 2024-05-01.",
    ],
)
def test_stays(text: str) -> None:
    assert not found(text)


def test_what_was_found_once_is_found_everywhere() -> None:
    texts = ["Order number 88123-77 of Anna Kowalski", "Where is 8812377? Kowalski asks."]
    first, second = DETECTOR.find_all(texts)
    assert len(first) == 2
    assert [texts[1][item.start : item.end] for item in second] == ["8812377", "Kowalski"]


def test_people_are_linked() -> None:
    vault = Vault()
    names = ["高俊杰", "俊杰", "高总", "Robert Nguyen", "Robert", "Ms. Kim", "Nguyen"]
    stand_ins = [vault.stand_in(Kind.PERSON, name) for name in names]
    assert stand_ins == [
        "[PERSON_1]",
        "[PERSON_1b]",
        "[PERSON_1c]",
        "[PERSON_2]",
        "[PERSON_2b]",
        "[PERSON_3]",
        "[PERSON_2c]",
    ]
    assert parts("欧阳先生") == {"surname 欧阳"}


@given(st.text(max_size=80))
def test_folding_maps_every_character_back(text: str) -> None:
    folded = fold(text)
    assert len(folded.text) == len(folded.lower)
    at = 0
    for place in range(len(folded.text)):
        start, end = folded.origin(place, place + 1)
        assert at <= start < end <= len(text)
        at = end


@settings(deadline=None)
@given(st.text(max_size=120))
def test_findings_are_in_order_and_apart(text: str) -> None:
    at = 0
    for item in DETECTOR.find(text):
        assert isinstance(item, Found)
        assert at <= item.start < item.end <= len(text)
        at = item.end


@pytest.mark.parametrize(
    "unit",
    [
        "a",
        "1",
        "1 ",
        "12345 6789 ",
        "a@",
        "a.",
        "a:",
        "[PERSON_",
        "B-",
        "张",
        "路1号",
        " ",
        "\n",
        "one ",
        "http://a/",
        "1.",
        "Aa ",
        "-",
        "'",
    ],
)
def test_time_is_linear(unit: str) -> None:
    """Eight times the text takes about eight times the time; quadratic rules would take 64 times and, on a line of
    a megabyte, minutes."""

    def seconds(size: int) -> float:
        text = unit * (size // len(unit))
        begun = time.process_time()
        DETECTOR.find(text)
        return time.process_time() - begun

    seconds(1000)
    small, large = min(seconds(3_000) for _ in range(2)), min(seconds(24_000) for _ in range(2))
    assert large < 24 * max(small, 0.005)
