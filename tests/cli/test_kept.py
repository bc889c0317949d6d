"""`perilune documents`, `feedback export`, `ps` over a server, and the shells that complete the command."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import openai
import pytest

from perilune.cli.client import RunningServer, announce_server
from tests.api.conftest import Serve
from tests.cli.conftest import START, Command, environment


async def run(home: Path, *words: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *START, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment(home)
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def test_documents_of_the_server(serve: Serve, tmp_path: Path) -> None:
    async with serve() as server:
        url = f"http://{server.host}:{server.port}"
        announce_server(tmp_path, RunningServer(url, os.getpid(), "fake-model"))
        made = await server.client.files.create(file=("a.txt", b"text"), purpose="user_data")
        code, out = await run(tmp_path, "ps", "--json")
        assert (code, json.loads(out)["url"]) == (0, url)
        code, out = await run(tmp_path, "documents", "ls", "--json")
        assert (code, [each["file_id"] for each in json.loads(out)["documents"]]) == (0, [made.id])
        assert (await run(tmp_path, "documents", "delete", made.id, "--json"))[0] == 0
        assert (await run(tmp_path, "documents", "rm", made.id))[0] == 1
        with pytest.raises(openai.NotFoundError):
            await server.client.files.retrieve(made.id)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_verbs(command: Command, shell: str) -> None:
    script = command("--show-completion", shell)
    assert script.code == 0
    assert "_COMPLETE" in script.out or "complete" in script.out
    words = {"bash": {"COMP_WORDS": "perilune docu", "COMP_CWORD": "1"}, "zsh": {}, "fish": {}}[shell]
    more = {"_TYPER_COMPLETE_ARGS": "perilune docu", "_TYPER_COMPLETE_FISH_ACTION": "get-args", **words}
    done = command(_PERILUNE_COMPLETE=f"complete_{shell}", **more)
    assert "documents" in done.out, done
