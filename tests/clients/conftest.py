"""One server with the real model, and every client's driver against it.

Drivers run once, side by side; tests read them proof by proof.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

from tests.clients.environments import environment
from tests.docs.pages import ROOT, Block, run_blocks
from tests.e2e.conftest import MODEL, Server, new_home, serving

DRIVERS = Path(__file__).parent / "drivers"
PROGRAMS = {
    "openai-python": ("openai", "openai_python.py"),
    "anthropic-python": ("anthropic", "anthropic_python.py"),
    "openai-node": ("node", "openai_node.mjs"),
    "anthropic-node": ("node", "anthropic_node.mjs"),
    "litellm": ("litellm", "litellm_python.py"),
    "langchain-openai": ("langchain", "langchain_python.py"),
    "pydantic-ai": ("pydantic_ai", "pydantic_ai_python.py"),
    "llm": ("llm", "llm_python.py"),
}
"""Client -> its environment and its driver."""

AT_ONCE = 3
WRITTEN_URL = "http://127.0.0.1:8642"
PAGE = ROOT / "docs" / "clients.md"
SECTIONS = {
    "openai-python": "openai (Python)",
    "anthropic-python": "anthropic (Python)",
    "openai-node": "openai (Node)",
    "anthropic-node": "@anthropic-ai/sdk (Node)",
}
"""What the page calls a client; the others have the same name there."""

IDLE_S = 10.0
"""The longest form takes a fast machine four times as long to fill."""


@pytest.fixture(scope="session")
def keyed(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Server]:
    """A server that wants keys, and its administrator's."""
    home = new_home(tmp_path_factory.mktemp("clients"), smollm2_path)
    with serving(home, PERILUNE_MODEL__TEMPERATURE="0") as server:
        server.key = _key(server, "--role", "admin")
        yield server
        server.check_blocks()


def _key(server: Server, *options: str) -> str:
    done = server.cli("keys", "create", "--json", *options)
    assert done.returncode == 0, done.stderr
    key: str = json.loads(done.stdout)["key"]
    return key


def shown(client: str) -> list[Block]:
    """The programs that the page shows for a client."""
    above: list[str] = PAGE.read_text(encoding="utf-8").splitlines()
    found = []
    for block in run_blocks(PAGE):
        section = next(line[3:] for line in reversed(above[: block.line]) if line.startswith("## "))
        if block.language != "sh" and section == SECTIONS.get(client, client):
            found.append(block)
    return found


@dataclass(slots=True)
class Proofs:
    """What a client saw, proof by proof, and how often it was told to wait. `stopped`: the answer that it left was
    stopped while it was still there. `said` is its stderr."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    refusals: int = 0
    stopped: bool = False
    said: str = ""

    def __getitem__(self, name: str) -> dict[str, Any]:
        found = self.facts.get(name)
        assert found is not None, f"{name} wasn't told; told were {list(self.facts)}. {self.said}"
        assert "fault" not in found, found["fault"]
        return found


Prove = Callable[[str], Proofs]


@pytest.fixture(scope="session")
def prove(request: pytest.FixtureRequest, keyed: Server) -> Prove:
    """The proofs of one client. All that the session's tests name run before the first is read."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    wanted = {each["client"] for each in params if each.get("client") in PROGRAMS}
    known = _all_proofs(keyed, {name: PROGRAMS[name] for name in PROGRAMS if name in wanted})
    return known.__getitem__


def _all_proofs(server: Server, programs: Mapping[str, tuple[str, str]]) -> Mapping[str, Proofs]:
    """Drivers side by side up to their last proof, `cancel`; that one by one, when the server is idle."""
    running = [Driver(server, client, *program) for client, program in programs.items()]
    with ExitStack() as open_processes, ThreadPoolExecutor(AT_ONCE) as pool:
        for driver in running:
            open_processes.callback(driver.close)
        list(pool.map(Driver.run, running))
        for driver in running:
            driver.cancel()
    log = (Path(server.environment["PERILUNE_HOME"]) / "serve.log").read_text()
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    for driver in running:
        driver.proofs.refusals = sum(
            1 for line in lines if line.get("status") == 429 and line.get("tenant") == driver.client
        )
    return {driver.client: driver.proofs for driver in running}


class Driver:
    """One client's program. It asks on stdin before it begins its last proof, and before it ends."""

    def __init__(self, server: Server, client: str, name: str, program: str) -> None:
        self.client = client
        self.proofs = Proofs()
        self._server = server
        self._name, self._program = name, program
        self._process: subprocess.Popen[str] | None = None
        self._programs: list[Path] = []

    def run(self) -> None:
        """Make the environment, start, and read until the driver waits."""
        made = environment(self._name)
        command = made.command(DRIVERS / self._program)
        variables = self._variables()
        self._put_programs(made.folder, variables)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=variables,
            text=True,
        )
        self._read()

    def cancel(self) -> None:
        """The last proof, and whether the answer that was left stops while the program still runs."""
        self._go_on()
        self._read()
        try:
            self._server.until_idle(IDLE_S)
            self.proofs.stopped = True
        except AssertionError:
            self.proofs.stopped = False
        self._go_on()

    def close(self) -> None:
        if self._process is not None:
            _, said = self._process.communicate(timeout=60)
            self.proofs.said += said[-3000:]
        for path in self._programs:
            path.unlink()

    def _put_programs(self, folder: Path, variables: dict[str, str]) -> None:
        """The page's programs as files, with this server's address and key. Node looks for packages beside them."""
        for number, block in enumerate(shown(self.client)):
            text = block.text.replace(WRITTEN_URL, self._server.url)
            text = text.replace('"any"', json.dumps(variables["PERILUNE_KEY"]))
            path = folder / f"page-{self.client}-{os.getpid()}-{number}.{'mjs' if block.language == 'js' else 'py'}"
            path.write_text(text)
            self._programs.append(path)
        variables["PERILUNE_PAGE"] = json.dumps([str(path) for path in self._programs])

    def _go_on(self) -> None:
        assert self._process is not None
        stdin: IO[str] | None = self._process.stdin
        assert stdin is not None
        if self._process.poll() is None:
            stdin.write("\n")
            stdin.flush()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("waiting"):
                return
            if line.startswith('{"proof"'):  # some clients print, too
                told = json.loads(line)
                self.proofs.facts[told["proof"]] = told

    def _variables(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PERILUNE_")}
        return {
            **kept,
            "PERILUNE_URL": self._server.url,
            "PERILUNE_MODEL": MODEL,
            "PERILUNE_KEY": _key(self._server, "--tenant", self.client),
            "PERILUNE_BUSY_KEY": _key(self._server, "--tenant", self.client, "--concurrency", "1"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network for prices
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
