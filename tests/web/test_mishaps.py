"""The web chat where something goes otherwise than planned: double clicks, half-written questions, own faults."""

from __future__ import annotations

import json
import re
from typing import Any

from playwright.sync_api import Page, Route, expect

from tests.e2e.conftest import Server
from tests.web.conftest import WAIT_MS, Opener
from tests.web.script import MODEL, ScriptedServer

expect.set_options(timeout=WAIT_MS)
SCRIPTED = {"model": MODEL}


def says(page: Page, path: str, body: object) -> None:
    """From now on the server gives `body` for GETs of a path."""

    def reply(route: Route) -> None:
        if route.request.method == "GET":
            route.fulfill(json=body)
        else:
            route.fallback()

    page.route(re.compile(re.escape(path) + r"(\?|$)"), reply)


def test_a_double_click_makes_one_branch(desks: Opener, server: Server, scripted: ScriptedServer) -> None:
    scripted.script.say("Root.")
    desk = desks(server.url, stored=SCRIPTED)
    desk.ask("Branch off twice at once.")
    desk.answered()
    trunk = desk.page.url
    made: list[str] = []
    desk.page.on("request", lambda request: made.append(request.url) if request.url.endswith("/fork") else None)
    desk.page.get_by_role("button", name="Branch off here").dblclick()
    expect(desk.page).not_to_have_url(trunk)
    expect(desk.answers.first).to_contain_text("Root.")
    assert len(made) == 1, made


def test_a_half_written_question_stays_with_its_conversation(
    desks: Opener, server: Server, scripted: ScriptedServer
) -> None:
    scripted.script.say("Said.")
    desk = desks(server.url, stored=SCRIPTED)
    page, field = desk.page, desk.page.locator("#question")
    desk.ask("Where half a question stays")
    desk.answered()
    field.fill("And what about")
    page.get_by_role("button", name="New conversation").click()
    expect(field).to_have_value("")
    page.get_by_role("link", name="Memory").click()
    page.get_by_role("link", name="Where half a question stays").click()
    expect(field).to_have_value("And what about")
    page.reload()
    expect(field).to_have_value("And what about")


def test_thoughts_are_closed_until_somebody_opens_them(desks: Opener, server: Server) -> None:
    desk = desks(server.url)
    deltas: list[tuple[dict[str, str], str | None]] = [
        ({"reasoning_content": "The user wants the moon. "}, None),
        ({"reasoning_content": "It is far."}, None),
        ({"content": "Far away."}, None),
        ({}, "stop"),
    ]
    events = [
        {"id": "chatcmpl-t", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        for delta, reason in deltas
    ]
    body = "".join(f"id: {n}\ndata: {json.dumps(each)}\n\n" for n, each in enumerate(events)) + "data: [DONE]\n\n"
    desk.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream")
    )
    desk.ask("Where is the moon?")
    desk.answered()
    expect(desk.answers.first).to_contain_text("Far away.")
    expect(desk.answers.first).not_to_contain_text("It is far.")
    desk.page.get_by_text("Thoughts", exact=True).click()
    expect(desk.answers.first).to_contain_text("The user wants the moon. It is far.")
    desk.shot("30-thoughts")
    desk.is_accessible()


def turn(number: int, speaker: str, text: str, **more: object) -> dict[str, Any]:
    return {"session": "odd", "turn": number, "speaker": speaker, "at": 0.0, "text": text, **more}


def test_a_fault_in_one_answer_leaves_the_rest(desks: Opener, server: Server) -> None:
    """An answer that can't be shown says so where it stands; nothing else is lost."""
    desk = desks(server.url)
    broken = {"id": "chatcmpl-x", "finish_reason": "stop", "citations": [None]}
    turns = [
        turn(1, "user", "First?"),
        turn(2, "assistant", "Broken.", answer=broken),
        turn(3, "user", "Second?"),
        turn(4, "assistant", "Whole."),
    ]
    session = {"id": "odd", "title": "Odd", "turns": 4, "created_at": 0, "updated_at": 0, "parent": None}
    says(desk.page, "/v1/sessions/odd", {**session, "data": turns, "has_more": False})
    desk.open("#/c/odd")
    expect(desk.page.get_by_role("alert")).to_contain_text("This part can't be shown.")
    expect(desk.page.get_by_text("Whole.")).to_be_visible()
    expect(desk.page.get_by_text("First?")).to_be_visible()
    desk.shot("31-fault")
    desk.is_accessible()
    assert desk.complaints  # the console tells of it
    desk.complaints.clear()


def test_what_the_server_warns_of_is_chinese_in_the_chinese_page(desks: Opener, server: Server) -> None:
    desk = desks(server.url, locale="zh-CN")
    checks = [
        {
            "name": "kernels",
            "state": "warning",
            "detail": "PyTorch reference",
            "fix": "python -m perilune.kernels.build",
        },
        {"name": "tape", "state": "warning", "detail": "The tape is torn.", "fix": ""},
    ]
    says(desk.page, "/v1/machine", {"object": "machine", "fit": "ok", "checks": checks})
    says(desk.page, "/v1/sessions", {"data": [], "has_more": False})
    says(desk.page, "/v1/files", {"data": [], "has_more": False, "last_id": None})
    desk.page.reload()
    expect(desk.page.get_by_text("没有编译快速内核")).to_be_visible()
    expect(desk.page.get_by_text("PyTorch reference")).to_be_hidden()
    expect(
        desk.page.get_by_text("The tape is torn.")
    ).to_be_visible()  # no code of it is known: better than nothing
    desk.shot("32-warnings")
    desk.is_accessible()
