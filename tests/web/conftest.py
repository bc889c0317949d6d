"""The page in Debian's Chromium, over a real server. What a test saw is kept under build/screenshots."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.e2e.conftest import Server, new_home, serving
from tests.web.packages import ROOT, npm_packages
from tests.web.script import ScriptedServer

SHOTS = ROOT / "build" / "screenshots"
WAIT_MS = 30_000  # two busy cores take their time
DESK = {"width": 1360, "height": 860}
PHONE = {"width": 390, "height": 844}


LISTEN = """() => {
  const region = [...document.querySelectorAll('[role=status][aria-live=polite]')].at(-1);
  window.heard = [];
  new MutationObserver(() => region.textContent && window.heard.push(region.textContent))
    .observe(region, {subtree: true, childList: true, characterData: true});
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Closed with the module: Playwright keeps an event loop in this thread, which async tests can't have."""
    chromium = shutil.which("chromium")
    assert chromium is not None, "chromium is missing: apt-get install chromium"
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, scripted: ScriptedServer
) -> Iterator[Server]:
    """The default model, and a backend that says what a test tells it to."""
    home = new_home(tmp_path_factory.mktemp("web"), smollm2_path)
    with serving(home, **scripted.settings()) as running:
        yield running


@dataclass
class Desk:
    """One page as somebody uses it. `complaints` are the console's errors and what a script left uncaught."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)

    def open(self, hash_: str = "") -> None:
        self.page.goto(f"{self.url}/{hash_}")
        self.page.locator("main").wait_for()

    def ask(self, question: str) -> None:
        self.page.locator("#question").fill(question)
        self.page.locator("main form button[type=submit]").last.click()  # waits until it can be pressed

    def answered(self, nth: int = 1) -> None:
        """Wait until `nth` answers are complete."""
        tools = self.page.get_by_role("button", name=re.compile("Copy the answer|复制回答"))
        tools.nth(nth - 1).wait_for()

    @property
    def answers(self) -> Any:
        return self.page.locator("li[data-speaker=assistant] article")

    @property
    def questions(self) -> Any:
        return self.page.locator("li[data-speaker=user] article")

    def attach(self, path: Path) -> None:
        self.page.locator("form input[type=file]").first.set_input_files(path)

    def listen(self) -> Callable[[], list[str]]:
        """From now on, until the page is loaded again: gives what a screen reader is told in passing, in order."""
        self.page.evaluate(LISTEN)

        def heard() -> list[str]:
            found: list[str] = self.page.evaluate("window.heard")
            return found

        return heard

    def shot(self, name: str) -> None:
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"{name}.png")

    def is_accessible(self) -> None:
        """axe finds nothing serious in what is shown."""
        self.page.evaluate((npm_packages() / "axe-core" / "axe.min.js").read_text())
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        serious = [
            f"{each['id']}: {each['help']}: {[node['html'][:160] for node in each['nodes'][:3]]}"
            for each in found
            if each["impact"] in ("serious", "critical")
        ]
        assert not serious, "\n".join(serious)


Opener = Callable[..., Desk]


@pytest.fixture
def desks(browser: Browser) -> Iterator[Opener]:
    """Opens pages of a server, each in a browser of its own; at the end none may have complained."""
    made: list[tuple[BrowserContext, Desk]] = []

    def open_(
        url: str, *, stored: dict[str, str] | None = None, start: str = "", script: str = "", **context: Any
    ) -> Desk:
        options = {"viewport": DESK, "locale": "en-GB", "accept_downloads": True, **context}
        opened = browser.new_context(**options)
        opened.set_default_timeout(WAIT_MS)
        for name, value in (stored or {}).items():
            opened.add_init_script(f"localStorage.setItem('perilune.{name}', {value!r})")
        if script:  # runs before the page's own
            opened.add_init_script(script)
        page = opened.new_page()
        desk = Desk(page, url)
        page.on("pageerror", lambda error: desk.complaints.append(f"uncaught: {error}"))
        page.on("console", lambda message: _note(desk, message))
        made.append((opened, desk))
        desk.open(start)
        return desk

    yield open_
    complaints = [each for _, desk in made for each in desk.complaints]
    for context, _ in made:
        with contextlib.suppress(Exception):  # a context of a crashed page
            context.close()
    assert not complaints, complaints


def _note(desk: Desk, message: Any) -> None:
    """Errors count; not that a killed server didn't answer, nor a look for what isn't there."""
    if message.type == "error" and not re.search(r"Failed to load resource", message.text):
        desk.complaints.append(message.text)
