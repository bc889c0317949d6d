"""Settings: precedence and origins, sizes, errors that name source and key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune import config
from perilune.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_user_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def test_later_sources_win_and_origins_say_so(tmp_path: Path) -> None:
    config.user_file().parent.mkdir(parents=True)
    config.user_file().write_text("server: {port: 1}\nruntime: {threads: 3, max_batch_size: 4}\n")
    Path("perilune.yaml").write_text("server: {port: 2}\nruntime: {threads: 1}\n")
    settings, origins = config.load(
        flags={"server.port": 5, "server.host": None}, environ={"PERILUNE_RUNTIME__THREADS": "2"}
    )
    assert settings.server.port == 5
    assert settings.server.host == "127.0.0.1"
    assert settings.runtime.threads == 2
    assert settings.runtime.max_batch_size == 4
    assert origins == {
        "server.port": "command line",
        "runtime.threads": "environment",
        "runtime.max_batch_size": str(config.user_file()),
    }


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("server: {port: 99999}", "server.port"),
        ("sever: {port: 1}", "sever"),
        ("server: [1]", "server"),
        ("- 1", "top level"),
        ("server: {port: ", "YAML"),
    ],
)
def test_a_bad_file_is_named_with_its_key(text: str, names: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(file=path, environ={})
    assert names in str(caught.value)
    assert caught.value.hint


@given(st.integers(0, 1 << 20), st.sampled_from(["", "K", "M", "G"]), st.sampled_from(["", "B", "iB"]))
def test_sizes_are_powers_of_1024(number: int, unit: str, suffix: str) -> None:
    if suffix == "iB" and not unit:
        suffix = "B"
    assert config.parse_size(f"{number}{unit}{suffix}") == number * 1024 ** " KMG".index(unit or " ")


def test_every_setting_has_help() -> None:
    assert all(text for _, text in config.describe())


def test_settings_are_frozen() -> None:
    settings, _ = config.load(environ={})
    with pytest.raises(Exception, match="frozen"):
        settings.server.port = 1  # type: ignore[misc]


def test_weights_are_set_by_module_in_a_file_or_a_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model:\n  decode_weights:\n    default: stored\n    lm_head: bf16\n")
    told = {"default": "stored", "lm_head": "bf16"}
    assert config.load(file, {}, {})[0].model.decode_weights == told
    assert (
        config.load(None, {"model.decode_weights": "default=stored, lm_head=bf16"}, {})[0].model.decode_weights
        == told
    )
    environment = {"PERILUNE_MODEL__DECODE_WEIGHTS": "mlp=int8"}
    assert config.load(None, {}, environment)[0].model.decode_weights == {"mlp": "int8"}
    for wrong in ("qkv=int8", "mlp=int4", "int4"):
        with pytest.raises(ConfigError, match="decode_weights"):
            config.load(None, {"model.decode_weights": wrong}, {})
