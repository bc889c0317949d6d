"""Long threads stay smooth, hostile words stay words, and an answer outlives its server.

The strict figures (every frame under 50 ms, open within a second) need an idle machine: `make soak`. Here the same
things are measured with room for a busy one.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import expect

from perilune.config import Settings
from perilune.memory.memory import Memory
from perilune.memory.sessions import Sessions
from perilune.memory.store import Store
from tests.e2e.conftest import Server, new_home, serving
from tests.web.cable import Cable
from tests.web.conftest import WAIT_MS, Opener
from tests.web.script import MODEL, ScriptedServer

expect.set_options(timeout=WAIT_MS)
SCRIPTED = {"model": MODEL}
TURNS = 1_000
TENANT = "local"

ANSWER = """A paragraph about **turn {n}**, long enough to take two lines on a wide screen, with `code` and a [link](https://example.com).

- the first of three points
- the second one, number {n}
- the third

```python
def answer(n):
    return {n}
```
"""

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
]
HUGE = [
    "y" * 1_000_000,
    "- " * 10_000 + "deep",
    "> " * 10_000 + "deep",
    "*" * 8_000 + "a" + "*" * 8_000,
    "a\n\n" * 50_000,
]


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, scripted: ScriptedServer
) -> Iterator[Server]:
    """A server that already keeps a long conversation and a hostile one."""
    home = new_home(tmp_path_factory.mktemp("threads"), smollm2_path)
    store = Store(home)
    memory = Memory.open(store, home, Settings().memory.model_copy(update={"embedder": "off"}))
    kept = Sessions(store, memory)
    for n in range(0, TURNS, 2):
        kept.add(TENANT, "long", [("user", f"Question {n}?", float(n)), ("assistant", ANSWER.format(n=n), n + 1.0)])
    for number, text in enumerate([*HOSTILE, *HUGE]):
        kept.add(TENANT, "hostile", [("user", text, float(number)), ("assistant", text, number + 0.5)])
    memory.close()
    store.close()
    with serving(home, PERILUNE_MEMORY__EMBEDDER="off", **scripted.settings()) as running:
        yield running


FRAMES = """async ([ms, act]) => {
  const gaps = [];
  let last = performance.now(), on = true;
  const tick = (now) => { gaps.push(now - last); last = now; if (on) requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
  const end = performance.now() + ms;
  const box = document.querySelector('[aria-label=Conversation]');
  let step = 0;
  while (performance.now() < end) {
    if (act === 'scroll') box.scrollTop -= 400;
    step++;
    await new Promise((resolve) => setTimeout(resolve, 30));
  }
  on = false;
  return gaps.slice(2);
}"""


def frames(desk: Any, ms: int, act: str) -> list[float]:
    """The gaps between frames, in ms, while the page is scrolled or left alone."""
    found: list[float] = desk.page.evaluate(FRAMES, [ms, act])
    return sorted(found)


def frames_while_typing(desk: Any, ms: int) -> list[float]:
    """The gaps between frames, in ms, while real keys are pressed, forty a second."""
    desk.page.evaluate(f"void (window.typed = ({FRAMES})([{ms}, 'none']))")
    keys = ms // 25
    desk.page.locator("#question").press_sequentially(("tides " * keys)[:keys], delay=25)
    found: list[float] = desk.page.evaluate("window.typed")
    assert len(desk.page.locator("#question").input_value()) == keys
    return sorted(found)


def opened_ms(desk: Any) -> float:
    """From the click on a conversation to its last turn on the screen."""
    desk.page.get_by_role("link", name="Question 0?").wait_for()
    return float(
        desk.page.evaluate(
            """async () => {
              const start = performance.now();
              [...document.querySelectorAll('nav a')].find((each) => each.textContent === 'Question 0?').click();
              for (;;) {
                await new Promise(requestAnimationFrame);
                const last = document.querySelector('#turn-1000 strong');
                if (last && last.getBoundingClientRect().bottom > 0) return performance.now() - start;
                if (performance.now() - start > 30000) throw new Error('never opened');
              }
            }"""
        )
    )


def measure(desks: Opener, server: Server, scripted: ScriptedServer, seconds: float) -> dict[str, float]:
    """Figures of the long thread: ms to open, and the slowest frames while scrolling, typing and streaming. Of a
    branch of it, which the sidebar leads to: the thread stays as it is for who measures next."""
    fork = Request(f"{server.url}/v1/sessions/long/fork", json.dumps({"turn": TURNS}).encode(), method="POST")
    fork.add_header("content-type", "application/json")
    urlopen(fork).close()
    desk = desks(server.url, stored=SCRIPTED)
    paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    figures = {"first_paint_ms": float(desk.page.evaluate(paint)), "open_ms": opened_ms(desk)}
    expect(desk.page.locator("li[data-speaker]")).to_have_count(TURNS)
    time.sleep(0.3)
    scrolled = frames(desk, int(1000 * seconds), "scroll")
    desk.page.get_by_role("button", name="To the latest").click()
    typed = frames_while_typing(desk, int(1000 * seconds))
    desk.page.locator("#question").fill("Go on.")
    scripted.script.say(*(f"word{n}{' ' if n % 40 else chr(10) * 2}" for n in range(2_000)), per_s=100)
    desk.page.locator("#question").press("Enter")
    expect(desk.answers.last).to_contain_text("word20")
    streamed = frames(desk, int(1000 * seconds), "stream")
    desk.page.get_by_role("button", name="Stop").click()
    for name, gaps in (("scroll", scrolled), ("type", typed), ("stream", streamed)):
        figures |= {f"{name}_max_ms": gaps[-1], f"{name}_p95_ms": gaps[int(0.95 * (len(gaps) - 1))]}
    desk.shot("20-thousand-turns")
    return figures


def test_a_thousand_turns_open_and_stay_smooth(desks: Opener, server: Server, scripted: ScriptedServer) -> None:
    figures = measure(desks, server, scripted, 1.5)
    print(figures)
    assert figures["first_paint_ms"] < 8_000, figures
    assert figures["open_ms"] < 8_000, figures
    assert figures["scroll_p95_ms"] < 200, figures
    assert figures["type_p95_ms"] < 200, figures
    assert figures["stream_p95_ms"] < 200, figures


@pytest.mark.soak
def test_a_thousand_turns_on_an_idle_machine(desks: Opener, server: Server, scripted: ScriptedServer) -> None:
    """Painted and opened within a second; no frame takes 50 ms while scrolling, typing and streaming."""
    time.sleep(5)
    figures = measure(desks, server, scripted, 6)
    print(figures)
    assert figures["first_paint_ms"] <= 1_000, figures
    assert figures["open_ms"] <= 1_000, figures
    for name in ("scroll", "type", "stream"):
        assert figures[f"{name}_max_ms"] < 50, figures


def test_hostile_turns_are_shown_and_do_nothing(desks: Opener, server: Server) -> None:
    """Script, handlers, SVG, frames, forms, styles, addresses: all of it is text. Huge ones don't freeze it."""
    desk = desks(server.url)
    page = desk.page
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    start_s = time.monotonic()
    page.goto(f"{server.url}/#/c/hostile/1")
    expect(page.locator("#turn-1")).to_contain_text("<script>")
    for turn in range(1, 2 * (len(HOSTILE) + len(HUGE)) + 1):  # each is brought near, so that it is shown in full
        page.locator(f"#turn-{turn}").evaluate("(each) => each.scrollIntoView()")
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    expect(page.get_by_role("button", name="Show more").first).to_be_attached()
    spent_s = time.monotonic() - start_s
    assert spent_s < 40, f"the page was held up: {spent_s:.0f} s"
    assert page.evaluate("window.hacked") is None
    inside = "[aria-label=Conversation]"
    assert (
        page.locator(
            f"{inside} :is(script, iframe, form, style, base, img, object, embed, details > style)"
        ).count()
        == 0
    )
    assert page.locator(f"{inside} svg:not([aria-hidden=true])").count() == 0
    links = page.locator(f"{inside} a").evaluate_all("(all) => all.map((each) => each.getAttribute('href'))")
    assert all(link.startswith(("https://", "http://", "mailto:")) for link in links), links
    assert all(url.startswith((server.url, "blob:")) for url in asked), asked
    desk.shot("21-hostile")


def test_a_hostile_answer_is_harmless_while_it_streams(
    desks: Opener, server: Server, scripted: ScriptedServer
) -> None:
    desk = desks(server.url, stored=SCRIPTED)
    whole = "\n\n".join(HOSTILE)
    scripted.script.say(*(whole[at : at + 7] for at in range(0, len(whole), 7)))
    desk.ask("<img src=x onerror=window.hacked=20>")
    desk.answered()
    assert desk.page.evaluate("window.hacked") is None
    scripted.script.say(*["z" * 10_000] * 100)
    desk.ask("A line of a million characters, please.")
    desk.answered(2)
    assert desk.page.evaluate("1 + 1") == 2


def test_the_policy_forbids_what_a_page_could_be_made_to_do(desks: Opener, server: Server) -> None:
    """Even a script that got in could neither run inline nor send anything elsewhere."""
    desk = desks(server.url)
    refused = desk.page.evaluate(
        """async () => {
          const blocked = [];
          addEventListener('securitypolicyviolation', (event) => blocked.push(event.effectiveDirective));
          const script = document.createElement('script');
          script.textContent = 'window.hacked = 30';
          document.body.append(script);
          document.body.insertAdjacentHTML('beforeend', '<p style="color: red" onclick="1"></p>');
          await fetch('http://127.0.0.1:1/').catch(() => 0);
          new Image().src = 'http://127.0.0.1:1/x.png';
          await new Promise((resolve) => setTimeout(resolve, 300));
          return [blocked, window.hacked ?? null];
        }"""
    )
    assert refused[1] is None
    assert {"script-src-elem", "style-src-attr", "connect-src", "img-src"} <= set(refused[0])
    desk.complaints.clear()  # the console tells of each


def port_of(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


@pytest.fixture
def cable() -> Iterator[Cable]:
    made = Cable(None)
    yield made
    made.close()


def test_an_answer_outlives_its_server(
    desks: Opener, cable: Cable, tmp_path: Path, smollm2_path: Path, scripted: ScriptedServer
) -> None:
    """Killed in the middle of an answer and started again: the page says so and gets the answer after all."""
    home = new_home(tmp_path, smollm2_path)
    scripted.script.say(*(f"word{n} " for n in range(2_000)), per_s=40)
    settings = {"PERILUNE_MEMORY__EMBEDDER": "off", **scripted.settings()}
    with serving(home, **settings) as first:
        cable.target = port_of(first)
        desk = desks(cable.url, stored=SCRIPTED)
        desk.ask("Count to two thousand.")
        expect(desk.answers.first).to_contain_text("word10")
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        expect(desk.page.get_by_text("The connection was lost.").first).to_be_visible()
        desk.shot("22-server-gone")
    scripted.script.say("Here ", "again.")
    with serving(home, **settings) as second:
        cable.target = port_of(second)
        desk.answered()
        expect(desk.answers.first).to_contain_text("Here again.")
        desk.page.reload()
        expect(desk.answers.first).to_contain_text("Here again.")
        expect(desk.answers).to_have_count(1)
        desk.shot("23-server-back")


def test_a_server_that_is_restarted_in_order_is_waited_for(
    desks: Opener, cable: Cable, tmp_path: Path, smollm2_path: Path, scripted: ScriptedServer
) -> None:
    """Its goodbye in the middle of an answer is no failure: once it is back the page shows what it kept of it."""
    home = new_home(tmp_path, smollm2_path)
    scripted.script.say(*(f"word{n} " for n in range(2_000)), per_s=40)
    settings = {"PERILUNE_MEMORY__EMBEDDER": "off", **scripted.settings()}
    with serving(home, **settings) as first:
        cable.target = port_of(first)
        desk = desks(cable.url, stored=SCRIPTED)
        desk.ask("Count until you are restarted.")
        expect(desk.answers.first).to_contain_text("word10")
        first.process.send_signal(signal.SIGTERM)
        expect(desk.page.get_by_text("The connection was lost.").first).to_be_visible()
        first.process.wait()
        expect(desk.page.get_by_text("The connection was lost.").first).to_be_visible()
    scripted.script.say("Here ", "again.")
    with serving(home, **settings) as second:
        cable.target = port_of(second)
        desk.answered()
        expect(desk.answers.first).to_contain_text("word10")
        expect(desk.answers.first).to_contain_text("The server was restarted")
        desk.shot("23-server-restarted")
        desk.page.get_by_role("button", name="Ask again").click()
        expect(desk.answers.first).to_contain_text("Here again.")
        expect(desk.page.get_by_role("group", name="Versions")).to_contain_text("2/2")


def test_a_dropped_connection_is_taken_up_again(
    desks: Opener, cable: Cable, server: Server, scripted: ScriptedServer
) -> None:
    scripted.script.say(*(f"word{n} " for n in range(120)), per_s=30)
    cable.target = port_of(server)
    desk = desks(cable.url, stored=SCRIPTED)
    desk.ask("Count through a tunnel.")
    expect(desk.answers.first).to_contain_text("word10")
    cable.cut()
    expect(desk.page.get_by_text("The connection was lost.").first).to_be_visible()
    desk.shot("24-offline")
    cable.target = port_of(server)
    desk.answered()
    said = desk.answers.first.inner_text().split()
    assert [said.count(f"word{n}") for n in range(120)] == [1] * 120


def test_a_reload_finds_the_answer_under_way(desks: Opener, server: Server, scripted: ScriptedServer) -> None:
    scripted.script.say(*(f"word{n} " for n in range(120)), per_s=30)
    desk = desks(server.url, stored=SCRIPTED)
    desk.ask("Count while I reload.")
    expect(desk.answers.first).to_contain_text("word10")
    desk.page.reload()
    expect(desk.answers.first).to_contain_text("word119")
    desk.answered()
    expect(desk.answers).to_have_count(1)


def test_a_summary_is_corrected(desks: Opener, server: Server) -> None:
    desk = desks(server.url, start="#/memory")
    page = desk.page
    page.get_by_role("tab", name="Summaries").click()
    page.get_by_role("combobox", name="Conversation", exact=True).select_option("long")
    page.get_by_role("button", name="Correct the sentence").first.click()
    page.get_by_role("textbox", name="Correct the sentence").fill("Every turn has three points.")
    page.get_by_role("button", name="Save").click()
    corrected = page.get_by_role("listitem").filter(has_text="Every turn has three points.")
    expect(corrected).to_contain_text("Corrected by you")
    desk.shot("25-summary")
    desk.is_accessible()
    corrected.get_by_role("button", name="Take the correction back").click()
    expect(corrected).to_be_hidden()


def test_a_key_is_asked_for_once(desks: Opener, server: Server) -> None:
    """The last test of this server: from the first key on it answers nobody without one."""
    made = server.cli("keys", "create", "--json")
    key = json.loads(made.stdout)["key"]
    desk = desks(server.url)
    dialog = desk.page.get_by_role("dialog", name="This server asks for a key")
    dialog.get_by_label("Key").fill("wrong")
    dialog.get_by_role("button", name="Use this key").click()
    expect(dialog).to_contain_text("isn't known here")
    desk.shot("26-key")
    desk.is_accessible()
    dialog.get_by_label("Key").fill(key)
    dialog.get_by_role("button", name="Use this key").click()
    expect(desk.page.get_by_role("link", name="Question 0?")).to_be_visible()
    desk.page.reload()
    expect(desk.page.get_by_role("link", name="Question 0?")).to_be_visible()
    expect(dialog).to_be_hidden()
    stored = desk.page.evaluate("JSON.stringify(localStorage) + document.cookie")
    assert key not in stored
