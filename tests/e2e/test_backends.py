"""Real servers as backends: the contract over HTTP, and a gateway before two perilune processes under load, of
which one is killed, stopped and started again.

Other engines (llama.cpp's server, vLLM's on the CPU) are asked under `make soak`: they take minutes to install.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from bench.gateway import Load as Asked
from bench.gateway import mock_engine
from bench.open_loop import OpenLoop, Timing
from bench.server import LlamaServer, PeriluneServer, ServerProcess, VllmServer
from perilune.service.backends.openai import Address, OpenAIBackend
from tests.contracts.backend import TOOLS, FormsContract, Ready, arguments_of, call, collect, idle_soon, text_of
from tests.e2e.conftest import MODEL, Server

BACK_WITHIN_S = 10.0
WORKERS = 4
SETTINGS = {
    "runtime__threads": 1,
    "kv_cache__ram": "96M",
    "deadlines__interactive_s": 300,
    "kv_cache__disk_quota": 0,
}


class TestPeriluneProcess(FormsContract):
    @pytest.fixture
    async def ready(self, server: Server) -> AsyncIterator[Ready]:
        backend = OpenAIBackend(Address("perilune", f"{server.url}/v1", MODEL, 8192))
        yield Ready(backend, lambda: not server.metric("perilune_sequences_running"))
        await backend.close()


@pytest.mark.soak
@pytest.mark.timeout(1800)
class TestLlamaServer(FormsContract):
    @pytest.fixture(scope="class")
    def process(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
        llama = LlamaServer(tmp_path_factory.mktemp("llama"), "--ctx-size", "8192", "--parallel", "4", "--jinja")
        llama.start()
        yield llama
        llama.stop()

    async def test_a_tool_that_must_be_called_is(self, ready: Ready) -> None:
        """SmolLM2's template has no notation of tools, and this server then leaves what must be called out of
        account: text comes, and nothing breaks."""
        events = await collect(ready.backend, replace(call("Look up the number 7."), tools=TOOLS))
        assert text_of(events)
        assert not arguments_of(events)
        await idle_soon(ready)

    @pytest.fixture
    async def ready(self, process: ServerProcess) -> AsyncIterator[Ready]:
        backend = OpenAIBackend(Address("llama", f"http://127.0.0.1:{process.port}/v1", "any", 2048))

        def idle() -> bool:
            status, slots = process.request("GET", "/slots")
            return status != 200 or not any(slot["is_processing"] for slot in json.loads(slots))

        yield Ready(backend, idle)
        await backend.close()


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestVllmServer(FormsContract):
    holds_calls = False  # 0.32 writes the tool's name where its arguments belong, with so small a model

    @pytest.fixture(scope="class")
    def process(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
        vllm = VllmServer(tmp_path_factory.mktemp("vllm"), 2048)
        vllm.start()
        yield vllm
        vllm.stop()

    @pytest.fixture
    async def ready(self, process: ServerProcess) -> AsyncIterator[Ready]:
        address = Address("vllm", f"http://127.0.0.1:{process.port}/v1", "any", 2048, silence_s=300.0)
        backend = OpenAIBackend(address)

        def idle() -> bool:
            _, metrics = process.request("GET", "/metrics")
            running = [
                line for line in metrics.decode().splitlines() if line.startswith("vllm:num_requests_running")
            ]
            return all(line.endswith(" 0.0") for line in running)

        yield Ready(backend, idle)
        await backend.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[tuple[PeriluneServer, ...]]:
    """Two backends and the gateway before them."""
    with contextlib.ExitStack() as stack:
        made: list[PeriluneServer] = []
        for name in ("a", "b", "gateway"):
            settings: dict[str, object] = {**SETTINGS, "model__path": str(smollm2_path)}
            if name == "gateway":
                settings |= _gateway(made)
            server = PeriluneServer(tmp_path_factory.mktemp(name), **settings)
            stack.callback(server.kill)
            server.start()
            made.append(server)
        yield tuple(made)


def _gateway(backends: list[PeriluneServer]) -> dict[str, object]:
    return _before({server.port: server.model_id() for server in backends}, "pair")


def _before(models: dict[int, str], serves: str) -> dict[str, object]:
    """Settings of a gateway before engines, by their ports, that serve one model."""
    entries = [
        {
            "name": name,
            "url": f"http://127.0.0.1:{port}/v1",
            "model": model,
            "serves": serves,
            "context_tokens": 8192,
            "connect_timeout": 1.0,
        }
        for name, (port, model) in zip("ab", models.items(), strict=True)
    ]
    return {"backends": json.dumps(entries), "model_serving__health_check__timeout": 1.0}


class Load:
    """Streams through the gateway from a few threads, each with its own deadline."""

    def __init__(self, gateway: PeriluneServer) -> None:
        url = f"http://127.0.0.1:{gateway.port}/v1"
        self.client = openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=120)
        self.outcomes: Counter[str] = Counter()
        self.lost: list[str] = []
        self.backends: Counter[str] = Counter()
        self.ttft_s: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(n,), daemon=True) for n in range(WORKERS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
        self.client.close()
        assert not any(thread.is_alive() for thread in self._threads), "a request never ended"

    def _work(self, number: int) -> None:
        chance = random.Random(number)
        while not self._stop.is_set():
            outcome = self.one(f"Count from {chance.randint(1, 10_000)}.")
            self.outcomes[outcome] += 1

    def one(self, text: str, deadline_s: float = 6.0) -> str:
        """One stream; `answered`, `broken` (an honest error after text), or `lost` before any."""
        said, start_s = "", time.monotonic()
        try:
            stream: Any = self.client.chat.completions.create(
                model="pair",
                messages=[{"role": "user", "content": text}],
                max_tokens=12,
                stream=True,
                extra_body={"deadline_s": deadline_s, "ignore_eos": True},
            )
            for chunk in stream:
                for choice in chunk.choices:
                    if choice.delta.content and not said:
                        self.ttft_s.append((start_s, time.monotonic() - start_s))
                    said += choice.delta.content or ""
                report = chunk.model_extra.get("perilune", {})
                if "attempts" in report:
                    self.backends[report["backend"]] += 1
                    return "answered"
        except openai.APIError as error:
            if said and error.code == "answer_broken":
                return "broken"
            self.lost.append(f"{said!r}: {error!r}")
            return "lost"
        self.lost.append(f"{said!r}: ended without a word")
        return "lost"


def _until(condition: Any, within_s: float) -> float:
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < within_s, "not in time"
        time.sleep(0.1)
    return time.monotonic() - start_s


def _available(gateway: PeriluneServer, name: str) -> bool:
    states = {state["name"]: state for state in gateway.json("GET", "/v1/backends")["data"]}
    return bool(states[name]["available"])


@pytest.mark.timeout(900)
def test_a_backend_killed_under_load_costs_nothing_before_its_first_token(pair: tuple[PeriluneServer, ...]) -> None:
    a, _, gateway = pair
    with Load(gateway) as load:
        _until(lambda: load.backends["a"] >= 3 and load.backends["b"] >= 3, 120)
        port = a.port
        a.kill()
        _until(lambda: not _available(gateway, "a"), 30)
        answered = load.backends["b"]
        _until(lambda: load.backends["b"] >= answered + 6, 60)
        a.start(port)
        _until(lambda: _available(gateway, "a"), BACK_WITHIN_S)
        again = load.backends["a"]
        _until(lambda: load.backends["a"] >= again + 2, 60)
    assert not load.lost, load.lost
    assert load.outcomes["answered"] >= 14
    assert load.outcomes["broken"] <= WORKERS


@pytest.mark.timeout(900)
def test_a_backend_that_hangs_is_left_and_taken_up_again(pair: tuple[PeriluneServer, ...]) -> None:
    a, _, gateway = pair
    with Load(gateway) as load:
        _until(lambda: load.backends["a"] >= 1, 120)
        os.killpg(a.pid, signal.SIGSTOP)
        try:
            _until(lambda: not _available(gateway, "a"), 60)
            answered = load.backends["b"]
            _until(lambda: load.backends["b"] >= answered + 4, 120)
        finally:
            a.resume()
        _until(lambda: _available(gateway, "a"), 3 * BACK_WITHIN_S)
    assert not load.lost, load.lost


PER_S, SECONDS, KILLED_S, IN_TIME_S = 25.0, 18.0, 5.0, 2.0


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_attainment_is_back_within_ten_seconds_of_a_backend_s_death(tmp_path: Path, smollm2_path: Path) -> None:
    """Open loop over two engines that compute nothing, so that only the change itself can make anybody late."""
    with contextlib.ExitStack() as stack:
        doomed = mock_engine()
        ports = [doomed.__enter__(), stack.enter_context(mock_engine())]
        settings: dict[str, object] = {**SETTINGS, "model__path": str(smollm2_path), "memory__embedder": "off"}
        gateway = PeriluneServer(tmp_path, **settings, **_before(dict.fromkeys(ports, "mock"), "mock"))
        stack.callback(gateway.kill)
        gateway.start()
        timings = asyncio.run(_through_a_death(gateway.port, lambda: doomed.__exit__(None, None, None)))
    assert all(timing.status == 200 for timing in timings), "a request was lost"
    late = [number / PER_S for number, timing in enumerate(timings) if timing.total_s > IN_TIME_S]
    assert len(timings) == PER_S * SECONDS
    assert not [at for at in late if at >= KILLED_S + BACK_WITHIN_S], "attainment is not back"


async def _through_a_death(port: int, kill: Callable[[], object]) -> list[Timing]:
    """Whole answers, the first second not counted: connections are made then."""
    asked = Asked("death", PER_S, stream=False)
    loop = OpenLoop(port, asked.bodies(), {}, asked.mark)
    await loop.run(PER_S, 1.0)
    asyncio.get_running_loop().call_later(KILLED_S, kill)
    return await loop.run(PER_S, SECONDS)
