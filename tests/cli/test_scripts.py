"""What scripts rely on: one JSON document on stdout, no colours in a pipe, quiet ends, exit codes, documents from
stdin, the order of settings' origins, and completion in a real shell."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sized
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command

from perilune.cli.main import app
from perilune.core import TextDelta
from perilune.errors import ContextTooLong
from perilune.service.ports import Caller
from tests.api.conftest import Serve, eventually
from tests.api.fakes import Fail, FakeService, Pause, Step, opening
from tests.cli.conftest import START, Command, environment, start
from tests.cli.test_remote import announce, finished

TRACE = [{"timestamp": 500 * at, "input_length": 900, "output_length": 5, "hash_ids": [at]} for at in range(8)]

ALONE = {
    "models": (),
    "doctor": (),
    "config show": (),
    "kv ls": (),
    "kv rm": ("--all",),
    "keys create": (),
    "keys ls": (),
    "keys audit": (),
    "cost": (),
    "capacity": ("trace.jsonl", "--policy", "fcfs", "--minutes", "0.1"),
    "simulate": ("trace.jsonl", "--policy", "fcfs", "--seeds", "1", "--minutes", "0.1"),
}
"""Verbs with `--json` that need no server, with what they must be told."""

OF_A_KEY = ("keys limit", "keys revoke")
ELSEWHERE = {
    "ask": "test_remote",
    "ingest": "test_remote",
    "ps": "test_kept",
    "documents ls": "test_kept",
    "documents rm": "test_kept",
    "documents delete": "test_kept",
    "kv health": "test_remote",
    "models rm": "test_pulled_models",
    "pull": "test_pulled_models",
    **dict.fromkeys(("sessions ls", "sessions list", "sessions show", "sessions rm", "sessions delete"), "e2e"),
    **dict.fromkeys(("memory search", "memory show", "memory edit", "memory forget"), "e2e"),
    **dict.fromkeys(("batch run", "batch fetch", "batch list", "batch cancel"), "e2e"),
    **dict.fromkeys(("eval kv", "eval weights", "eval heads", "eval length"), "test_eval"),
    "bench replay": "test_replay",
}
"""Those whose JSON is read by other tests."""


def verbs_with_json() -> set[str]:
    root = get_command(app)
    assert isinstance(root, TyperGroup)
    found = set()
    for name, command in root.commands.items():
        subcommands = command.commands if isinstance(command, TyperGroup) else {}
        for words, each in ((name, command), *((f"{name} {sub}", each) for sub, each in subcommands.items())):
            if any("--json" in parameter.opts for parameter in each.params):
                found.add(words)
    return found


def test_no_verb_with_json_is_forgotten() -> None:
    assert verbs_with_json() == {*ALONE, *OF_A_KEY, *ELSEWHERE}


@pytest.mark.parametrize("verb", sorted(ALONE))
def test_stdout_is_one_json_document(call: Command, tmp_path: Path, verb: str) -> None:
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(each) + "\n" for each in TRACE))
    done = call(*verb.split(), *ALONE[verb], "--json")
    assert done.code in (0, 1), done.err  # doctor finds no model here
    assert json.loads(done.out) is not None


def test_keys_are_limited_and_revoked_in_json(call: Command) -> None:
    made = json.loads(call("keys", "create", "--json").out)
    limited = json.loads(call("keys", "limit", made["id"], "--rpm", "7", "--json").out)
    assert limited["limits"]["requests_per_minute"] == 7
    assert json.loads(call("keys", "revoke", made["id"], "--json").out) == {"id": made["id"], "revoked": True}


@pytest.mark.parametrize("words", [("keys", "revoke", "key-x"), ("ps",), ("kv", "rm", "x"), ("models", "rm", "x")])
def test_what_fails_leaves_stdout_empty(call: Command, words: tuple[str, ...]) -> None:
    done = call(*words, "--json")
    assert done.code in (1, 3)
    assert done.out == ""
    assert done.err.startswith("error: ")


@pytest.mark.parametrize("words", [("--help",), ("ask", "--help"), ("models",), ("nonsense",), ("serve",), ("ps",)])
def test_a_pipe_gets_no_colours(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Whatever the terminal can that this runs in."""
    colourful = environment(tmp_path, TERM="xterm-256color", COLORTERM="truecolor")
    for name in ("NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS"):
        colourful.pop(name, None)
    done = subprocess.run([*START, *words], capture_output=True, env=colourful, cwd=tmp_path)
    assert done.stdout + done.stderr
    assert b"\x1b" not in done.stdout + done.stderr
    assert b"\r" not in done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------- pipes


@pytest.mark.parametrize("words", ["config schema", "config show", "models", "--help"])
def test_head_ends_it_quietly(tmp_path: Path, words: str) -> None:
    line = f"{sys.executable} -m perilune.cli.main {words} | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment(tmp_path))
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == "" or "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("verb", ["ask", "chat"])
async def test_an_answer_whose_reader_leaves_is_stopped(serve: Serve, tmp_path: Path, verb: str) -> None:
    words: list[Step] = [TextDelta(0, "word\n" * 9), Pause(0.05)]
    async with serve(FakeService([*opening(), *words * 400])) as server:
        announce(tmp_path, server)
        process = await start(tmp_path, verb, *(["Tell me."] if verb == "ask" else []))
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"Tell me.\n")
        assert await process.stdout.readline() == b"word\n"
        process.stdout._transport.close()  # type: ignore[attr-defined]
        told = await process.stderr.read()
        assert await process.wait() == 1
        assert b"Traceback" not in told
        assert b"Exception ignored" not in told
        await eventually(lambda: server.service.open == 0)


async def test_a_document_from_stdin(serve: Serve, tmp_path: Path) -> None:
    async with serve() as server:
        announce(tmp_path, server)
        process = await start(tmp_path, "ask", "-", "What?", "--deadline", "0.2")
        done = await finished(process, b"The moon is far. " * 60)
        assert (done.code, done.out) == (0, "The answer is 42.\n")
        [(record, content)] = server.service.documents.files.values()
        assert (record.filename, content) == ("stdin", b"The moon is far. " * 60)
        empty = await finished(await start(tmp_path, "ask", "-", "What?"))
        assert (empty.code, "stdin is empty" in empty.err) == (2, True)


@pytest.mark.parametrize("words", [("ask", "-", "-", "What?"), ("ingest", "-", "-"), ("chat", "-")])
def test_there_is_one_stdin(call: Command, words: tuple[str, ...]) -> None:
    done = call(*words)
    assert (done.code, done.out) == (2, "")
    assert "stdin" in done.err


def test_what_was_piped_in_does_not_stay(command: Command, tmp_path: Path) -> None:
    """Where another document can't be read, either."""
    for name in ("spool", "empty"):
        (tmp_path / name).mkdir()
    done = command("ask", "-", "empty", "What?", stdin="A secret.\n", TMPDIR=str(tmp_path / "spool"))
    assert (done.code, "holds no text files" in done.err) == (2, True)
    assert not list((tmp_path / "spool").iterdir())


def _are(files: Sized, count: int) -> bool:
    return len(files) == count


async def test_local_only_documents(serve: Serve, tmp_path: Path) -> None:
    """One that was read before may leave: it isn't taken for one that may not."""
    (tmp_path / "moon.txt").write_text("All about the moon. " * 50)
    async with serve() as server:
        announce(tmp_path, server)
        documents = server.service.documents
        for at, options in enumerate(((), ("--local-only",), ("--local-only",))):
            process = await start(tmp_path, "ingest", "moon.txt", *options)
            await eventually(partial(_are, documents.files, min(2, at + 1)), 80)
            documents.finish(list(documents.files)[-1])
            done = await finished(process)
            assert done.code == 0, done.err
            assert list(documents.files.values())[-1][0].local_only is bool(options)
            assert ("documents rm file-1" in done.err) is (at == 1)
        assert len(documents.files) == 2


# -------------------------------------------------------------------------------------------- exit codes


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("version",), 0),
        (("kv", "rm", "file-x"), 1),
        (("nonsense",), 2),
        (("ingest", "empty.txt"), 2),
        (("ps",), 3),
    ],
)
def test_how_a_process_ends_without_a_server(
    command: Command, tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    (tmp_path / "empty.txt").touch()
    done = command(*words)
    assert done.code == code
    assert "Traceback" not in done.err


async def test_how_a_process_ends_with_a_server(serve: Serve, tmp_path: Path) -> None:
    too_long = Fail(ContextTooLong("9,000 tokens are more than 8,192.", hint="Ask for less."))
    async with serve(FakeService([too_long], keys={"pl-good": Caller("local", "user")})) as server:
        announce(tmp_path, server)
        assert (await finished(await start(tmp_path, "ask", "Who?"))).code == 4
        assert (await finished(await start(tmp_path, "ask", "Who?", PERILUNE_API_KEY="pl-good"))).code == 5
    async with serve(FakeService([*opening(), Pause(60)])) as server:
        announce(tmp_path, server)
        process = await start(tmp_path, "ask", "How long?")
        await eventually(lambda: server.service.open == 1, 30)
        process.send_signal(signal.SIGINT)
        stopped = await finished(process)
        assert stopped.code == 130
        assert stopped.err.endswith("interrupted\n")


# --------------------------------------------------------------------------------- settings, completion


def test_the_nearest_origin_wins(call: Command, tmp_path: Path) -> None:
    """Command line, environment, --config, ./perilune.yaml, the user's own file, the default."""
    mine = tmp_path / "config" / "perilune" / "perilune.yaml"
    mine.parent.mkdir(parents=True)
    files = {"given.yaml": 7003, "perilune.yaml": 7004, str(mine): 7005}
    for name, port in files.items():
        (tmp_path / name).write_text(f"server: {{port: {port}}}\n")
    show = ("config", "show", "--origin", "--json")
    ways: list[tuple[tuple[str, ...], dict[str, str], int, str]] = [
        (
            ("--config", "given.yaml", "--set", "server.port=7001"),
            {"PERILUNE_SERVER__PORT": "7002"},
            7001,
            "command",
        ),
        (("--config", "given.yaml"), {"PERILUNE_SERVER__PORT": "7002"}, 7002, "environment"),
        (("--config", "given.yaml"), {}, 7003, "given.yaml"),
        ((), {}, 7004, "perilune.yaml"),
        ((), {}, 7005, str(mine)),
        ((), {}, 8642, "default"),
    ]
    for words, more, port, origin in ways:
        if port == 7005:
            (tmp_path / "perilune.yaml").unlink()
        if port == 8642:
            mine.unlink()
        found = json.loads(call(*words, *show, **more).out)["server.port"]
        assert found["value"] == port
        assert origin in found["origin"]


COMPLETING = {
    "bash": """
        source <(perilune --show-completion bash)
        for typed in "docu" "keys au" "ask --dead"; do
            COMP_WORDS=(perilune $typed) COMP_CWORD=$(set -- $typed; echo $#)
            $(complete -p perilune | sed 's/.*-F \\([^ ]*\\).*/\\1/') perilune  # as bash calls it
            echo "${COMPREPLY[@]}"
        done
    """,
    "fish": """
        perilune --show-completion fish | source
        for typed in "docu" "keys au" "ask --dead"
            complete --do-complete "perilune $typed" | string split --fields 1 \\t
        end
    """,
    # At a terminal: what Tab adds to the line is read from its screen.
    "zsh": """
        zmodload zsh/zpty
        zpty shell zsh -f -i
        zpty -w shell 'PS1=; autoload -U compinit; compinit -u -D'
        zpty -w shell 'source <(perilune --show-completion zsh); echo o""k'
        zpty -r -m shell seen '*ok*'
        for typed rest in "docu" "ments" "keys au" "dit" "ask --dead" "line"; do
            zpty -n -w shell "perilune $typed"$'\\t'
            zpty -r -m shell seen "*$rest*" && print -r -- "${typed##* }$rest"
            zpty -n -w shell $'\\x15'
        done
        zpty -d shell
    """,
}
"""Shell -> what completes three beginnings there."""

UNCONFIGURED = {"bash": "--norc", "fish": "--no-config", "zsh": "-f"}


@pytest.mark.parametrize("name", COMPLETING)
def test_shells_complete(tmp_path: Path, name: str) -> None:
    """The script that --show-completion prints, sourced by the real shell."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    program = bin_folder / "perilune"
    program.write_text(f"#!{sys.executable}\nfrom perilune.cli.main import main\n\nmain()\n")
    program.chmod(0o755)
    shell = shutil.which(name)
    assert shell is not None, f"{name} isn't installed"
    told = environment(tmp_path, PATH=f"{bin_folder}:{os.environ['PATH']}", SHELL=shell, HOME=str(tmp_path))
    told["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
    words = [shell, UNCONFIGURED[name], "-c", COMPLETING[name]]
    done = subprocess.run(words, capture_output=True, text=True, env=told, timeout=120, cwd=tmp_path)
    assert done.stdout.split() == ["documents", "audit", "--deadline"], done.stderr


def test_every_help_says_what_each_word_and_option_is() -> None:
    """No verb, argument or option without a sentence."""
    root = get_command(app)
    assert isinstance(root, TyperGroup)
    context = typer.Context(root)
    pending: list[tuple[str, Any]] = [("perilune", root)]
    while pending:
        name, command = pending.pop()
        if isinstance(command, TyperGroup):
            pending += [(f"{name} {sub}", each) for sub, each in command.commands.items()]
        assert command.help, name
        assert re.search(r"[.?!)]$", command.help.strip()), (name, command.help)
        for parameter in command.get_params(context):
            told = getattr(parameter, "help", None)
            assert told, (name, parameter.name)
