"""How an answer came about and what becomes of a document, in every view: for eyes, for keys, for a screen reader.

Over the real server. Two things are put in at its edge: empty lists (a first run beside kept conversations), and a
machine that is too small, which this one isn't. The card with every row is a kept answer that the server serves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.e2e.conftest import Server, new_home, serving
from tests.web.conftest import PHONE, WAIT_MS, Opener
from tests.web.planted import Exchange, plant
from tests.web.script import MODEL, ScriptedServer

expect.set_options(timeout=WAIT_MS)
SCRIPTED = {"model": MODEL}
OCTAVE = Path("/usr/share/doc/octave/octave.pdf")
DEBIAN_ZH = Path("/usr/share/debian-reference/ch08.zh-cn.html")
VAULT = "The vault of the observatory opens with the word heliotrope."
CARD: dict[str, Any] = {
    "plan": "refined",
    "deadline_s": 5.0,
    "predicted_ttft_s": 4.2,
    "measured_ttft_s": 7.9,
    "tokens": {
        "offered": 712_034,
        "exact": 1_988,
        "estimated": 6_000,
        "summarised": 46,
        "dropped": 704_000,
        "cached": {"ram": 320, "disk": 1_024},
    },
    "model": "smollm2-135m-instruct",
    "backend": "local",
    "citations": [],
    "degradations": [
        {"code": "over_window", "reason": "712,034 tokens were offered and the model's window is 8,192."},
        {"code": "late", "reason": "The answer was expected after the deadline."},
        {"code": "failover", "reason": "Another server was asked first and failed."},
    ],
    "attempts": [{"backend": "north", "model": "big", "outcome": "timeout", "seconds": 2.5}],
    "taken_out": {"email": 2},
    "answer_cache": None,
    "cost": 0.01,
    "memory": {
        "profile": [{"key": "residence", "value": "Oslo", "session": "vault", "turn": 1}],
        "summary": [
            {"session": "vault", "turn": 1, "start": 0, "end": 9, "quote": "The vault", "corrected": False}
        ],
    },
    "confidence": 0.83,
    "claims": None,
}


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, scripted: ScriptedServer
) -> Iterator[Server]:
    """Its KV holds less than the model's window: `GET /v1/machine` says that it is tight."""
    home = new_home(tmp_path_factory.mktemp("views"), smollm2_path)
    vault: list[Exchange] = [("Where is the password kept?", VAULT, None)]
    vault += [(f"What of day {n}?", f"On day {n} the sky was clear.", None) for n in range(30)]
    plant(home, vault=vault, card=[("How was it read?", "In parts.", CARD)])
    with serving(home, PERILUNE_KV_CACHE__RAM="96M", **scripted.settings()) as running:
        yield running


def sources(page: Page, name: str = "Where it is from") -> Any:
    return page.get_by_role("region", name=name).get_by_role("button")


def panel_of(page: Page, name: str = "Source") -> Any:
    return page.get_by_role("complementary", name=name)


def empty_lists(page: Page) -> None:
    """As if nobody had used the server yet."""
    for path in ("sessions", "files"):
        page.route(
            re.compile(rf"/v1/{path}\?"),
            lambda route: route.fulfill(json={"object": "list", "data": [], "has_more": False}),
        )


def test_a_citation_of_a_turn_opens_that_turn(desks: Opener, server: Server, scripted: ScriptedServer) -> None:
    """Said sixty turns ago, found by the server, marked in the panel; from there to its place."""
    scripted.script.say("Heliotrope.")
    desk = desks(server.url, stored=SCRIPTED, start="#/c/vault")
    page = desk.page
    desk.ask("Which word opens the vault of the observatory?")
    expect(desk.answers.last).to_contain_text("Heliotrope.")
    cited = sources(page).filter(has_text="Turn 2 of a conversation")
    expect(cited.locator("mark")).to_contain_text("heliotrope")
    assert "Turn 2" in cited.inner_text()
    cited.click()
    panel = panel_of(page)
    expect(panel.get_by_role("heading", name="Earlier turn")).to_be_visible()
    expect(panel.get_by_text("Perilune, turn 2")).to_be_visible()
    expect(panel.locator("mark")).to_have_text(VAULT)
    desk.shot("30-turn")
    desk.is_accessible()
    panel.get_by_role("button", name="Open it in its conversation").click()
    expect(page).to_have_url(re.compile(r"#/c/vault/2$"))
    expect(page.locator("#turn-2")).to_be_in_viewport()
    expect(page.locator("#turn-2")).to_be_focused()


def test_a_chinese_page_cites_a_chinese_document(desks: Opener, server: Server, scripted: ScriptedServer) -> None:
    assert DEBIAN_ZH.exists(), f"{DEBIAN_ZH} is missing: apt-get install debian-reference-zh-cn"
    scripted.script.say("用 dpkg-reconfigure locales 重新配置语言环境。")
    desk = desks(server.url, stored=SCRIPTED | {"language": "zh"})
    page = desk.page
    desk.attach(DEBIAN_ZH)
    expect(page.get_by_role("list", name="已添加的文档")).to_contain_text("词元")
    desk.ask("怎样重新配置语言环境？")
    desk.answered()
    source = sources(page, "出处").first
    expect(source).to_contain_text("ch08.zh-cn.html，第")
    expect(source.locator("mark")).to_contain_text(re.compile("语言环境|重新配置"))
    source.click()
    panel = panel_of(page, "出处")
    expect(panel.locator("mark").first).to_contain_text(re.compile("语言环境|重新配置"))
    expect(panel.locator("mark").first).to_be_in_viewport()
    page.get_by_role("region", name="这个回答的由来").get_by_role("button").first.click()
    expect(page.get_by_role("region", name="这个回答的由来")).to_contain_text("通读全文")
    desk.shot("31-chinese-citation")
    desk.is_accessible()


def test_the_card_tells_all_that_is_known(desks: Opener, server: Server) -> None:
    """Late, refined, exact, estimated, summarised, dropped, tiers, every degradation, attempts, memory."""
    desk = desks(server.url, start="#/c/card")
    card = desk.page.get_by_role("region", name="How this answer came about")
    expect(card).to_contain_text("The best passages")
    expect(card).to_contain_text("began after 7.9 s, later than the 5 s allowed")
    for degradation in CARD["degradations"]:
        expect(card).to_contain_text(degradation["reason"])
    card.get_by_role("button").first.click()
    for row in (
        "1,988 read exactly",
        "6,000 estimated",
        "46 summarised",
        "704,000 left out",
        "320 tokens in memory, 1,024 on disk",
        "expected 4.2 s",
        "83% that the passages hold the answer",
        "on this machine",
        "712 tokens read, 31 written",
        "north (big): timeout",
        "e-mail addresses: 2",
        "residence:",
        "one sentence of the summary",
    ):
        expect(card).to_contain_text(row)
    shares = card.get_by_role("img").last
    expect(shares).to_have_accessible_name(re.compile("1,988 read exactly .*704,000 left out"))
    desk.shot("32-card")
    desk.is_accessible()
    card.get_by_role("button", name="Where it was said").first.click()
    expect(desk.page).to_have_url(re.compile(r"#/c/vault/1$"))


def test_an_answer_that_began_late_says_so(desks: Opener, server: Server, scripted: ScriptedServer) -> None:
    """The real measurement of a real answer, to a question that allows less time than any answer takes."""
    scripted.script.say("Too late.")
    desk = desks(server.url, stored=SCRIPTED)

    def hurry(route: Route) -> None:
        asked = route.request.post_data_json
        route.continue_(post_data=json.dumps({**asked, "deadline_s": 0.001}))

    desk.page.route("**/v1/chat/completions", hurry)
    desk.ask("Be quicker than anybody.")
    desk.answered()
    card = desk.page.get_by_role("region", name="How this answer came about")
    expect(card).to_contain_text(re.compile("began after .* later than the .* allowed"))


def test_the_machine_says_how_well_the_model_fits(desks: Opener, server: Server) -> None:
    """Tight is what this server really is; too big and untold are told by nobody else."""
    desk = desks(server.url)
    page = desk.page
    empty_lists(page)
    page.reload()
    expect(page.get_by_text("runs on this machine, but memory is tight")).to_be_visible()
    expect(page.get_by_text("less than the model's window")).to_be_visible()
    desk.shot("33-machine-tight")
    desk.is_accessible()

    def too_big(route: Route) -> None:
        machine = route.fetch().json()
        check = {"name": "memory", "state": "failed", "detail": "1.2 GB free; the weights need 4.1 GB.", "fix": ""}
        machine |= {"fit": "too_big", "checks": [check]}
        route.fulfill(json=machine)

    page.route("**/v1/machine", too_big)
    page.reload()
    expect(page.get_by_text("is too big for this machine's memory")).to_be_visible()
    expect(page.get_by_text("the weights need 4.1 GB")).to_be_visible()
    desk.shot("33-machine-too-big")
    desk.is_accessible()
    page.unroute("**/v1/machine")
    page.route("**/v1/machine", lambda route: route.fulfill(status=500, json={"error": {"message": "no"}}))
    page.reload()
    expect(page.get_by_text("tokens at once")).to_be_visible()


def test_a_long_document_is_sent_read_asked_and_deleted(
    desks: Opener, server: Server, scripted: ScriptedServer
) -> None:
    """Shares while it is sent, pages while it is read; an answer meanwhile says what it covers; then it goes."""
    assert OCTAVE.exists(), f"{OCTAVE} is missing: apt-get install octave-doc"
    desk = desks(server.url, stored=SCRIPTED)
    page = desk.page
    network = page.context.new_cdp_session(page)
    limits = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": 3_000_000}
    network.send("Network.emulateNetworkConditions", limits)
    desk.attach(OCTAVE)
    chip = page.get_by_role("list", name="Attached documents").get_by_role("listitem")
    expect(chip).to_contain_text(re.compile(r"Sending, [1-9][0-9]?%"))
    expect(chip.get_by_role("progressbar")).to_be_visible()
    desk.shot("34-sending")
    network.send("Network.emulateNetworkConditions", limits | {"uploadThroughput": -1})
    expect(chip).to_contain_text(re.compile(r"Reading page [1-9][0-9,]* of 1,158"))
    share = float(chip.get_by_role("progressbar").get_attribute("value") or 0)
    assert 0 < share < 1
    desk.shot("34-reading")
    desk.is_accessible()
    scripted.script.say("By its elements.")
    desk.ask("How is a matrix entered?")
    desk.answered()
    card = page.get_by_role("region", name="How this answer came about")
    expect(card).to_contain_text(re.compile(r"octave.pdf is still being read: pages parsed [0-9,]+ of 1,158"))
    expect(sources(page).first).to_contain_text("octave.pdf, page")
    desk.shot("34-asked-meanwhile")
    page.get_by_role("link", name="Memory").click()
    page.get_by_role("tab", name="Documents").click()
    page.get_by_role("button", name="Delete octave.pdf").click()
    dialog = page.get_by_role("dialog", name="Delete octave.pdf")
    expect(dialog).to_contain_text("will be gone for good")
    desk.shot("34-delete")
    desk.is_accessible()
    dialog.get_by_role("button", name="Delete", exact=True).click()
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("button", name="octave.pdf", exact=True)).to_be_hidden()
    assert all(each.filename != OCTAVE.name for each in server.client.files.list())
    page.go_back()
    expect(desk.questions.first).to_contain_text("This document was deleted.")


def test_a_screen_reader_hears_beginnings_and_ends(
    desks: Opener, server: Server, scripted: ScriptedServer, tmp_path: Path
) -> None:
    """In passing: never the stream itself, which is read where it stands."""
    note = tmp_path / "note.txt"
    note.write_text("The ferry leaves at nine.")
    scripted.script.say(*(f"zebra{n} " for n in range(30)), per_s=60)
    desk = desks(server.url, stored=SCRIPTED)
    heard = desk.listen()
    desk.attach(note)
    expect(desk.page.get_by_role("list", name="Attached documents")).to_contain_text("1 page")
    desk.ask("When does the ferry leave?")
    expect(desk.answers.first).to_have_attribute("aria-busy", "true")
    desk.answered()
    expect(desk.answers.first).to_have_attribute("aria-busy", "false")
    desk.page.get_by_role("button", name="Copy the answer").click()
    sources(desk.page).first.click()
    expect(panel_of(desk.page).locator("mark")).to_be_visible()
    desk.page.wait_for_timeout(100)
    told = heard()
    assert told[0] == "Attached: note.txt"
    for part in ("Answering…", "The answer is complete.", "Page 1, marked: The ferry leaves at nine."):
        assert part in told, told
    assert told.index("Answering…") < told.index("The answer is complete.")
    assert not any("zebra" in each for each in told)


def tab_to(page: Page, name: str, back: bool = False) -> None:
    """Press Tab until the focus is on what has that name."""
    for _ in range(80):
        page.keyboard.press("Shift+Tab" if back else "Tab")
        now = page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent")
        if now.startswith(name):
            return
    pytest.fail(f"Tab doesn't reach {name}")


def to_question(page: Page) -> None:
    if page.evaluate("document.activeElement.id") != "question":  # else it is a letter of the question
        page.keyboard.press("/")
    expect(page.locator("#question")).to_be_focused()


def test_everything_is_done_with_keys_alone(
    desks: Opener, server: Server, scripted: ScriptedServer, tmp_path: Path
) -> None:
    """Ask, open the citation, close it, stop, answer again, edit, branch, search; no pointer is used."""
    note = tmp_path / "harbour.txt"
    note.write_text("The harbour master is called Quill.")
    desk = desks(server.url, stored=SCRIPTED)
    page, keys = desk.page, desk.page.keyboard
    desk.attach(note)
    expect(page.get_by_role("list", name="Attached documents")).to_contain_text("1 page")
    scripted.script.say("Quill.")
    to_question(page)
    keys.insert_text("Who is the harbour master?")
    keys.press("Enter")
    desk.answered()
    tab_to(page, "1harbour.txt, page 1", back=True)
    keys.press("Enter")
    expect(panel_of(page).locator("mark")).to_contain_text("Quill")
    keys.press("Escape")
    expect(panel_of(page)).to_be_hidden()
    assert page.evaluate("document.activeElement.textContent").startswith("1harbour.txt")
    to_question(page)
    scripted.script.say(*(f"word{n} " for n in range(2_000)), per_s=50)
    keys.insert_text("Count.")
    keys.press("Enter")
    expect(desk.answers.last).to_contain_text("word5")
    keys.press("Escape")
    expect(desk.answers.last).to_have_attribute("aria-busy", "false")
    server.until_idle()
    to_question(page)
    scripted.script.say("Again.")
    tab_to(page, "Answer again", back=True)
    keys.press("Enter")
    expect(desk.answers.last).to_contain_text("Again.")
    desk.answered(2)
    to_question(page)
    tab_to(page, "Edit the question", back=True)
    keys.press("Enter")
    expect(page.get_by_role("textbox", name="Edit the question")).to_be_focused()
    keys.press("Control+a")
    keys.insert_text("Count backwards.")
    scripted.script.say("Two, one.")
    keys.press("Enter")
    expect(desk.answers.last).to_contain_text("Two, one.")
    desk.answered(2)
    before = page.url
    to_question(page)
    tab_to(page, "Branch off here", back=True)
    keys.press("Enter")
    expect(page).not_to_have_url(before)
    keys.press("Control+k")
    expect(page.get_by_role("searchbox")).to_be_focused()
    keys.insert_text("harbour master")
    expect(page.get_by_role("navigation").get_by_role("button").filter(has_text="Quill").first).to_be_visible()
    page.wait_for_timeout(400)
    tab_to(page, "Who is the harbour")
    keys.press("Enter")
    expect(desk.questions.first).to_contain_text("Who is the harbour master?")


LOOKS = ["light", "zh-phone-dark few"]
MORE_LOOKS = ["zh-phone-dark", "dark", "phone", "phone-dark", "zh", "zh-dark", "zh-phone"]
FEW_VIEWS = {"start", "answer", "source", "settings", "memory-documents"}


@pytest.mark.parametrize("look", [*LOOKS, *(pytest.param(each, marks=pytest.mark.soak) for each in MORE_LOOKS)])
def test_every_view_is_accessible(
    desks: Opener, server: Server, scripted: ScriptedServer, tmp_path: Path, look: str
) -> None:
    """axe finds nothing serious in any view, with every dialog and menu open; none is too wide. Of a look with few
    views only those are opened."""
    look, _, few = look.partition(" ")
    note = tmp_path / "note.md"
    note.write_text("# Ferry\n\nThe ferry leaves at nine.\n")
    texts = json.loads(
        (Path(__file__).parents[2] / f"web/src/text/{look[:2] if 'zh' in look else 'en'}.json").read_text()
    )
    phone = "phone" in look
    desk = desks(
        server.url,
        stored=SCRIPTED | ({"language": "zh"} if "zh" in look else {}),
        color_scheme="dark" if "dark" in look else "light",
        **({"viewport": PHONE, "has_touch": True, "is_mobile": True} if phone else {}),
    )
    page = desk.page

    def wanted(name: str) -> bool:
        return not few or name in FEW_VIEWS

    def check(name: str) -> None:
        if not wanted(name):
            return
        page.wait_for_timeout(250)  # what fades in is there
        desk.shot(f"35-{look}-{name}")
        desk.is_accessible()
        width = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert width <= 0, f"{name} is {width} px too wide"

    def dialog(name: str, *buttons: Any) -> None:
        if not wanted(name):
            return
        for button in buttons:
            button.click()
        page.get_by_role("dialog").wait_for()
        check(name)
        page.keyboard.press("Escape")
        page.get_by_role("dialog").wait_for(state="detached")

    def aside() -> None:
        if phone:
            page.get_by_role("button", name=texts["sidebar.open"]).click()

    page.locator("main h2").first.wait_for()
    check("start")
    scripted.script.say("At **nine**, says `note.md`.")
    desk.attach(note)
    page.locator("form ul li[data-state=ready]").wait_for()
    desk.ask("When does the ferry leave?")
    desk.answered()
    page.get_by_role("region", name=texts["card.label"]).get_by_role("button").first.click()
    check("answer")
    menu = page.get_by_role("button", name=texts["conversation.menu"], exact=True)
    menu.click()
    check("menu")
    page.keyboard.press("Escape")
    dialog("rename", menu, page.get_by_role("menuitem", name=texts["rename"]))
    dialog("delete", menu, page.get_by_role("menuitem", name=texts["delete"]))
    dialog("feedback", page.get_by_role("button", name=texts["feedback.down"]))
    sources(page, texts["sources"]).first.click()
    panel_of(page, texts["panel.label"]).locator("mark").wait_for()
    check("source")
    page.get_by_role("button", name=texts["panel.close"]).click()
    aside()
    page.get_by_role("searchbox").fill("ferry")
    page.locator("nav mark").first.wait_for()
    check("search")
    page.get_by_role("searchbox").fill("")
    dialog("settings", page.get_by_role("button", name=texts["settings"]))
    if not phone:
        dialog("shortcuts", page.get_by_role("button", name=texts["shortcuts"]))
    aside()
    page.get_by_role("link", name=texts["memory"]).click()
    for tab in ("memory.profile", "memory.summaries", "memory.documents"):
        page.get_by_role("tab", name=texts[tab]).click()
        page.wait_for_load_state("networkidle")
        check(tab.replace(".", "-"))
    page.goto(f"{server.url}/#/c/nowhere")
    page.get_by_text(texts["conversation.missing"]).wait_for()
    check("missing")
