"""Files in parts: what is joined is what was sent, in the order that was named, and nothing else stays."""

from __future__ import annotations

import hashlib
import io
import os
import time
from pathlib import Path

import pytest

from perilune.errors import Conflict, InvalidRequest, NotFound, TooLarge, UnsupportedDocument
from perilune.memory import uploads as module
from perilune.memory.store import Store
from perilune.memory.uploads import UploadStore


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def uploads(store: Store, tmp_path: Path, clock: Clock) -> UploadStore:
    return UploadStore(store, tmp_path, clock)


def parts_on_disk(home: Path) -> list[str]:
    return [path.name for path in (home / "files").glob("*/*")]


def test_parts_become_one_stream(uploads: UploadStore, tmp_path: Path) -> None:
    pieces = [os.urandom(3_000_000), b"x", b"end"]
    upload = uploads.create("local", "a.bin", "user_data", sum(map(len, pieces)), None)
    late = uploads.add_part("local", upload.upload_id, io.BytesIO(pieces[2]))
    ids = [uploads.add_part("local", upload.upload_id, io.BytesIO(piece)).part_id for piece in pieces[:2]]
    ids.append(late.part_id)
    whole = b"".join(pieces)
    md5 = hashlib.md5(whole).hexdigest().upper()
    with uploads.joined("local", upload.upload_id, ids, md5) as data:
        assert data.read() == whole
    for wrong in ([], ids[:2], [*ids, ids[0]], [*ids[:2], "part_x"]):
        with pytest.raises(InvalidRequest) as refused:
            uploads.joined("local", upload.upload_id, wrong, None)
        assert refused.value.param == "part_ids"
    with pytest.raises(InvalidRequest, match="md5"):
        uploads.joined("local", upload.upload_id, ids, "0" * 32)
    assert len(parts_on_disk(tmp_path)) == 3
    assert uploads.end("local", upload.upload_id, "completed").status == "completed"
    assert parts_on_disk(tmp_path) == []
    for call in (
        lambda: uploads.add_part("local", upload.upload_id, io.BytesIO(b"x")),
        lambda: uploads.joined("local", upload.upload_id, ids, None),
        lambda: uploads.end("local", upload.upload_id, "cancelled"),
    ):
        with pytest.raises(Conflict, match="completed"):
            call()


def test_parts_are_bounded(uploads: UploadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = uploads.create("local", "a.bin", "user_data", 10, None)
    uploads.add_part("local", upload.upload_id, io.BytesIO(b"x" * 20))
    with pytest.raises(TooLarge, match="announced"):
        uploads.add_part("local", upload.upload_id, io.BytesIO(b"x"))
    with pytest.raises(UnsupportedDocument):
        uploads.add_part("local", upload.upload_id, io.BytesIO(b""))
    monkeypatch.setattr(module, "MAX_PART_BYTES", 5)
    with pytest.raises(TooLarge):
        uploads.add_part("local", upload.upload_id, io.BytesIO(b"x" * 6))
    assert len(parts_on_disk(tmp_path)) == 1
    monkeypatch.setattr(module, "MAX_PENDING", 2)
    uploads.create("local", "b.bin", "user_data", 10, None)
    with pytest.raises(InvalidRequest, match="pending"):
        uploads.create("local", "c.bin", "user_data", 10, None)
    uploads.create("other", "c.bin", "user_data", 10, None)


def test_other_tenants_find_nothing(uploads: UploadStore) -> None:
    mine = uploads.create("mine", "a.bin", "user_data", 1, None)
    part = uploads.add_part("mine", mine.upload_id, io.BytesIO(b"x"))
    for call in (
        lambda: uploads.get("other", mine.upload_id),
        lambda: uploads.add_part("other", mine.upload_id, io.BytesIO(b"x")),
        lambda: uploads.end("other", mine.upload_id, "cancelled"),
    ):
        with pytest.raises(NotFound):
            call()
    theirs = uploads.create("other", "b.bin", "user_data", 1, None)
    with pytest.raises(InvalidRequest):
        uploads.joined("other", theirs.upload_id, [part.part_id], None)


def test_a_file_that_is_made_while_its_time_passes_is_complete(
    uploads: UploadStore, clock: Clock, tmp_path: Path
) -> None:
    """Large files take a while: what was joined in time isn't thrown away, and not lost to its owner."""
    upload = uploads.create("local", "a.bin", "user_data", 3, None)
    part = uploads.add_part("local", upload.upload_id, io.BytesIO(b"abc"))
    with uploads.joined("local", upload.upload_id, [part.part_id], None) as data:
        clock.now += module.LASTS_S + 1
        assert data.read() == b"abc"
    assert uploads.end("local", upload.upload_id, "completed").status == "completed"
    assert uploads.expire() == 0
    late = uploads.create("local", "b.bin", "user_data", 3, None)
    clock.now += module.LASTS_S + 1
    with pytest.raises(Conflict, match="expired"):
        uploads.end("local", late.upload_id, "cancelled")


def test_what_lapses_goes(uploads: UploadStore, clock: Clock, tmp_path: Path) -> None:
    upload = uploads.create("local", "a.bin", "user_data", 1, None)
    uploads.add_part("local", upload.upload_id, io.BytesIO(b"x"))
    clock.now += module.LASTS_S - 1
    assert uploads.expire() == 0
    clock.now += 1
    assert uploads.get("local", upload.upload_id).status == "expired"
    with pytest.raises(Conflict, match="expired"):
        uploads.add_part("local", upload.upload_id, io.BytesIO(b"x"))
    assert uploads.expire() == 1
    assert parts_on_disk(tmp_path) == []
    folder = next((tmp_path / "files").iterdir())
    (folder / "part_lost").write_bytes(b"x")  # a kill between bytes and row
    uploads.expire()
    assert parts_on_disk(tmp_path) == ["part_lost"]
    clock.now += 3_601
    uploads.expire()
    assert parts_on_disk(tmp_path) == []


def test_forgetting_a_tenant(uploads: UploadStore, tmp_path: Path) -> None:
    for tenant in ("mine", "other"):
        upload = uploads.create(tenant, "a.bin", "user_data", 1, None)
        uploads.add_part(tenant, upload.upload_id, io.BytesIO(b"x"))
    uploads.forget_tenant("mine")
    assert len(parts_on_disk(tmp_path)) == 1
