"""What several rooms' tests share: real models, fetched once through `perilune pull`, kept outside the checkout."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from perilune.runtime.hub.pull import pull
from perilune.runtime.tokenizer_gguf import convert_tokenizer
from tests.postgres import new_database, postgres_server

settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


LONGEST = (
    "cli/test_local.py",
    "e2e/test_soak.py",
    "docs/test_commands_alone.py",
    "e2e/test_deletion.py",
    "e2e/test_sessions.py",
)
"""Files of few tests that take a minute and more."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files begin first, then those of most tests: in xdist's own order (turned off by
    `--no-loadscope-reorder`) one of the longest would be alone at the end, and all but one process idle."""
    longest = {Path(__file__).parent / name for name in LONGEST}
    sizes = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in longest, -sizes[item.path]))


def models_home() -> Path:
    """`$PERILUNE_TEST_MODELS`, else a folder in the user's cache."""
    return Path(os.environ.get("PERILUNE_TEST_MODELS") or Path.home() / ".cache" / "perilune-tests")


def _pulled(name: str) -> Path:
    return pull(name, models_home(), finish=_convert).path


def _convert(path: Path) -> None:
    convert_tokenizer(path)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1 GGUF."""
    return _pulled("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma-3-270M (base), Q4_K_M GGUF."""
    return _pulled("gemma3-270m")


@pytest.fixture(scope="session")
def postgres_of_all() -> Iterator[str]:
    """The URL of a real PostgreSQL server, for `postgres`."""
    with postgres_server() as url:
        yield url


@pytest.fixture(scope="module")
def postgres(postgres_of_all: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty database of a real PostgreSQL server: each file of tests has its own, so that what one
    leaves isn't another's."""
    with new_database(postgres_of_all, request.module.__name__.replace(".", "_")[-60:]) as url:
        yield url
