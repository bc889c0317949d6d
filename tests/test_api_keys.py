"""Keys come from the environment, and a bad one is told when the server starts, not with every request."""

from __future__ import annotations

from pathlib import Path

import pytest

from perilune.api_keys import api_key
from perilune.config import MemorySettings
from perilune.errors import ConfigError
from perilune.memory.memory import Memory
from perilune.memory.store import Store


def test_a_key_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-1")
    assert api_key("SOME_KEY", whose="It", param="p") == "sk-1"
    assert api_key("", whose="It", param="p") == ""


@pytest.mark.parametrize("key", ["", "secret\n", "schlüssel", "a\tb"])
@pytest.mark.parametrize("room", ["embedder", "reranker"])
def test_a_key_that_is_none_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, room: str
) -> None:
    monkeypatch.setenv("SOME_KEY", key)
    settings = MemorySettings(embedder="off").model_copy(
        update={room: "http://127.0.0.1:9/v1", f"{room}_key_env": "SOME_KEY"}
    )
    store = Store(tmp_path)
    with pytest.raises(ConfigError, match="SOME_KEY") as raised:
        Memory.open(store, tmp_path, settings)
    store.close()
    assert raised.value.param == f"memory.{room}_key_env"
    assert not key or key not in raised.value.message
