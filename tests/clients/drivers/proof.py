"""What every Python driver shares: the questions that are asked, and how each proof is told to the test.

Runs inside a client's own environment, so it knows the standard library only. A driver maps names of proofs to
functions; each returns what the client saw, and is told as one line of JSON. After `cancel` the process stays until
the test has looked at the server.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
import traceback
from pathlib import Path

URL = os.environ["PERILUNE_URL"]
MODEL = os.environ["PERILUNE_MODEL"]
KEY = os.environ["PERILUNE_KEY"]
BUSY_KEY = os.environ["PERILUNE_BUSY_KEY"]
"""A key that may run one request at a time."""

_ASKED = json.loads((Path(__file__).parent / "questions.json").read_text())
QUESTION, TOKENS = _ASKED["question"], _ASKED["tokens"]
WEATHER, CITY = _ASKED["weather"], _ASKED["city"]
LONG, LONGEST = _ASKED["long"], _ASKED["longest"]
"""Forms that make an answer long, whatever the model would say."""

ASKED, RESULTS, SAID = _ASKED["asked"], _ASKED["results"], _ASKED["said"]
"""A question that wants two calls, their results, and an answer."""


def wait():
    print("waiting", flush=True)
    sys.stdin.readline()


def page():
    """What the programs print that docs/clients.md shows for this client."""
    said = []
    for path in map(Path, json.loads(os.environ["PERILUNE_PAGE"])):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})
        said.append(printed.getvalue())
    return {"said": said}


def run(proofs):
    """`page`, then every proof in this order. The last is `cancel`; the test lets it begin, and lets the program
    end."""
    for name, prove in {"page": page, **proofs}.items():
        if name == "cancel":
            wait()
        start_s = time.monotonic()
        try:
            facts = prove()
        except Exception:
            facts = {"fault": traceback.format_exc()[-3000:]}
        spent_s = round(time.monotonic() - start_s, 2)
        print(json.dumps({"proof": name, **facts, "spent_s": spent_s}), flush=True)
    wait()
