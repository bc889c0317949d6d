"""`perilune kv`: what the KV cache keeps on disk, and deleting it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from perilune.build.opened import KV_FOLDER, SEGMENT_FOLDER
from perilune.cli.client import find_server
from perilune.cli.console import print_json, say, table
from perilune.config import Settings
from perilune.errors import Conflict, InvalidRequest, NotFound
from perilune.runtime.kv.disk import DiskKVStore
from perilune.runtime.kv.store import KVEntry
from perilune.runtime.memory import human_bytes


def show(settings: Settings, as_json: bool) -> None:
    """List owners with their bytes on disk, largest first: full precision (blocks), and closed segments (INT8)."""
    with _stores(settings) as stores:
        entries = [entry for store in stores for entry in store.entries()]
        total = sum(store.size_bytes for store in stores)
        closed = {entry.owner: entry.size_bytes for store in stores[1:] for entry in store.entries()}
    entries = sorted(_joined(entries), key=lambda entry: -entry.size_bytes)
    names = _names(settings, entries)
    if as_json:
        rows = [
            {
                "owner": entry.owner,
                "filename": names.get(entry.owner),
                "blocks": entry.blocks,
                "size_bytes": entry.size_bytes,
                "segment_bytes": closed.get(entry.owner, 0),
                "last_used_at": entry.last_used_at,
            }
            for entry in entries
        ]
        print_json({"entries": rows, "size_bytes": total, "quota_bytes": settings.kv_cache.disk_quota})
        return
    if entries:
        table(
            ("OWNER", "DOCUMENT", "BLOCKS", "SIZE", "OF IT INT8", "LAST USED"),
            [
                (
                    entry.owner,
                    names.get(entry.owner, "-"),
                    entry.blocks,
                    human_bytes(entry.size_bytes),
                    human_bytes(closed[entry.owner]) if entry.owner in closed else "-",
                    time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used_at)),
                )
                for entry in entries
            ],
        )
    say(f"{human_bytes(total)} of {human_bytes(settings.kv_cache.disk_quota)} used.")


def delete(settings: Settings, owners: Sequence[str], everything: bool, as_json: bool) -> None:
    """Forget owners' KV. Raises `NotFound` for an owner that has none."""
    if everything == bool(owners):
        raise InvalidRequest("Say whose KV to delete.", hint="Name owners from `perilune kv ls`, or write --all.")
    with _stores(settings) as stores:
        known = {entry.owner for store in stores for entry in store.entries()}
        unknown = [owner for owner in owners if owner not in known]
        if unknown:
            raise NotFound(f"No KV belongs to {unknown[0]}.", hint="`perilune kv ls` lists owners.")
        chosen = known if everything else owners
        freed = sum(store.forget(owner) for owner in chosen for store in stores)
    if as_json:
        print_json({"freed_bytes": freed})
    else:
        say(f"Freed {human_bytes(freed)}. The documents stay; their next question computes it again.")


def _joined(entries: Sequence[KVEntry]) -> list[KVEntry]:
    """One entry an owner: bytes of both stores, blocks of the first that has any."""
    joined: dict[str, KVEntry] = {}
    for entry in entries:
        known = joined.get(entry.owner)
        if known is not None:
            used = max(known.last_used_at, entry.last_used_at)
            entry = KVEntry(entry.owner, known.blocks, known.size_bytes + entry.size_bytes, used)
        joined[entry.owner] = entry
    return list(joined.values())


@contextmanager
def _stores(settings: Settings) -> Iterator[list[DiskKVStore]]:
    server = find_server(settings.home)
    if server is not None:
        raise Conflict(
            f"The KV folder belongs to the running server (process {server.pid}).",
            hint=f"Stop it with `kill {server.pid}`, or delete files through it: their KV goes with them.",
        )
    with ExitStack() as closers:
        stores = []
        for folder in (KV_FOLDER, SEGMENT_FOLDER):  # no quota: a smaller one in this shell must not delete anything
            stores.append(DiskKVStore(settings.home / folder, None))
            closers.callback(stores[-1].close)
        yield stores


def _names(settings: Settings, entries: Sequence[KVEntry]) -> dict[str, str]:
    """File names of owners that are documents of the local tenant."""
    from perilune.cli.keys import open_store
    from perilune.memory.schema import FILES

    if not entries or not (settings.home.is_dir()):
        return {}
    import sqlalchemy as sa

    with open_store(settings) as store, store.read() as connection:
        rows = connection.execute(sa.select(FILES.c.id, FILES.c.filename))
        return {row.id: row.filename for row in rows}
