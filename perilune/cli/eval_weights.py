"""`perilune eval weights`: what each weight precision costs in accuracy, on the user's text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.cli.console import StatusLine, print_json, say, table
from perilune.config import Settings
from perilune.errors import ConfigError
from perilune.runtime.memory import human_bytes

if TYPE_CHECKING:
    from perilune.runtime.evaluate.metrics import Fidelity, Interval
    from perilune.runtime.evaluate.text import EvalText
    from perilune.runtime.evaluate.weights import Accuracy, WeightsResult
    from perilune.runtime.weights import DecodeWeights


@dataclass(frozen=True, slots=True)
class Options:
    """`precisions`: as `model.decode_weights` is written; empty: all plain ones and what the settings say."""

    precisions: tuple[str, ...]
    tokens: int
    length: int
    limit_s: float
    as_json: bool
    report: Path | None


def run(settings: Settings, texts: Sequence[Path], options: Options) -> None:
    """Measure and print. The table goes to stdout, progress to stderr.

    Raises `UnsupportedModel`, `Overloaded`, `InvalidRequest` for text that can't be used, `ConfigError` for a
    precision that isn't one.
    """
    candidates = _candidates(settings, options.precisions)
    from perilune.kernels.select import load
    from perilune.runtime.evaluate.text import read_text
    from perilune.runtime.evaluate.weights import WeightsEvaluation
    from perilune.runtime.hub.pull import resolve

    text = read_text(texts)
    files = resolve(settings.model.path, settings.home)
    lora = Path(settings.model.lora).expanduser() if settings.model.lora else None
    status = StatusLine(quiet=options.as_json)
    status.update("loading", settings.model.path)
    evaluation = WeightsEvaluation.open(files.path, lora, load(settings.runtime.threads or _cores()))
    token_ids = evaluation.tokenizer.encode(text.text[: 16 * options.tokens])[: options.tokens]

    def report(stage: str, done: int, total: int) -> None:
        status.update(stage, f"{done:,} of {total:,} tokens")

    result = evaluation.run(token_ids, candidates, length=options.length, limit_s=options.limit_s, report=report)
    status.clear()
    told = _json(files.card.name, settings, text, result)
    if options.report is not None:
        options.report.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    if options.as_json:
        print_json(told)
    else:
        _show(files.card.name, text, result)


def _candidates(settings: Settings, precisions: Sequence[str]) -> list[tuple[str, DecodeWeights]]:
    """Names with policies: those asked for, else the plain ones, the prefill, and what the settings mix."""
    from perilune.config import load
    from perilune.runtime.evaluate.weights import PREFILL
    from perilune.runtime.weights import policy_text

    if not precisions:
        configured = settings.model.decode_weights
        plain: list[tuple[str, DecodeWeights]] = [("bf16", "bf16"), ("int8", "int8"), ("stored", "stored")]
        mixed = [] if isinstance(configured, str) else [(policy_text(configured), configured)]
        return [*plain, *mixed, (PREFILL, "bf16")]
    found: list[tuple[str, DecodeWeights]] = []
    for text in precisions:
        if text == PREFILL:
            found.append((PREFILL, "bf16"))
            continue
        checked = load(None, {"model.decode_weights": text}, {})[0]  # raises ConfigError, naming what is accepted
        found.append((text, checked.model.decode_weights))
    if len({name for name, _ in found}) < len(found):
        raise ConfigError("A precision was named twice.", hint="Name each once.")
    return found


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0))


# ------------------------------------------------------------------------------------------------- printing


def _show(model: str, text: EvalText, result: WeightsResult) -> None:
    say(f"{model} on {text.name} ({text.digest}): {result.tokens:,} tokens in stretches of {result.length:,}")
    say("Against fp32 arithmetic on the weights as the file holds them; intervals are 95 %.")
    say("prefill: the same weights in bf16 arithmetic. Others: the packed decode weights in fp32 arithmetic.")
    if result.cut:
        say(f"The time limit cut the text short at {result.tokens:,} tokens; --time-limit gives it longer.")
    columns = ("WEIGHTS", "SIZE", "KLD MEAN", "MEDIAN", "P99", "TOP-1 SAME", "PPL", "PPL CHANGE")
    table(columns, [_row(accuracy) for accuracy in result.accuracies])
    print()
    columns = ("WEIGHTS", "POSITIONS", "KLD MEAN", "MEDIAN", "P99", "TOP-1 SAME", "PPL", "PPL CHANGE")
    rows = [
        (accuracy.name, f"{low:,} – {high - 1:,}", *_figures(fidelity))
        for accuracy in result.accuracies
        for (low, high), fidelity in accuracy.by_position
    ]
    table(columns, rows)


def _row(accuracy: Accuracy) -> tuple[str, ...]:
    return (accuracy.name, human_bytes(accuracy.weight_bytes), *_figures(accuracy.overall))


def _figures(fidelity: Fidelity) -> tuple[str, ...]:
    return (
        _span(fidelity.kld_mean, 1, "{:.2g}"),
        f"{fidelity.kld_median:.2g}",
        f"{fidelity.kld_p99:.2g}",
        _span(fidelity.top1_agreement, 100, "{:.2f}", " %"),
        f"{fidelity.candidate_ppl:.3f}",
        _span(fidelity.ppl_change, 100, "{:+.3f}", " %"),
    )


def _span(interval: Interval, factor: float, form: str, unit: str = "") -> str:
    value, low, high = (form.format(factor * number) for number in (interval.value, interval.low, interval.high))
    return f"{value}{unit} ({low} … {high})"


def _json(model: str, settings: Settings, text: EvalText, result: WeightsResult) -> dict[str, Any]:
    return {
        "model": model,
        "lora": settings.model.lora or None,
        "text": {"name": text.name, "sha256_16": text.digest},
        "reference": "fp32 arithmetic on the weights as stored",
        "tokens": result.tokens,
        "length": result.length,
        "cut_by_time_limit": result.cut,
        "elapsed_s": round(result.elapsed_s, 1),
        "precisions": [
            {
                "name": accuracy.name,
                "weight_bytes": accuracy.weight_bytes,
                "overall": asdict(accuracy.overall),
                "by_position": [
                    {"from": low, "to": high, **asdict(fidelity)} for (low, high), fidelity in accuracy.by_position
                ],
            }
            for accuracy in result.accuracies
        ],
    }
