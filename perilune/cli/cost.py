"""`perilune cost`: what was used and what it cost, from the home folder's database, without a server.

Knows the rows of usage: requests, prompt and completion tokens and cost by key and UTC day. The cost is what the
backends' prices said when it arose; which model it was, and how much of a prompt was cached, isn't kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from perilune.cli.console import print_json, say, table
from perilune.cli.keys import open_store
from perilune.config import Settings
from perilune.core import Usage
from perilune.errors import InvalidRequest
from perilune.memory.keys import KeyInfo, Keyring
from perilune.memory.usage import UsageStore, Used
from perilune.service.ledger import WITHOUT_KEY
from perilune.service.routing import Prices

GROUPS: Mapping[str, Callable[[str, str], str]] = {
    "key": lambda key_id, day: key_id,
    "day": lambda key_id, day: day,
    "month": lambda key_id, day: day[:7],
}
"""What `--by` knows -> the group of a row (key id, day)."""


@dataclass(frozen=True, slots=True)
class Options:
    """`since` is a UTC day; `prices` what the use is priced by anew, beside what it cost."""

    by: str
    since: str | None
    prices: Prices | None
    as_json: bool


def prices_of(prompt: float | None, completion: float | None) -> Prices | None:
    """Of a million tokens; None where neither is given. The one that isn't is 0."""
    return None if prompt is None and completion is None else Prices(prompt or 0.0, completion or 0.0)


def run(settings: Settings, options: Options) -> None:
    """Raises `InvalidRequest` for a day that is none, and for groups that aren't kept."""
    group = group_named(options.by)
    since = None if options.since is None else day_named(options.since)
    with open_store(settings) as store:
        rows = UsageStore(store).since(since)
        keys = {info.key_id: info for info in Keyring(store, settings.home).list()}
    groups: dict[str, Used] = {}
    for (key_id, day), used in sorted(rows.items()):
        name = group(key_id, day)
        groups[name] = groups.get(name, Used()) + used
    total = sum(groups.values(), Used())
    if options.as_json:
        told = [_fields(options, keys, name, used) for name, used in groups.items()]
        print_json({"by": options.by, "since": since, "rows": told, "total": _figures(options, total)})
        return
    if not groups:
        say("Nothing was used." if since is None else f"Nothing was used since {since} (UTC).")
        return
    _table(options, keys, groups, total)
    if not total.cost and not any(each.prompt_cost or each.completion_cost for each in settings.backends):
        say("note: no backend has a price (prompt_cost, completion_cost), and the local model costs nothing.")


def group_named(by: str) -> Callable[[str, str], str]:
    """Raises `InvalidRequest`."""
    if by not in GROUPS:
        kept = "Usage isn't kept by model" if by == "model" else f"There is no group {by!r}"
        raise InvalidRequest(f"{kept}.", hint=f"Use --by {', '.join(GROUPS)}.")
    return GROUPS[by]


def day_named(text: str) -> str:
    """As rows name it. Raises `InvalidRequest`."""
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise InvalidRequest(f"{text!r} is no day.", hint="Write --since 2026-03-01; days are UTC's.") from None


def _figures(options: Options, used: Used) -> dict[str, Any]:
    priced = options.prices
    return asdict(used) | ({} if priced is None else {"cost_at_prices": _at(priced, used)})


def _fields(options: Options, keys: Mapping[str, KeyInfo], name: str, used: Used) -> dict[str, Any]:
    info = keys.get(name)
    whose = {} if info is None else {"name": info.name, "tenant": info.tenant}
    return {options.by: name} | whose | _figures(options, used)


def _at(prices: Prices, used: Used) -> float:
    return prices.of(Usage(used.prompt_tokens, used.completion_tokens, 0))


def _table(options: Options, keys: Mapping[str, KeyInfo], groups: Mapping[str, Used], total: Used) -> None:
    by_key = options.by == "key"
    columns = [options.by.upper(), *(("TENANT", "NAME") if by_key else ())]
    columns += ["REQUESTS", "PROMPT", "COMPLETION", "COST", *(("AT THESE PRICES",) if options.prices else ())]
    rows: list[Sequence[str]] = []
    for name, used in (*groups.items(), ("total", total)):
        rows.append([name, *(_whose(keys, name) if by_key else ()), *_cells(options, used)])
    table(columns, rows)


def _whose(keys: Mapping[str, KeyInfo], name: str) -> tuple[str, str]:
    if name == WITHOUT_KEY:
        return "-", "(without a key)"
    info = keys.get(name)
    return ("-", "-") if info is None else (info.tenant, info.name or "-")


def _cells(options: Options, used: Used) -> list[str]:
    cells = [f"{used.requests:,}", f"{used.prompt_tokens:,}", f"{used.completion_tokens:,}", f"{used.cost:,.4f}"]
    return cells if options.prices is None else [*cells, f"{_at(options.prices, used):,.4f}"]
