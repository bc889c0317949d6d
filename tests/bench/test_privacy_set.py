"""The planted set is what its README says: exact offsets, right check digits, balanced, nothing twice, invented.


Check digits are computed here anew; nothing of the generator's arithmetic is trusted.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from bench.privacy_set import DATA, dump, messages

KINDS = {
    "person", "phone", "email", "address", "national_id", "passport", "bank_card", "iban",
    "tax_id", "account", "order", "ip", "mac", "url_token", "secret", "plate",
    "birth_date", "chat_id", "username", "staff_id", "medical_record", "geo", "amount",
}  # fmt: skip
TEXT = (DATA / "messages.jsonl").read_text(encoding="utf-8")
MESSAGES: list[dict[str, Any]] = [json.loads(line) for line in TEXT.splitlines()]
CJK = re.compile(r"[\u4e00-\u9fff]")


def planted(*kinds: str) -> list[dict[str, Any]]:
    return [item for one in MESSAGES for item in one["planted"] if item["kind"] in kinds]


def bare(value: str) -> str:
    """Without the disguise: full-width forms folded, zero-width characters, blanks and dashes gone."""
    return re.sub(r"[\s\u200b-]", "", unicodedata.normalize("NFKC", value))


def luhn(number: str) -> bool:
    doubled = [int(c) * (1 + i % 2) for i, c in enumerate(reversed(number))]
    return sum(d // 10 + d % 10 for d in doubled) % 10 == 0


def resident(number: str) -> bool:
    weights = [pow(2, 17 - i, 11) for i in range(18)]
    return sum((10 if c == "X" else int(c)) * w for c, w in zip(number, weights, strict=True)) % 11 == 1


def iban(number: str) -> bool:
    return int("".join(str(int(c, 36)) for c in number[4:] + number[:4])) % 97 == 1


def credit_code(code: str) -> bool:
    alphabet = "0123456789ABCDEFGHJKLMNPQRTUWXY"
    return (
        sum(alphabet.index(c) * pow(3, i, 31) for i, c in enumerate(code[:17])) % 31
        == (-alphabet.index(code[17])) % 31
    )


def nhs(number: str) -> bool:
    return len(number) == 10 and sum(int(c) * (10 - i) for i, c in enumerate(number)) % 11 == 0


def dni(number: str) -> bool:
    return "TRWAGMYFPDXBNJZSQVHLCKE"[int(number[:8]) % 23] == number[8]


def cpf(number: str) -> bool:
    number = number.replace(".", "")
    return all(
        sum(int(number[i]) * (n + 1 - i) for i in range(n)) * 10 % 11 % 10 == int(number[n]) for n in (9, 10)
    )


def hong_kong(number: str) -> bool:
    values = [36, int(number[0], 36), *(int(c) for c in number[1:7]), int(number[8], 16)]
    return sum(v * (9 - i) for i, v in enumerate(values)) % 11 == 0


def isbn(number: str) -> bool:
    return sum(int(c) * (3 if i % 2 else 1) for i, c in enumerate(number)) % 10 == 0


def test_every_offset_points_at_its_value() -> None:
    for one in MESSAGES:
        end = 0
        for item in one["planted"]:
            assert item["value"], one["id"]
            assert one["text"][item["start"] : item["end"]] == item["value"], one["id"]
            assert item["start"] >= end, f"{one['id']}: spans overlap or are out of order"
            end = item["end"]
        assert "{{" not in one["text"] or {"json", "code"} & set(one["tags"]), one["id"]
        assert one["planted"], one["id"]


def test_size_balance_and_no_duplicates() -> None:
    assert len(MESSAGES) >= 1200
    assert len({one["id"] for one in MESSAGES}) == len({one["text"] for one in MESSAGES}) == len(MESSAGES)
    languages = Counter(one["language"] for one in MESSAGES)
    assert set(languages) == {"en", "zh", "mixed"}
    assert min(languages.values()) >= 0.28 * len(MESSAGES)
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for one in MESSAGES:
        by_kind_of_one = {item["kind"] for item in one["planted"]}
        for kind in by_kind_of_one:
            by_kind[kind][one["language"]] += 1
    assert set(by_kind) == KINDS | {"keep"}
    for kind, counts in by_kind.items():
        assert sum(counts.values()) >= 50, kind
        expected = {"zh", "mixed"} if kind == "chat_id" else set(languages)
        assert all(counts[language] >= 12 for language in expected), (kind, counts)


def test_languages_are_what_they_say() -> None:
    for one in MESSAGES:
        if one["language"] == "en":
            assert not CJK.search(one["text"]), one["id"]
        else:
            assert CJK.search(one["text"]), one["id"]
        if one["language"] == "mixed":
            assert re.search(r"[A-Za-z]{2}", one["text"]), one["id"]


def test_only_what_must_go_says_how_it_can_be_found() -> None:
    for one in MESSAGES:
        for item in one["planted"]:
            allowed = {None} if item["kind"] == "keep" else {"rule", "cue", "list", "context"}
            assert item.get("need") in allowed, one["id"]
    needs = Counter(item["need"] for item in planted(*KINDS))
    assert min(needs.values()) >= 900, needs
    assert {item["need"] for item in planted("bank_card", "iban", "ip") if not CJK.search(item["value"])} == {
        "rule"
    }


CHECKS: list[tuple[str, str, Callable[[str], bool], int]] = [
    ("bank_card", r"\d{15,19}", luhn, 100),
    ("iban", r"[A-Z]{2}\d{2}[A-Z0-9]{11,30}", iban, 80),
    ("national_id", r"\d{17}[\dX]", resident, 80),
    ("national_id", r"\d{8}[A-Z]", dni, 8),
    ("national_id", r"\d{3}\.\d{3}\.\d{5}", cpf, 8),
    ("national_id", r"[A-Z]\d{6}\([\dA]\)", hong_kong, 8),
    ("tax_id", r"91[0-9A-Z]{16}", credit_code, 25),
    ("medical_record", r"999\d{7}", nhs, 8),
    ("keep", r"978\d{10}", isbn, 30),
]


@pytest.mark.parametrize(("kind", "shape", "valid", "least"), CHECKS)
def test_check_digits(kind: str, shape: str, valid: Callable[[str], bool], least: int) -> None:
    found = [bare(item["value"]) for item in planted(kind)]
    numbers = [number for number in found if re.fullmatch(shape, number)]
    assert len(numbers) >= least
    wrong = [number for number in numbers if not valid(number)]
    assert not wrong


def test_every_number_has_one_of_the_shapes_named() -> None:
    """So that no value slips past its check digit because its shape isn't listed."""
    vat = r"DE\d{9}|FR\d{11}|NL\d{9}B\d\d|ATU\d{8}|IT\d{11}|PL\d{10}|ESB\d{8}|IE\d{7}[A-W][A-I]"
    shapes = {"tax_id": vat, "national_id": r"98765432\d|QQ\d{6}[A-D]"}
    for kind in ("bank_card", "iban", "national_id", "tax_id"):
        own = [shape for name, shape, _, _ in CHECKS if name == kind] + [shapes.get(kind, r"(?!)")]
        for item in planted(kind):
            value = bare(item["value"])
            assert CJK.search(value) or any(re.fullmatch(shape, value) for shape in own), item


def test_nothing_real_and_nothing_left_unplanted() -> None:
    """Addresses are of ranges for documentation; what plainly looks like an identifier is planted."""
    for item in planted("email"):
        value = unicodedata.normalize("NFKC", item["value"]).replace("\u200b", "")
        assert re.search(r"example(\.| dot )(com|org|net)$|acme(\.| dot )example$", value), item
    for item in planted("mac"):
        assert re.sub(r"[^0-9a-f]", "", item["value"].lower()).startswith("00005e0053"), item
    telling = re.compile(
        r"[\w.+]+@[\w-]+\.\w+|(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])|(?<!\d)\d{15,19}(?!\d)|1[3-9]\d{9}(?!\d)"
    )
    for one in MESSAGES:
        covered = {i for item in one["planted"] for i in range(item["start"], item["end"])}
        for match in telling.finditer(one["text"]):
            assert covered & set(range(*match.span())), (one["id"], match[0])


def test_persons_come_back_in_several_forms() -> None:
    several = 0
    for one in MESSAGES:
        forms: dict[str, set[str]] = defaultdict(set)
        for item in one["planted"]:
            if item["kind"] == "person" and "entity" in item:
                forms[item["entity"]].add(item["value"])
        several += any(len(values) > 1 for values in forms.values())
    assert several >= 250


def test_the_file_is_what_the_frames_give() -> None:
    assert dump(messages()) == TEXT
