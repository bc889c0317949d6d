"""The backend contract: the local engine, and another perilune over HTTP. Real engines are in tests/e2e."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from perilune.service.backends.local import LocalBackend
from perilune.service.backends.local_chat import LocalChat
from perilune.service.backends.openai import Address, OpenAIBackend
from perilune.service.backends.protocol import Call, ChatMessage
from perilune.service.compose import Composer
from perilune.service.model import ServedModel
from perilune.service.predictor import Predictor
from perilune.service.presets import all_full
from perilune.telemetry import Telemetry
from tests.contracts.backend import BackendContract, Ready, collect, text_of
from tests.service.backends.server import served
from tests.service.fakes import CharTokenizer, FakeEngine, Template
from tests.service.harness import VOCABULARY, Bench

LONG = "A long answer. " * 60


def engine() -> FakeEngine:
    return FakeEngine(lambda spec: LONG, token_s=0.002)


def local_chat(engine: FakeEngine, window: int = 2048) -> LocalChat:
    tokenizer = CharTokenizer()
    return LocalChat(
        ServedModel("fake-1", window, "Apache-2.0", 0, VOCABULARY),
        LocalBackend(engine),
        Composer(tokenizer, Template(), window),
        tokenizer,
        Predictor(None, Telemetry(), 1024),
        lambda tenant: tenant.encode().ljust(32, b"-"),
        all_full,
        30.0,
    )


class TestLocalEngine(BackendContract):
    @pytest.fixture
    async def ready(self) -> AsyncIterator[Ready]:
        fake = engine()
        yield Ready(local_chat(fake), lambda: not fake.stats().running + fake.stats().waiting)
        fake.close()

    async def test_it_continues_an_answer_token_by_token(self, ready: Ready) -> None:
        said = (ChatMessage("user", "Say it."), ChatMessage("assistant", "A long"))
        backend = ready.backend
        assert isinstance(backend, LocalChat)
        spec = backend._spec(Call("req-c", "local", said, continues=True))
        whole = backend._spec(Call("req-w", "local", said[:1]))
        assert list(spec.token_ids) == [*whole.token_ids, *map(ord, "A long")]
        assert spec.shared_tokens == len(whole.token_ids)  # decoded tokens' KV isn't what prefill would have made


class TestPeriluneOverHTTP(BackendContract):
    @pytest.fixture
    async def ready(self, tmp_path: Path) -> AsyncIterator[Ready]:
        bench = Bench(engine=engine(), window=2048)
        await bench.start()
        async with served(bench.service, tmp_path) as url:
            backend = OpenAIBackend(Address("other", url, "fake-1", 2048))
            yield Ready(backend, lambda: not bench.engine.stats().running + bench.admission.inside)
            await backend.close()
        await bench.service.close()
        bench.engine.close()

    async def test_log_probabilities_come_through(self, ready: Ready) -> None:
        asked = Call("req-l", "local", (ChatMessage("user", "Hi"),))
        asked = replace(asked, sampling=replace(asked.sampling, max_tokens=3, logprobs=2))
        events = await collect(ready.backend, asked)
        told = [logprob for event in events for logprob in getattr(event, "logprobs", ())]
        assert "".join(item.token for item in told) == text_of(events)
        assert all(len(item.top) == 2 for item in told)
