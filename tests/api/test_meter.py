"""One line of log an answer: numbers that a simulation can be made of, and no text."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from perilune.api.meter import AnswerMeter
from perilune.core import Completed, Message, Request, ServiceClass, TextPart, Usage
from perilune.engine.traces import TraceRequest, read_trace
from perilune.ops.logging import JsonFormatter
from perilune.telemetry import Telemetry

from .fakes import report


def test_the_line_of_an_answer_is_a_trace(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    asked = (Message("user", (TextPart("What does the secret plan say?"),)),)
    request = Request("req_1", "acme", "m", asked, 100.0, service_class=ServiceClass.P1_DOCUMENT)
    with caplog.at_level(logging.INFO, "perilune.api"):
        meter = AnswerMeter(Telemetry(), lambda: 102.5, request, lambda: 1_000.0)
        meter.see(Completed(Usage(900, 40, 32), report()))
    line = JsonFormatter().format(caplog.records[-1])
    assert "secret" not in line
    assert json.loads(line)["arrival_s"] == 997.5
    path = tmp_path / "server.log"
    path.write_text(line + "\n")
    assert read_trace(path) == [TraceRequest(0.0, 900, 40, ServiceClass.P1_DOCUMENT, "acme", 5.0)]
