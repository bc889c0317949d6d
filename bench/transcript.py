"""Ask the real documents five questions each, through `perilune ask`, and write what came back, unedited.

    python -m bench.transcript [--out docs/transcript.md]

Each question is a process of its own, as a person would ask it; the first one of a document ingests it. The
answers come from the default model, which has 135 M parameters: the passages and pages are what to look at.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Subject:
    """A document and what is asked about it. `note` says what a reader should know."""

    title: str
    path: Path
    note: str
    questions: tuple[str, ...]


SUBJECTS = (
    Subject(
        "GNU Octave manual (PDF, over 1,000 pages, English)",
        Path("/usr/share/doc/octave/octave.pdf"),
        "Debian package octave-doc. Far over the window, so the plan is `refined`.",
        (
            "Which function computes the singular value decomposition of a matrix?",
            "How do I read a file line by line?",
            "What does the function fzero do?",
            "Which command saves variables to a file?",
            "How are comments written in Octave?",
        ),
    ),
    Subject(
        "Debian Reference (PDF, Chinese)",
        Path("/usr/share/debian-reference/debian-reference.zh-cn.pdf"),
        "Debian package debian-reference-zh-cn. The default model speaks English only, and says so.",
        (
            "如何用 apt 安装一个软件包?",
            "什么是命名管道?",
            "怎样改变文件的权限?",
            "systemd 是什么?",
            "如何设置系统时区?",
        ),
    ),
    Subject(
        "A source tree (perilune/engine of this project)",
        ROOT / "perilune" / "engine",
        "A folder: its text files are read one by one.",
        (
            "Which class runs the engine thread?",
            "What happens when the block pool runs out of blocks?",
            "How is a sequence cancelled?",
            "What decides how many prompt tokens one step takes?",
            "When does a prefill block enter the shared cache?",
        ),
    ),
    Subject(
        "GNU General Public License 3 (text, 6,000 tokens)",
        Path("/usr/share/common-licenses/GPL-3"),
        "Fits the window: prefilled at the first question, `warm` from then on, in new processes too.",
        (
            "What does the license say about patents?",
            "Who publishes the GNU General Public License?",
            "What is the Corresponding Source?",
            "May I charge a price for copies?",
            "When are my rights terminated?",
        ),
    ),
)


def ask(home: Path, subject: Subject, question: str) -> dict[str, Any]:
    """One `perilune ask` from process start. Raises CalledProcessError with its errors on stderr."""
    report = home / "report.json"
    command = [sys.executable, "-m", "perilune.cli.main", "--home", str(home), "ask", str(subject.path), question]
    command += ["--max-tokens", "96", "--report", str(report)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, timeout=600)
    result: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return result


def lines_of(question: str, result: dict[str, Any]) -> Iterator[str]:
    told, elapsed = result["perilune"], result["elapsed"]
    tokens = told["tokens"]
    cached = tokens["cached"]
    yield f"**{question}**"
    yield ""
    yield from (f"> {line}" for line in result["answer"].strip().splitlines() or ["(empty)"])
    yield ""
    yield (
        f"Plan `{told['plan']}`; started {told['measured_ttft_s']:.2f} s after the question (predicted "
        f"{told['predicted_ttft_s']:.2f} s, deadline {told['deadline_s']:g} s), "
        f"{elapsed['first_token_s']:.1f} s after the process. "
        f"{tokens['offered']:,} tokens offered, {tokens['exact']:,} read, {tokens['dropped']:,} left out, "
        f"{cached['ram'] + cached['disk']:,} found in cache."
    )
    for degradation in told["degradations"]:
        yield f"Said so: {degradation['reason']}"
    yield ""
    for citation in told["citations"][:3]:
        quote = " ".join(citation["quote"].split())
        place = citation["anchor"] or f"page {citation['page']}"
        yield f"- {citation['filename']}, {place}: “{quote[:160]}…”"
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "transcript.md")
    out: Path = parser.parse_args().out
    lines = [
        "# Transcript: real documents, real questions",
        "",
        "Written by `python -m bench.transcript`, unedited. Every question is a process of its own, on two cores",
        "without a GPU. The model is SmolLM2-135M-Instruct: it has 135 million parameters and is often wrong. What",
        "the system promises is the time, the passages with their pages, and an honest account of what was read.",
        "",
    ]
    with tempfile.TemporaryDirectory(prefix="perilune-transcript-") as folder:
        home = Path(folder)
        subprocess.run(
            [sys.executable, "-m", "perilune.cli.main", "--home", folder, "pull", "smollm2-135m-instruct"],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ.copy(),
        )
        for subject in SUBJECTS:
            lines += [f"## {subject.title}", "", subject.note, ""]
            for question in subject.questions:
                lines += lines_of(question, ask(home, subject, question))
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
