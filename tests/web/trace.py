"""What Chromium itself records of a page: how long its main thread was busy at a time, and which frames it dropped.

CPU time of a task doesn't depend on who else uses the machine, so it is what the usual tests bound; the time on the
clock is for quiet machines. Frames are those of the page's compositor, as DevTools counts them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser

_CATEGORIES = ["disabled-by-default-devtools.timeline", "disabled-by-default-devtools.timeline.frame"]
_TASKS = ("RunTask", "ThreadControllerImpl::RunTask")
_SHOWN = ("STATE_PRESENTED_ALL", "STATE_PRESENTED_PARTIAL")
_DROPPED = "STATE_DROPPED"


@dataclass
class Trace:
    """Tasks of the page's main thread, in ms on the clock and of CPU; frames that were shown or dropped."""

    tasks_ms: list[float] = field(default_factory=list)
    tasks_cpu_ms: list[float] = field(default_factory=list)
    shown: int = 0
    dropped: int = 0

    @property
    def longest_cpu_ms(self) -> float:
        return max(self.tasks_cpu_ms, default=0.0)

    @property
    def longest_ms(self) -> float:
        return max(self.tasks_ms, default=0.0)

    @property
    def cpu_ms(self) -> float:
        return sum(self.tasks_cpu_ms)


@contextlib.contextmanager
def traced(browser: Browser | None) -> Iterator[Trace]:
    """Filled when the block ends. One at a time: Chromium records the whole browser. Without a browser nothing is
    recorded: that takes a share of a core, which figures on the clock would show."""
    trace = Trace()
    if browser is None:
        yield trace
        return
    browser.start_tracing(categories=_CATEGORIES)
    try:
        yield trace
    finally:
        _fill(trace, _stopped(browser))


def _stopped(browser: Browser) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(browser.stop_tracing())["traceEvents"]
    return events


def _fill(trace: Trace, events: list[dict[str, Any]]) -> None:
    """Of all renderers the one that did most is the page's: others that are open stand still."""
    mains = {
        (each["pid"], each["tid"])
        for each in events
        if each["name"] == "thread_name" and each["args"]["name"] == "CrRendererMain"
    }
    tasks: dict[int, list[tuple[float, float]]] = {pid: [] for pid, _ in mains}
    for each in events:
        if each["name"] in _TASKS and (each["pid"], each["tid"]) in mains and "tdur" in each:
            tasks[each["pid"]].append((each["dur"] / 1000, each["tdur"] / 1000))
    pid = max(tasks, key=lambda renderer: sum(cpu for _, cpu in tasks[renderer]))
    trace.tasks_ms = [ms for ms, _ in tasks[pid]]
    trace.tasks_cpu_ms = [cpu for _, cpu in tasks[pid]]
    for each in events:
        if each["name"] == "PipelineReporter" and each["ph"] == "b" and each["pid"] == pid:
            state = each["args"].get("frame_reporter", {}).get("state")
            trace.shown += state in _SHOWN
            trace.dropped += state == _DROPPED
    assert trace.tasks_ms, "Chromium recorded nothing of a page"
