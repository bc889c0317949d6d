"""`runtime.backend: llamacpp` behind the real command: the default model answers about a file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Done, start
from tests.cli.test_local import LEASE, SETTINGS
from tests.cli.test_local import home as home  # the default model in a home of the test

pytest.importorskip("llama_cpp", reason="the extra `llamacpp` isn't installed")
LLAMACPP = SETTINGS | {"PERILUNE_RUNTIME__BACKEND": "llamacpp"}


async def command(home: Path, *words: str, **more: str) -> Done:
    process = await start(home, *words, **LLAMACPP, **more)
    out, err = await asyncio.wait_for(process.communicate(), 170)
    return Done(process.returncode or 0, out.decode(), err.decode())


async def test_ask_answers_about_a_file(home: Path) -> None:
    (home / "lease.txt").write_text(LEASE * 8)
    done = await command(home, "ask", "lease.txt", "What is the rent?", "--max-tokens", "12", "--wait", "--json")
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    assert result["answer"].strip()
    assert result["perilune"]["plan"] == "warm"
    assert result["perilune"]["tokens"]["cached"]["ram"] > 300, "the ingest's blocks are shared"
    assert not (home / "kv").exists(), "no disk tier"


async def test_doctor_names_it_and_sees_one_openmp_runtime(home: Path) -> None:
    done = await command(home, "doctor", "--json", PERILUNE_SERVER__PORT="0")
    checks = {check["name"]: check for check in json.loads(done.out)["checks"]}
    assert checks["backend"]["state"] == "ok"
    assert "llama.cpp" in checks["backend"]["detail"]
    assert checks["openmp"]["state"] == "ok", checks["openmp"]


async def test_settings_that_it_cannot_follow_are_named(home: Path) -> None:
    (home / "lease.txt").write_text(LEASE)
    done = await command(home, "ask", "lease.txt", "Hm?", PERILUNE_MODEL__DTYPE="fp32")
    assert done.code != 0
    assert "model.dtype is fp32" in done.err
