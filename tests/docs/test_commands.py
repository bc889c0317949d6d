"""Every command and program of the README and of the documentation's pages, in one home, on one real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.newcomer import Newcomer, with_commands
from tests.docs.pages import name_of


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Newcomer]:
    newcomer = Newcomer(tmp_path_factory.mktemp("together"), smollm2_path)
    yield newcomer
    newcomer.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", with_commands(alone=False), ids=name_of)
def test_every_command_runs(reader: Newcomer, page: Path) -> None:
    reader.serve()
    reader.run(page)
