"""What surrounds the endpoints: paths, limits, Host and Origin, keys and roles, health, metrics, logs, binding."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import logging
import socket
from pathlib import Path
from typing import Any

import openai
import pytest

from perilune import __version__
from perilune.api import app as api_app
from perilune.api.app import create_app, listen, url_of
from perilune.api.auth import check_bind, host_name, is_loopback
from perilune.config import ServerSettings, Settings
from perilune.errors import ConfigError, Conflict
from perilune.memory import audit
from perilune.ops.logging import JsonFormatter, configure
from perilune.ops.metrics import TABLE, PrometheusSink
from perilune.service.ports import Caller
from perilune.telemetry import Telemetry

from .conftest import Serve
from .fakes import MODEL, FakeService

ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "why?"}]}
KEYS = {"alpha": Caller("a", "user"), "beta": Caller("b", "user"), "reader": Caller("a", "read-only", 3.0)}


async def test_models(serve: Serve) -> None:
    async with serve() as server:
        page = await server.client.models.list()
        assert [model.id for model in page.data] == [MODEL]
        card = await server.client.models.retrieve(MODEL)
        assert card.model_extra == {"max_model_len": 8192, "licence": "Apache-2.0"}
        with pytest.raises(openai.NotFoundError) as caught:
            await server.client.models.retrieve("org/none")
        assert caught.value.code == "model_not_found"


async def test_health_ready_version(serve: Serve) -> None:
    async with serve() as server:
        assert await (await server.http.get("/health")).json() == {"status": "ok"}
        assert await (await server.http.get("/version")).json() == {"version": __version__}
        assert (await server.http.get("/ready")).status == 200
        server.service.is_ready = False
        reply = await server.http.get("/ready")
        assert (reply.status, reply.headers["retry-after"]) == (503, "2")
        assert (await server.http.get("/health")).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/files", 405, "method_not_allowed"),
        ("PUT", "/v1/files/file-1", 405, "method_not_allowed"),
        ("GET", "/v1/files/..%2f..%2fetc", 404, "not_found"),
        ("GET", "/v1/files/%00", 404, "not_found"),
    ],
)
async def test_wrong_paths(serve: Serve, method: str, path: str, status: int, code: str) -> None:
    async with serve() as server, server.http.request(method, path) as reply:
        assert reply.status == status
        error = (await reply.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == code
        assert reply.headers["x-request-id"].startswith("req_")
        assert status != 405 or "allow" in reply.headers


async def test_request_id_is_the_servers_own(serve: Serve) -> None:
    async with serve() as server:
        reply = await server.http.get("/health", headers={"x-request-id": "mine"})
        assert reply.headers["x-request-id"] != "mine"


async def test_body_limit_counts_while_reading(serve: Serve) -> None:
    async with serve(max_body=2048) as server:
        big = json.dumps({**ASK, "user": "x" * 4000}).encode()

        async def pieces() -> Any:
            for start in range(0, len(big), 500):
                yield big[start : start + 500]

        for data in (big, pieces()):
            reply = await server.http.post("/v1/chat/completions", data=data)
            assert reply.status == 413
            assert "2,048" in (await reply.json())["error"]["message"]
        assert (await server.http.post("/v1/chat/completions", json=ASK)).status == 200
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n"
        assert b" 413 " in await server.raw(head)  # before a byte of the body was sent


async def test_body_cut_short_is_no_request(serve: Serve) -> None:
    async with serve() as server:
        _, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.sleep(0.05)
        assert server.service.requests == []


async def test_headers_are_bounded(serve: Serve) -> None:
    async with serve() as server:
        head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"x-a: " + b"y" * 100_000 + b"\r\n\r\n"
        got = await server.raw(head)
        assert b" 431 " in got or b" 400 " in got or got == b""  # b"": closed while the client was still sending
        assert b" 400 " in await server.raw(b"\x16\x03\x01 not http\r\n\r\n")
        assert (await server.http.get("/health")).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Host: 127.0.0.1:1", 200),
        ("Host: [::1]:80", 200),
        ("Host: localhost", 200),
        ("Host: localhost\r\nOrigin: http://localhost:3000", 200),
        ("Host: evil.example", 403),
        ("Host: localhost.evil.example", 403),
        ("Host: 127.0.0.1.evil.example", 403),
        ("Host: evil.example:80@localhost", 403),
        ("Host: ", 403),
        ("Host: localhost\r\nOrigin: https://evil.example", 403),
        ("Host: localhost\r\nOrigin: null", 403),
    ],
)
async def test_only_this_machine_may_be_named(serve: Serve, headers: str, status: int) -> None:
    async with serve() as server:
        reply = await server.raw(f"GET /v1/models HTTP/1.1\r\n{headers}\r\nConnection: close\r\n\r\n".encode())
        assert reply.startswith(f"HTTP/1.1 {status} ".encode()), reply[:300]


async def test_keys(serve: Serve) -> None:
    async with serve(FakeService(keys=dict(KEYS)), key="wrong") as server:
        with pytest.raises(openai.AuthenticationError) as caught:
            await server.client.chat.completions.create(**ASK)
        assert caught.value.code == "invalid_api_key"
        for path in ("/v1/models", "/metrics", "/nothing", "/v1/files"):
            reply = await server.http.get(path)
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
        for path in ("/health", "/ready", "/version"):
            assert (await server.http.get(path)).status == 200
        for value in ("Basic alpha", "Bearer", "Bearer ", "alpha", "Bearer " + "x" * 600):
            assert (await server.http.get("/v1/models", headers={"authorization": value})).status == 401
        twice = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + b"Authorization: Bearer alpha\r\n" * 2 + b"\r\n"
        assert b" 400 " in await server.raw(twice)
        done = await server.client.with_options(api_key="reader").chat.completions.create(**ASK)
        assert done.choices
        assert (server.service.requests[-1].tenant, server.service.requests[-1].deadline_s) == ("a", 3.0)


async def test_read_only_keys_change_nothing(serve: Serve) -> None:
    async with serve(FakeService(keys=dict(KEYS)), key="reader") as server:
        with pytest.raises(openai.PermissionDeniedError):
            await server.client.files.create(file=("a.txt", b"text"), purpose="user_data")
        record = await server.client.with_options(api_key="alpha").files.create(
            file=("a.txt", b"text"), purpose="user_data"
        )
        with pytest.raises(openai.PermissionDeniedError):
            await server.client.files.delete(record.id)
        assert (await server.client.files.retrieve(record.id)).filename == "a.txt"
        with pytest.raises(openai.NotFoundError):  # another tenant's file doesn't exist
            await server.client.with_options(api_key="beta").files.retrieve(record.id)


async def test_public_address_needs_keys_at_every_request(serve: Serve) -> None:
    async with serve(FakeService(keys=dict(KEYS)), key="alpha", public=True) as server:
        head = b"GET /v1/models HTTP/1.1\r\nHost: llm.example\r\nAuthorization: Bearer alpha\r\n\r\n"
        assert b" 200 " in await server.raw(head)
        server.service.keys.clear()  # the last key was revoked: nobody may enter, rather than everybody
        assert b" 401 " in await server.raw(head)


async def test_binding() -> None:
    await check_bind(FakeService(), "127.0.0.1")
    await check_bind(FakeService(keys=dict(KEYS)), "0.0.0.0")
    for host in ("0.0.0.0", "::", "", "192.168.1.5", "example.org"):
        with pytest.raises(ConfigError, match="no key exists"):
            await check_bind(FakeService(), host)


def test_addresses() -> None:
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]"))
    assert not any(is_loopback(host) for host in ("", "0.0.0.0", "::", "10.0.0.1", "localhost.example", "127.1"))
    assert host_name("LOCALHOST:80") == "localhost"
    assert host_name("[bad") == ""
    assert url_of("::1", 5) == "http://[::1]:5"


def test_port_in_use_is_explained() -> None:
    with listen("127.0.0.1", 0) as first, pytest.raises(Conflict, match="can't be used") as caught:
        listen("127.0.0.1", first.getsockname()[1])
    assert "--port" in caught.value.hint
    with pytest.raises(ConfigError, match="isn't an address"):
        listen("no such host", 0)


async def test_serve_runs_until_told_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(home=tmp_path, server=ServerSettings(port=0))
    service, sink = FakeService(), PrometheusSink(MODEL)
    app = create_app(service, settings, telemetry=Telemetry(sink), metrics=sink)
    urls: list[str] = []

    def ready(url: str) -> None:
        urls.append(url)
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=2):
            pass
        signal_number = api_app.signal.SIGINT
        asyncio.get_running_loop().call_later(0.05, api_app.signal.raise_signal, signal_number)

    assert await asyncio.wait_for(api_app.serve(app, service, settings, ready), 10) == 130
    assert urls[0].startswith("http://127.0.0.1:")


async def test_too_many_requests_at_once(serve: Serve) -> None:
    from .fakes import Pause

    async with serve(FakeService([Pause(3600)]), max_queue=1) as server:
        limit = 1 + 16 + 32
        held = [asyncio.create_task(server.client.chat.completions.create(**ASK)) for _ in range(limit)]
        async with asyncio.timeout(10):
            while server.service.open < limit:
                await asyncio.sleep(0.01)
        with pytest.raises(openai.InternalServerError) as caught:
            await server.client.chat.completions.create(**ASK)
        assert (caught.value.status_code, caught.value.code) == (503, "overloaded")
        assert caught.value.response.headers["retry-after"] == "2"
        assert (await server.http.get("/metrics")).status == 200
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def test_metrics_page(serve: Serve) -> None:
    async with serve() as server:
        await server.client.chat.completions.create(**ASK)
        reply = await server.http.get("/metrics")
        text = await reply.text()
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert 'perilune_answers_total{outcome="completed"} 1.0' in text
        assert 'perilune_plans_total{plan="full"} 1.0' in text
        assert "perilune_prompt_tokens_total 96.0" in text
        assert f'vllm:prompt_tokens_total{{model_name="{MODEL}"}} 96.0' in text
        assert f'vllm:generation_tokens_total{{model_name="{MODEL}"}} 5.0' in text
        assert f'vllm:request_success_total{{finished_reason="stop",model_name="{MODEL}"}} 1.0' in text
        assert 'route="/v1/chat/completions",status="200"' in text


async def test_metrics_labels_are_bounded(serve: Serve) -> None:
    async with serve() as server:
        for i in range(20):
            await server.http.request(f"VERB{i}", f"/v1/{i}")
        lines = [
            line for line in server.shown_metrics().splitlines() if line.startswith("perilune_http_requests_total")
        ]
        assert lines == ['perilune_http_requests_total{method="OTHER",route="other",status="404"} 20.0']


def test_sink_takes_names_that_are_not_listed() -> None:
    telemetry = Telemetry(sink := PrometheusSink("m"))
    telemetry.count("surprises_total", kind="a")
    telemetry.count("surprises", 2, kind="b", more="dropped")
    telemetry.observe("surprise_seconds", 0.2)
    telemetry.gauge("surprise", 4)
    with telemetry.span("work"):
        pass
    text = sink.render().decode()
    assert 'perilune_surprises_total{kind="a"} 1.0' in text
    assert 'perilune_surprises_total{kind="b"} 2.0' in text
    assert "perilune_surprise_seconds_sum 0.2" in text
    assert "perilune_surprise 4.0" in text
    assert "perilune_work_seconds_count 1.0" in text


def test_gauges_are_asked_for_when_shown() -> None:
    sink = PrometheusSink("m")
    sink.before_render(lambda: sink.gauge("sequences_running", 3, {}))
    text = sink.render().decode()
    assert "perilune_sequences_running 3.0" in text
    assert 'vllm:num_requests_running{model_name="m"} 3.0' in text


def test_every_name_in_the_code_is_listed() -> None:
    """What any layer reports is in the table, with the labels it is reported with."""
    listed = {metric.name: set(metric.labels) for metric in TABLE}
    for path in sorted(Path(api_app.__file__).parents[1].rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            kind, owner = node.func.attr, ast.unparse(node.func.value)
            if kind not in {"count", "observe", "gauge", "span"} or not owner.endswith("telemetry"):
                continue
            assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno} computes a metric's name"
            name = str(node.args[0].value).removesuffix("_total") + ("_seconds" if kind == "span" else "")
            assert name in listed, f"{path}:{node.lineno}: {name} isn't in ops.metrics.TABLE"
            assert {word.arg for word in node.keywords} <= listed[name] | {"value"}, f"{path}:{node.lineno}: {name}"


def test_every_metric_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    missing = [name for metric in TABLE for name in (metric.name, *metric.aliases) if f"`{name}`" not in text]
    assert not missing


async def test_logs_hold_no_prompt_and_no_key(serve: Serve) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    before = root.level
    root.setLevel(logging.INFO)
    try:
        async with serve(FakeService(keys={"topsecretkey": Caller("acme", "user")}), key="topsecretkey") as server:
            ask = {"model": MODEL, "messages": [{"role": "user", "content": "my secret diary"}]}
            await server.client.chat.completions.create(**ask)  # type: ignore[call-overload]
            await server.http.post("/v1/chat/completions?key=topsecretkey", data=b'{"my secret diary"')
            await server.http.get("/my secret diary", headers={"authorization": "Bearer topsecretkey"})
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
    text = stream.getvalue()
    assert "diary" not in text
    assert "topsecretkey" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    mine = [line for line in lines if line["message"] == "request" and line["status"] == 200]
    assert mine[0]["tenant"] == "acme"
    assert mine[0]["route"] == "/v1/chat/completions"
    assert {line["status"] for line in lines if line["message"] == "request"} == {200, 401, 404}


def test_log_lines_are_json_and_redacted() -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    try:
        configure("INFO", stream)
        logging.getLogger("x").info(
            'sent "Authorization: Bearer sk-123", api_key=\'abc"', extra={"fields": {"n": 1}}
        )
        try:
            raise ValueError("Bearer sk-456")
        except ValueError:
            logging.getLogger("x").exception("failed")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["level"], first["logger"], first["n"]) == ("info", "x", 1)
    assert "sk-" not in stream.getvalue()
    assert "abc" not in first["message"]
    assert second["traceback"][-1] == "ValueError"
    assert "test_log_lines" in second["traceback"][-2]


def test_logged_exceptions_quote_nothing() -> None:
    """Messages of libraries hold what they worked on, causes' messages too."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("test.quotes")
    logger.addHandler(handler)
    try:
        try:
            int("my secret diary")
        except ValueError as error:
            raise OSError(28, "No space left on device", "diary.pdf") from error
    except OSError:
        logger.exception("failed")
    finally:
        logger.removeHandler(handler)
    shown = json.loads(stream.getvalue())["traceback"]
    assert "diary" not in stream.getvalue()
    assert "ValueError" in shown
    assert shown[-1] == "OSError (No space left on device)"


async def test_only_an_admin_sees_the_metrics(serve: Serve) -> None:
    """They tell of every tenant's load."""
    keys = {"boss": Caller("acme", "admin"), "worker": Caller("acme", "user"), "guest": Caller("acme", "read-only")}
    async with serve(FakeService(keys=keys)) as server:
        for key, status in (("boss", 200), ("worker", 403), ("guest", 403)):
            headers = {"authorization": f"Bearer {key}"}
            assert (await server.http.get("/metrics", headers=headers)).status == status
            assert (await server.http.get("/v1/models", headers=headers)).status == 200


async def test_a_deletion_is_done_in_the_name_of_its_key(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService(keys={"worker": Caller("acme", "user", key_id="key-7")})
    actors: list[str | None] = []

    async def delete(tenant: str, file_id: str) -> None:
        actors.append(await asyncio.to_thread(audit._actor.get))

    monkeypatch.setattr(service.documents, "delete", delete)
    async with serve(service, key="worker") as server:
        await server.client.files.delete("file-1")
        service.keys.clear()
        await server.client.files.delete("file-1")
    assert actors == ["key:key-7", "local"]
