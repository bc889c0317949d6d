"""A program that runs one block after the other in the same process, as a reader's terminal does.

`bash` keeps its folder and variables, `python` its names. Each stops at the first fault.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

CLOSE_S = 2.0
BASH = "set -euo pipefail; while read -r block <&{read}; do source $block; echo >&{write}; done"
PYTHON = """
import os
names = {{"__name__": "__main__"}}
ended = os.fdopen({write}, "w", buffering=1)
for line in os.fdopen({read}):
    with open(line.strip()) as file:
        exec(compile(file.read(), line.strip(), "exec"), names)
    ended.write("\\n")
"""


class Session:
    """`run` gives it a file; `log` is where all of its output goes."""

    def __init__(
        self, program: Sequence[str], loop: str, folder: Path, environment: Mapping[str, str], log: Path
    ) -> None:
        blocks, self._blocks = os.pipe()
        self._ended, ended = os.pipe()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*program, "-c", loop.format(read=blocks, write=ended)],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(blocks, ended),
                start_new_session=True,
            )
        os.close(blocks)
        os.close(ended)

    def run(self, file: Path, limit_s: float) -> bool:
        """Whether the block ended well within `limit_s`."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._blocks, f"{file}\n".encode())
        ready, _, _ = select.select([self._ended], [], [], limit_s)
        return bool(ready) and os.read(self._ended, 1) == b"\n"

    def close(self) -> None:
        """End it, and what a block left running in it."""
        os.close(self._blocks)
        end = time.monotonic() + CLOSE_S
        while self._process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        os.close(self._ended)
