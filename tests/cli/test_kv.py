"""`perilune kv` on a folder with something in it."""

from __future__ import annotations

import json
from pathlib import Path

from perilune.build.opened import KV_FOLDER
from perilune.runtime.kv.disk import DiskKVStore
from tests.cli.conftest import Command


def test_looking_at_kv_deletes_nothing_whatever_the_quota(call: Command, tmp_path: Path) -> None:
    store = DiskKVStore(tmp_path / KV_FOLDER, None)
    for owner in ("first", "second"):
        store.save([owner.encode().ljust(32, b"-")], [memoryview(bytearray(4096))], owner)
    store.close()
    small = {"PERILUNE_KV_CACHE__DISK_QUOTA": "4096"}
    for _ in range(2):
        done = call("kv", "ls", "--json", **small)
        assert {entry["owner"] for entry in json.loads(done.out)["entries"]} == {"first", "second"}
    assert call("kv", "rm", "first", **small).code == 0
    assert [entry["owner"] for entry in json.loads(call("kv", "ls", "--json").out)["entries"]] == ["second"]
