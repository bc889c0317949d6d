"""`perilune cost`: what the database keeps of use, grouped, summed, priced anew; and what it can't tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perilune.memory.keys import Keyring
from perilune.memory.store import Store
from perilune.memory.usage import UsageStore, Used
from tests.cli.conftest import Command


@pytest.fixture
def key_id(tmp_path: Path) -> str:
    """Of a key that has used something on two days; so has a caller without one."""
    store = Store(tmp_path)
    _, info = Keyring(store, tmp_path).create("acme", "laptop")
    UsageStore(store).add(
        {
            (info.key_id, "2026-10-31"): Used(2, 1_000_000, 500_000, 1.5),
            (info.key_id, "2026-11-01"): Used(1, 10, 5, 0.25),
            ("local", "2026-11-01"): Used(4, 400, 40),
        }
    )
    store.close()
    return info.key_id


def test_by_key(call: Command, key_id: str) -> None:
    told = json.loads(call("cost", "--json").out)
    rows = {row["key"]: row for row in told["rows"]}
    assert rows[key_id] == {
        "key": key_id,
        "name": "laptop",
        "tenant": "acme",
        "requests": 3,
        "prompt_tokens": 1_000_010,
        "completion_tokens": 500_005,
        "cost": 1.75,
    }
    assert rows["local"]["requests"] == 4
    assert told["total"] == {
        "requests": 7,
        "prompt_tokens": 1_000_410,
        "completion_tokens": 500_045,
        "cost": 1.75,
    }


def test_by_day_and_month_since_a_day(call: Command, key_id: str) -> None:
    days = json.loads(call("cost", "--by", "day", "--json").out)["rows"]
    assert [(row["day"], row["requests"]) for row in days] == [("2026-10-31", 2), ("2026-11-01", 5)]
    [month] = json.loads(call("cost", "--by", "month", "--since", "2026-11-01", "--json").out)["rows"]
    assert (month["month"], month["requests"], month["cost"]) == ("2026-11", 5, 0.25)


def test_other_prices(call: Command, key_id: str) -> None:
    told = json.loads(call("cost", "--prompt-cost", "0.6", "--completion-cost", "2", "--json").out)
    assert told["total"]["cost_at_prices"] == pytest.approx(0.6 * 1.000410 + 2 * 0.500045)
    assert told["total"]["cost"] == 1.75
    alone = json.loads(call("cost", "--completion-cost", "2", "--json").out)
    assert alone["total"]["cost_at_prices"] == pytest.approx(2 * 0.500045)


def test_the_table(call: Command, key_id: str) -> None:
    done = call("cost", "--prompt-cost", "1")
    head, *rows = done.out.splitlines()
    assert head.split()[:4] == ["KEY", "TENANT", "NAME", "REQUESTS"]
    assert "AT THESE PRICES" in head
    assert rows[0].split() == [key_id, "acme", "laptop", "3", "1,000,010", "500,005", "1.7500", "1.0000"]
    assert "(without a key)" in rows[1]
    assert rows[2].startswith("total ")
    assert done.err == ""


def test_what_costs_nothing_says_why(call: Command, key_id: str) -> None:
    assert call("cost", "--since", "2026-12-01").err == "Nothing was used since 2026-12-01 (UTC).\n"
    assert call("--home", "empty", "cost").err == "Nothing was used.\n"


@pytest.mark.parametrize(
    "wrong", [("--by", "model"), ("--by", "moon"), ("--since", "yesterday"), ("--prompt-cost", "nan")]
)
def test_what_is_not_kept_is_refused(call: Command, wrong: tuple[str, ...]) -> None:
    done = call("cost", *wrong)
    assert (done.code, done.out) == (2, "")
    assert "hint: " in done.err or "--prompt-cost" in done.err
