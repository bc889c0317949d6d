"""The whole application over the real default model: build, ingest, ask, restart, delete."""

from __future__ import annotations

import io
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from perilune.build import Application, build
from perilune.build.models import rates_file
from perilune.config import KVCacheSettings, RuntimeSettings, Settings
from perilune.core import (
    Completed,
    FilePart,
    FileStatus,
    Message,
    PlanKind,
    Request,
    SamplingParams,
    TextDelta,
    TextPart,
)
from perilune.errors import Conflict, ModelNotFound
from perilune.runtime.loader import ModelInfo
from perilune.service.report import report_dict
from tests.service.test_service import SCHEMA

DOCUMENT = (
    "Lease between Ada Moor and the city of Brill. The rent is 940 crowns a month. "
    "Rent is due on the third day of each month. Whoever pays late owes a fee of twelve crowns. "
    "The notice period is ninety days. Dogs are allowed; geese are not. "
) * 6
QUESTION = "How much is the rent?"


@pytest.fixture
def settings(tmp_path: Path, smollm2_path: Path) -> Settings:
    """A fresh home with the default model in it."""
    models = tmp_path / "models"
    models.mkdir()
    (models / "smollm2-135m-instruct").symlink_to(smollm2_path.parent)
    return Settings(
        home=tmp_path,
        kv_cache=KVCacheSettings.model_validate({"ram": "96M"}),
        runtime=RuntimeSettings(threads=1),  # two threads that share one free core wait for each other
    )


@asynccontextmanager
async def application(settings: Settings) -> AsyncIterator[Application]:
    app = build(settings)
    try:
        await app.start()
        yield app
    finally:
        await app.close()
    app.engine.check_integrity()


async def ask(app: Application, *files: str) -> tuple[str, Completed]:
    message = Message("user", (*map(FilePart, files), TextPart(QUESTION)))
    request = Request(
        uuid.uuid4().hex,
        "local",
        "smollm2",
        (message,),
        time.monotonic(),
        SamplingParams(max_tokens=12),
        deadline_s=500.0,  # machines that run tests are slow and busy: the plan must not depend on it
    )
    text, end = "", None
    async for event in app.service.run(request):
        if isinstance(event, TextDelta):
            text += event.text
        if isinstance(event, Completed):
            end = event
    assert end is not None
    jsonschema.validate(report_dict(end.report), SCHEMA)
    return text, end


async def upload(app: Application) -> str:
    record = await app.service.documents.upload("local", "lease.txt", "user_data", io.BytesIO(DOCUMENT.encode()))
    await app.service.documents.settled()
    return record.file_id


async def test_a_document_is_warm_after_ingest_after_a_restart_and_gone_when_deleted(settings: Settings) -> None:
    async with application(settings) as app:
        cold, first = await ask(app)  # without the document, and so without any KV of it
        assert first.report.plan is PlanKind.FULL
        file_id = await upload(app)
        record = await app.service.documents.get("local", file_id)
        assert (record.status, record.pages_total) == (FileStatus.PROCESSED, 1)
        assert record.tokens is not None
        warm, second = await ask(app, file_id)
        assert second.report.plan is PlanKind.WARM
        assert second.report.tokens.cached.ram >= record.tokens // 32 * 32
        assert "940" in warm
        assert warm != cold
        assert second.report.citations[0].filename == "lease.txt"
        assert second.report.degradations == ()
    assert list(settings.home.glob("rates-*.json")), "measured rates are kept"
    assert settings.home.stat().st_mode & 0o022 == 0

    async with application(settings) as app:
        restarted, third = await ask(app, file_id)
        assert third.report.plan is PlanKind.WARM
        assert third.report.tokens.cached.disk >= (record.tokens - 32) // 32 * 32
        assert restarted == warm, "restored KV gives another answer than computed KV"
        await app.service.documents.delete("local", file_id)
        again = await upload(app)
        computed, fourth = await ask(app, again)
        assert computed == warm
        assert fourth.report.tokens.cached.disk == 0


async def test_a_home_folder_has_one_owner(settings: Settings) -> None:
    async with application(settings):
        with pytest.raises(Conflict):
            build(settings)
    async with application(settings) as app:
        assert await app.service.ready(), "the second attempt left nothing locked"


def test_rates_measured_another_way_are_not_taken_over(tmp_path: Path) -> None:
    info = ModelInfo("m", "llama", 2048, 1, 1, "f" * 64, (), "bf16+q8", "native avx2, 2 threads on libgomp.so.1")
    file = rates_file(tmp_path, info, 2)
    assert file == rates_file(tmp_path, replace(info, model_id="another name"), 2)
    others = [
        rates_file(tmp_path, replace(info, fingerprint="e" * 64), 2),
        rates_file(tmp_path, replace(info, kernels="native avx512, 2 threads on libgomp.so.1"), 2),
        rates_file(tmp_path, replace(info, weights_resident="bf16"), 2),
        rates_file(tmp_path, info, 1),
    ]
    assert len({file, *others}) == 5


def test_a_model_that_is_not_installed_is_named_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound) as caught:
        build(Settings(home=tmp_path))
    assert "perilune pull smollm2-135m-instruct" in caught.value.hint
