"""Nothing in the documentation is forgotten: each block is run or says why not, and what runs them is no sham."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

from tests.docs.newcomer import beside, is_server
from tests.docs.pages import DATA, REASONS, ROOT, RUN, blocks, name_of, pages, prose, run_blocks
from tests.docs.session import BASH, PYTHON, Session
from tests.docs.typed import filled, remember

NOT_RUN_AT_MOST = 0.22
COMMAND = r"(perilune|curl|make|python3?|pip|npm|sudo|export|\.) "


def test_nothing_is_forgotten() -> None:
    """Each block is run, or says why not in words of the list; and one of these isn't a way out."""
    everything = [block for page in pages() for block in blocks(page)]
    unknown = [block.place for block in everything if block.language not in RUN + DATA]
    assert not unknown, f"in no language that a rule knows: {unknown}"
    unsaid = [block.place for block in everything if block.reason and block.reason not in REASONS]
    assert not unsaid, f"not run for a reason that isn't in the list: {unsaid}"
    commands = [block for block in everything if block.language in RUN]
    assert len(commands) > 100
    assert sum(bool(block.reason) for block in commands) <= NOT_RUN_AT_MOST * len(commands)


def test_no_command_hides_outside_of_a_block() -> None:
    """Neither in a drawing or a reply, nor by indentation alone."""
    hidden = [
        f"{block.place}: {line}"
        for page in pages()
        for block in blocks(page)
        if block.language in DATA
        for line in block.text.splitlines()
        if re.match(COMMAND, line)
    ]
    hidden += [
        f"{name_of(page)}: {line}"
        for page in pages()
        for line in prose(page).splitlines()
        if re.match(rf" {{4,}}{COMMAND}", line)
    ]
    assert not hidden, "\n".join(hidden)


def test_nothing_stands_behind_a_server_in_its_block() -> None:
    """`perilune serve` keeps its terminal: what comes next belongs into another one."""
    everything = [block for page in pages() for block in blocks(page) if block.language == "sh"]
    served = [block for block in everything if any(is_server(line) for line in block.text.splitlines())]
    assert len(served) > 10
    misleading = [block.place for block in served if not is_server(block.text.rstrip().splitlines()[-1])]
    assert not misleading, misleading


def test_what_ci_runs_by_itself_it_runs() -> None:
    """Line by line; and what a page has the administrator install, CI installs."""
    ci = "\n".join(path.read_text() for path in sorted((ROOT / ".ci").iterdir()))
    for block in (block for page in pages() for block in blocks(page)):
        lines = [line.partition("#")[0].strip() for line in block.text.replace("\\\n", " ").splitlines()]
        if block.reason == "CI runs it by itself":
            for line in filter(None, lines):
                assert re.search(rf"(?<![\w-]){re.escape(line)}(?![\w-])", ci), f"{block.place}: {line}"
        elif block.reason == "needs the administrator":
            packages = [
                word for line in lines for word in line.split() if word not in ("sudo", "apt-get", "install")
            ]
            assert packages, block.place
            for package in packages:
                assert re.search(rf"(?<![\w+-]){re.escape(package)}(?![\w+-])", ci), f"{block.place}: {package}"


def test_a_block_that_fails_fails_its_page(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "keeps.sh").write_text("kept=yes\ncd /\n")
    (tmp_path / "uses.sh").write_text('test "$kept $PWD" = "yes /"\n')
    (tmp_path / "fails.sh").write_text("false\necho never\n")
    (tmp_path / "keeps.py").write_text("kept = 7\n")
    (tmp_path / "uses.py").write_text("assert kept == 7\n")
    (tmp_path / "fails.py").write_text("assert kept == 8\n")
    (tmp_path / "hangs.sh").write_text("sleep 60\n")
    for program, loop, kind in ((["bash"], BASH, "sh"), ([sys.executable], PYTHON, "py")):
        session = Session(program, loop, tmp_path, os.environ, log)
        ended = [session.run(tmp_path / f"{name}.{kind}", 20) for name in ("keeps", "uses", "fails", "uses")]
        session.close()
        assert ended == [True, True, False, False]
    assert "never" not in log.read_text()
    session = Session(["bash"], BASH, tmp_path, os.environ, log)
    assert not session.run(tmp_path / "hangs.sh", 0.2)
    began_s = time.monotonic()
    session.close()
    assert time.monotonic() - began_s < 20


def test_a_reason_is_read_from_the_fence(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\ntrue\n```\n\n```sh no-run: downloads\nfalse\n```\n\n```json\n{}\n```\n")
    assert [(block.language, block.reason, block.line) for block in blocks(page)] == [
        ("sh", "", 1),
        ("sh", "downloads", 5),
        ("json", "", 9),
    ]
    assert [block.text for block in run_blocks(page)] == ["true\n"]


def test_what_a_reader_fills_in() -> None:
    seen: dict[str, str] = {}
    remember('{"id":"file-AbC_d-9xyz","object":"file"}', seen)
    assert filled('{"input_file_id": "FILE_ID", "at": "BATCH_ID"}', seen) == (
        '{"input_file_id": "file-AbC_d-9xyz", "at": "BATCH_ID"}'
    )
    assert beside("perilune --home x serve") == "serve_beside --home x serve"
    assert not is_server("systemctl --user enable --now perilune")
