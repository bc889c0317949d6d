"""The web chat as a person meets it: first run, citations, versions, search, export, memory, languages, looks.

In real Chromium over the real server and model; the words of some answers come from a scripted backend.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect
from reportlab.lib.pagesizes import A4
from reportlab.pdfgen.canvas import Canvas

from tests.e2e.conftest import Server
from tests.web.conftest import PHONE, WAIT_MS, Desk, Opener
from tests.web.script import MODEL, ScriptedServer

SCRIPTED = {"model": MODEL}
PAGES, SECRET_PAGE = 12, 7
SECRET = "The emergency code of the pump is KESTREL-77."
expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A document with one telling sentence."""
    data = io.BytesIO()
    canvas = Canvas(data, pagesize=A4)
    for number in range(1, PAGES + 1):
        lines = [f"On day {day} station {number} measured a depth of {number * day} metres." for day in range(1, 9)]
        if number == SECRET_PAGE:
            lines.insert(4, SECRET)
        for row, line in enumerate([f"Chapter {number}. The survey of station {number}.", *lines]):
            canvas.drawString(60, 780 - 18 * row, line)
        canvas.showPage()
    canvas.save()
    path = tmp_path_factory.mktemp("documents") / "survey.pdf"
    path.write_bytes(data.getvalue())
    return path


def test_the_first_run_leads_to_an_answer_with_its_source(desks: Opener, server: Server, report: Path) -> None:
    """Guide, upload with progress, question, streamed answer, the card, and the citation at its place."""
    desk = desks(server.url)
    page = desk.page
    expect(page.get_by_role("heading", name="Ask your documents")).to_be_visible()
    expect(page.get_by_text("smollm2-135m-instruct").first).to_be_visible()
    expect(page.get_by_text("Reads at once")).to_be_visible()
    desk.shot("01-first-run")
    desk.is_accessible()
    desk.attach(report)
    chip = page.get_by_role("list", name="Attached documents")
    expect(chip).to_contain_text("survey.pdf")
    expect(chip).to_contain_text(f"{PAGES} pages")
    desk.shot("02-attached")
    desk.ask("What is the emergency code of the pump?")
    expect(desk.questions.first).to_contain_text("survey.pdf")
    desk.answered()
    desk.shot("03-answered")
    card = page.get_by_role("region", name="How this answer came about")
    expect(card).to_contain_text("began after")
    card.get_by_role("button").first.click()
    expect(card).to_contain_text("read exactly")
    expect(card).to_contain_text("smollm2-135m-instruct")
    source = page.get_by_role("region", name="Where it is from").get_by_role("button", name=f"page {SECRET_PAGE}")
    expect(source.locator("mark")).to_have_text(SECRET)
    source.click()
    panel = page.get_by_role("complementary", name="Source")
    expect(panel.locator("mark")).to_have_text(SECRET)
    expect(panel.locator("mark")).to_be_in_viewport()
    expect(panel.get_by_label("Page", exact=False).first).to_be_visible()
    desk.shot("04-citation")
    desk.is_accessible()
    mark_a_better_place(desk)
    panel.get_by_role("button", name="Show the page as a picture").click()
    expect(panel.get_by_role("img", name=f"Page {SECRET_PAGE} of survey.pdf")).to_be_visible()
    desk.shot("04-picture")
    panel.get_by_role("button", name="Next page").click()
    expect(panel.get_by_role("img", name=f"Page {SECRET_PAGE + 1} of survey.pdf")).to_be_visible()
    panel.focus()
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    expect(source).to_be_focused()


def mark_a_better_place(desk: Desk) -> None:
    """Select words of the page and tell the server that the answer stands there."""
    button = desk.page.get_by_role("button", name="Mark as the right place")
    expect(button).to_be_disabled()
    desk.page.evaluate(
        """() => {
          const page = document.querySelector('aside [role=region]');
          const text = document.createTreeWalker(page, NodeFilter.SHOW_TEXT);
          const range = document.createRange();
          while (text.nextNode().textContent.trim() === '');
          range.selectNodeContents(text.currentNode);
          getSelection().removeAllRanges();
          getSelection().addRange(range);
        }"""
    )
    button.click()
    expect(desk.page.get_by_text("that place is found first")).to_be_visible()


def test_conversations_live_on_the_server(desks: Opener, server: Server, scripted: ScriptedServer) -> None:
    """Another browser shows the same; a document is still named, and the card is still there."""
    scripted.script.say("Kept ", "words.")
    first = desks(server.url, stored=SCRIPTED)
    first.ask("Where are you kept?")
    first.answered()
    second = desks(server.url)
    second.page.get_by_role("link", name="Where are you kept?").click()
    expect(second.answers.first).to_contain_text("Kept words.")
    expect(second.page.get_by_role("region", name="How this answer came about")).to_be_visible()


def test_stop_keeps_what_was_said(desks: Opener, server: Server, scripted: ScriptedServer) -> None:
    scripted.script.say(*(f"word{n} " for n in range(2_000)), per_s=50)
    desk = desks(server.url, stored=SCRIPTED)
    desk.ask("Count for a long time.")
    expect(desk.answers.first).to_contain_text("word20")
    desk.page.get_by_role("button", name="Stop").click()
    expect(desk.answers.first).to_contain_text("This answer was stopped")
    server.until_idle()
    assert "word500" not in desk.answers.first.inner_text()
    desk.page.reload()
    expect(desk.answers.first).to_contain_text("word20")
    desk.shot("05-stopped")


def test_versions_by_regenerating_and_editing(desks: Opener, server: Server, scripted: ScriptedServer) -> None:
    desk = desks(server.url, stored=SCRIPTED)
    page = desk.page
    scripted.script.say("First answer.")
    desk.ask("Tell me of the moon.")
    desk.answered()
    scripted.script.say("Second answer.")
    page.get_by_role("button", name="Answer again").click()
    expect(desk.answers.first).to_contain_text("Second answer.")
    desk.answered()
    assert scripted.script.asked[-1]["temperature"] > 0  # else it would say the same
    versions = page.get_by_role("group", name="Versions")
    expect(versions).to_contain_text("2/2")
    versions.get_by_role("button", name="Version before").click()
    expect(desk.answers.first).to_contain_text("First answer.")
    scripted.script.say("Of the sun.")
    desk.questions.first.hover()
    page.get_by_role("button", name="Edit the question").click()
    page.get_by_role("textbox", name="Edit the question").fill("Tell me of the sun.")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(desk.questions.first).to_contain_text("Tell me of the sun.")
    expect(desk.answers.first).to_contain_text("Of the sun.")
    expect(versions).to_contain_text("3/3")
    desk.shot("06-versions")
    desk.is_accessible()


def test_a_branch_leaves_the_other_as_it_was(desks: Opener, server: Server, scripted: ScriptedServer) -> None:
    desk = desks(server.url, stored=SCRIPTED)
    scripted.script.say("Root.")
    desk.ask("Begin a tree.")
    desk.answered()
    trunk = desk.page.url
    desk.page.get_by_role("button", name="Branch off here").click()
    expect(desk.page).not_to_have_url(trunk)
    expect(desk.answers.first).to_contain_text("Root.")
    desk.ask("Grow a leaf.")
    desk.answered(2)
    desk.page.goto(trunk)
    expect(desk.answers).to_have_count(1)


def test_search_finds_what_was_said_and_leads_there(
    desks: Opener, server: Server, scripted: ScriptedServer
) -> None:
    scripted.script.say("The locker is number 4711.")
    desk = desks(server.url, stored=SCRIPTED)
    desk.ask("Which locker is mine?")
    desk.answered()
    desk.page.get_by_role("button", name="New conversation").click()
    desk.page.keyboard.press("Control+k")
    desk.page.get_by_role("searchbox").fill("locker 4711")
    hit = desk.page.get_by_role("navigation").get_by_role("button", name=re.compile("number 4711"))
    hit.first.click()
    expect(desk.answers.first).to_contain_text("4711")
    expect(desk.page).to_have_url(re.compile(r"/\d+$"))
    desk.shot("07-search")


def test_export_rename_delete(desks: Opener, server: Server, scripted: ScriptedServer) -> None:
    scripted.script.say("Exported **words**.")
    desk = desks(server.url, stored=SCRIPTED)
    page = desk.page
    desk.ask("Something to export")
    desk.answered()
    menu = page.get_by_role("button", name="What to do with this conversation")
    texts = {}
    for kind, name in (("md", "Export as Markdown"), ("json", "Export as JSON")):
        menu.click()
        with page.expect_download() as download:
            page.get_by_role("menuitem", name=name).click()
        assert download.value.suggested_filename.endswith(f".{kind}")
        texts[kind] = download.value.path().read_text()
    assert "Something to export" in texts["md"]
    assert "Exported **words**." in texts["md"]
    assert "Exported **words**." in json.dumps(json.loads(texts["json"]), ensure_ascii=False)
    menu.click()
    page.get_by_role("menuitem", name="Rename").click()
    page.get_by_label("Title").fill("A name of my own")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("A name of my own")
    expect(page.get_by_role("link", name="A name of my own")).to_be_visible()
    menu.click()
    page.get_by_role("menuitem", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_role("link", name="A name of my own")).to_be_hidden()
    expect(page.get_by_role("heading", name=re.compile("What would you like|Ask your documents"))).to_be_visible()


def test_feedback_is_kept(desks: Opener, server: Server, scripted: ScriptedServer) -> None:
    scripted.script.say("Surely wrong.")
    desk = desks(server.url, stored=SCRIPTED)
    page = desk.page
    desk.ask("Be wrong, please.")
    desk.answered()
    page.get_by_role("button", name="Bad answer").click()
    dialog = page.get_by_role("dialog", name="What was wrong?")
    dialog.get_by_label("From the wrong place").check()
    dialog.get_by_placeholder("Anything else?").fill("It is on page 7.")
    desk.shot("08-feedback")
    desk.is_accessible()
    dialog.get_by_role("button", name="Send").click()
    expect(dialog).to_be_hidden()
    page.reload()
    expect(page.get_by_role("button", name="Bad answer")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="Bad answer").click()
    expect(page.get_by_role("button", name="Bad answer")).to_have_attribute("aria-pressed", "false")


def test_memory_is_seen_changed_and_erased(desks: Opener, server: Server) -> None:
    desk = desks(server.url)
    page = desk.page
    page.get_by_role("link", name="Memory").click()
    expect(page.get_by_role("heading", name="Memory")).to_be_visible()
    page.get_by_label("Name of the fact").fill("residence")
    page.get_by_label("What is true").fill("Oslo")
    page.get_by_role("button", name="Add").click()
    fact = page.get_by_role("listitem").filter(has_text="Oslo")
    expect(fact).to_contain_text("written by hand")
    fact.get_by_role("button", name="Change residence").click()
    page.get_by_label("New value of residence").fill("Bergen")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("listitem").filter(has_text="Bergen")).to_be_visible()
    desk.shot("09-memory")
    desk.is_accessible()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export everything").click()
    assert "Bergen" in download.value.path().read_text()
    page.get_by_role("button", name="Erase residence").click()
    expect(page.get_by_role("listitem").filter(has_text="Bergen")).to_be_hidden()


@pytest.mark.parametrize("look", ["light", "dark", "phone", "zh", "zh-phone-dark"])
def test_every_look_is_accessible(desks: Opener, server: Server, scripted: ScriptedServer, look: str) -> None:
    """Two languages, two themes, two widths; formulas, code and tables among the words."""
    scripted.script.say(SHOWPIECE)
    options = {"viewport": PHONE, "has_touch": True, "is_mobile": True} if "phone" in look else {}
    desk = desks(
        server.url,
        stored=SCRIPTED | ({"language": "zh"} if "zh" in look else {}),
        color_scheme="dark" if "dark" in look else "light",
        **options,
    )
    desk.ask("潮汐是如何形成的？" if "zh" in look else "How do tides work?")
    desk.answered()
    desk.page.locator(".katex").first.wait_for()
    desk.page.locator("[data-kind=keyword]").first.wait_for()
    desk.shot(f"10-{look}")
    desk.is_accessible()
    if look == "phone":
        desk.page.get_by_role("button", name="Show conversations").click()
        expect(desk.page.get_by_role("navigation")).to_be_in_viewport(ratio=0.9)
        desk.shot("10-phone-sidebar")
        desk.page.get_by_role("navigation").get_by_role("button", name="Close").click()
    width = desk.page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert width <= 0, f"the page is {width} px too wide"


def test_language_and_theme_switch_at_once(desks: Opener, server: Server) -> None:
    desk = desks(server.url)
    page = desk.page
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Language").select_option("zh")
    expect(page.get_by_role("dialog").get_by_role("heading")).to_have_text("设置")
    assert page.evaluate("document.documentElement.lang") == "zh"
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_label("外观").select_option("dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    desk.shot("11-settings")
    desk.is_accessible()
    page.reload()
    expect(page.get_by_label("你的问题")).to_be_visible()


def test_the_keyboard_is_enough(desks: Opener, server: Server, scripted: ScriptedServer) -> None:
    scripted.script.say("By keys.")
    desk = desks(server.url, stored=SCRIPTED)
    page = desk.page
    page.keyboard.press("Tab")
    page.locator("body").press("?")
    expect(page.get_by_role("dialog", name="Shortcuts")).to_be_visible()
    desk.is_accessible()
    page.keyboard.press("Escape")
    page.locator("body").press("/")
    expect(page.locator("#question")).to_be_focused()
    page.keyboard.type("line one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line two")
    assert page.locator("#question").input_value() == "line one\nline two"
    page.keyboard.press("Enter")
    desk.answered()
    for _ in range(15):  # what can be done to an answer stands before the field
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.ariaLabel") == "Answer again":
            break
    else:
        pytest.fail("Tab doesn't reach the buttons of an answer")


def test_documents_come_by_drop_and_by_paste(desks: Opener, server: Server) -> None:
    desk = desks(server.url)
    for event, target, name in (("drop", "main", "dropped.txt"), ("paste", "#question", "pasted.txt")):
        desk.page.evaluate(
            """([event, target, name]) => {
              const data = new DataTransfer();
              data.items.add(new File(['Words of ' + name], name, {type: 'text/plain'}));
              const options = {bubbles: true, cancelable: true};
              const made = event === 'drop'
                ? new DragEvent(event, {...options, dataTransfer: data})
                : new ClipboardEvent(event, {...options, clipboardData: data});
              document.querySelector(target).dispatchEvent(made);
            }""",
            [event, target, name],
        )
        chip = (
            desk.page.get_by_role("list", name="Attached documents").get_by_role("listitem").filter(has_text=name)
        )
        expect(chip).to_contain_text("1 page")
        chip.get_by_role("button", name=f"Remove {name}").click()
        expect(chip).to_be_hidden()


def test_enter_that_belongs_to_an_input_method_sends_nothing(
    desks: Opener, server: Server, scripted: ScriptedServer
) -> None:
    desk = desks(server.url, stored=SCRIPTED)
    field = desk.page.locator("#question")
    field.fill("你好")
    asked = len(scripted.script.asked)
    desk.page.evaluate(
        "document.getElementById('question').dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true, cancelable: true}))"
    )
    desk.page.wait_for_timeout(200)
    assert field.input_value() == "你好"
    assert len(scripted.script.asked) == asked


def test_what_cannot_be_read_is_said(desks: Opener, server: Server, tmp_path: Path) -> None:
    """A document without text, and a conversation that isn't there."""
    broken = tmp_path / "broken.pdf"
    broken.write_bytes(b"%PDF-1.7 and nothing more")
    desk = desks(server.url)
    desk.attach(broken)
    expect(desk.page.get_by_role("list", name="Attached documents").get_by_role("alert")).to_be_visible()
    desk.shot("12-broken-document")
    desk.page.get_by_role("button", name="Settings").click()
    desk.page.get_by_label("Language").select_option("zh")
    desk.page.keyboard.press("Escape")
    expect(desk.page.get_by_role("alert").get_by_text("文档已损坏或不完整。")).to_be_visible()
    desk.page.goto(f"{server.url}/#/c/nowhere")
    expect(desk.page.get_by_text("没有这个对话，可能已被删除。")).to_be_visible()
    expect(desk.page.get_by_role("heading", name="没有这个对话")).to_be_visible()


SHOWPIECE = r"""# Tides

The Moon pulls on the *near* side of the Earth **more** than on the far side; the difference shrinks with the
cube of the distance:

$$F \approx \frac{2 G M m r}{d^3}$$

So \(F\) halves when $d$ grows by a quarter.

| body | share | cause |
|:-----|------:|-------|
| Moon | 68 % | near |
| Sun | 32 % | massive, far |

```python
def tide(mass, radius, distance):
    # the difference of the pull
    return 2 * G * mass * radius / distance**3
```

1. High water comes twice a day.
2. Spring tides come at full and new moon.

> 海水涨落，昼夜两次，谓之潮汐。
"""
