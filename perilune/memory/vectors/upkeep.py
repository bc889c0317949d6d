"""Builds and tidies an embedded index in a process of its own, at nice 19 with one thread of each kind.

LanceDB uses every core it finds while it builds; beside an engine that decodes, that is felt. Run by `run`, or
`python -m perilune.memory.vectors.upkeep FOLDER MODEL WIDTH PURGE`.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

TIMEOUT_S = 3600.0
_NICE = 19
_PURGE = "purge"
_POLL_S = 0.1
# Without LANCE_IO_THREADS: with 1 of those, compaction waits for itself for ever.
_ONE_THREAD = (
    *("LANCE_CPU_THREADS", "TOKIO_WORKER_THREADS", "RAYON_NUM_THREADS"),
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
)
_ENVIRONMENT = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
_log = logging.getLogger(__name__)


def run(
    folder: Path, model: str, width: int, stopped: Callable[[], bool] = lambda: False, purge: bool = False
) -> bool:
    """Maintain the index, and wait for it or for `stopped`; returns whether it was done. `purge`: see
    `VectorIndex.maintain`. What fails is logged: searches are only slower then.

    Killing it half way is safe: LanceDB shows a version whole or not at all. It ends with this process, too.
    """
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    environment |= dict.fromkeys(_ONE_THREAD, "1")
    program = (sys.executable, "-P", "-m", "perilune.memory.vectors.upkeep")
    command = (*program, str(folder), model, str(width), _PURGE if purge else "")
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors
        )
        end_s = time.monotonic() + TIMEOUT_S
        while process.poll() is None and not stopped() and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        late = process.poll() is None
        if late:
            process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
        if late:
            return False
        if process.returncode != 0:
            errors.seek(0)
            last = errors.read().decode(errors="replace").splitlines() or ["no word"]
            _log.warning("upkeep of the index failed: %s", last[-1][:300])
    return process.returncode == 0


def end_with_parent() -> None:
    """From now on this process ends when whoever started it does, kill -9 included: nothing is ever written to its
    stdin, which ends then."""

    def watch() -> None:
        os.read(0, 1)  # not through sys.stdin, whose lock an ordinary exit would wait for
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(folder: str, model: str, width: str, purge: str) -> None:
    os.nice(_NICE)
    end_with_parent()
    from perilune.memory.vectors.lance import LanceIndex

    LanceIndex(Path(folder), model, int(width)).maintain(purge=purge == _PURGE)


if __name__ == "__main__":
    main(*sys.argv[1:5])
