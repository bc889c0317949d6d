"""What is looked up is there: every endpoint, field, verb and setting; and what pages name exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import typer
import yaml

from perilune.api.openapi import document
from perilune.cli.main import app
from perilune.config import Settings
from tests.docs.pages import ROOT, Block, blocks, name_of, pages, prose

DOCS = ROOT / "docs"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
SETTING = re.compile(r"`(?:--set )?([a-z_]+(?:\.[a-z_]+)+)(?:[:=][^`]*)?`")


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def endpoints(text: str) -> set[tuple[str, str]]:
    """(method, path) of the tables' first cells; `GET`, `DELETE /path` are two."""
    found = set()
    for cell in re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE):
        methods: list[str] = []
        for span in re.findall(r"`([^`]+)`", cell):
            method, _, path = span.partition(" ")
            if method in METHODS:
                methods.append(method)
            if path.startswith("/"):
                found |= {(method, shape(path)) for method in methods}
                methods = []
    return found


def shape(path: str) -> str:
    return re.sub(r"{\w+}", "{}", path)


def test_every_endpoint_is_in_the_reference_and_no_other() -> None:
    described = {(method.upper(), shape(path)) for path, each in document()["paths"].items() for method in each}
    reference = read("api.md")
    named = endpoints(reference[: reference.index("## Keys, addresses, limits")])
    assert described - named == set(), "not in the tables of docs/api.md"
    assert named - described == set(), "in the tables of docs/api.md, and not served"


def test_every_field_of_a_body_or_a_query_is_explained() -> None:
    text = read("api.md") + read("vector-stores.md")
    named = set(re.findall(r"[`\"?&=\[.]([a-z_0-9]+)[`\"=\].]", text))
    unknown = {
        f"{method.upper()} {path}: {name}"
        for path, each in document()["paths"].items()
        for method, operation in each.items()
        for name in fields(operation) - named
    }
    assert not unknown, "\n".join(sorted(unknown))


def fields(operation: Mapping[str, Any]) -> set[str]:
    """Names of a body's own fields and of the query."""
    found = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"}
    for content in operation.get("requestBody", {}).get("content", {}).values():
        found |= properties(content["schema"])
    return found


def properties(schema: Mapping[str, Any]) -> set[str]:
    if "$ref" in schema:
        return properties(document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    found = set(schema.get("properties", ()))
    for kind in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(kind, ()):
            found |= properties(each)
    return found


# ------------------------------------------------------------------------------------------------ commands


@cache
def root() -> Any:
    """The `perilune` command."""
    return typer.main.get_command(app)


@cache
def verbs() -> dict[str, Any]:
    """`kv health` -> its command, hidden ones too."""
    found: dict[str, Any] = {}

    def walk(command: Any, words: tuple[str, ...]) -> None:
        for name, each in getattr(command, "commands", {}).items():
            found[" ".join((*words, name))] = each
            walk(each, (*words, name))

    walk(root(), ())
    return found


def test_every_verb_is_explained() -> None:
    text = read("cli.md") + read("scheduling.md")
    shown = [name for name, command in verbs().items() if not command.hidden]
    assert len(shown) > 30
    missing = [name for name in shown if not re.search(rf"(perilune |`){re.escape(name)}\b", text)]
    assert not missing, missing


def commands() -> Iterator[tuple[str, str]]:
    """(where, command line) of every block, run or not, and of every `perilune …` in a sentence."""
    for page in pages():
        for block in blocks(page):
            if block.language == "sh":
                yield from ((block.place, line) for line in lines(block) if re.match(r"(\w+=\S+ )?perilune ", line))
        for span in re.findall(r"`(perilune [^`]+)`", prose(page)):
            yield name_of(page), span


def lines(block: Block) -> list[str]:
    return block.text.replace("\\\n", " ").splitlines()


def fault_of(line: str) -> str | None:
    """What is wrong with a command line; whether its files exist is none of this."""
    words = shlex.split(re.sub(r"\$\([^)]*\)", "X", line), comments=True)
    words = words[words.index("perilune") + 1 :]
    command = root()
    known = options(command)
    while words:
        word = words.pop(0)
        if word in ("|", ">", "&&"):
            return None
        if word.startswith("--"):
            name = word.partition("=")[0]
            if name not in known and name not in ("--help", "--install-completion"):
                return f"{name} is no option"
            if known.get(name) and "=" not in word and words:
                words.pop(0)
        elif word in getattr(command, "commands", {}):
            command = command.commands[word]
            known = options(command)
        elif getattr(command, "commands", None) and word not in ("VERB", "…"):
            return f"{word} is no verb"
    return None


def options(command: Any) -> dict[str, bool]:
    """Name -> whether a value follows."""
    return {
        name: not getattr(each, "is_flag", False)
        for each in command.params
        for name in (*each.opts, *each.secondary_opts)
    }


def test_every_command_that_pages_show_exists() -> None:
    found = list(commands())
    assert len(found) > 150
    faults = [f"{where}: {line}: {fault}" for where, line in found if (fault := fault_of(line))]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "line", ["perilune tell", "perilune kv heal", "perilune ask --police full x", "perilune --homes x serve"]
)
def test_wrong_commands_are_found(line: str) -> None:
    assert fault_of(line)


def test_benches_that_pages_name_exist() -> None:
    named = {name for page in pages() for name in re.findall(r"python -m bench\.(\w+)", page.read_text())}
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / "bench" / f"{name}.py").exists()]


def test_files_that_pages_name_exist() -> None:
    """Of the source, by their path in it or in its rooms; what lies in a reader's folders has no suffix of code."""
    named = {
        (name_of(page), name)
        for page in pages()
        if name_of(page) != "docs/log.md"  # of its time
        for name in re.findall(r"`([\w./*-]+\.(?:py|c|h|mjs|css|toml|svg))`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 40
    rooms = [ROOT / room for room in ("perilune", "tests", "web/src")]
    missing = [
        f"{page}: {name}"
        for page, name in sorted(named)
        if not any(ROOT.glob(name)) and not any(any(room.glob(f"**/{name}")) for room in rooms)
    ]
    assert not missing, "\n".join(missing)


# ------------------------------------------------------------------------------------------------ settings


def every_setting() -> set[str]:
    schema = Settings.model_json_schema()
    found = set()

    def walk(node: Mapping[str, Any], words: tuple[str, ...]) -> None:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        for name, each in node.get("properties", {}).items():
            found.add(".".join((*words, name)))
            walk(each, (*words, name))
            for choice in (*each.get("anyOf", ()), *each.get("allOf", ())):
                walk(choice, (*words, name))

    walk(schema, ())
    return found


def test_settings_that_pages_name_exist() -> None:
    known = every_setting()
    sections = {name.partition(".")[0] for name in known if "." in name}
    named = {
        (name_of(page), name)
        for page in pages()
        if name_of(page) != "docs/log.md"  # of its time
        for name in SETTING.findall(prose(page))
        if name.partition(".")[0] in sections and not name.endswith((".py", ".json"))
    }
    assert len(named) > 60
    unknown = [f"{page}: {name}" for page, name in sorted(named) if name not in known]
    assert not unknown, "\n".join(unknown)


def test_files_of_settings_that_pages_show_are_valid() -> None:
    """YAML that a page has the reader write into `perilune.yaml`, or shows as such."""
    shown = [
        (block.place, text)
        for page in pages()
        for block in blocks(page)
        for text in (
            re.findall(r"perilune\.yaml <<'END'\n(.*?)^END$", block.text, re.MULTILINE | re.DOTALL)
            or ([block.text] if block.language == "yaml" and "perilune.yaml" in context(block) else [])
        )
    ]
    assert len(shown) >= 3
    for place, text in shown:
        assert Settings.model_validate(yaml.safe_load(text)), place


def context(block: Block) -> str:
    """A block, and the two lines before it."""
    page = (ROOT / block.page).read_text(encoding="utf-8").splitlines()
    return "\n".join([*page[max(0, block.line - 4) : block.line], block.text])
