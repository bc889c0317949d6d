"""`perilune serve` as a process with the real default model; no test may leave a used block behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

MODEL = "smollm2-135m-instruct"
START_S = 240  # two busy cores have taken a minute to start a server


@dataclass
class Server:
    client: openai.OpenAI
    url: str
    process: subprocess.Popen[bytes]
    environment: dict[str, str]
    key: str = "any"

    def metric(self, name: str) -> float:
        request = urllib.request.Request(f"{self.url}/metrics", headers={"authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request) as reply:
            text = reply.read().decode()
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def until_idle(self, within_s: float = 10.0) -> None:
        """Wait until the engine holds no sequence: nothing a client left behind runs on."""
        end = time.monotonic() + within_s
        while self.metric("perilune_sequences_running") + self.metric("perilune_sequences_waiting"):
            assert time.monotonic() < end, "a sequence runs on"
            time.sleep(0.02)

    def check_blocks(self, within_s: float = 30.0) -> None:
        """Every KV block is free or merely cached: none is leaked."""
        self.until_idle(within_s)
        end = time.monotonic() + within_s
        while used := self.metric("perilune_kv_cache_usage_ratio"):
            assert time.monotonic() < end, f"{used:.2%} of the blocks are still used"
            time.sleep(0.02)

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024

    def cli(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "perilune.cli.main", *words]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, input=stdin
        )


def new_home(home: Path, model: Path) -> Path:
    """A home folder with the default model in it."""
    (home / "models").mkdir()
    (home / "models" / MODEL).symlink_to(model.parent)
    return home


@contextlib.contextmanager
def serving(home: Path, **settings: str) -> Iterator[Server]:
    """A server of `home`. It is stopped and must end well, unless it was killed inside."""
    # Machines that run tests are slow and busy: plans must not depend on it.
    usual = {"PERILUNE_KV_CACHE__RAM": "192M", "PERILUNE_DEADLINES__INTERACTIVE_S": "300"}
    environment = {**os.environ, "PERILUNE_HOME": str(home), **usual, **settings}
    log = (home / "serve.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "perilune.cli.main", "serve", "--port", "0"], env=environment, stdout=log, stderr=log
    )
    try:
        url = _address(home, process)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=300) as client:
            yield Server(client, url, process, environment)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, (home / "serve.log").read_text()
    finally:
        process.kill()
        process.wait()
        log.close()


def _address(home: Path, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, (home / "serve.log").read_text()
        with contextlib.suppress(FileNotFoundError):
            found = json.loads((home / "server.json").read_text())
            if found["pid"] == process.pid:  # one that was killed leaves its own behind
                return str(found["url"])
        time.sleep(0.05)
    raise AssertionError("the server did not start")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Server]:
    with serving(new_home(tmp_path_factory.mktemp("home"), smollm2_path)) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_block_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").check_blocks()
