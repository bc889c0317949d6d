"""Time to first token of questions about a document: cold, warm, and warm after kill -9 and restart.

    python -m bench.warm_ttft [--quick] [--json FILE]

Everything goes through the real service over HTTP. The document fills an 8K window. Each round: start on an empty
KV folder and ask (cold: everything is computed), ask again in the same process (warm), kill -9, start, ask
(restart: the KV comes from disk). `identical` says that the greedy answers of all three are equal, character for
character.
A full run adds `perilune ask` from process start and a 1,000-page PDF, where Debian's octave-doc is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from bench import peers
from bench.corpus import text
from bench.driver import ROOT, Machine, say
from bench.machine import CpuClock
from bench.report import Bar, Options, Result, finish, parse_options, summarise
from bench.server import Answer, PeriluneServer, ServerError
from bench.speed import THREADS

BARS = {
    "warm_s": Bar(at_most=5.0, unit="s"),
    "restart_s": Bar(at_most=5.0, unit="s"),
    "warm_over_cold": Bar(at_most=1 / 20),
    "restart_over_cold": Bar(at_most=1 / 20),
    "identical": Bar(at_least=1, unit="(true)"),
    "ask_warm_s": Bar(at_most=5.0, unit="s"),
    "pdf_first_s": Bar(at_most=10.0, unit="s"),
    "pdf_indexed_s": Bar(at_most=5.0, unit="s"),
}
DOCUMENT_TOKENS = 7500
PDF = Path("/usr/share/doc/octave/octave.pdf")
QUESTION = "What does this text say about functions?"
QUESTIONS = (
    "Which statements are described?",
    "How are names bound?",
    "What is an assignment?",
    "What are the rules for comparisons?",
    "What is said about exceptions?",
)
PDF_QUESTIONS = (
    "How do I solve a linear system?",
    "How is a cell array indexed?",
    "How do I plot two lines in one figure?",
    "What does the function fzero do?",
    "How do I read a text file line by line?",
)
ANSWER_TOKENS = 48
_SETTLED_S = 1.0


@dataclass(slots=True)
class Readings:
    """Seconds of every reading, and whether the three kinds of answers agreed in every round."""

    cold_s: list[float] = field(default_factory=list)
    warm_s: list[float] = field(default_factory=list)
    restart_s: list[float] = field(default_factory=list)
    identical: list[bool] = field(default_factory=list)
    runs: list[dict[str, object]] = field(default_factory=list)

    def add(self, kind: str, answer: Answer) -> Answer:
        """Keep a reading. Raises `ServerError` when the answer never began."""
        if answer.ttft_s is None:
            raise ServerError(f"the {kind} answer had no content")
        tokens = answer.report.get("tokens", {})
        run = {
            "kind": kind,
            "seconds": round(answer.ttft_s, 4),
            "plan": answer.report.get("plan"),
            "cached": tokens.get("cached"),
            "predicted_ttft_s": answer.report.get("predicted_ttft_s"),
            "measured_ttft_s": answer.report.get("measured_ttft_s"),
        }
        self.runs.append(run)
        say(f"{kind}: {answer.ttft_s:.3f} s, plan {run['plan']}, cached {run['cached']}")
        return answer


def document() -> bytes:
    """English text of `DOCUMENT_TOKENS` tokens of the default model."""
    tokenizer = Tokenizer.from_file(str(peers.model_safetensors() / "tokenizer.json"))
    encoding = tokenizer.encode(text()[: 12 * DOCUMENT_TOKENS], add_special_tokens=False)
    return text()[: encoding.offsets[DOCUMENT_TOKENS][0]].encode()


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options("TTFT of questions about a document: cold, warm, restarted.", argv)
    machine = Machine(THREADS)
    try:
        machine.calibrate()
        before = CpuClock.now([os.getpid()])
        with tempfile.TemporaryDirectory(prefix="perilune-bench-") as folder:
            readings = _document_rounds(Path(folder) / "document", options)
            extra = {} if options.quick else _extra_figures(Path(folder), readings)
        foreign = CpuClock.now([os.getpid()]).foreign_share(before)
        machine.calibrate()
    finally:
        machine.close()
    cold_s, warm_s, restart_s = (median(v) for v in (readings.cold_s, readings.warm_s, readings.restart_s))
    figures: dict[str, float | bool | None] = {
        "cold_s": round(cold_s, 3),
        "warm_s": round(warm_s, 3),
        "restart_s": round(restart_s, 3),
        "identical": all(readings.identical),
        "warm_over_cold": round(warm_s / cold_s, 4),
        "restart_over_cold": round(restart_s / cold_s, 4),
        **extra,
    }
    result = Result(
        "warm_ttft", figures, summarise(machine.calibration, foreign), readings.runs, quick=options.quick
    )
    for key in ("cold_s", "warm_s", "restart_s"):
        values = getattr(readings, key)
        result.spread[key] = (round(min(values), 3), round(max(values), 3))
    finish(result, BARS, options)


def _document_rounds(home: Path, options: Options) -> Readings:
    readings = Readings()
    server = PeriluneServer(home)
    try:
        server.start()
        begun_s = time.perf_counter()
        file_id = server.upload("reference.txt", document())
        if options.quick:
            server.wait_until(file_id, {"prefilling", "processed"})
        else:
            server.wait_until(file_id, {"processed"})
            readings.runs.append({"kind": "ingest", "seconds": round(time.perf_counter() - begun_s, 3)})
        for number in range(1 if options.quick else options.rounds):
            if not options.quick:
                server.stop()
                shutil.rmtree(home / "kv")
                server.start()
            _one_round(server, file_id, readings, QUESTIONS[: 3 if options.quick or number else None])
    finally:
        server.stop()
    return readings


def _one_round(server: PeriluneServer, file_id: str, readings: Readings, others: Sequence[str]) -> None:
    """The server runs and holds no KV of the document; it is stopped by kill -9 and runs again at the end."""
    cold = readings.add("cold", _ask(server, QUESTION, file_id, context_policy="full"))
    warm = [readings.add("warm", _ask(server, question, file_id)) for question in others]
    again = readings.add("warm", _ask(server, QUESTION, file_id))
    _wait_for_disk(server)
    server.kill()
    server.start()
    restored = readings.add("restart", _ask(server, QUESTION, file_id))
    readings.cold_s.append(_ttft(cold))
    readings.warm_s.append(median(_ttft(answer) for answer in (*warm, again)))
    readings.restart_s.append(_ttft(restored))
    from_disk = restored.report["tokens"]["cached"]["disk"] > 0
    readings.identical.append(from_disk and cold.text == again.text == restored.text != "")


def _ask(server: PeriluneServer, question: str, file_id: str, **body: object) -> Answer:
    return server.ask(question, file_id, max_tokens=ANSWER_TOKENS, **body)


def _ttft(answer: Answer) -> float:
    assert answer.ttft_s is not None  # `Readings.add` saw to it
    return answer.ttft_s


def _wait_for_disk(server: PeriluneServer) -> None:
    """Until the background writer has been quiet for a second, so that every round restores the same."""
    size, since_s = -1, time.perf_counter()
    while time.perf_counter() - since_s < _SETTLED_S:
        now = server.kv_bytes()
        if now != size:
            size, since_s = now, time.perf_counter()
        time.sleep(0.05)


def _extra_figures(folder: Path, readings: Readings) -> dict[str, float | bool | None]:
    return {**_ask_figures(folder / "ask", readings), **_pdf_figures(folder / "pdf", readings)}


def _ask_figures(home: Path, readings: Readings) -> dict[str, float | bool | None]:
    """`perilune ask FILE "question"` with no server: seconds from process start to the answer's first bytes."""
    home.mkdir()
    file = home.parent / "reference.txt"
    file.write_bytes(document())
    server = PeriluneServer(home)  # for its environment; it is not started
    seconds = []
    for kind in ("ask_first", *["ask_warm"] * 5):
        begun_s = time.perf_counter()
        with subprocess.Popen(
            [*PeriluneServer.COMMAND, "ask", "--max-tokens", "16", str(file), QUESTION],
            cwd=ROOT,
            env=server.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        ) as process:
            assert process.stdout
            if not process.stdout.read(1):
                raise ServerError(f"`perilune ask` answered nothing (exit code {process.wait()})")
            seconds.append(time.perf_counter() - begun_s)
            while process.stdout.read(65536):
                pass
        readings.runs.append({"kind": kind, "seconds": round(seconds[-1], 4)})
        say(f"{kind}: {seconds[-1]:.3f} s")
    return {"ask_first_s": round(seconds[0], 3), "ask_warm_s": round(median(seconds[1:]), 3)}


def _pdf_figures(home: Path, readings: Readings) -> dict[str, float | bool | None]:
    """A 1,000-page PDF: one question at once after its upload, one once it is indexed; medians of five rounds."""
    if not PDF.is_file():
        say(f"{PDF.name} is not here (Debian's octave-doc): the PDF figures are left out")
        return {"pdf_first_s": None, "pdf_indexed_s": None}
    pairs = [
        _pdf_round(home / str(number), first, second, readings)
        for number, (first, second) in enumerate(
            zip(PDF_QUESTIONS, PDF_QUESTIONS[1:] + PDF_QUESTIONS[:1], strict=True)
        )
    ]
    return {
        "pdf_first_s": round(median(first_s for first_s, _ in pairs), 3),
        "pdf_indexed_s": round(median(indexed_s for _, indexed_s in pairs), 3),
    }


def _pdf_round(home: Path, first: str, second: str, readings: Readings) -> tuple[float, float]:
    """In a fresh home: seconds from the start of the upload to the first answer, and from the second question, once
    the document is indexed, to its answer."""
    server = PeriluneServer(home)
    try:
        server.start()
        begun_s = time.perf_counter()
        file_id = server.upload(PDF.name, PDF.read_bytes())
        uploaded_s = time.perf_counter() - begun_s
        answer = readings.add("pdf_first", _ask(server, first, file_id))
        server.wait_until(file_id, {"processed"})
        readings.runs.append({"kind": "pdf_ingest", "seconds": round(time.perf_counter() - begun_s, 3)})
        indexed = readings.add("pdf_indexed", _ask(server, second, file_id))
    finally:
        server.stop()
    return uploaded_s + _ttft(answer), _ttft(indexed)


if __name__ == "__main__":
    main()
