"""Documents and answers that are written to run something, or to hold the page up: all of it stays words.

Nothing of theirs runs, is loaded or becomes an element that could; and no task of the page's main thread takes long
enough to be noticed, by its CPU time, which other load on the machine doesn't change.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from playwright.sync_api import Browser, expect
from reportlab.pdfgen.canvas import Canvas

from tests.e2e.conftest import Server, new_home, serving
from tests.web.conftest import WAIT_MS, Desk, Opener
from tests.web.planted import plant
from tests.web.script import MODEL, ScriptedServer
from tests.web.trace import traced

expect.set_options(timeout=WAIT_MS)
SCRIPTED = {"model": MODEL}
NOTICED_CPU_MS = 300
COMPLETE = "li[data-speaker=assistant] article[aria-busy=false]"

HOSTILE = [
    "<script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 2">',
    '<svg onload="window.hacked = 3"><animate onbegin="window.hacked = 3"/></svg>',
    '<iframe srcdoc="<script>parent.hacked = 4</script>"></iframe>',
    "[run](javascript:window.hacked=5) [data](data:text/html,<script>window.hacked=5</script>)",
    "![x](javascript:window.hacked=6) ![y](data:image/svg+xml,<svg/onload=window.hacked=6>)",
    "<details open ontoggle=window.hacked=7><style>body{display:none}</style></details>",
    "$\\href{javascript:window.hacked=8}{x}$ $\\htmlData{a=b}{x}$ $\\includegraphics{http://127.0.0.1:1/x.png}$",
    '```html"><script>window.hacked=9</script>\n<script>window.hacked=9</script>\n```',
    '<form action="https://example.com"><input autofocus onfocus=window.hacked=10></form>',
    '<a href="javascript:window.hacked=11" onclick="window.hacked=11">x</a><base href="https://example.com">',
    "[blob](blob:x) [file](file:///etc/passwd) [vb](vbscript:x) [up](//example.com) <javascript:window.hacked=12>",
]
HUGE = {
    "a line of a million characters": "y" * 1_000_000,
    "a line of a million words": "word " * 200_000,
    "ten thousand lists in each other": "- " * 10_000 + "deep",
    "ten thousand lists below each other": "".join("  " * (n % 200) + "- item\n" for n in range(10_000)),
    "ten thousand quotes in each other": "> " * 10_000 + "deep",
    "emphasis in emphasis": "*" * 8_000 + "a" + "*" * 8_000,
    "fifty thousand paragraphs": "a\n\n" * 50_000,
    "sixteen thousand brackets": "[" * 16_000,
    "thousands of formulas": "$a" * 8_000,
    "hundreds of formulas": "$$\\int_0^1 x^{n} dx$$\n\n" * 500,
    "formulas that never end": "$$ x\n" * 5_000,
    "a formula as deep as a tab bears not": "$" + "\\sqrt{" * 240 + "x" + "}" * 240 + "$",
    "a formula with a thousand columns": "$$\\begin{matrix}" + "a&" * 900 + "\\end{matrix}$$",
    "a formula that grows by itself": "$\\def\\a{xx}\\def\\b{\\a\\a}\\def\\c{\\b\\b}\\def\\d{\\c\\c}\\d\\d\\d\\d$",
    "eight hundred pieces of code": "```python\nx = 1\n```\n\n" * 800,
    "a table of three thousand rows": "|a|b|\n|-|-|\n" + "|1|2|\n" * 3_000,
    "a table of a thousand columns": "|"
    + "a|" * 1_000
    + "\n|"
    + "-|" * 1_000
    + "\n"
    + ("|" + "1|" * 1_000 + "\n") * 6,
}
FEW = ["a line of a million characters", "ten thousand lists in each other"]
"""What the usual run streams; `make soak` streams all of them."""

MARKUP_NAME = "<img src=x onerror=window.hacked=20>'&.md"
ASKED = "Which colour does the lighthouse of Kestrel Point have? <b onclick=1>"
FACT = "The lighthouse of Kestrel Point is painted vermilion"

WATCH = """(() => {
  window.violations = [];
  addEventListener('securitypolicyviolation', (event) => violations.push(event.effectiveDirective));
})()"""


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, scripted: ScriptedServer
) -> Iterator[Server]:
    """It keeps a conversation in which everything hostile was said already."""
    home = new_home(tmp_path_factory.mktemp("hostile"), smollm2_path)
    plant(home, hostile=[(text, text, None) for text in [*HOSTILE, *HUGE.values()]])
    with serving(home, PERILUNE_MEMORY__EMBEDDER="off", **scripted.settings()) as running:
        yield running


def watched(desks: Opener, server: Server, start: str = "") -> tuple[Desk, list[str]]:
    """A page, and the addresses that it asks for."""
    desk = desks(server.url, stored=SCRIPTED, script=WATCH)
    asked: list[str] = []
    desk.page.on("request", lambda request: asked.append(request.url))
    desk.page.on("popup", lambda popup: asked.append(f"popup: {popup.url}"))
    desk.open(start)
    return desk, asked


def is_harmless(desk: Desk, asked: list[str]) -> None:
    """Nothing ran or tried to; nothing was loaded from elsewhere; no element is there that a text made."""
    page = desk.page
    assert page.evaluate("window.hacked ?? null") is None
    assert page.evaluate("window.violations") == []
    assert all(url.startswith((desk.url, f"blob:{desk.url}")) for url in asked), asked
    made = "script, iframe, frame, form[action], style, base, object, embed, meta, link, img:not([src^='blob:'])"
    assert page.locator(f"#page :is({made})").count() == 0
    assert page.locator("#page svg:not([aria-hidden=true])").count() == 0
    handlers = """() => [...document.querySelectorAll('#page *')].flatMap((each) =>
      each.getAttributeNames().filter((name) => name.startsWith('on')))"""
    assert page.evaluate(handlers) == []
    links = page.locator("#page a[href]").evaluate_all("(all) => all.map((each) => each.getAttribute('href'))")
    assert all(link.startswith(("https://", "http://", "mailto:", "#")) for link in links), links


def test_hostile_turns_are_shown_and_do_nothing(desks: Opener, browser: Browser, server: Server) -> None:
    """Script, handlers, SVG, frames, forms, styles, addresses: all of it is text. Huge ones don't freeze it."""
    desk, asked = watched(desks, server)
    page = desk.page
    with traced(browser) as trace:  # no `expect` in here: while it waits it reads the whole page, for half a second
        page.goto(f"{server.url}/#/c/hostile/1")
        page.locator("#turn-1", has_text="<script>").wait_for()
        for turn in range(
            1, 2 * (len(HOSTILE) + len(HUGE)) + 1
        ):  # each is brought near, so that it is shown in full
            page.locator(f"#turn-{turn}").evaluate("(each) => each.scrollIntoView()")
            page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        page.wait_for_timeout(500)
    print(f"longest task {trace.longest_cpu_ms:.0f} ms of CPU, {trace.longest_ms:.0f} on the clock")
    assert trace.longest_cpu_ms < NOTICED_CPU_MS
    assert page.get_by_text("Show more").count() > 0
    is_harmless(desk, asked)
    page.locator("#turn-1").scroll_into_view_if_needed()
    desk.shot("21-hostile")


@pytest.mark.parametrize("huge", [FEW, pytest.param(list(HUGE), marks=pytest.mark.soak)], ids=["few", "all"])
def test_hostile_answers_are_harmless_while_they_stream(
    desks: Opener, browser: Browser, server: Server, scripted: ScriptedServer, huge: list[str]
) -> None:
    """In small pieces and in bursts, as a server sends them."""
    desk, asked = watched(desks, server)
    whole = "\n\n".join(HOSTILE)
    scripted.script.say(*(whole[at : at + 7] for at in range(0, len(whole), 7)))
    desk.ask("<img src=x onerror=window.hacked=20>")
    desk.answered()
    is_harmless(desk, asked)
    desk.shot("21-hostile-answer")
    slow = {}
    for name in huge:
        text = HUGE[name]
        desk.open("#/")
        size = max(1, len(text) // 300)
        scripted.script.say(*(text[at : at + size] for at in range(0, len(text), size)))
        desk.page.locator("#question").fill(f"Say {name}.")
        with traced(browser) as trace:
            desk.page.locator("#question").press("Enter")
            desk.page.locator(COMPLETE).wait_for()
            desk.page.wait_for_timeout(100)
        slow[name] = round(trace.longest_cpu_ms)
    print(dict(sorted(slow.items(), key=lambda each: -each[1])))
    assert max(slow.values()) < NOTICED_CPU_MS, slow
    is_harmless(desk, asked)


def hostile_markdown() -> bytes:
    """One telling sentence among everything else."""
    return "\n\n".join([HOSTILE[0], f"{FACT}. <b onclick=window.hacked=22>Really</b>.", *HOSTILE[1:]]).encode()


def hostile_html() -> bytes:
    body = "".join(f"<p>{text}</p>" for text in HOSTILE)
    head = f"<html><head><title>{HOSTILE[0]}</title></head>"
    return f"{head}<body onload='window.hacked=23'>{body}</body></html>".encode()


def hostile_pdf() -> bytes:
    """Markup on the page, in the title, and links that lead to script."""
    data = io.BytesIO()
    canvas = Canvas(data)
    canvas.setTitle(HOSTILE[1])
    for row, text in enumerate(HOSTILE[:8]):
        canvas.drawString(60, 760 - 30 * row, text[:90])
        canvas.linkURL("javascript:window.hacked=24", (60, 755 - 30 * row, 400, 775 - 30 * row))
    canvas.save()
    return data.getvalue()


def attach(desk: Desk, name: str, kind: str, data: bytes) -> None:
    field = desk.page.locator("form input[type=file]").first
    field.set_input_files({"name": name, "mimeType": kind, "buffer": data})
    chip = desk.page.get_by_role("list", name="Attached documents").get_by_role("listitem").filter(has_text=name)
    expect(chip).to_contain_text("tokens")


def test_a_hostile_document_is_words_wherever_it_shows(
    desks: Opener, server: Server, scripted: ScriptedServer
) -> None:
    """Its name, its citation and quote, its page as text and as a picture, the search, the list in Memory."""
    desk, asked = watched(desks, server)
    page = desk.page
    attach(desk, MARKUP_NAME, "text/markdown", hostile_markdown())
    attach(desk, "page<svg onload=window.hacked=25>.html", "text/html", hostile_html())
    attach(desk, "picture.pdf", "application/pdf", hostile_pdf())
    is_harmless(desk, asked)
    scripted.script.say("It is painted vermilion.")
    desk.ask(ASKED)
    desk.answered()
    assert page.title().startswith("Which colour does the lighthouse")
    source = page.get_by_role("region", name="Where it is from").get_by_role("button").filter(has_text=MARKUP_NAME)
    expect(source.first).to_contain_text(FACT)
    source.first.click()
    panel = page.get_by_role("complementary", name="Source")
    expect(panel.get_by_role("heading")).to_have_text(MARKUP_NAME)
    expect(panel.locator("mark").first).to_contain_text(FACT)
    expect(panel).to_contain_text("<script>window.hacked = 1</script>")
    desk.shot("21-hostile-document")
    is_harmless(desk, asked)
    page.get_by_role("button", name="Close the source").click()
    desk.questions.first.get_by_role("button", name="picture.pdf").click()
    panel.get_by_role("button", name="Show the page as a picture").click()
    expect(panel.get_by_role("img", name="Page 1 of picture.pdf")).to_be_visible()
    desk.shot("21-hostile-picture")
    is_harmless(desk, asked)
    page.get_by_role("searchbox").fill("lighthouse vermilion")
    expect(page.get_by_role("navigation").get_by_text("vermilion").first).to_be_visible()
    page.get_by_role("searchbox").fill("")
    page.get_by_role("link", name="Memory").click()
    page.get_by_role("tab", name="Documents").click()
    expect(page.get_by_role("button", name=MARKUP_NAME, exact=True)).to_be_visible()
    is_harmless(desk, asked)
    desk.shot("21-hostile-memory")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("line.txt", f"{FACT}. " + "y" * 1_000_000),
        ("lists.md", f"{FACT}.\n\n" + "- " * 10_000 + "deep"),
        ("lines.txt", f"{FACT}.\n" + "x\n" * 100_000),
    ],
)
def test_a_huge_document_does_not_freeze_its_page(
    desks: Opener, browser: Browser, server: Server, scripted: ScriptedServer, name: str, text: str
) -> None:
    desk, asked = watched(desks, server)
    attach(desk, name, "text/plain", text.encode())
    scripted.script.say("Vermilion.")
    desk.ask("Which colour does the lighthouse of Kestrel Point have?")
    desk.answered()
    source = desk.page.locator("section[aria-label='Where it is from'] button").first
    expect(source).to_contain_text("vermilion")
    with traced(browser) as trace:
        source.click()
        desk.page.locator("aside mark").first.wait_for()
        desk.page.locator("aside [role=region]").evaluate("(each) => (each.scrollTop = each.scrollHeight)")
        desk.page.wait_for_timeout(300)
    print(f"{name}: longest task {trace.longest_cpu_ms:.0f} ms of CPU")
    assert trace.longest_cpu_ms < NOTICED_CPU_MS
    is_harmless(desk, asked)


def policy_of(url: str) -> dict[str, set[str]]:
    with urlopen(url) as reply:
        assert reply.headers["x-content-type-options"] == "nosniff"
        parts = [each.split() for each in reply.headers["content-security-policy"].split(";")]
    return {name: set(allowed) for name, *allowed in parts}


def test_the_policy_is_strict_wherever_a_browser_may_land(server: Server) -> None:
    """No inline script, handler, style, eval, frame, form or other origin; a document is never shown as a page."""
    with urlopen(server.url) as reply:
        script = str(reply.read()).partition('type="module" src="')[2].partition('"')[0]
    for path in ("/", script):
        policy = policy_of(server.url + path)
        assert policy["default-src"] == {"'self'"}
        for name in ("script-src", "style-src", "connect-src", "worker-src", "font-src"):
            assert policy[name] == {"'self'"}, name
        assert "script-src-attr" not in policy  # then script-src decides, and allows no handler
        assert policy["img-src"] == {"'self'", "blob:", "data:"}
        for name in ("object-src", "base-uri", "form-action", "frame-ancestors"):
            assert policy[name] == {"'none'"}, name
    stored = server.client.files.create(file=("evil.html", hostile_html(), "text/html"), purpose="user_data")
    with urlopen(f"{server.url}/v1/files/{stored.id}/content") as reply:
        assert reply.headers["content-disposition"].startswith("attachment")
        assert reply.headers["content-type"] == "application/octet-stream"
        assert reply.headers["x-content-type-options"] == "nosniff"


def test_the_policy_forbids_what_a_page_could_be_made_to_do(desks: Opener, server: Server) -> None:
    """Even a script that got in could neither run inline nor send anything elsewhere."""
    desk = desks(server.url)
    refused: list[Any] = desk.page.evaluate(
        """async () => {
          const blocked = [];
          addEventListener('securitypolicyviolation', (event) => blocked.push(event.effectiveDirective));
          const script = document.createElement('script');
          script.textContent = 'window.hacked = 30';
          document.body.append(script);
          const made = '<p id=made style="color: red" onclick="window.hacked = 31"></p>';
          document.body.insertAdjacentHTML('beforeend', made);
          document.getElementById('made').click();
          await fetch('http://127.0.0.1:1/').catch(() => 0);
          new Image().src = 'http://127.0.0.1:1/x.png';
          await new Promise((resolve) => setTimeout(resolve, 300));
          return [blocked, window.hacked ?? null];
        }"""
    )
    assert refused[1] is None
    tried = {"script-src-elem", "script-src-attr", "style-src-attr", "connect-src", "img-src"}
    assert tried <= set(refused[0])
    desk.complaints.clear()  # the console tells of each
