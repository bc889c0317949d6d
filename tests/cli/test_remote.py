"""`ask` and `chat` through a running server: the real command, the real API, a scripted service behind it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perilune.cli.client import SERVER_FILE, RunningServer, announce_server, find_server
from perilune.cli.ports import local_url
from perilune.core import ContextPolicy, FilePart, FileStatus
from perilune.errors import ContextTooLong
from perilune.service.ports import Caller
from tests.api.conftest import Serve, Server, eventually
from tests.api.fakes import MODEL, Fail, FakeService, Pause, opening
from tests.cli.conftest import Done, start


def announce(home: Path, server: Server) -> None:
    announce_server(home, RunningServer(f"http://127.0.0.1:{server.port}", os.getpid(), MODEL))


async def finished(process: asyncio.subprocess.Process, stdin: bytes = b"") -> Done:
    out, err = await asyncio.wait_for(process.communicate(stdin), 60)
    assert process.returncode is not None
    return Done(process.returncode, out.decode(), err.decode())


async def test_ingest_prints_a_line_for_each_document(serve: Serve, tmp_path: Path) -> None:
    for name in ("moon", "tide"):
        (tmp_path / f"{name}.txt").write_text(f"All about the {name}. " * 50)
    async with serve() as server:
        announce(tmp_path, server)
        process = await start(tmp_path, "ingest", "moon.txt", "tide.txt")
        documents = server.service.documents
        await eventually(lambda: len(documents.files) == 2)
        assert process.returncode is None
        documents.finish("file-1")
        record, content = documents.files["file-2"]
        documents.files["file-2"] = (replace(record, status=FileStatus.ERROR, error="It is a drawing."), content)
        done = await finished(process)
    assert done.code == 2
    assert done.out == "moon.txt: 12 pages, en, file-1\ntide.txt: It is a drawing.\n"
    assert "1 of 2 documents can't be used: tide.txt." in done.err


async def test_replacing_deletes_earlier_versions_of_what_could_be_read(serve: Serve, tmp_path: Path) -> None:
    names = ("moon.txt", "tide.txt", "sun.txt")

    async def ingest(server: Any, ids: list[str], *options: str, error: str = "") -> Done:
        for name in names[: len(ids)]:
            (tmp_path / name).write_text(f"{ids} of {name}. " * 50)
        process = await start(tmp_path, "ingest", *names[: len(ids)], *options)
        documents = server.service.documents
        await eventually(lambda: set(ids) <= set(documents.files))
        for file_id in ids:
            if file_id == error:
                record, content = documents.files[file_id]
                documents.files[file_id] = (replace(record, status=FileStatus.ERROR, error="Broken."), content)
            else:
                documents.finish(file_id)
        return await finished(process)

    async with serve() as server:
        announce(tmp_path, server)
        await ingest(server, ["file-1", "file-2", "file-3"])
        done = await ingest(server, ["file-4", "file-5"], "--replace", error="file-5")
        assert done.code == 2
        assert "earlier versions deleted: 1" in done.err
        assert set(server.service.documents.files) == {"file-2", "file-3", "file-4", "file-5"}


async def test_ask_uses_the_running_server(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "moon.txt").write_text("The far side of the moon. " * 50)
    async with serve() as server:
        announce(tmp_path, server)
        process = await start(
            tmp_path,
            "ask",
            "moon.txt",
            "Which side?",
            "--deadline",
            "0.3",
            "--policy",
            "refined",
            "--max-tokens",
            "9",
        )
        done = await finished(process)
        assert (done.code, done.out) == (0, "The answer is 42.\n")
        assert "plan: full, answer expected to start in 0.2 s (deadline 5 s)" in done.err
        assert '[moon.pdf p. 3] "the far side"' in done.err
        assert "32 found in cache" in done.err
        [request] = server.service.requests
        assert request.deadline_s == 0.3
        assert request.context_policy is ContextPolicy.REFINED
        assert request.sampling.max_tokens == 9
        assert request.messages[0].parts[0] == FilePart("file-1")
        assert request.messages[0].text == "Which side?"
        server.service.documents.finish("file-1")
        again = await finished(await start(tmp_path, "ask", "moon.txt", "Again?", "--json"))
        result = json.loads(again.out)
        assert again.err == ""
        assert result["answer"] == "The answer is 42."
        assert result["perilune"]["plan"] == "full"
        assert result["usage"]["cached_tokens"] == 32
        assert result["files"][0]["id"] == "file-1"
        assert 0 < result["elapsed"]["ready_s"] <= result["elapsed"]["first_token_s"] < 30
        assert len(server.service.documents.files) == 1, "an unchanged document is not uploaded again"


async def test_a_folder_becomes_one_document(serve: Serve, tmp_path: Path) -> None:
    tree = tmp_path / "project"
    (tree / "src").mkdir(parents=True)
    (tree / ".git").mkdir()
    (tree / "README.md").write_text("# Moon\r\nabout\n")
    (tree / "src" / "main.py").write_text("print('hello')\n")
    (tree / "src" / "logo.bin").write_bytes(b"\0\1\2")
    (tree / ".git" / "secret").write_text("hidden")
    async with serve() as server:
        announce(tmp_path, server)
        done = await finished(await start(tmp_path, "ask", "project", "What?", "--deadline", "0.2"))
        assert done.code == 0
        assert "1 files of project are left out" in done.err
        [(record, content)] = server.service.documents.files.values()
        assert record.filename == "project.txt"
        text = content.decode()
        assert text.index("project/README.md") < text.index("# Moon\nabout") < text.index("project/src/main.py")
        assert "hidden" not in text


async def test_ctrl_c_cancels_the_answer(serve: Serve, tmp_path: Path) -> None:
    async with serve(FakeService([*opening(), Pause(60)])) as server:
        announce(tmp_path, server)
        process = await start(tmp_path, "ask", "How long?")
        await asyncio.wait_for(server.service.reached.wait(), 30)
        process.send_signal(signal.SIGINT)
        done = await finished(process)
        assert done.code == 130
        assert "Traceback" not in done.err
        await eventually(lambda: server.service.open == 0)


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ([Fail(ContextTooLong("9,000 tokens are more than 8,192.", hint="Ask for less."))], 5, "8,192"),
        ([*opening(), Fail(RuntimeError("boom"))], 1, "failed"),
    ],
)
async def test_errors_come_back_as_they_were(
    serve: Serve, tmp_path: Path, script: list[object], code: int, said: str
) -> None:
    async with serve(FakeService(script)) as server:  # type: ignore[arg-type]
        announce(tmp_path, server)
        done = await finished(await start(tmp_path, "ask", "Too long?"))
        assert done.code == code
        assert said in done.err
        assert "boom" not in done.err


async def test_a_server_that_needs_a_key(serve: Serve, tmp_path: Path) -> None:
    service = FakeService(keys={"pl-good": Caller("local", "user")})
    async with serve(service) as server:
        announce(tmp_path, server)
        refused = await finished(await start(tmp_path, "ask", "Who?"))
        assert refused.code == 4
        allowed = await finished(await start(tmp_path, "ask", "Who?", PERILUNE_API_KEY="pl-good"))
        assert (allowed.code, allowed.out) == (0, "The answer is 42.\n")


async def test_another_model_than_the_servers(serve: Serve, tmp_path: Path) -> None:
    async with serve() as server:
        announce(tmp_path, server)
        done = await finished(await start(tmp_path, "ask", "What?", "--model", "other"))
        assert done.code == 1
        assert f"kill {os.getpid()}" in done.err
        blocked = await finished(await start(tmp_path, "kv", "ls"))
        assert (blocked.code, "running server" in blocked.err) == (1, True)
        assert not server.service.requests


async def test_chat_remembers_the_conversation(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "moon.txt").write_text("The far side of the moon.")
    async with serve() as server:
        announce(tmp_path, server)
        process = await start(tmp_path, "--set", "deadlines.interactive_s=0.2", "chat", "moon.txt")
        done = await finished(process, b"First?\nSecond?\n/new\nThird?\n/quit\n")
        assert (done.code, done.out) == (0, "The answer is 42.\n" * 3)
        first, second, third = server.service.requests
        assert [message.role for message in second.messages] == ["user", "assistant", "user"]
        assert second.messages[0] == first.messages[0]
        assert second.messages[1].text == "The answer is 42."
        assert second.messages[2].file_ids == ()
        assert [message.text for message in third.messages] == ["Third?"]
        assert third.file_ids == ("file-1",)


async def test_a_dead_server_is_not_found(serve: Serve, tmp_path: Path) -> None:
    assert find_server(tmp_path) is None
    announce_server(tmp_path, RunningServer("http://127.0.0.1:9", os.getpid(), MODEL))
    assert find_server(tmp_path) is None
    assert (tmp_path / SERVER_FILE).stat().st_mode & 0o777 == 0o600
    announce_server(tmp_path, RunningServer("http://example.com", os.getpid(), MODEL))
    assert find_server(tmp_path) is None
    (tmp_path / SERVER_FILE).write_text("{")
    assert find_server(tmp_path) is None
    async with serve() as server:
        announce(tmp_path, server)
        found = await asyncio.to_thread(find_server, tmp_path)
        assert found is not None
        assert found.model == MODEL


async def test_a_proxy_does_not_hide_the_server(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with serve() as server:
        announce(tmp_path, server)
        assert await asyncio.to_thread(find_server, tmp_path) is not None


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("127.0.0.2", "http://127.0.0.2:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("192.0.2.7", "http://192.0.2.7:80"),
    ],
)
def test_announced_addresses_are_reachable_from_here(host: str, url: str) -> None:
    assert local_url(host, 80) == url


@pytest.mark.parametrize("host", ["localhost", ""])
async def test_servers_bound_by_name_are_found(serve: Serve, tmp_path: Path, host: str) -> None:
    async with serve() as server:
        url = local_url(host, server.port).replace("[::1]", "127.0.0.1")
        announce_server(tmp_path, RunningServer(url, os.getpid(), MODEL))
        assert await asyncio.to_thread(find_server, tmp_path) is not None


async def test_a_key_is_never_sent_to_another_machine(tmp_path: Path) -> None:
    for url in ("http://192.0.2.7:80", "http://127.0.0.1.example.com:80", "http://localhost@192.0.2.7:80"):
        announce_server(tmp_path, RunningServer(url, os.getpid(), MODEL))
        assert find_server(tmp_path) is None


async def test_kv_health_of_a_running_server(serve: Serve, tmp_path: Path) -> None:
    async with serve() as server:
        announce(tmp_path, server)
        done = await finished(await start(tmp_path, "kv", "health", "--debug", "--steps", "1"))
        assert done.code == 0, done.err
        assert server.service.kv.on
        assert "attention.window_size: Tokens that are always read exactly take 70% of a decode step" in done.out
        assert "HOT        3 MiB" in done.out
        assert "WARM is 71% smaller than fp32, 1.72 times smaller than bf16" in done.out
        assert "300 found in RAM, 100 brought back from disk, 400 computed (50% reused)" in done.out
        assert "step 10: 2 sequences, 9,000 tokens, 2.0 ms" in done.out
        told = json.loads((await finished(await start(tmp_path, "kv", "health", "--no-debug", "--json"))).out)
        assert not server.service.kv.on
        assert told["findings"][0]["code"] == "local_attention"


async def test_kv_health_needs_an_admin(serve: Serve, tmp_path: Path) -> None:
    keys = {"worker": Caller("acme", "user")}
    async with serve(FakeService(keys=keys)) as server:
        announce(tmp_path, server)
        done = await finished(await start(tmp_path, "kv", "health", PERILUNE_API_KEY="worker"))
        assert done.code == 4
        assert "admin" in done.err
