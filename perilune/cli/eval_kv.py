"""`perilune eval kv`: what tiered KV and hybrid attention cost a model in accuracy, on the user's text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.cli.console import StatusLine, print_json, say, table
from perilune.config import Settings
from perilune.errors import InvalidRequest

if TYPE_CHECKING:
    from perilune.runtime.evaluate.kv_eval import ByPosition, KvPlan, KvReport, TaskFlips
    from perilune.runtime.evaluate.metrics import Interval


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for. Zero tokens or haystacks leave a part out."""

    haystacks: int
    segments: int
    budgets: tuple[float, ...]
    ablations: bool
    int8_tokens: int
    hybrid_tokens: int
    context_tokens: int
    threads: int
    as_json: bool
    report: Path | None
    journal: Path | None


def run(settings: Settings, texts: Sequence[Path], options: Options) -> None:
    """Measure and print. The table goes to stdout, progress to stderr.

    Raises `UnsupportedModel`, `Overloaded`, `InvalidRequest` for text or sizes that can't be used.
    """
    plan = _plan(options)
    import torch

    from perilune.runtime.evaluate.kv_eval import evaluate_kv
    from perilune.runtime.evaluate.text import read_text
    from perilune.runtime.hub.pull import resolve

    if options.threads:
        torch.set_num_threads(options.threads)
    text = read_text(texts)
    files = resolve(settings.model.path, settings.home)
    status = StatusLine(quiet=options.as_json)
    report = evaluate_kv(
        files.path, text.text, plan, lambda stage: status.update("evaluating", stage), options.journal
    )
    status.clear()
    told = _json(report)
    if options.report is not None:
        options.report.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    if options.as_json:
        print_json(told)
    else:
        show(report)


def _plan(options: Options) -> KvPlan:
    from perilune.runtime.evaluate.kv_eval import ABLATIONS, KvPlan
    from perilune.runtime.evaluate.kv_tiers import Scale

    if not options.budgets or not all(0 < budget <= 1 for budget in options.budgets):
        raise InvalidRequest("A budget is a share of the context.", hint="Write --budget 0.1.")
    return KvPlan(
        scale=Scale(sink_tokens=16),
        haystacks=options.haystacks,
        haystack_segments=options.segments,
        budgets=options.budgets,
        ablations=ABLATIONS if options.ablations else (),
        int8_tokens=options.int8_tokens,
        hybrid_tokens=options.hybrid_tokens,
        context_tokens=options.context_tokens,
    )


def _json(report: KvReport) -> dict[str, Any]:
    """The report as plain data, with the shares that are derived."""
    told: dict[str, Any] = asdict(report)
    for entry, found in zip(told["tasks"], report.tasks, strict=True):
        flips = found.flips
        derived = {"lost_share": flips.lost_share, "net_share": flips.net_share, "upper_95": flips.upper}
        entry["flips"] |= {
            key: None if value is None or math.isnan(value) else value for key, value in derived.items()
        }
        entry |= {"usable": found.usable, "claim": found.claim}
    return told


def show(report: KvReport) -> None:
    """Three tables: logits, attention, tasks."""
    rows = [("INT8 tier", *row) for row in _fidelity_rows(report.int8)]
    for found in report.hybrid:
        rows += [(f"hybrid {found.measured_budget:.1%}", *row) for row in _fidelity_rows(found.fidelity)]
    if rows:
        table(("AGAINST FULL KV", "POSITIONS", "TOKENS", "KLD", "TOP-1", "PPL CHANGE"), rows)
    if report.attention:
        say()
        table(
            ("BUDGET", "OUTPUT ERROR", "MASS RECALL", "ORACLE ERROR", "WORST HEAD"),
            [
                (f"{a.budget:.0%}", f"{a.error:.4f}", f"{a.recall:.3f}", f"{a.oracle_error:.4f}",
                 f"layer {a.worst.layer} head {a.worst.head}: {a.worst.error:.3f}")
                for a in report.attention
            ],
        )  # fmt: skip
    if report.tasks:
        say()
        columns = (
            "VARIANT",
            "BUDGET",
            "QUESTIONS",
            "ASKED",
            "FULL KV RIGHT",
            "LOST",
            "GAINED",
            "LOST %",
            "≤ (95 %)",
        )
        table(columns, [_task_row(found) for found in report.tasks])
        if not any(found.claim for found in report.tasks):
            say("note: fewer than 300 pairs: no claim. Ask for more --haystacks.")


def _fidelity_rows(found: ByPosition | None) -> list[tuple[str, str, str, str, str]]:
    if found is None:
        return []
    named = [("all", found.whole), *((f"{low}…{high - 1}", part) for (low, high), part in found.buckets)]
    return [
        (name, str(part.tokens), _spread(part.kld_mean, ".6f"), _spread(part.top1_agreement, ".2%"),
         _spread(part.ppl_change, "+.3%"))
        for name, part in named
    ]  # fmt: skip


def _spread(interval: Interval, form: str) -> str:
    return f"{interval.value:{form}} ({interval.low:{form}} … {interval.high:{form}})"


def _task_row(found: TaskFlips) -> tuple[str, ...]:
    flips = found.flips
    lost = f"{flips.lost_share:.1%}" if found.usable else "-"
    upper = f"{flips.upper:.1%}" if found.usable and flips.upper is not None else "-"
    counts = (flips.asked, flips.dense_right, flips.lost, flips.gained)
    return (found.variant, f"{found.measured_budget:.1%}", found.group, *map(str, counts), lost, upper)
