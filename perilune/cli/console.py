"""What people see: errors, tables, progress. Answers go to stdout and everything else to stderr.

A terminal gets colours and bars; anything else gets plain lines, or JSON lines for progress. Rich is imported only
where something is drawn.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from perilune.errors import PeriluneError

if TYPE_CHECKING:
    from perilune.runtime.hub.pull import PullProgress

LINE_INTERVAL_S = 1.0


def say(text: str = "") -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


def show_error(error: PeriluneError) -> None:
    """`error:` what and why, `hint:` what to do next."""
    say(f"error: {error.message}")
    if error.hint:
        say(f"hint: {error.hint}")


def print_json(value: object) -> None:
    """A JSON document on stdout."""
    print(json.dumps(value, ensure_ascii=False, indent=2, default=str), flush=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Aligned columns on stdout: boxed and coloured on a terminal, plain where it is piped."""
    cells = [[str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        drawn = Table(*columns, box=None, header_style="bold", pad_edge=False)
        for row in cells:
            drawn.add_row(*row)
        Console().print(drawn)
        return
    widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]
    for row in [list(columns), *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


class StatusLine:
    """One line that is rewritten on a terminal; elsewhere a line at most every second, and each new stage."""

    def __init__(self, quiet: bool = False) -> None:
        self._tty = sys.stderr.isatty()
        self._quiet = quiet
        self._shown = ""
        self._stage = ""
        self._at = 0.0

    def update(self, stage: str, detail: str = "") -> None:
        """Show `stage` with its present `detail`."""
        if self._quiet:
            return
        text = f"{stage}: {detail}" if detail else stage
        if text == self._shown:
            return
        if self._tty:
            sys.stderr.write(f"\r\x1b[2K{text}")
            sys.stderr.flush()
        else:
            now = time.monotonic()
            if stage == self._stage and now - self._at < LINE_INTERVAL_S:
                return
            self._at = now
            say(text)
        self._shown, self._stage = text, stage

    def clear(self) -> None:
        """Leave an empty line for what comes next."""
        if self._tty and self._shown and not self._quiet:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
        self._shown = self._stage = ""


class PullDisplay:
    """Shows a pull: a bar on a terminal, JSON lines elsewhere."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._stage = ""
        self._at = 0.0

    def __call__(self, progress: PullProgress) -> None:
        if sys.stderr.isatty():
            self._draw(progress)
            return
        now = time.monotonic()
        if progress.stage == self._stage and now - self._at < LINE_INTERVAL_S:
            return
        self._stage, self._at = progress.stage, now
        say(
            json.dumps(
                {
                    "model": progress.model,
                    "stage": progress.stage,
                    "done_bytes": progress.done_bytes,
                    "total_bytes": progress.total_bytes,
                    "source": progress.source,
                }
            )
        )

    def _draw(self, progress: PullProgress) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task(progress.model, total=progress.total_bytes)
        self._bar.update(
            self._task,
            description=f"{progress.model} {progress.stage}",
            completed=progress.done_bytes,
            total=progress.total_bytes,
        )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def pull_display() -> Iterator[PullDisplay]:
    """A display that leaves the terminal as it was, whatever happens."""
    display = PullDisplay()
    try:
        yield display
    finally:
        display.close()
