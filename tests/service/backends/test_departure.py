"""Nothing but `OpenAIBackend` sends a question to another machine, and it only sends what a `Departure` let go."""

from __future__ import annotations

import ast
import dis
import inspect
from pathlib import Path
from types import CodeType

import perilune
from perilune.service.backends import dialect, openai

PACKAGE = Path(perilune.__file__).parent
CLIENTS = {
    "aiohttp",
    "http",
    "urllib.request",
    "requests",
    "httpx",
    "openai",
    "ssl",
    "smtplib",
    "ftplib",
    "urllib3",
}
MAY_CONNECT = {
    "service/backends/openai.py": "the backends",
    "service/backends/searxng.py": "the web search, where one is configured and asked for",
    "cli/replay.py": "replays a trace against a server that the caller names; its prompts are made up",
    "cli/remote.py": "asks a perilune server of this home",
    "cli/client.py": "finds that server",
    "runtime/hub/sources.py": "downloads models; sends names only",
    "memory/model_server.py": "an embeddings or re-ranking server the administrator names",
}
MAY_OPEN_SOCKETS = {
    "api/app.py",
    "cli/ports.py",
    "memory/model_server.py",
    "memory/ingest/sandbox.py",
    "memory/ingest/starter.py",
}


def imported(path: Path) -> set[str]:
    """Modules and names that a file imports anywhere. By its code, not by `ast`: in CPython 3.11 a parse fails now
    and then with "recursion depth mismatch" while another thread builds a tree, too (gh-106905)."""
    names: set[str] = set()
    pending = [compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)]
    while pending:
        code = pending.pop()
        pending += [each for each in code.co_consts if isinstance(each, CodeType)]
        module = ""
        for step in dis.get_instructions(code):
            if step.opname == "IMPORT_NAME":
                module = step.argval
                names.add(module)
            elif step.opname == "IMPORT_FROM":
                names.add(f"{module}.{step.argval}")
    return names


def is_client(name: str) -> bool:
    return any(name == client or name.startswith(client + ".") for client in CLIENTS)


def test_only_these_modules_have_an_http_client() -> None:
    found = {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if any(map(is_client, imported(path)))
    }
    assert found == set(MAY_CONNECT)


def test_only_these_modules_open_sockets() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "socket" in imported(path)}
    assert found == MAY_OPEN_SOCKETS
    asyncio_clients = [
        path
        for path in PACKAGE.rglob("*.py")
        if any(word in path.read_text(encoding="utf-8") for word in ("open_connection(", "create_connection("))
    ]
    assert not asyncio_clients


def test_a_body_is_made_of_what_departed() -> None:
    """`body_of` reads text from `departed`; of the call only numbers and flags."""
    tree = ast.parse(inspect.getsource(dialect.body_of))
    of_call = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "call"
    }
    assert of_call == {"sampling", "n", "continues", "tools"}
    wanted = {word for word in inspect.getsource(dialect._tools).replace("(", " ").split() if "wanted." in word}
    assert all(any(flag in word for flag in (".mode", ".name", ".parallel")) for word in wanted)
    assert "stop" not in inspect.getsource(dialect._sampling).replace("stop_", "")
    posts = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(openai)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "body_of"
    ]
    assert not posts  # only imported by name, and called once:
    assert inspect.getsource(openai).count("body_of(") == 1
