"""`perilune keys`: make, limit, list and revoke API keys, show who did. A key is printed once, alone on stdout."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from perilune.cli.console import print_json, say, table
from perilune.config import Settings
from perilune.core import KeyLimits
from perilune.memory import audit
from perilune.memory.keys import KeyInfo, Keyring
from perilune.memory.store import Store
from perilune.memory.usage import UsageStore, day_of


@contextmanager
def open_store(settings: Settings) -> Iterator[Store]:
    """The database, closed again."""
    store = Store(settings.home, settings.database)
    try:
        yield store
    finally:
        store.close()


_LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "tokens_per_day",
    "concurrency",
    "budget",
    "stream_tokens_per_s",
)
_LIFTED = -1


def named_limits(*values: float | None) -> dict[str, float | None]:
    """The options that were given, by the names of `KeyLimits`; -1 lifts a limit."""
    given = zip(_LIMITS, values, strict=True)
    return {name: None if value == _LIFTED else value for name, value in given if value is not None}


def create(
    settings: Settings,
    tenant: str,
    role: str,
    name: str,
    deadline_s: float | None,
    limits: dict[str, float | None],
    as_json: bool,
) -> None:
    """Make a key and print it."""
    own = KeyLimits(**limits)  # type: ignore[arg-type]
    with open_store(settings) as store:
        key, info = Keyring(store, settings.home).create(tenant, name, role, deadline_s, own)
    if as_json:
        print_json({"key": key} | _fields(info))
        return
    print(key)
    say(f"{info.key_id}: tenant {info.tenant}, role {info.role}. The key is not stored and not shown again.")
    say("From now on every request needs a key.")


def show(settings: Settings, as_json: bool) -> None:
    """List every key ever made."""
    with open_store(settings) as store:
        keys = Keyring(store, settings.home).list()
    if as_json:
        print_json([_fields(info) for info in keys])
        return
    if not keys:
        say("No keys: every caller on this machine is the local admin.")
        return
    columns = ("ID", "TENANT", "ROLE", "NAME", "CREATED", "LAST USED", "STATE", "LIMITS")
    table(columns, [_row(info) for info in keys])


def limit(settings: Settings, key_id: str, changes: dict[str, float | None], as_json: bool) -> None:
    """Change a key's limits, and show them with what was used of them."""
    with open_store(settings) as store:
        info = Keyring(store, settings.home).set_limits(key_id, changes)
        day, rows = day_of(time.time()), UsageStore(store)
        today, month = rows.day(key_id, day), rows.month(key_id, day[:7])
    if as_json:
        print_json({"id": key_id, "limits": asdict(info.limits), "today": asdict(today), "month": asdict(month)})
        return
    used = {"tokens_per_day": f"{today.tokens:,}", "budget": f"{month.cost:g}"}
    limits = asdict(info.limits)
    rows_shown = [
        (name, "-" if limits[name] is None else f"{limits[name]:,}", used.get(name, "")) for name in _LIMITS
    ]
    table(("LIMIT", "OF THE KEY", "USED"), rows_shown)


def revoke(settings: Settings, key_id: str, as_json: bool) -> None:
    """End a key."""
    with open_store(settings) as store:
        Keyring(store, settings.home).revoke(key_id)
    if as_json:
        print_json({"id": key_id, "revoked": True})
    else:
        say(f"{key_id} is revoked.")


def show_audit(settings: Settings, limit: int, as_json: bool) -> None:
    """The newest entries of the audit table, oldest first."""
    with open_store(settings) as store:
        entries = audit.read(store, limit)
    if as_json:
        print_json([asdict(entry) for entry in entries])
        return
    if not entries:
        say("No key was made or revoked and no file was deleted.")
        return
    rows = [
        (_moment(entry.at), entry.actor, entry.action, entry.tenant or "-", entry.subject, entry.outcome)
        for entry in entries
    ]
    table(("WHEN", "WHO", "WHAT", "TENANT", "ID", "OUTCOME"), rows)


def _fields(info: KeyInfo) -> dict[str, object]:
    return {
        "id": info.key_id,
        "tenant": info.tenant,
        "role": info.role,
        "name": info.name,
        "deadline_s": info.deadline_s,
        "created_at": info.created_at,
        "last_used_at": info.last_used_at,
        "revoked_at": info.revoked_at,
        "limits": asdict(info.limits),
    }


def _row(info: KeyInfo) -> tuple[str, ...]:
    state = "revoked" if info.revoked_at is not None else "active"
    return (
        info.key_id,
        info.tenant,
        info.role,
        info.name or "-",
        _day(info.created_at),
        _day(info.last_used_at),
        state,
        _shown_limits(info.limits),
    )


def _shown_limits(limits: KeyLimits) -> str:
    """Those that are set, as the options are called."""
    options = ("rpm", "tpm", "tpd", "concurrency", "budget", "stream-rate")
    told = ((option, getattr(limits, name)) for option, name in zip(options, _LIMITS, strict=True))
    return ", ".join(f"{option} {value:g}" for option, value in told if value is not None) or "-"


def _day(moment: float | None) -> str:
    return "never" if moment is None else time.strftime("%Y-%m-%d", time.localtime(moment))


def _moment(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
