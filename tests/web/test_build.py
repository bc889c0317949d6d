"""What is delivered is what web/ builds; the unit tests of the page; how much a browser has to load."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.web.packages import ROOT, npm_packages, run

DIST = ROOT / "perilune" / "web" / "dist"
MAX_WEIGHT_BYTES = 400 * 1024
ON_DEMAND = ("katex", "KaTeX", "formula", "highlighter")


@pytest.fixture(scope="module", autouse=True)
def _packages() -> None:
    npm_packages()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def unpacked(name: str, data: bytes) -> bytes:
    return gzip.decompress(data) if name.endswith(".gz") else data


def test_what_is_committed_is_what_the_sources_build(tmp_path: Path) -> None:
    run("node", "build.mjs", str(tmp_path / "dist"))
    built, kept = files_of(tmp_path / "dist"), files_of(DIST)
    assert sorted(built) == sorted(kept), "run `make web` and commit perilune/web/dist"
    # Another release of Node may pack otherwise; what is inside is what counts.
    changed = [name for name in built if unpacked(name, built[name]) != unpacked(name, kept[name])]
    assert not changed, f"run `make web` and commit perilune/web/dist: {changed}"


def test_the_sources_are_typed_and_their_own_tests_pass() -> None:
    run("node", "node_modules/typescript/bin/tsc", "--noEmit")
    run("node", "test/run.mjs")


def test_the_page_is_light_before_formulas_and_highlighting() -> None:
    """At most 400 KB, compressed, with both languages and the letters that every page uses."""
    weight = 0
    for name, data in files_of(DIST).items():
        if not name.endswith((".gz", "LICENSES.txt")) and not any(part in name for part in ON_DEMAND):
            weight += len(data) if name.endswith(".woff2") else len(gzip.compress(data, 9))
    print(f"{weight / 1024:.0f} KB")
    assert weight <= MAX_WEIGHT_BYTES, f"{weight / 1024:.0f} KB"


def test_nothing_is_loaded_from_elsewhere() -> None:
    html = (DIST / "index.html").read_text()
    assert "http" not in html
    assert "<script>" not in html
    assert "<style" not in html
