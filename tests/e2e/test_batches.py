"""Batches over the real server and model: killed twice and every line once; nobody waits for them; deletion.

The short form runs 300 lines in every test run; `make soak` runs 10,000.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.e2e.conftest import MODEL, Server, new_home, serving
from tests.memory.test_purge import MARK, holding

CHAT = "/v1/chat/completions"
OVER = ("completed", "failed", "expired", "cancelled")
WITHIN_S = 150.0
# Nothing here searches by meaning, and no line's time is measured.
SETTINGS = {"PERILUNE_MEMORY__EMBEDDER": "off", "PERILUNE_RUNTIME__CACHE_WARMUP": "false"}


def line(number: int, text: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    short = {"role": "system", "content": "."}  # the template's own is longer
    asked: dict[str, Any] = {"messages": [short, {"role": "user", "content": text}], "max_tokens": 1}
    if url == "/v1/responses":
        asked = {"input": text, "max_output_tokens": 16}
    elif url == "/v1/completions":
        asked = {"prompt": text, "max_tokens": 1}
    elif url == "/v1/embeddings":
        asked = {"input": text}
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": {"model": MODEL, **asked, **body}}


def begun(client: openai.OpenAI, lines: list[dict[str, Any]], endpoint: str = CHAT) -> Batch:
    data = "\n".join(json.dumps(each) for each in lines).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")  # type: ignore[arg-type]


def until(client: openai.OpenAI, batch: Batch, done: int | None, within_s: float) -> Batch:
    """Wait until so many lines are done; None: until the batch has ended."""
    end_s = time.monotonic() + within_s
    while batch.status not in OVER:
        assert time.monotonic() < end_s, batch
        counts = batch.request_counts
        if done is not None and counts is not None and counts.completed >= done:
            break
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def rows(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


@pytest.mark.parametrize(
    ("lines", "within_s"),
    [
        pytest.param(300, WITHIN_S, id="short", marks=pytest.mark.timeout(600)),
        pytest.param(
            int(os.environ.get("PERILUNE_SOAK_LINES", "10000")),
            6_000.0,
            id="long",
            marks=[pytest.mark.soak, pytest.mark.timeout(7_200)],
        ),
    ],
)
def test_killed_twice_every_line_is_in_the_output_once(
    tmp_path: Path, smollm2_path: Path, lines: int, within_s: float
) -> None:
    home = new_home(tmp_path, smollm2_path)
    wanted = [line(number, f"Say {number}.") for number in range(lines)]
    wanted[3]["body"]["model"] = "no-such-model"
    with serving(home, **SETTINGS) as server:
        batch = until(server.client, begun(server.client, wanted), lines // 3, within_s)
        assert batch.status == "in_progress"
        server.process.kill()
        server.process.wait()
    ran = []
    with serving(home, **SETTINGS) as server:
        batch = until(server.client, server.client.batches.retrieve(batch.id), 2 * lines // 3, within_s)
        ran.append(server.metric('perilune_batch_lines_total{status="200"}'))
        server.process.kill()
        server.process.wait()
    with serving(home, **SETTINGS) as server:
        batch = until(server.client, server.client.batches.retrieve(batch.id), None, within_s)
        ran.append(server.metric('perilune_batch_lines_total{status="200"}'))
        done, failed = rows(server.client, batch.output_file_id), rows(server.client, batch.error_file_id)
        server.check_blocks()
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (lines - 1, 1)
    assert [row["custom_id"] for row in failed] == ["line-3"]
    assert Counter(row["custom_id"] for row in done) == Counter(
        f"line-{number}" for number in range(lines) if number != 3
    )
    assert all(row["response"]["body"]["choices"][0]["message"] for row in done)
    assert max(ran) < 2 * lines / 3, "a life does again what was stored before"


def test_nobody_waits_for_a_batch(server: Server) -> None:
    """An interactive question in the middle of a batch: the batch stands still until it is answered."""
    batch = begun(server.client, [line(number, f"Say {number}.", max_tokens=24) for number in range(60)])
    until(server.client, batch, 1, WITHIN_S)
    stream = server.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell me a long story."}],
        max_tokens=48,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    done = []
    for number, _ in enumerate(stream):
        if number % 8 == 2:
            counts = server.client.batches.retrieve(batch.id).request_counts
            assert counts is not None
            done.append(counts.completed)
    # What the engine had finished may still be on its way to the database at the first look.
    assert done[-1] - done[0] <= 3, f"lines were answered while somebody waited: {done}"
    batch = until(server.client, server.client.batches.retrieve(batch.id), None, WITHIN_S)
    assert batch.status == "completed"


def test_every_endpoint_and_what_is_wrong_with_lines(server: Server) -> None:
    embedder = next(model.id for model in server.client.models.list() if model.id != MODEL)
    models = {CHAT: MODEL, "/v1/responses": MODEL, "/v1/completions": MODEL, "/v1/embeddings": embedder}
    batches = [
        begun(server.client, [line(n, f"Hi {n}", url, model=model) for n in range(3)], url)
        for url, model in models.items()
    ]
    for batch in batches:
        ended = until(server.client, batch, None, WITHIN_S)
        done = rows(server.client, ended.output_file_id)
        assert [row["custom_id"] for row in done] == ["line-0", "line-1", "line-2"], rows(
            server.client, ended.error_file_id
        )
        assert ended.usage is not None
        assert ended.usage.input_tokens > 0
    wrong = begun(server.client, [line(0, "a"), line(0, "b")])
    ended = until(server.client, wrong, None, WITHIN_S)
    assert (ended.status, ended.errors and ended.errors.data and ended.errors.data[0].code) == (
        "failed",
        "duplicate_custom_id",
    )


def test_the_command_line(server: Server, tmp_path: Path) -> None:
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line(number, f"Say {number}.") for number in range(5)]
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    done = server.cli("batch", "run", str(file), "-o", str(output))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "completed: 5 of 5" in done.stderr
    answered = [json.loads(each) for each in output.read_text().splitlines()]
    assert [row["custom_id"] for row in answered] == [each["custom_id"] for each in lines]
    lines[1]["body"]["model"] = "no-such-model"
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    done = server.cli("batch", "run", str(file), "--errors", str(tmp_path / "failed.jsonl"))
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 4)
    assert json.loads((tmp_path / "failed.jsonl").read_text())["custom_id"] == "line-1"
    detached = server.cli("batch", "run", str(file), "--detach")
    batch_id = detached.stdout.strip()
    fetched = server.cli("batch", "fetch", batch_id, "--json", "--errors", str(tmp_path / "again.jsonl"))
    assert (fetched.returncode, json.loads(fetched.stdout)["id"]) == (1, batch_id)
    listed = json.loads(server.cli("batch", "list", "--json").stdout)
    assert listed[0]["id"] == batch_id
    assert batch_id in server.cli("batch", "list").stdout
    late = server.cli("batch", "cancel", batch_id)
    assert late.returncode == 1
    assert "can't be cancelled" in late.stderr
    file.write_text(json.dumps(lines[0]) + "\n{\n")
    wrong = server.cli("batch", "run", str(file))
    assert wrong.returncode == 1
    assert "line 2" in wrong.stderr


def test_file_extract_gives_the_text_that_was_read(server: Server) -> None:
    page = "<html><body><h1>Brill</h1><p>The fee is twelve crowns.</p></body></html>"
    file = server.client.files.create(file=("fees.html", page.encode()), purpose="file-extract")  # type: ignore[arg-type]
    text = server.client.files.content(file.id).text
    assert "The fee is twelve crowns." in text
    assert "<p>" not in text
    upload = server.client.uploads.upload_file_chunked(
        file=page.encode(),
        filename="parts.html",
        bytes=len(page),
        mime_type="text/html",
        purpose="user_data",
        part_size=20,
    )
    assert upload.file is not None
    server.client.files.wait_for_processing(upload.file.id, poll_interval=0.1)
    answer = server.client.chat.completions.create(
        model=MODEL,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "file", "file": {"file_id": upload.file.id}},
                    {"type": "text", "text": "What is the fee?"},
                ],
            }
        ],
        max_tokens=4,
    )
    assert answer.choices[0].message.content
    for made in (file.id, upload.file.id):
        server.client.files.delete(made)


def test_nothing_of_a_forgotten_tenants_batches_stays(server: Server) -> None:
    home = Path(server.environment["PERILUNE_HOME"])
    lines = [line(number, f"What does {MARK} owe?") for number in range(4)]
    ended = until(server.client, begun(server.client, lines), None, WITHIN_S)
    assert ended.status == "completed"
    running = begun(server.client, [line(n, f"Tell me of {MARK}.", max_tokens=200) for n in range(400)])
    upload = server.client.uploads.create(
        filename=f"{MARK}.txt", bytes=40, mime_type="text/plain", purpose="user_data"
    )
    server.client.uploads.parts.create(upload.id, data=MARK.encode())
    until(server.client, running, 1, WITHIN_S)
    assert any(name.startswith("files/") for name in holding(home, MARK))
    request = urllib.request.Request(f"{server.url}/v1/memory", method="DELETE")
    urllib.request.urlopen(request).close()
    with pytest.raises(openai.NotFoundError):
        server.client.batches.retrieve(running.id)
    end_s = time.monotonic() + WITHIN_S
    while found := holding(home, MARK):
        assert time.monotonic() < end_s, found
        time.sleep(0.2)
