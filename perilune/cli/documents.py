"""Files and folders of the command line -> uploaded, searchable documents, with visible progress.

A folder becomes one document: its text files behind one another, each under a line with its path, so that a source
tree costs one ingest and a passage can be traced to its file. Unchanged documents are found by hash and not read
again.
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perilune.cli.client import Client
from perilune.cli.console import StatusLine, say
from perilune.core import Citation, FileRecord, FileStatus, TurnCitation
from perilune.errors import InvalidRequest, NotFound, TooLarge, UnsupportedDocument
from perilune.memory.ingest.pagination import clean
from perilune.runtime.memory import human_bytes

STDIN = Path("-")
STDIN_NAME = "stdin"
MAX_FOLDER_FILES = 5_000
MAX_FOLDER_BYTES = 64 * 1024**2
MAX_FOLDER_FILE_BYTES = 1024**2
_POLL_S = 0.05
_SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__", "venv", "dist", "build", "target"})
_HEADER = "===== {path} =====\n"
_TEXT_COMPLETE = frozenset({FileStatus.PREFILLING, FileStatus.PROCESSED})
_FINAL = frozenset({FileStatus.PROCESSED, FileStatus.ERROR})


@dataclass(frozen=True, slots=True)
class Source:
    """Something named on the command line. `members` are (start character, path) of a folder's files."""

    path: Path
    filename: str
    temporary: bool = False
    members: tuple[tuple[int, str], ...] = ()

    def member_at(self, start: int) -> str | None:
        """The folder's file that holds character `start` of the document's text."""
        index = bisect.bisect_right([begin for begin, _ in self.members], start) - 1
        return self.members[index][1] if index >= 0 else None


@dataclass(slots=True)
class Documents:
    """The uploaded documents of one command, in the order of its words."""

    sources: dict[str, Source] = field(default_factory=dict)  # by file id
    records: dict[str, FileRecord] = field(default_factory=dict)
    earlier: dict[str, tuple[str, ...]] = field(default_factory=dict)  # ids of older files of the same name
    _prefilling_since_s: dict[str, float] = field(default_factory=dict)

    @property
    def file_ids(self) -> tuple[str, ...]:
        return tuple(self.sources)

    @property
    def text_complete(self) -> bool:
        return all(record.status in _TEXT_COMPLETE for record in self.records.values())

    @property
    def finished(self) -> bool:
        return all(record.status in _FINAL for record in self.records.values())

    def stage(self, record: FileRecord, now_s: float) -> tuple[str, str]:
        """What ingest is doing with a document, and how far it is."""
        if record.status is FileStatus.PREFILLING:
            since_s = self._prefilling_since_s.setdefault(record.file_id, now_s)
            size = f"{record.tokens:,} tokens" if record.tokens else "its text"
            return f"prefilling {record.filename}", f"computing the KV of {size}, {now_s - since_s:.0f} s"
        of = f" of {record.pages_total}" if record.pages_total else ""
        return f"reading {record.filename}", f"page {record.pages_parsed}{of}"

    def place(self, citation: Citation | TurnCitation) -> str:
        """Where a quote stands, for people: `manual.pdf p. 12`, or a folder's own file."""
        if isinstance(citation, TurnCitation):
            return f"{citation.session_id}, turn {citation.turn}"
        source = self.sources.get(citation.file_id)
        member = source.member_at(citation.start) if source else None
        if member:
            return member
        place = f", {citation.anchor}" if citation.anchor else f" p. {citation.page}"
        return f"{citation.filename}{place}"


# ---------------------------------------------------------------------------------------------- reading


def check_paths(paths: Sequence[Path]) -> None:
    """Raises `NotFound` for a name that isn't there, `UnsupportedDocument` for an empty file, `InvalidRequest`
    where stdin is named twice."""
    if paths.count(STDIN) > 1:
        raise InvalidRequest("`-` is named twice; there is one stdin.", hint="Name it once.")
    for path in paths:
        if path == STDIN:
            continue
        if not path.exists():
            raise NotFound(f"There is no file {path}.", hint="The question is the last word; quote it.")
        if path.is_file() and path.stat().st_size == 0:
            raise UnsupportedDocument(f"{path} is empty.", hint="Give a file with text in it.")


def read_sources(paths: Sequence[Path]) -> list[Source]:
    """Check every path, and join folders. Raises `NotFound`, `TooLarge` or `UnsupportedDocument`."""
    check_paths(paths)
    sources: list[Source] = []
    try:
        sources.extend(map(_source, paths))  # one at a time: what came before a fault is there
    except BaseException:
        discard(sources)
        raise
    return sources


def _source(path: Path) -> Source:
    if path == STDIN:
        return _spool_stdin()
    return _join_folder(path) if path.is_dir() else Source(path, path.name)


def _spool_stdin() -> Source:
    """What is piped in, as a file in a temporary place; its format is known by its content."""
    if sys.stdin.isatty():
        say("reading the document from stdin; Ctrl-D ends it")
    descriptor, spooled = tempfile.mkstemp(prefix="perilune-")
    source = Source(Path(spooled), STDIN_NAME, temporary=True)
    try:
        with os.fdopen(descriptor, "wb") as out:
            shutil.copyfileobj(sys.stdin.buffer, out)
            size = out.tell()
        if not size:
            raise UnsupportedDocument("stdin is empty.", hint="Pipe a document in, or name a file.")
    except BaseException:
        discard([source])
        raise
    return source


def _join_folder(folder: Path) -> Source:
    """One text file out of a folder's text files, in a temporary place."""
    members: list[tuple[int, str]] = []
    skipped = characters = written = 0
    name = folder.resolve().name or "folder"
    descriptor, joined = tempfile.mkstemp(prefix="perilune-", suffix=".txt")
    with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as out:
        for path in _walk(folder):
            text = _text_of(path)
            if text is None:
                skipped += 1
                continue
            members.append((characters, f"{name}/{path.relative_to(folder).as_posix()}"))
            piece = _HEADER.format(path=members[-1][1]) + text.rstrip() + "\n\n"
            characters += len(piece)
            written += out.write(piece)
            if len(members) > MAX_FOLDER_FILES or written > MAX_FOLDER_BYTES:
                Path(joined).unlink()
                raise TooLarge(
                    f"{folder} holds more than {MAX_FOLDER_FILES:,} text files or {human_bytes(MAX_FOLDER_BYTES)}.",
                    hint="Name the subfolders or files you mean.",
                )
    if not members:
        Path(joined).unlink()
        raise UnsupportedDocument(
            f"{folder} holds no text files.",
            hint="PDF, Office, EPUB and HTML files are named one by one, or as a ZIP.",
        )
    if skipped:
        say(
            f"note: {skipped} files of {folder} are left out: not text, or over "
            f"{human_bytes(MAX_FOLDER_FILE_BYTES)}."
        )
    return Source(Path(joined), f"{name}.txt", True, tuple(members))


def _walk(folder: Path) -> Iterator[Path]:
    """Files in a fixed order; hidden ones, symbolic links and what tools generate are left out."""
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in _SKIPPED_FOLDERS)
        for name in sorted(files):
            path = Path(here) / name
            if name[0] != "." and not path.is_symlink() and path.is_file():
                yield path


def _text_of(path: Path) -> str | None:
    if path.stat().st_size > MAX_FOLDER_FILE_BYTES:
        return None
    data = path.read_bytes()
    if b"\0" in data[:8192]:
        return None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return clean(text)  # as the parser will, so that character offsets agree


# ---------------------------------------------------------------------------------------------- ingest


async def upload(
    client: Client, sources: Sequence[Source], status: StatusLine, local_only: bool = False
) -> Documents:
    """Upload what the server doesn't have; with `local_only`, what it doesn't have as such. Failed earlier attempts
    are replaced."""
    documents = Documents()
    known = await client.files() if sources else []
    for source in sources:
        digest = await asyncio.to_thread(_sha256, source.path)
        mine = (item for item in known if item.is_document and item.filename == source.filename)
        same = [item for item in mine if item.sha256 == digest]
        for item in same:
            if item.status is FileStatus.ERROR:
                await client.delete(item.file_id)
        present = [
            item for item in same if item.status is not FileStatus.ERROR and (item.local_only or not local_only)
        ]
        if present:
            record = present[0]
        else:
            status.update("uploading", source.filename)
            record = await client.upload(source.path, source.filename, local_only)
            loose = [item for item in same if item.status is not FileStatus.ERROR]
            if loose:
                names = " ".join(item.file_id for item in loose)
                say(f"note: an earlier copy may leave this machine; `perilune documents rm {names}` deletes it")
        documents.sources[record.file_id] = source
        documents.records[record.file_id] = record
        documents.earlier[record.file_id] = tuple(
            item.file_id
            for item in known
            if item.filename == source.filename and item not in same and item.file_id != record.file_id
        )
    return documents


async def delete_earlier(client: Client, documents: Documents) -> int:
    """Delete what the documents replace: older files of the same names, where the new one could be read. Returns
    how many. Not before that: pages that didn't change are taken over from them."""
    gone = 0
    for file_id, record in documents.records.items():
        if record.status in _TEXT_COMPLETE:
            for earlier in documents.earlier[file_id]:
                if earlier not in documents.records:  # two files of one name may be given together
                    await client.delete(earlier)
                    gone += 1
    return gone


def discard(sources: Sequence[Source]) -> None:
    """Delete the temporary files of joined folders."""
    for source in sources:
        if source.temporary:
            source.path.unlink(missing_ok=True)


async def wait_for_text(client: Client, documents: Documents, limit_s: float, status: StatusLine) -> None:
    """Until everything is parsed and searchable; after `limit_s`, until each document has at least a page.

    Raises `UnsupportedDocument` for a document that can't be read.
    """
    end_s = time.monotonic() + limit_s
    while not documents.text_complete:
        some = all(record.pages_parsed or record.status in _TEXT_COMPLETE for record in documents.records.values())
        if some and time.monotonic() >= end_s:
            break
        await _refresh(client, documents, status)
    status.clear()


async def wait_until_finished(client: Client, documents: Documents, status: StatusLine) -> None:
    """Until the KV of what fits the window is computed, too."""
    while not documents.finished:
        await _refresh(client, documents, status)
    status.clear()


async def wait_for_all(client: Client, documents: Documents, status: StatusLine, *, until_finished: bool) -> None:
    """Until each document is searchable or has failed; with `until_finished` until its KV is computed, too."""
    ended = _FINAL if until_finished else _FINAL | _TEXT_COMPLETE
    while any(record.status not in ended for record in documents.records.values()):
        await _refresh(client, documents, status, raising=False)
    status.clear()


async def _refresh(client: Client, documents: Documents, status: StatusLine, *, raising: bool = True) -> None:
    for file_id, record in documents.records.items():
        if record.status in _FINAL:
            continue
        fresh = await client.file(file_id)
        documents.records[file_id] = fresh
        if fresh.status is FileStatus.ERROR and raising:
            status.clear()
            raise UnsupportedDocument(
                f"{fresh.filename} can't be used. {fresh.error or ''}".rstrip(),
                hint="`perilune doctor` checks the machine; docs/cli.md lists what can be read.",
            )
        status.update(*documents.stage(fresh, time.monotonic()))
    if not documents.finished:
        await asyncio.sleep(_POLL_S)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
