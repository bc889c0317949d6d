"""The command line as people and scripts meet it: help, exit codes, errors that say what to do."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from tests.cli.conftest import START, Command, environment

BARE = "import typer\napp = typer.Typer()\n@app.command()\ndef f(): ...\napp(['--help'])"


def cpu_s(arguments: list[str], home: Path) -> float:
    """Least CPU time of three runs: another busy process must not fail this test."""
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(arguments, capture_output=True, env=environment(home), check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(spent)


def test_help_is_fast_and_loads_nothing_heavy(command: Command, tmp_path: Path) -> None:
    bare = cpu_s([sys.executable, "-c", BARE], tmp_path)
    assert cpu_s([*START, "--help"], tmp_path) < max(0.3, 1.5 * bare)
    done = command("--help")
    assert done.code == 0
    for verb in ("ask", "chat", "serve", "pull", "models", "doctor", "config", "kv", "keys", "version"):
        assert verb in done.out
    code = "import sys, perilune.cli.main\nprint(sorted({'torch','pydantic','aiohttp','numpy'} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert loaded.stdout.strip() == "[]"


@pytest.mark.parametrize("verb", ["ask", "chat", "serve", "pull", "models", "doctor", "keys create", "kv rm"])
def test_every_verb_explains_itself(call: Command, verb: str) -> None:
    done = call(*verb.split(), "--help")
    assert done.code == 0
    assert "--help" in done.out


def test_version(call: Command) -> None:
    done = call("version")
    assert done.code == 0
    assert Version(done.out.strip())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nonsense"], 2, "No such command"),
        (["ask"], 2, "Missing argument"),
        (["ask", "--policy", "guess", "q"], 2, "auto, full, refined"),
        (["ask", "missing.pdf", "What?"], 1, "no file missing.pdf"),
        (["ask", "  "], 2, "question is empty"),
        (["pull", "smollm3"], 1, "perilune pull smollm2"),
        (["pull", "hf:only-this"], 2, "hf:owner/repo/file.gguf"),
        (["models", "rm", "nothing"], 1, "not installed"),
        (["serve"], 1, "perilune pull smollm2-135m-instruct"),
        (["serve", "no/such/model.gguf"], 1, "no model file"),
        (["serve", "--dtype", "fp8"], 2, "bf16 or fp32"),
        (["serve", "a", "--model", "b"], 2, "Two models"),
        (["--set", "kv_cache.disk_quota", "config", "show"], 2, "--set kv_cache.disk_quota=5G"),
        (["--set", "kv_cache.no_such=1", "config", "show"], 2, "kv_cache.no_such"),
        (["kv", "rm"], 2, "--all"),
        (["kv", "rm", "file-x"], 1, "kv ls"),
        (["keys", "revoke", "key-x"], 1, "no key"),
        (["keys", "create", "--role", "king"], 2, "read-only"),
    ],
)
def test_errors_have_a_code_and_a_next_step(call: Command, arguments: list[str], code: int, said: str) -> None:
    done = call(*arguments)
    assert (done.code, done.out) == (code, "")
    assert said in " ".join(done.err.split())
    assert "Traceback" not in done.err


def test_an_existing_file_alone_is_no_question(call: Command, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    done = call("ask", "a.txt")
    assert done.code == 2
    assert "Nothing was asked" in done.err


def test_empty_and_broken_models_and_documents(call: Command, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    done = call("ask", "empty.txt", "What?")
    assert (done.code, "is empty" in done.err) == (2, True)
    (tmp_path / "broken.gguf").write_bytes(b"not a model")
    done = call("serve", "./broken.gguf")
    assert (done.code, "not a GGUF file" in done.err) == (1, True)
    (tmp_path / "folder").mkdir()
    done = call("ask", "folder", "What?")
    assert (done.code, "holds no text files" in done.err) == (2, True)


def test_a_port_in_use_names_its_owner(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "smollm2-135m-instruct"
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(b"GGUF")
    card = {"name": folder.name, "file": "m.gguf", "aliases": [], "languages": [], "window_tokens": 8192}
    (folder / "model.json").write_text(json.dumps({"model": card, "source": "test", "verified": "pinned"}))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = command("serve", "--port", str(port))
        assert done.code == 1
        assert f"Port {port} on 127.0.0.1 is used by" in done.err
        assert f"process {os.getpid()}" in done.err
        assert f"perilune serve --port {port + 1}" in done.err
    done = command("serve", "--max-model-len", "9000")
    assert (done.code, "8,192 tokens" in done.err) == (2, True)


def test_config_says_where_values_come_from(call: Command, tmp_path: Path) -> None:
    (tmp_path / "perilune.yaml").write_text("server: {port: 7000}\nkv_cache: {disk_quota: 3G}\n")
    done = call(
        "--set", "kv_cache.disk_quota=1G", "config", "show", "--origin", "--json", PERILUNE_MODEL__DTYPE="fp32"
    )
    shown = json.loads(done.out)
    assert (shown["server.port"]["value"], shown["server.port"]["origin"]) == (7000, "perilune.yaml")
    assert (shown["kv_cache.disk_quota"]["value"], shown["kv_cache.disk_quota"]["origin"]) == (
        1024**3,
        "command line",
    )
    assert shown["model.dtype"]["origin"] == "environment"
    assert shown["home"]["value"] == str(tmp_path)
    assert all(entry["description"] for entry in shown.values())
    plain = call("config", "show", "--origin")
    assert "perilune.yaml" in plain.out
    schema = json.loads(call("config", "schema").out)
    assert "KVCacheSettings" in schema["$defs"]
    (tmp_path / "perilune.yaml").write_text("server: {prt: 1}\n")
    wrong = call("config", "show")
    assert (wrong.code, "server.prt" in wrong.err) == (2, True)


def test_keys_are_shown_once(call: Command) -> None:
    assert "No keys" in call("keys", "ls").err
    made = call("keys", "create", "--tenant", "acme", "--role", "admin", "--name", "laptop")
    key = made.out.strip()
    assert made.code == 0
    assert key.startswith("pl-")
    [listed] = json.loads(call("keys", "ls", "--json").out)
    assert (listed["tenant"], listed["role"], listed["name"]) == ("acme", "admin", "laptop")
    assert key not in json.dumps(listed)
    assert call("keys", "revoke", listed["id"]).code == 0
    assert "revoked" in call("keys", "ls").out


def test_the_audit_tells_who_made_and_revoked_keys(call: Command) -> None:
    assert "No key was made" in call("keys", "audit").err
    call("keys", "create", "--tenant", "acme")
    [listed] = json.loads(call("keys", "ls", "--json").out)
    call("keys", "revoke", listed["id"])
    entries = json.loads(call("keys", "audit", "--json").out)
    told = [(entry["action"], entry["tenant"], entry["subject"], entry["outcome"]) for entry in entries]
    assert told == [("key.create", "acme", listed["id"], "done"), ("key.revoke", "acme", listed["id"], "done")]
    assert all(entry["actor"].startswith("user:") and entry["at"] > 0 for entry in entries)
    assert "key.revoke" in call("keys", "audit", "--limit", "1").out


def test_kv_of_an_empty_home(call: Command) -> None:
    done = call("kv", "ls")
    assert done.code == 0
    assert "of 20.0 GiB used" in done.err
    assert json.loads(call("kv", "ls", "--json").out)["entries"] == []
    assert call("kv", "rm", "--all").code == 0


def test_models_before_anything_is_installed(call: Command) -> None:
    done = call("models")
    assert done.code == 0
    assert "smollm2-135m-instruct  available" in done.out
    assert "perilune pull" in done.err
    shown = json.loads(call("models", "--json").out)
    assert shown["installed"] == []
    assert "gemma3-270m" in [entry["name"] for entry in shown["available"]]


def test_a_download_that_can_not_work_is_unreachable(call: Command) -> None:
    done = call("pull", "qwen3", "--source", "hf", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.code == 3
    assert "HF_ENDPOINT" in done.err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["nonsense"], 2), (["kv", "rm", "file-x"], 1), (["pull", "smollm3"], 1), (["config", "schema"], 0)],
)
def test_the_process_ends_with_the_code(command: Command, arguments: list[str], code: int) -> None:
    done = command(*arguments)
    assert done.code == code
    assert "Traceback" not in done.err
    assert bool(done.out) == (code == 0)


def test_shell_completion(command: Command) -> None:
    done = command("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.code == 0
    assert "complete" in done.out


def test_output_into_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*START, "config", "schema"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path),
    )
    assert process.stdout is not None
    process.stdout.close()
    _, error = process.communicate(timeout=30)
    assert b"Traceback" not in error
    assert process.returncode == 1
