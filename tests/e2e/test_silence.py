"""The promise of spec C5 under load for eight minutes: no started stream of any dialect is silent for a second.

`make soak` runs it; `test_dialects` holds a short form. Many long prompts come at once, so that the last ones wait
and are computed for all of that time, as one very long prompt would be; streams that still run then are left."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from .conftest import new_home, serving
from .streams import FIRST_S, SILENCE_S, Lateness, Timed, long_prompt, requests_of, timed

LONG_S = 480.0
WORDS = 700
STREAMS = 112
APART_S = 0.25


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_no_stream_is_silent_for_eight_minutes(tmp_path: Path, smollm2_path: Path) -> None:
    home = new_home(tmp_path, smollm2_path)
    found: list[Timed] = []
    settings = {
        "MODEL_SERVING__TIMEOUT": "3600",
        "DEADLINES__INTERACTIVE_S": "3000",
        "SERVER__MAX_QUEUE": str(STREAMS),
    }
    with serving(home, **{f"PERILUNE_{name}": value for name, value in settings.items()}) as server:
        end = time.monotonic() + LONG_S

        def ask(number: int) -> None:
            for turn in range(1000):
                requests = requests_of(long_prompt(number + STREAMS * turn, WORDS), 3000.0)
                dialect = list(requests)[number % len(requests)]
                found.append(timed(server, dialect, *requests[dialect], until_s=end))
                if time.monotonic() >= end:
                    return

        with Lateness() as late:
            threads = [threading.Thread(target=ask, args=(number,)) for number in range(STREAMS)]
            for thread in threads:
                thread.start()
                time.sleep(APART_S)
            for thread in threads:
                thread.join()
    told, broken = [], []
    for dialect in requests_of("", 0.0):
        of = [each for each in found if each.dialect == dialect]
        first_s = sorted(each.first_s for each in of)
        silence_s, longest_s = max(each.silence_s for each in of), max(each.total_s for each in of)
        told.append(
            f"{dialect}: {len(of)} streams, first bytes median {first_s[len(of) // 2]:.3f} s, worst "
            f"{first_s[-1]:.3f} s; longest silence {silence_s:.3f} s; longest stream {longest_s:.0f} s"
        )
        kept = first_s[-1] < FIRST_S + late.allowed_s and silence_s < SILENCE_S + late.allowed_s
        if not kept or longest_s < 0.9 * LONG_S:
            broken.append(dialect)
    print("\n".join([*told, f"this machine was late by up to {late.worst_s:.3f} s"]))
    assert not broken, told
