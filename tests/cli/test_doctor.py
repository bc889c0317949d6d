"""Every finding of `perilune doctor`: what is wrong, and the one command that fixes it."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from perilune.build.models import tier_settings
from perilune.cli import doctor
from perilune.cli.doctor import BASE_BYTES, Check, examine
from perilune.cli.ports import is_free, owner_of
from perilune.config import KVCacheSettings, ModelSettings, RuntimeSettings, ServerSettings, Settings
from perilune.errors import PeriluneError
from perilune.runtime import loader
from perilune.runtime.kv.spec import KVSpec
from tests.cli.conftest import Command

FACTS: dict[str, Any] = {
    "torch": "2.13.0+cpu",
    "torch_cuda": None,
    "cuda_available": False,
    "kernels": "native, AVX-512",
    "openmp": ["/x/libgomp.so.1"],
    "architecture": "llama",
    "window_tokens": 8192,
    "weights_bytes": 400 << 20,
    "prefill_bytes": 270 << 20,
    "kv_token_bytes": 23_040,
    "chat_template": True,
    "tiers": None,
}


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    return Settings(home=tmp_path / "home", model=ModelSettings(path=str(model)), server=ServerSettings(port=0))


def examined(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, free: int = 8 << 30, **facts: Any
) -> dict[str, Check]:
    """The checks where a child would have found `facts` beside the usual ones."""
    monkeypatch.setattr(doctor, "_probe", lambda settings, model: FACTS | facts)
    monkeypatch.setattr(doctor, "free_memory_bytes", lambda: free)
    return by_name(examine(settings))


def test_a_good_machine(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    checks = examined(monkeypatch, settings)
    assert {check.state for check in checks.values()} <= {"ok", "warning"}
    assert "needs" in checks["fit"].detail


def test_two_openmp_runtimes_fail(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    check = examined(monkeypatch, settings, openmp=["/a/libgomp.so.1", "/b/libiomp5.so"])["openmp"]
    assert check.state == "failed"
    assert "libiomp5.so" in check.detail
    assert check.fix


@pytest.mark.parametrize(
    ("free", "ram", "state", "said"),
    [
        (100 << 20, 0, "failed", "weights don't fit"),
        ((400 << 20) + BASE_BYTES + (300 << 20), 1 << 30, "failed", "KV pool doesn't fit"),
        (2 << 30, 32 << 20, "warning", "less than one window"),
        # The loader runs these: one copy of the weights, or no room for anything else.
        (500 << 20, 200 << 20, "warning", "only one copy of the weights"),
        (700 << 20, 200 << 20, "warning", "nothing is left for the process"),
        (8 << 30, 1 << 30, "ok", "weights 400 MiB"),
    ],
)
def test_fit_is_predicted(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, free: int, ram: int, state: str, said: str
) -> None:
    sized = settings.model_copy(update={"kv_cache": KVCacheSettings(ram=ram)})
    check = examined(monkeypatch, sized, free)["fit"]
    assert (check.state, said in check.detail) == (state, True)
    assert bool(check.fix) == (state == "failed" or "nothing is left" in said)


@pytest.mark.parametrize("free_mib", [250, 300, 360, 440, 500, 620, 900])
@pytest.mark.parametrize("ram_mib", [0, 64, 200])
def test_doctor_fails_exactly_what_the_loader_refuses(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, free_mib: int, ram_mib: int
) -> None:
    free, ram = free_mib << 20, ram_mib << 20
    spec = KVSpec(30, 3, 64, "bf16", "")
    facts = {"kv_token_bytes": spec.token_bytes}
    try:
        blocks = loader.block_count(spec, None, ram, free)
        refused = FACTS["prefill_bytes"] > free - blocks * spec.block_bytes  # WeightBuilder.build
    except PeriluneError:
        refused = True
    sized = settings.model_copy(update={"kv_cache": KVCacheSettings(ram=ram)})
    check = examined(monkeypatch, sized, free, **facts)["fit"]
    assert (check.state == "failed") == refused, check.detail


def test_other_findings(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    checks = examined(
        monkeypatch,
        settings,
        torch_cuda="13.0",
        kernels="PyTorch reference (no library)",
        chat_template=False,
    )
    assert (checks["torch"].state, "whl/cpu" in checks["torch"].fix) == ("warning", True)
    assert checks["kernels"].state == "warning"
    assert "chat template" in checks["model"].detail
    broken = examined(monkeypatch, settings, model_error="Broken.", model_hint="Get another.")
    assert broken["fit"].state == "failed"
    huge = settings.model_copy(update={"kv_cache": KVCacheSettings(disk_quota=1 << 60)})
    assert examined(monkeypatch, huge)["disk"].state == "warning"


def test_port_and_home(monkeypatch: pytest.MonkeyPatch, settings: Settings, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        owner = owner_of(port)
        assert owner is not None
        assert owner.pid == os.getpid()
        busy = settings.model_copy(update={"server": ServerSettings(port=port)})
        check = examined(monkeypatch, busy)["port"]
        assert (check.state, str(os.getpid()) in check.detail) == ("failed", True)
        assert check.fix == f"perilune serve --port {port + 1}"
    assert owner_of(port) is None
    (tmp_path / "file").touch()
    bad = settings.model_copy(update={"home": tmp_path / "file"})
    assert examined(monkeypatch, bad)["home"].state == "failed"


def test_this_machine_for_real(command: Command, tmp_path: Path) -> None:
    """The real child loads torch and the kernels: one OpenMP runtime, whatever else is missing here."""
    done = command("--set", "server.port=0", "doctor", "--json")
    shown = json.loads(done.out)
    checks = {check["name"]: check for check in shown["checks"]}
    assert checks["openmp"]["state"] == "ok", checks["openmp"]
    assert checks["torch"]["state"] in ("ok", "warning")
    assert (checks["model"]["state"], checks["model"]["fix"]) == ("failed", "perilune pull smollm2-135m-instruct")
    assert (done.code, shown["ok"]) == (1, False)


def test_llama_cpp_is_named_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    assert "backend" not in examined(monkeypatch, settings)
    asked = settings.model_copy(update={"runtime": RuntimeSettings(backend="llamacpp")})
    assert examined(monkeypatch, asked, backend="llama.cpp 1")["backend"] == Check("backend", "ok", "llama.cpp 1")
    missing = examined(monkeypatch, asked, backend_error="it can't be loaded.")["backend"]
    assert (missing.state, "GGML_OPENMP=OFF" in missing.fix) == ("failed", True)


TIERS = {
    "block_tokens": 40_960,
    "warm_tokens": 61_440,
    "cold_tokens": 20_480,
    "warm_bytes": 700 << 20,
    "cold_bytes": 240 << 20,
    "summary_bytes": 80 << 20,
}


def test_what_tiers_hold_is_told_by_tier(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    tiered = settings.model_copy(update={"kv_cache": KVCacheSettings(policy="tiered", ram=2 << 30, spill=1 << 20)})
    checks = examined(monkeypatch, tiered, tiers=TIERS)
    assert checks["fit"].state == "ok"
    for said in ("40,960 tokens bf16", "61,440 INT8", "80", "of summaries", "20,480 tokens more"):
        assert said in checks["fit"].detail
    short = examined(monkeypatch, tiered, tiers=TIERS | {"warm_tokens": 4096, "cold_tokens": 2048})
    assert "less than one window" in short["fit"].detail


def test_a_disk_without_room_for_the_cold_tier_fails(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    checks = examined(monkeypatch, settings, tiers=TIERS | {"cold_bytes": 1 << 60})
    assert checks["disk"].state == "failed"
    assert "kv_cache.spill=" in checks["disk"].fix


def test_the_probe_sizes_tiers_as_the_loader_does(smollm2_path: Path) -> None:
    told = loader.describe_model(smollm2_path, kv_bytes=1 << 30, tiers=tier_settings(TIERED, smollm2_path.parent))
    need = told.tiers
    assert need is not None
    assert 0.9 < (need.warm_bytes + need.summary_bytes) / (1 << 29) <= 1
    assert need.block_tokens * told.kv_token_bytes <= 1 << 29
    assert need.cold_bytes <= TIERED.spill
    assert need.warm_tokens > need.block_tokens, "INT8 holds more in the same room, beside the summaries of COLD"


TIERED = KVCacheSettings(policy="tiered")
