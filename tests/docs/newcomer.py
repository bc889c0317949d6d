"""Someone with an empty home folder, the source's docs, documents of his own, and `perilune` in the path."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

from docx import Document
from pptx import Presentation
from reportlab.pdfgen.canvas import Canvas

from tests.clients.environments import environment
from tests.docs import servers
from tests.docs.pages import ROOT, Block, name_of, pages, run_blocks
from tests.docs.session import BASH, PYTHON, Session
from tests.e2e.conftest import MODEL, new_home

PORTS = ("8642", "8643", "8080")
"""What pages write: the server, a second one, a search engine. A test takes free ones."""

ALONE = (
    "docs/cli.md",
    "docs/web-search.md",
    "docs/how-to/backends.md",
    "docs/how-to/keys.md",
    "docs/how-to/offline.md",
    "docs/how-to/own-model.md",
    "docs/how-to/proxy.md",
)
"""These make keys, or settings of their own; the others share a home and its server."""

LAST = ("docs/runtime.md", "docs/mri.md", "docs/how-to/backup.md")
"""These stop the shared server, or start it with other settings."""

PAGE_S = 560
CLIENTS = "docs/clients.md"
"""Its programs are run by tests/clients, where each client is started anyway: to import them all takes a minute."""


class Newcomer:
    """`run` does what a page says, from its first block to its last."""

    def __init__(self, folder: Path, model: Path, search_port: int = 0) -> None:
        self._folder = folder
        self._ports = (*free_ports(), str(search_port))
        self._model = model
        self.home = new_home(self._made("perilune-home"), model)
        self.work = self._made("work")
        for name in ("docs", "README.md"):
            (self.work / name).symlink_to(ROOT / name)
        write_documents(self.work)
        self.servers = self._made("servers")
        self._shims()

    def run(self, page: Path) -> None:
        """Raises `AssertionError` with what was said when a block fails."""
        end = time.monotonic() + PAGE_S
        name = name_of(page).replace("/", "-")
        variables, log, steps = self._environment(name), self._folder / f"{name}.log", self._made(f"blocks-{name}")
        if name_of(page) == CLIENTS:
            self._shim("llm", [str(environment("llm").folder / "bin" / "llm")])
        shell = Session(["bash"], BASH, self.work, variables, log)
        python = Session([sys.executable], PYTHON, self.work, variables, log)
        try:
            for number, block in enumerate(each for each in run_blocks(page) if not is_client(each)):
                file = steps / f"{number}.{block.language}"
                file.write_text(self._for_this_machine(block))
                session = python if block.language == "python" else shell
                began = time.monotonic()
                well = session.run(file, max(0.0, end - began))
                with log.open("a") as said:
                    said.write(f"\n### {block.place}: {time.monotonic() - began:.1f} s\n")
                assert well, f"{block.place}:\n{block.text}\n{log.read_text(errors='replace')[-4000:]}"
        finally:
            shell.close()
            python.close()

    def serve(self) -> None:
        """A server, as `perilune serve` starts it; what a page starts then is the same one."""
        command = ["bash", "-c", "serve_beside serve"]
        subprocess.run(command, cwd=self.work, env=self._environment("first"), check=True)

    def close(self) -> None:
        servers.stop_all(self.servers)

    def _for_this_machine(self, block: Block) -> str:
        text = block.text
        for written, taken in zip(PORTS, self._ports, strict=True):
            text = text.replace(written, taken)
        if block.language == "sh":
            text = "\n".join(beside(line) for line in text.splitlines()) + "\n"
        return text

    def _shims(self) -> None:
        """Programs by the names that a reader types. curl takes an HTTP error for success, unless told."""
        typed = [sys.executable, "-S", "-m", "tests.docs.typed"]
        ours = [sys.executable, "-m", "perilune.cli.main"]
        curl = [shutil.which("curl") or "curl", "--fail-with-body"]
        self._shim("perilune", [*typed, *ours, "--"])
        self._shim("curl", [*typed, *curl, "--"])
        self._shim("python", [sys.executable])
        self._shim("serve_beside", [sys.executable, "-m", "tests.docs.servers", "start"])
        self._shim("stop_servers", [sys.executable, "-m", "tests.docs.servers", "stop"])

    def _shim(self, name: str, command: list[str]) -> None:
        path = self._made("bin") / name
        path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        path.chmod(0o755)

    def _environment(self, name: str) -> Mapping[str, str]:
        user_home = self._made(f"user-{name}")
        own = user_home / "models" / "my-model.gguf"
        if not own.exists():
            own.parent.mkdir()
            own.symlink_to(self._model)
        variables = {
            **os.environ,
            "HOME": str(user_home),
            "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PERILUNE_HOME": str(self.home),
            "PERILUNE_SERVER__PORT": self._ports[0],
            "PERILUNE_KV_CACHE__RAM": "192M",
            "PERILUNE_KV_CACHE__DISK_QUOTA": "1G",
            "PERILUNE_KV_CACHE__SPILL": "64M",
            "PERILUNE_DEADLINES__INTERACTIVE_S": "300",  # machines that run tests are slow and busy
            "DOCS_SERVERS": str(self.servers),
            "DOCS_SEEN": str(self._folder / f"seen-{name}.json"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network for prices
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }
        for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "PERILUNE_API_KEY"):
            variables.pop(name, None)
        return variables

    def _made(self, name: str) -> Path:
        (self._folder / name).mkdir(exist_ok=True)
        return self._folder / name


def with_commands(*, alone: bool) -> list[Path]:
    """Pages that hold some, in an order that starts the shared server once."""
    found = [page for page in pages() if run_blocks(page) and (name_of(page) in ALONE) == alone]
    return sorted(found, key=lambda page: name_of(page) in LAST)


def is_client(block: Block) -> bool:
    return block.page == CLIENTS and block.language != "sh"


def beside(line: str) -> str:
    """A server blocks its terminal, so a test starts it beside; and Ctrl-C is a command of its own."""
    if is_server(line):
        before, _, after = line.partition("perilune ")
        return f"{before}serve_beside {after}"
    return "stop_servers" if line.startswith("# Stop the server") else line


def is_server(line: str) -> bool:
    words = line.partition("#")[0].split()
    return "perilune" in words and "serve" in words and "systemctl" not in words


def free_ports() -> tuple[str, str]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1]), str(two.getsockname()[1])


LEASE = (
    "Lease between Ole Berg and Anna Lund.",
    "The rent is 940 euros a month, due on the third. Notice is three months.",
    "The tenant may keep one cat. The landlord repairs the heating within two days.",
)


def write_documents(folder: Path) -> None:
    """What pages take for the reader's own: small ones of each kind that they name."""
    for name in ("manual.pdf", "report.pdf", "contract.pdf", "lease.pdf"):
        canvas = Canvas(str(folder / name))
        for _ in range(3):
            for row, line in enumerate(LEASE):
                canvas.drawString(72, 720 - 20 * row, line)
            canvas.showPage()
        canvas.save()
    document = Document()
    document.add_paragraph(" ".join(LEASE))
    document.save(str(folder / "report.docx"))
    slides = Presentation()
    slides.slides.add_slide(slides.slide_layouts[5]).shapes.title.text = LEASE[1]
    slides.save(str(folder / "slides.pptx"))
    (folder / "notes.md").write_text("# Notes\n" + "\n".join(LEASE) + "\n")
    with zipfile.ZipFile(folder / "notes.zip", "w") as archive:
        archive.write(folder / "notes.md", "notes.md")
    (folder / "src").mkdir()
    (folder / "src" / "server.py").write_text(
        "import socket\n\nsocket.create_server(('127.0.0.1', 9000))  # the port\n"
    )
    body = {"model": MODEL, "max_tokens": 10, "messages": [{"role": "user", "content": "Name a river."}]}
    lines = [
        {"custom_id": f"r-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number in range(2)
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_traces(folder)


def write_traces(folder: Path) -> None:
    """Six requests within two seconds, as Mooncake's and as Azure's traces have them."""
    lengths = [(200, 8), (900, 4), (300, 8), (1500, 4), (250, 8), (400, 8)]
    lines = [
        {"timestamp": 30 * number, "input_length": size, "output_length": new, "hash_ids": [0, number]}
        for number, (size, new) in enumerate(lengths)
    ]
    (folder / "mooncake.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [f"2023-11-16 18:17:0{number // 3}.{number},{size},{new}" for number, (size, new) in enumerate(lengths)]
    (folder / "azure.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
