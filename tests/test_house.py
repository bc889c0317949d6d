"""The house rules of docs/architecture.md, enforced: imports run one way, the light modules load without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "perilune"

# Lower may not import higher; `engine` and `memory` are peers and never import each other.
RANK = {
    "kernels": 0,
    "runtime": 1,
    "engine": 2,
    "memory": 2,
    "service": 3,
    "ops": 3,
    "api": 4,
    "cli": 5,
    "build": 5,
}
LEAVES = {"core", "config", "errors", "api_keys", "telemetry", "__init__", "__version__"}
MAY_USE_OPS = {"service", "cli", "api", "build"}
TORCH_FREE = [
    "perilune.core",
    "perilune.config",
    "perilune.errors",
    "perilune.telemetry",
    "perilune.engine.loop",
    "perilune.engine.scheduler",
    "perilune.runtime.mri",
    "perilune.runtime.mri_session",
    "perilune.runtime.llamacpp",
    "perilune.runtime.kv.spec",
    "perilune.kernels.tiers",
    "perilune.memory.library",
    "perilune.service.planner",
    "perilune.cli.main",
]


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def tree_of(path: Path) -> ast.Module:
    """Its syntax. In CPython 3.11 a parse fails now and then while another thread parses, too (gh-106905)."""
    text = path.read_text(encoding="utf-8")
    for _ in range(20):
        try:
            return ast.parse(text)
        except SystemError:
            continue
    return ast.parse(text)


def imported_rooms(path: Path) -> set[str]:
    rooms: set[str] = set()
    for node in ast.walk(tree_of(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} uses a relative import"
            names = [node.module or ""]
            if node.module == "perilune":
                names = [f"perilune.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("perilune.")}
    return rooms


def violation(room: str, target: str) -> str | None:
    if target in LEAVES or target == room:
        return None
    if room in LEAVES:
        return "a leaf imports nothing of ours but leaves"
    if target == "ops":
        return None if room in MAY_USE_OPS else "ops may be imported by service, api, cli and build only"
    if room == "cli" and target == "build":
        return None
    if RANK[target] >= RANK[room]:
        return "imports run downward only"
    return None


def test_imports_run_one_way() -> None:
    faults = [
        f"{path.relative_to(ROOT)} imports perilune.{target}: {why}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for target in sorted(imported_rooms(path))
        if (why := violation(room_of(path), target))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("room", "target"),
    [("engine", "memory"), ("memory", "engine"), ("runtime", "service"), ("core", "engine")],
)
def test_rule_catches(room: str, target: str) -> None:
    assert violation(room, target)


def test_light_modules_load_without_torch() -> None:
    code = "import importlib, sys\n"
    code += f"for name in {TORCH_FREE!r}:\n"
    code += "    importlib.import_module(name)\n"
    code += "    heavy = {'torch', 'transformers'} & set(sys.modules)\n"
    code += "    assert not heavy, f'{name} loads {heavy}'\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


NAMES = {"python-multipart": "python_multipart", "prometheus-client": "prometheus_client", "pyyaml": "yaml"}
NAMES |= {"pystemmer": "Stemmer", "charset-normalizer": "charset_normalizer"}
NAMES |= {"llama-cpp-python": "llama_cpp", "pillow": "PIL"}


def test_what_is_installed_is_what_is_imported() -> None:
    """Every run-time dependency is imported by the package, and nothing else that has to be installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for name, lines in project["optional-dependencies"].items() if name != "dev" for line in lines]
    wanted = {re.split(r"[\[<>=]", line, maxsplit=1)[0] for line in (*project["dependencies"], *extras)}
    imported = {
        name.split(".")[0]
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(tree_of(path))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    ours = {NAMES.get(name, name) for name in wanted}
    assert imported - set(sys.stdlib_module_names) - {"perilune"} == ours


def test_nothing_stays_tracked_that_speaks_of_one_machine() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    words = ["/" + "work" + "/", "/" + "root" + "/"]
    for name in tracked:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".c", ".h", ".json", ""} and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            assert not any(word in text for word in words), name


def test_modules_have_headers() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*.py")
        if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(tree_of(path))
    ]
    assert not silent, silent
