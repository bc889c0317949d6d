"""The web chat where something goes otherwise than planned: double clicks, half-written questions, own faults."""

from __future__ import annotations

import re
from pathlib import Path
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


def test_thoughts_are_closed_until_somebody_opens_them(
    desks: Opener, server: Server, scripted: ScriptedServer
) -> None:
    """While the answer is made, and when the conversation is opened again."""
    scripted.script.say("Far away.", thought="The user wants the moon. It is far.")
    desk = desks(server.url, stored=SCRIPTED)
    desk.ask("Where is the moon?")
    desk.answered()
    expect(desk.answers.first).to_contain_text("Far away.")
    expect(desk.answers.first).not_to_contain_text("It is far.")
    desk.page.get_by_text("Thoughts", exact=True).click()
    expect(desk.answers.first).to_contain_text("The user wants the moon. It is far.")
    desk.shot("30-thoughts")
    desk.is_accessible()
    desk.page.reload()
    expect(desk.answers.first).not_to_contain_text("It is far.")
    desk.page.get_by_text("Thoughts", exact=True).click()
    expect(desk.answers.first).to_contain_text("The user wants the moon. It is far.")


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


DRAG = """([event, target, beside]) => {
  const data = new DataTransfer();
  data.items.add(new File(['Words.'], 'words.txt', {type: 'text/plain'}));
  const relatedTarget = beside && document.querySelector(beside);
  const made = new DragEvent(event, {bubbles: true, cancelable: true, dataTransfer: data, relatedTarget});
  document.querySelector(target).dispatchEvent(made);
  return made.defaultPrevented;
}"""


def test_a_file_that_is_dragged_past_the_conversation(desks: Opener, server: Server) -> None:
    """The browser never opens it in the page's place, and the invitation to drop it goes away with it."""
    page = desks(server.url).page
    for beside in ("nav", "nav #search"):
        assert page.evaluate(DRAG, ["dragover", beside, None])
    invitation = page.get_by_text("Drop documents to ask about them")
    expect(invitation).to_be_hidden()
    page.evaluate(DRAG, ["dragover", "main #question", None])
    page.evaluate(DRAG, ["dragleave", "main #question", "main header"])
    expect(invitation).to_be_visible()
    page.evaluate(DRAG, ["dragleave", "main header", None])
    expect(invitation).to_be_hidden()


SELECT = """() => {
  const words = document.querySelector('aside [role=region]');
  getSelection().selectAllChildren(words);
}"""


def test_the_right_place_can_be_marked_again_and_again(
    desks: Opener, server: Server, scripted: ScriptedServer, tmp_path: Path
) -> None:
    """In a page that was open already, and for another answer from the same document."""
    kept = tmp_path / "kestrel.txt"
    kept.write_text("The lighthouse of Kestrel Point is painted vermilion.")
    scripted.script.say("Vermilion.")
    desk = desks(server.url, stored=SCRIPTED)
    page = desk.page
    desk.attach(kept)
    sources = page.get_by_role("region", name="Where it is from").get_by_role("button")
    panel = page.get_by_role("complementary", name="Source")
    mark = panel.get_by_role("button", name="Mark as the right place")
    for nth, question in enumerate(
        ("Which colour has the lighthouse?", "Is the lighthouse of Kestrel Point vermilion?"), 1
    ):
        desk.ask(question)
        desk.answered(nth)
        if nth == 1:
            desk.questions.first.get_by_role("button", name="kestrel.txt").click()
            expect(panel.get_by_text("is painted vermilion")).to_be_visible()
            expect(mark).to_be_hidden()
        sources.last.click()
        expect(panel.locator("mark").first).to_be_visible()
        expect(mark).to_be_visible()
        page.evaluate(SELECT)
        mark.click()
        expect(panel.get_by_role("status")).to_contain_text("The next time this is asked")


def test_escape_leaves_the_edit_and_stops_no_answer(
    desks: Opener, server: Server, scripted: ScriptedServer
) -> None:
    scripted.script.say("Said.")
    desk = desks(server.url, stored=SCRIPTED)
    desk.ask("Edited in vain.")
    desk.answered()
    desk.questions.first.hover()
    desk.page.get_by_role("button", name="Edit the question").click()
    scripted.script.say(*(f"word{n} " for n in range(40)), per_s=50)
    desk.ask("Answered meanwhile.")
    expect(desk.answers.last).to_contain_text("word3")
    desk.page.get_by_role("textbox", name="Edit the question").press("Escape")
    expect(desk.questions).to_have_count(2)
    expect(desk.answers.last).to_contain_text("word39")
