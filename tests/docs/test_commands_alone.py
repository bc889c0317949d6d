"""The commands of pages that make keys, or settings of their own: each in a home of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.newcomer import Newcomer, with_commands
from tests.docs.pages import name_of
from tests.docs.search import search_engine

SERVED = ("docs/cli.md",)
"""What finds a server running."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", with_commands(alone=True), ids=name_of)
def test_every_command_runs(tmp_path: Path, smollm2_path: Path, page: Path) -> None:
    with search_engine() as port:
        newcomer = Newcomer(tmp_path, smollm2_path, port)
        try:
            if name_of(page) in SERVED:
                newcomer.serve()
            newcomer.run(page)
        finally:
            newcomer.close()
