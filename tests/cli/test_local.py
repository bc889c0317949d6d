"""`ask` without a server: the real default model in the command's own process, in a home folder that persists."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Done, start

MODEL = "smollm2-135m-instruct"
LEASE = (
    "Lease between Ada Moor and the city of Brill. The rent is 940 crowns a month. "
    "Rent is due on the third day of each month. Whoever pays late owes a fee of twelve crowns. "
    "The notice period is ninety days. Dogs are allowed; geese are not.\n\n"
)
# Machines that run tests are slow and busy: plans must not depend on it.
SETTINGS = {
    "PERILUNE_KV_CACHE__RAM": "256M",
    "PERILUNE_DEADLINES__INTERACTIVE_S": "300",
    "PERILUNE_RUNTIME__THREADS": "1",  # two that share a busy core wait for each other (docs/log.md)
}


@pytest.fixture
def home(tmp_path: Path, smollm2_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / MODEL).symlink_to(smollm2_path.parent)
    return tmp_path


async def ask(home: Path, *words: str) -> Done:
    process = await start(home, "ask", *words, **SETTINGS)
    out, err = await asyncio.wait_for(process.communicate(), 170)
    return Done(process.returncode or 0, out.decode(), err.decode())


async def asked(home: Path, *words: str) -> dict[str, Any]:
    done = await ask(home, *words, "--json")
    assert done.code == 0, done.err
    assert done.err == ""
    result: dict[str, Any] = json.loads(done.out)
    return result


async def test_the_second_process_finds_the_document_warm(home: Path) -> None:
    (home / "lease.txt").write_text(LEASE * 8)
    words = ("lease.txt", "What is the rent?", "--max-tokens", "12")
    first = await asked(home, *words, "--wait")
    again = await asked(home, *words)
    assert first["files"][0]["status"] == again["files"][0]["status"] == "processed"
    assert again["files"][0]["id"] == first["files"][0]["id"]
    assert again["perilune"]["plan"] == "warm"
    assert again["perilune"]["tokens"]["cached"]["disk"] > 300
    assert again["answer"] == first["answer"], "restored KV gives the answer that computed KV gave"
    assert again["elapsed"]["first_token_s"] < first["elapsed"]["first_token_s"] + 5
    assert first["perilune"]["citations"]


async def test_ctrl_c_stops_ingest_and_the_next_command_resumes_it(home: Path) -> None:
    (home / "lease.txt").write_text(LEASE * 45)  # about 2,500 tokens
    process = await start(home, "ask", "lease.txt", "What is the rent?", "--wait", **SETTINGS)
    assert process.stderr is not None
    seen = b""
    async with asyncio.timeout(120):
        while b"prefilling" not in seen:
            line = await process.stderr.readline()
            assert line, seen
            seen += line
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 130, err
    assert b"Traceback" not in seen + err
    result = await asked(home, "lease.txt", "What is the rent?", "--max-tokens", "4", "--policy", "refined")
    [file] = result["files"]
    assert file["status"] == "processed", "the ingest was finished before the command ended"
    assert result["perilune"]["plan"] == "refined"


async def test_a_damaged_document_says_why(home: Path) -> None:
    (home / "broken.pdf").write_bytes(b"%PDF-1.7\nnothing more")
    done = await ask(home, "broken.pdf", "What is it about?")
    assert done.code == 2
    assert "broken.pdf can't be used" in done.err
    assert done.out == ""


async def test_a_base_model_can_not_answer(home: Path, gemma_path: Path) -> None:
    done = await ask(home, "--model", str(gemma_path), "Who are you?")
    assert done.code in (1, 2)
    assert "template" in done.err


async def test_a_truncated_model_says_so(home: Path, smollm2_path: Path) -> None:
    (home / "cut.gguf").write_bytes(smollm2_path.read_bytes()[:3_000_000])
    done = await ask(home, "--model", "./cut.gguf", "Who are you?")
    assert done.code == 1
    assert "Traceback" not in done.err
    assert "error:" in done.err
