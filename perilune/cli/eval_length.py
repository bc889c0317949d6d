"""`perilune eval length`: up to which length a model still answers, as a grid of length by depth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.cli.console import StatusLine, print_json, say, table
from perilune.config import Settings

if TYPE_CHECKING:
    from perilune.runtime.evaluate.length_record import EffectiveLength


@dataclass(frozen=True, slots=True)
class Options:
    """`max_length` 0 is the model's window."""

    max_length: int
    trials: int
    seed: int
    limit_s: float
    as_json: bool
    report: Path | None


def run(settings: Settings, texts: Sequence[Path], options: Options) -> None:
    """Measure, print and keep the result in the home folder, where `serve` and `ask` find it.

    Raises `UnsupportedModel`, `Overloaded`, `InvalidRequest` for text or lengths that can't be used.
    """
    from perilune.runtime.checkpoint import open_checkpoint
    from perilune.runtime.evaluate import length_record
    from perilune.runtime.evaluate.length import lengths_up_to, measure
    from perilune.runtime.evaluate.text import read_text
    from perilune.runtime.evaluate.weights import eval_model
    from perilune.runtime.hub.pull import resolve
    from perilune.runtime.loader import content_name, with_lora
    from perilune.runtime.tokenizer import load_tokenizer

    text = read_text(texts)
    files = resolve(settings.model.path, settings.home)
    lora = Path(settings.model.lora).expanduser() if settings.model.lora else None
    status = StatusLine(quiet=options.as_json)
    status.update("loading", settings.model.path)
    base = open_checkpoint(files.path)
    checkpoint, tokenizer = with_lora(base, lora), load_tokenizer(base)
    longest = min(options.max_length or checkpoint.config.max_context_tokens, checkpoint.config.max_context_tokens)
    lengths = lengths_up_to(longest)
    filler = tokenizer.encode(text.text[: 32 * longest])

    def report(stage: str, done: int, total: int) -> None:
        status.update(stage, f"text {done + 1} of {total}")

    cells = measure(
        eval_model(checkpoint, "bf16", longest),
        tokenizer.encode,
        filler,
        lengths,
        trials=options.trials,
        seed=options.seed,
        limit_s=options.limit_s,
        report=report,
    )
    status.clear()
    found = length_record.judge(files.card.name, cells)
    kept = length_record.save(settings.home, content_name(checkpoint), found)
    told: dict[str, Any] = {
        "text": {"name": text.name, "sha256_16": text.digest},
        "unmeasured_lengths": sorted(set(lengths) - {cell.length for cell in cells}),
        **asdict(found),
    }
    if options.report is not None:
        options.report.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    if options.as_json:
        print_json(told)
    else:
        _show(found, kept)


def _show(found: EffectiveLength, kept: Path) -> None:
    from perilune.runtime.evaluate.metrics import share_interval

    depths = sorted({cell.depth for cell in found.cells})
    columns = ("TASK", "LENGTH", *(f"AT {100 * depth:.0f} %" for depth in depths), "ALL", "95 %")
    rows = []
    for task, length in sorted({(cell.task, cell.length) for cell in found.cells}):
        row = {cell.depth: cell for cell in found.cells if (cell.task, cell.length) == (task, length)}
        right, asked = (sum(getattr(cell, name) for cell in row.values()) for name in ("right", "asked"))
        bounds = share_interval(right, asked)
        cells = [f"{row[depth].right}/{row[depth].asked}" if depth in row else "" for depth in depths]
        span = f"{100 * bounds.low:.0f} … {100 * bounds.high:.0f} %"
        rows.append((task, f"{length:,}", *cells, f"{100 * right / asked:.0f} %", span))
    table(columns, rows)
    say(conclusion(found))
    say(f"Kept in {kept}.")


def conclusion(found: EffectiveLength) -> str:
    """One sentence."""
    if not found.tokens:
        return f"{found.model} answers none of these tasks even at the shortest length."
    if found.fails_at is None:
        return f"{found.model} still answers at {found.tokens:,} tokens, the longest length measured."
    return (
        f"{found.model} still answers at {found.tokens:,} tokens; at {found.fails_at:,} it gives "
        f"{100 * found.accuracy(found.fails_at):.0f} % of the answers, {100 * _best(found):.0f} % at the shortest."
    )


def _best(found: EffectiveLength) -> float:
    return found.accuracy(min(cell.length for cell in found.cells))
