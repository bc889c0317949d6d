"""Keys open the door for one tenant; what is stored opens nothing."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from perilune.core import KeyLimits
from perilune.errors import ConfigError, InvalidRequest, NotFound, Unauthenticated
from perilune.memory.keys import KeyOwner, Keyring
from perilune.memory.store import DATABASE_FILE, Store


@pytest.fixture
def now() -> list[float]:
    return [1_000.0]


@pytest.fixture
def keyring(store: Store, tmp_path: Path, now: list[float]) -> Keyring:
    return Keyring(store, tmp_path, clock=lambda: now[0])


def test_without_keys_everybody_is_the_local_admin(keyring: Keyring) -> None:
    for key in (None, "", "anything"):
        assert keyring.authenticate(key) == KeyOwner("local", "admin", None)
    assert not keyring.exist()


def test_a_key_speaks_for_its_tenant(keyring: Keyring) -> None:
    key, info = keyring.create("acme", "laptop", "read-only", deadline_s=2.5)
    assert key.startswith("pl-")
    assert len(key) == 46
    assert keyring.authenticate(key) == KeyOwner("acme", "read-only", 2.5, info.key_id)
    assert keyring.list() == [info] or keyring.list()[0].key_id == info.key_id


@pytest.mark.parametrize("wrong", [None, "", "pl-", "pl-" + "A" * 43, "x" * 10_000, "pl-\ud800", "' OR 1=1 --"])
def test_wrong_keys(keyring: Keyring, wrong: str | None) -> None:
    keyring.create()
    with pytest.raises(Unauthenticated):
        keyring.authenticate(wrong)


def test_revoked_keys_stay_out_and_the_door_stays_shut(keyring: Keyring) -> None:
    key, info = keyring.create(role="admin")
    keyring.revoke(info.key_id)
    keyring.revoke(info.key_id)
    for caller in (key, None):
        with pytest.raises(Unauthenticated):
            keyring.authenticate(caller)
    assert keyring.list()[0].revoked_at == 1_000.0
    with pytest.raises(NotFound) as unknown:
        keyring.revoke("key-none")
    assert "perilune keys ls" in unknown.value.hint  # the verb that there is


def test_last_use_is_noted_once_a_minute(keyring: Keyring, now: list[float]) -> None:
    key, _ = keyring.create()
    for moment, noted in ((2_000.0, 2_000.0), (2_030.0, 2_000.0), (2_061.0, 2_061.0)):
        now[0] = moment
        keyring.authenticate(key)
        assert keyring.list()[0].last_used_at == noted


def test_nothing_stored_opens_the_door(keyring: Keyring, store: Store, tmp_path: Path) -> None:
    key, _ = keyring.create()
    store.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert tmp_path / DATABASE_FILE in files
    assert not any(key.encode() in path.read_bytes() for path in files)
    pepper = tmp_path / "pepper"
    assert stat.S_IMODE(pepper.stat().st_mode) == 0o600
    assert pepper.read_bytes() not in (tmp_path / DATABASE_FILE).read_bytes()


def test_two_processes_that_make_the_first_key_at_once(store: Store, tmp_path: Path) -> None:
    """The other one's file and key come between two looks of this one."""
    other = Keyring(store, tmp_path)

    class Slow(Keyring):
        def exist(self) -> bool:
            other.create("acme")
            return super().exist()

    key, made = Slow(store, tmp_path).create("acme")
    assert other.authenticate(key).key_id == made.key_id


def test_lost_pepper_is_named(keyring: Keyring, tmp_path: Path) -> None:
    key, _ = keyring.create()
    (tmp_path / "pepper").unlink()
    for call in (lambda: keyring.authenticate(key), keyring.create):
        with pytest.raises(ConfigError, match="pepper"):
            call()


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": "root"},
        {"tenant": ""},
        {"tenant": "../x"},
        {"tenant": "UPPER"},
        {"tenant": "a" * 65},
        {"name": "x" * 200},
        {"name": "a\nb"},
        {"deadline_s": 0.0},
        {"deadline_s": float("nan")},
        {"deadline_s": float("inf")},
    ],
)
def test_bad_arguments(keyring: Keyring, wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        keyring.create(**wrong)  # type: ignore[arg-type]
    assert not keyring.exist()


def test_tenant_secrets_differ_and_last(store: Store, tmp_path: Path) -> None:
    one = Keyring(store, tmp_path)
    first, second = one.tenant_secret("a"), one.tenant_secret("b")
    assert len(first) == 32
    assert first != second
    assert Keyring(store, tmp_path).tenant_secret("a") == first
    with pytest.raises(InvalidRequest):
        one.tenant_secret("no such/tenant")


def test_tenant_secret_is_made_once_by_racing_threads(store: Store, tmp_path: Path) -> None:
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(Keyring(store, tmp_path).tenant_secret("race")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_known_key_is_found_at_once_until_anything_is_written(
    keyring: Keyring, store: Store, tmp_path: Path
) -> None:
    key, info = keyring.create("acme", deadline_s=2.5)
    assert keyring.known(key) is None  # never looked up
    keyring.authenticate(key)  # notes that the key was used, which is a change
    assert keyring.known(key) is None
    owner = keyring.authenticate(key)
    assert keyring.known(key) == owner
    assert keyring.known(None) is None
    assert keyring.known("pl-other") is None
    other = Store(tmp_path)  # as another process would
    Keyring(other, tmp_path).revoke(info.key_id)
    other.close()
    assert keyring.known(key) is None
    with pytest.raises(Unauthenticated):
        keyring.authenticate(key)
    assert keyring.known(key) is None


def test_limits_are_set_shown_and_lifted(keyring: Keyring) -> None:
    key, info = keyring.create(limits=KeyLimits(requests_per_minute=60, budget=0.0))
    assert keyring.authenticate(key).limits == KeyLimits(requests_per_minute=60, budget=0.0)
    changed = keyring.set_limits(info.key_id, {"requests_per_minute": None, "tokens_per_day": 1000})
    assert changed.limits == KeyLimits(tokens_per_day=1000, budget=0.0)
    assert keyring.known(key) is None
    assert keyring.authenticate(key).limits == keyring.list()[0].limits == changed.limits
    with pytest.raises(NotFound):
        keyring.set_limits("key-none", {})
    for wrong in (0, -5, float("inf"), float("nan")):
        with pytest.raises(InvalidRequest):
            keyring.set_limits(info.key_id, {"tokens_per_minute": wrong})
