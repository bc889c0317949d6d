"""Makes summaries grow in the background, a leaf at a time, behind whoever writes.

Knows when to work and when to rest: it takes at most a fifth of a core, because a model may be answering. What is
undone stands in SQL (`summary_work`), so a kill costs nothing. A failure is tried again, less and less often.
"""

from __future__ import annotations

import logging
import threading
import time

from perilune.errors import PeriluneError
from perilune.memory.summaries import Summaries

REST = 4.0
"""Rest after a leaf, as a multiple of the time that it took."""

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_log = logging.getLogger(__name__)


class Summariser:
    """One thread. `notify` says that something was stored."""

    def __init__(self, summaries: Summaries) -> None:
        self._summaries = summaries
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="summaries")

    def start(self) -> None:
        self._thread.start()

    def notify(self) -> None:
        self._wake.set()

    def close(self) -> None:
        """Stop; what is undone is taken up at the next start. Idempotent."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stop.is_set():
            self._wake.clear()
            start_s = time.monotonic()
            try:
                more = self._summaries.advance()
            except Exception as error:  # a busy database or a full disk must not end the thread
                known = isinstance(error, PeriluneError)
                _log.warning("summaries wait (%s)", type(error).__name__, exc_info=None if known else error)
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            pause_s = _FIRST_PAUSE_S
            if more:
                self._stop.wait(REST * (time.monotonic() - start_s))
            else:
                self._wake.wait()
