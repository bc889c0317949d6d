"""What tiered KV and hybrid attention cost in accuracy, against full-precision KV on the same weights and tokens.

    python -m bench.kv_fidelity [--quick] [--json FILE] [--rounds HAYSTACKS]

SmolLM2-135M in fp32 on both sides, Python's reference as text. `int8_*`: the INT8 tier alone over rows that read it
(positions 2,304 to 8,191). `flips_*`: answers lost among those that full precision gets right, in points; answers
gained are told in the notes, not taken off. Question and answer are read sparsely, every layer sparse (sinks 16,
window 128, hot 256, segments of 2,048). The upper end of a spread is the one-sided 95 % bound. Fewer than 300 pairs
leave a figure unmeasured. What else runs doesn't change the figures.

A full run keeps every piece in `kv_fidelity.jsonl` in the benches' home, so a run that is cut goes on where it
stopped, and one that was complete is repeated from there; delete the file to measure everything again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from bench.corpus import text
from bench.driver import say
from bench.machine import CpuClock, describe
from bench.peers import home, model_gguf
from bench.report import Bar, Options, Result, finish, parse_options
from perilune.runtime.evaluate.kv_eval import ByPosition, KvPlan, KvReport, TaskFlips, evaluate_kv
from perilune.runtime.evaluate.kv_tiers import Scale

BARS = {
    "int8_kld": Bar(at_most=0.0003, unit="nats"),
    "int8_top1": Bar(at_least=0.99, unit=""),
    "int8_ppl_delta": Bar(at_most=0.001, unit=""),
    "flips_10pct": Bar(at_most=1.0, unit="points"),
    "flips_5pct": Bar(at_most=2.0, unit="points"),
    "multikey_flips": Bar(at_most=3.0, unit="points"),
}


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options("Accuracy of tiered KV and hybrid attention against full KV.", argv, rounds=10)
    clock = CpuClock.now([os.getpid()])
    journal = None if options.quick else home() / "kv_fidelity.jsonl"
    report = evaluate_kv(model_gguf(), text(), plan_of(options), say, journal)
    result = Result("kv_fidelity", dict.fromkeys(BARS), {}, [], quick=options.quick)
    if report.int8 is not None:
        _enter_int8(result, report.int8)
    _enter_flips(result, report)
    _note_tasks(result, report)
    result.runs = [_run(found) for found in report.tasks]
    share = CpuClock.now([os.getpid()]).foreign_share(clock)
    result.machine = describe() | {"foreign_share": round(share, 3)}
    finish(result, BARS, options)


def plan_of(options: Options) -> KvPlan:
    """Full: `options.rounds` haystacks and 53,248 tokens for the INT8 tier. Quick: a look at INT8 only."""
    scale = Scale(sink_tokens=16, hot_tokens=256)
    if options.quick:
        return KvPlan(scale, haystacks=0, int8_tokens=256, hybrid_tokens=0, context_tokens=2816)
    return KvPlan(scale, haystacks=options.rounds, int8_tokens=53248, hybrid_tokens=0)


def _enter_int8(result: Result, found: ByPosition) -> None:
    whole = found.whole
    for key, interval in (
        ("int8_kld", whole.kld_mean),
        ("int8_top1", whole.top1_agreement),
        ("int8_ppl_delta", whole.ppl_change),
    ):
        result.figures[key] = interval.value
        result.spread[key] = (interval.low, interval.high)
    result.notes.append(f"INT8 tier: {whole.tokens} tokens")


def _enter_flips(result: Result, report: KvReport) -> None:
    """Points lost of dense-right answers; multikey at the larger budget."""
    wanted = {("all", 0.10): "flips_10pct", ("all", 0.05): "flips_5pct", ("multikey", 0.10): "multikey_flips"}
    for found in report.tasks:
        key = wanted.get((found.group, found.budget)) if found.variant == "hybrid" else None
        if key is None:
            continue
        flips = found.flips
        result.notes.append(
            f"{key}: {flips.lost} lost, {flips.gained} gained of {flips.dense_right} pairs, "
            f"budget measured {found.measured_budget:.1%}"
        )
        if found.claim and flips.upper is not None:
            result.figures[key] = 100 * flips.lost_share
            result.spread[key] = (100 * flips.lost_share, 100 * flips.upper)


def _note_tasks(result: Result, report: KvReport) -> None:
    """Full precision's own answers by task; a task below half of them counts in no figure."""
    told: set[str] = set()
    for found in report.tasks:
        if found.group == "all" or found.group.startswith("at ") or found.group in told:
            continue
        told.add(found.group)
        share = f"full KV answers {found.flips.dense_right} of {found.flips.asked}"
        result.notes.append(f"{found.group}: {share}{'' if found.usable else ', left out'}")


def _run(found: TaskFlips) -> dict[str, object]:
    flips = found.flips
    return {
        "variant": found.variant,
        "budget": found.budget,
        "measured_budget": round(found.measured_budget, 4),
        "group": found.group,
        "asked": flips.asked,
        "dense_right": flips.dense_right,
        "lost": flips.lost,
        "gained": flips.gained,
    }


if __name__ == "__main__":
    main()
