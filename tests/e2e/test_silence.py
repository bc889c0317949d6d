"""The promise of spec C5 under load for eight minutes: no started stream of any dialect is silent for a second.

`make soak` runs it; `test_dialects` holds a short form. Many long prompts come at once, so that the last ones wait
and are computed for minutes, as one very long prompt would be."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from .conftest import new_home, serving
from .streams import Timed, long_prompt, requests_of, timed

LONG_S = 480.0
WORDS = 1500
STREAMS = 40
FIRST_S, SILENCE_S = 0.2, 1.0
SLACK_S = 0.3  # of the reader, which is a thread among forty


@pytest.mark.soak
def test_no_stream_is_silent_for_eight_minutes(tmp_path: Path, smollm2_path: Path) -> None:
    home = new_home(tmp_path, smollm2_path)
    found: list[Timed] = []
    with serving(home, PERILUNE_MODEL_SERVING__TIMEOUT="3600", PERILUNE_DEADLINES__INTERACTIVE_S="3000") as server:
        longest_s = 0.0
        while longest_s < LONG_S:

            def ask(number: int) -> None:
                requests = requests_of(long_prompt(number + len(found), WORDS), 3000.0)
                dialect = list(requests)[number % len(requests)]
                found.append(timed(server, dialect, *requests[dialect]))

            threads = [threading.Thread(target=ask, args=(number,)) for number in range(STREAMS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            longest_s += max(each.total_s for each in found[-STREAMS:])
    assert len({each.dialect for each in found}) == 4
    assert max(each.first_s for each in found) < FIRST_S + SLACK_S
    assert max(each.silence_s for each in found) < SILENCE_S + SLACK_S
