"""The service under test, as a fixture that checks for leaks when the test is over."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.service.harness import Bench, running


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with running() as made:
        yield made
