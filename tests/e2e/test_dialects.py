"""OpenAI's and Anthropic's unmodified clients against `perilune serve` with the real model: every dialect."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from .conftest import MODEL, Server, new_home, serving

ASK: dict[str, Any] = {"model": MODEL, "input": "Name three rivers.", "temperature": 0, "max_output_tokens": 24}


def until(server: Server, response_id: str, within_s: float = 120.0) -> Any:
    """The response, once it has come to an end."""
    end = time.monotonic() + within_s
    while (found := server.client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < end, found.status
        time.sleep(0.05)
    return found


def test_responses_in_the_background(server: Server) -> None:
    create, retrieve = server.client.responses.create, server.client.responses.retrieve
    usual = create(**ASK)
    stream = create(**ASK, background=True, stream=True)
    first = next(iter(stream))
    stream.close()  # nobody waits
    response_id = first.response.id  # type: ignore[union-attr]
    made = until(server, response_id)
    assert (made.status, made.output_text) == (usual.status, usual.output_text)

    events = list(retrieve(response_id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for cut in range(0, len(events), 5):
        rest = list(retrieve(response_id, stream=True, starting_after=cut))
        assert [event.to_dict() for event in rest] == [event.to_dict() for event in events[cut + 1 :]]

    endless = create(**{**ASK, "max_output_tokens": 4000}, background=True)
    while retrieve(endless.id).status == "queued":
        time.sleep(0.02)
    assert server.client.responses.cancel(endless.id).status == "cancelled"
    server.until_idle()


def test_conversations_and_compaction(server: Server) -> None:
    create, talks = server.client.responses.create, server.client.conversations
    talk = talks.create(items=[{"type": "message", "role": "user", "content": "My dog is called Otto."}])
    first = create(**ASK, conversation=talk.id)
    second = create(**{**ASK, "input": "Which is the longest?"}, conversation=talk.id)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + 20
    items = list(talks.items.list(talk.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]  # type: ignore[union-attr]

    small = server.client.responses.compact(model=MODEL, previous_response_id=create(**ASK).id)
    assert [item.type for item in small.output] == ["message", "compaction"]
    sent: Any = [item.model_dump(exclude_none=True, warnings=False) for item in small.output]
    follows = create(**{**ASK, "input": [*sent, {"role": "user", "content": "And a lake?"}]})
    assert follows.output_text

    talks.delete(talk.id)
    for response_id in (first.id, second.id):
        with pytest.raises(openai.NotFoundError):
            server.client.responses.retrieve(response_id)


def test_what_is_deleted_while_an_answer_is_made_isnt_kept(server: Server) -> None:
    client = server.client
    file = client.files.create(file=("rivers.txt", b"The Oder is 840 km long. " * 20), purpose="user_data")
    content = [{"type": "input_file", "file_id": file.id}, {"type": "input_text", "text": "How long is it?"}]
    talk = client.conversations.create()
    for asked, delete in (
        ({"input": [{"role": "user", "content": content}]}, lambda: client.files.delete(file.id)),
        ({"conversation": talk.id}, lambda: client.conversations.delete(talk.id)),
    ):
        with client.responses.create(**{**ASK, **asked, "max_output_tokens": 60}, stream=True) as stream:
            kept = None
            for event in stream:
                if event.type == "response.output_text.delta" and kept is None:
                    delete()
                    kept = False
                if event.type in ("response.completed", "response.incomplete"):
                    response_id = event.response.id  # type: ignore[union-attr]
        assert kept is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)


def test_an_answer_whose_server_is_killed_is_failed(tmp_path: Path, smollm2_path: Path) -> None:
    home = new_home(tmp_path, smollm2_path)
    with serving(home) as server:
        lost = server.client.responses.create(**{**ASK, "max_output_tokens": 4000}, background=True)
        done = until(server, server.client.responses.create(**ASK, background=True).id)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with serving(home) as server:
        assert server.client.responses.retrieve(lost.id).status == "failed"
        assert server.client.responses.retrieve(done.id).output_text == done.output_text
        kinds = [event.type for event in server.client.responses.retrieve(done.id, stream=True, starting_after=3)]
        assert kinds[-1] in ("response.completed", "response.incomplete")
