"""An answer outlives its connection, its server and a reload; summaries are corrected; a key is asked for once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.e2e.conftest import Server, new_home, serving
from tests.web.cable import Cable
from tests.web.conftest import WAIT_MS, Opener
from tests.web.planted import long_thread, plant
from tests.web.script import MODEL, ScriptedServer

expect.set_options(timeout=WAIT_MS)
SCRIPTED = {"model": MODEL}


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, scripted: ScriptedServer
) -> Iterator[Server]:
    """A server that already keeps a long conversation."""
    home = new_home(tmp_path_factory.mktemp("threads"), smollm2_path)
    plant(home, long=long_thread())
    with serving(home, PERILUNE_MEMORY__EMBEDDER="off", **scripted.settings()) as running:
        yield running


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
        heard = desk.listen()
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        expect(desk.page.get_by_text("The connection was lost.").first).to_be_visible()
        desk.shot("22-server-gone")
    scripted.script.say("Here ", "again.")
    with serving(home, **settings) as second:
        cable.target = port_of(second)
        desk.answered()
        expect(desk.answers.first).to_contain_text("Here again.")
        assert "The server was restarted. Asking again…" in heard()
        desk.page.reload()
        expect(desk.answers.first).to_contain_text("Here again.")
        expect(desk.answers).to_have_count(1)
        desk.shot("23-server-back")


def test_a_server_that_is_restarted_in_order_is_waited_for(
    desks: Opener, cable: Cable, tmp_path: Path, smollm2_path: Path, scripted: ScriptedServer
) -> None:
    """Its goodbye in the middle of an answer is no failure: once it is back the page asks again by itself, beside
    what was kept of the first answer."""
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
        heard = desk.listen()
    scripted.script.say("Here ", "again.")
    with serving(home, **settings) as second:
        cable.target = port_of(second)
        expect(desk.answers.first).to_contain_text("Here again.")
        desk.answered()
        assert "The server was restarted. Asking again…" in heard()
        versions = desk.page.get_by_role("group", name="Versions")
        expect(versions).to_contain_text("2/2")
        desk.shot("23-server-restarted")
        versions.get_by_role("button").first.click()
        expect(desk.answers.first).to_contain_text("word10")
        expect(desk.answers.first).to_contain_text("The server was restarted")
        expect(versions).to_contain_text("1/2")


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
