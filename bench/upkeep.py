"""What tiers cost beside attention, and whether they drift: the engine with the default model over real text.

    python -m bench.upkeep [--quick] [--json FILE] [--rounds N]

- `bookkeeping_share`: of the time between two tokens, what the engine spends outside the runtime's step; one
  sequence, 6K tokens of context. `usual_ms`: of most steps; `closing_ms`: what closing a segment adds in all.
- `adaptive_zone_ms`: what a step takes longer with the statistics that the adaptive window needs, and its own look
  at them. `debug_ms`: the same for attention debug. Steps with and without alternate in one answer.
- `drift_bytes_error`: share of closed segments that changed a byte in ten rounds of HOT, WARM, COLD and disk.
  `drift_summary_error`: share of answers about numbers, dates and clauses, given from summaries only, that changed.
- `border_over_interior`: relative error of INT8 keys and values next to a segment's border, over the others': mean
  over segments, layers and KV heads, its spread a 95 % interval.

A full run takes about three minutes on two cores and 3 GB.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, cast

import torch

from bench import peers
from bench.corpus import text
from bench.machine import CpuClock, describe
from bench.report import Bar, Result, compare, finish, parse_options
from perilune.core import (
    BLOCK_TOKENS,
    EngineEvent,
    EngineFinished,
    EngineToken,
    KVPolicy,
    SamplingParams,
    SequenceSpec,
)
from perilune.engine.hot_zone import HotZone
from perilune.engine.loop import EngineLoop
from perilune.engine.policy import EngineLimits
from perilune.engine.stepper import TierPolicy
from perilune.kernels.reference import gather_kv
from perilune.kernels.tier_reference import arrange, encode, rotate
from perilune.kernels.tiers import SEGMENT_TOKENS, AttentionPolicy
from perilune.runtime.kv.disk import DiskKVStore
from perilune.runtime.kv.sizing import TierSettings
from perilune.runtime.kv.spec import block_hashes
from perilune.runtime.loader import LoadedModel, load_model
from perilune.runtime.mri import CancelFlag, ModelRuntime, StepPlan, StepResult
from perilune.runtime.torch_runtime import TorchRuntime

BARS = {
    "bookkeeping_share": Bar(at_most=0.05, unit="of decode time"),
    "adaptive_zone_ms": Bar(at_most=0.8, unit="ms"),
    "drift_bytes_error": Bar(at_most=0.0, unit="of segments"),
    "drift_summary_error": Bar(at_most=0.009, unit="of answers"),
    "border_over_interior": Bar(at_most=1.0),
}
DOCUMENT_TOKENS = 3 * SEGMENT_TOKENS
OPEN_TOKENS = 96  # of the last segment that are still to come when decoding starts
NEW_TOKENS, QUICK_NEW_TOKENS = 400, 160
ROUNDS = 10
SALT = b"bench.upkeep"
BORDER_TOKENS = 32

SUMMARIES_ONLY = AttentionPolicy(window_tokens=64, dense_tokens=0, dense_layers=0, top_p=1.0, topk_units=0)
FACTS = (
    ("Clause {n}.{m} of the charter sets the fee at {v} crowns.", "What fee does clause {n}.{m} set?"),
    ("The lighthouse of point {n} was opened on {m} May 18{w}.", "When was the lighthouse of point {n} opened?"),
    ("Article {n}({m}) bars claims after {v} days.", "After how many days does article {n}({m}) bar claims?"),
)


@dataclass(slots=True)
class Watched:
    """A runtime whose decode steps are timed, in turn plain and measured as `modes` say."""

    runtime: TorchRuntime
    modes: Sequence[str] = ("plain",)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    figures: list[tuple[tuple[float, ...], ...]] = field(default_factory=list)
    _steps: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    def forward_step(self, plan: StepPlan, cancelled: CancelFlag) -> StepResult:
        if any(len(piece.token_ids) > 1 for piece in plan.slices):
            return self.runtime.forward_step(plan, cancelled)
        mode = self.modes[self._steps % len(self.modes)]
        self._steps += 1
        if mode != "plain":
            slices = tuple(replace(piece, measure=True) for piece in plan.slices)
            plan = StepPlan(slices, timed=mode == "timed")
        start = time.perf_counter()
        result = self.runtime.forward_step(plan, cancelled)
        self.seconds.setdefault(mode, []).append(time.perf_counter() - start)
        self.figures += result.attention.values()
        return result


class Answer:
    """The tokens of one answer, and when each came."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self._ended = threading.Event()

    def __call__(self, event: EngineEvent) -> None:
        if isinstance(event, EngineToken):
            self.tokens.append(event.token_id)
            self.times.append(time.perf_counter())
        elif isinstance(event, EngineFinished):
            self._ended.set()

    def wait(self) -> Answer:
        self._ended.wait()
        return self


@dataclass(frozen=True, slots=True)
class Setup:
    model: LoadedModel
    watched: Watched
    stores: tuple[DiskKVStore, DiskKVStore]
    document: list[int]
    questions: list[list[int]]

    @contextmanager
    def engine(self, policy: AttentionPolicy, warm_tokens: int = 1 << 20) -> Iterator[EngineLoop]:
        engine = EngineLoop(
            cast(ModelRuntime, self.watched),
            self.stores[0],
            EngineLimits(),
            segment_store=self.stores[1],
            tier_policy=TierPolicy(warm_tokens, {"general": policy}),
        )
        engine.start()
        try:
            yield engine
        finally:
            engine.close()

    def ask(self, engine: EngineLoop, tokens: Sequence[int], new: int, *, keep: bool = False) -> Answer:
        answer = Answer()
        name = hashlib.sha256(repr(tokens).encode()).hexdigest()
        shared = min(len(tokens), DOCUMENT_TOKENS)
        owner = "document" if keep else None
        spec = SequenceSpec(
            name, list(tokens), SALT, SamplingParams(ignore_eos=True), new, shared_tokens=shared,
            persist_owner=owner, kv_policy=KVPolicy.TIERED,
        )  # fmt: skip
        engine.submit(spec, answer)
        return answer.wait()


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options("What tiers cost beside attention, and whether they drift.", argv, rounds=3)
    clock = CpuClock.now([os.getpid()])
    rounds = 1 if options.quick else options.rounds
    with ExitStack() as stack:
        setup = _open(stack)
        found = [_cost(setup, QUICK_NEW_TOKENS if options.quick else NEW_TOKENS) for _ in range(rounds)]
        figures = _drift(setup)
        border = _border(setup)
    share = CpuClock.now([os.getpid()]).foreign_share(clock)
    machine = describe() | {"kernels": setup.model.info.kernels, "foreign_share": round(share, 3)}
    result = Result("upkeep", {}, machine, [dict(one) for one in found], quick=options.quick)
    for key in found[0]:
        compare(result, key, [one[key] for one in found])
    result.figures |= {key: round(value, 4) for key, value in figures.items()}
    middle, half = mean(border), 1.96 * stdev(border) / len(border) ** 0.5
    result.figures["border_over_interior"] = round(middle, 4)
    result.spread["border_over_interior"] = (round(middle - half, 4), round(middle + half, 4))
    finish(result, BARS, options)


def _open(stack: ExitStack) -> Setup:
    home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    threads = len(os.sched_getaffinity(0))
    tiers = TierSettings(ram_bytes=256 << 20, spill_bytes=160 << 20, spill_folder=home)
    model = load_model(peers.model_gguf(), num_blocks=640, tiers=tiers, threads=threads)
    stack.callback(model.close)
    stores = DiskKVStore(home / "kv", 1 << 32), DiskKVStore(home / "segments", 1 << 32)
    for store in stores:
        stack.callback(store.close)
    document, questions = _document(model)
    assert isinstance(model.runtime, TorchRuntime)
    return Setup(model, Watched(model.runtime), stores, document, questions)


def _document(model: LoadedModel) -> tuple[list[int], list[list[int]]]:
    """Real text with facts strewn in, a whole number of segments long, and the questions."""
    facts = [
        tuple(part.format(n=11 + i, m=1 + i % 27, v=130 + 17 * i, w=41 + i) for part in FACTS[i % 3])
        for i in range(12)
    ]
    filler = model.tokenizer.encode(text())
    tokens: list[int] = []
    for index, (fact, _) in enumerate(facts):
        tokens += filler[index * 400 : (index + 1) * 400] + model.tokenizer.encode(f"\n{fact}\n")
    tokens += filler[8000 : 8000 + DOCUMENT_TOKENS]
    return tokens[:DOCUMENT_TOKENS], [model.tokenizer.encode(f"\nQuestion: {asked}\nAnswer:") for _, asked in facts]


# ------------------------------------------------------------------------------------------------------- cost


def _cost(setup: Setup, new_tokens: int) -> dict[str, float]:
    prompt = setup.document[: DOCUMENT_TOKENS - OPEN_TOKENS]
    with setup.engine(AttentionPolicy()) as engine:
        setup.watched.modes, setup.watched.seconds = ("plain",), {}
        answer = setup.ask(engine, prompt, new_tokens)
        forward_s = setup.watched.seconds["plain"]
        gaps_s = [later - one for one, later in pairwise(answer.times)]
        setup.watched.modes, setup.watched.seconds = ("plain", "stats", "timed"), {}
        setup.ask(engine, prompt, new_tokens)
    step_s = {mode: median(seconds) for mode, seconds in setup.watched.seconds.items()}
    zone_s = _zone_s(setup.watched.figures)
    setup.watched.figures.clear()
    return {
        **_bookkeeping([gap - step for gap, step in zip(gaps_s, forward_s, strict=True)], median(forward_s)),
        "adaptive_zone_ms": 1000 * (step_s["stats"] - step_s["plain"] + zone_s),
        "debug_ms": 1000 * (step_s["timed"] - step_s["plain"]),
        "step_ms": 1000 * step_s["plain"],
    }


def _bookkeeping(beside_s: Sequence[float], forward_s: float) -> dict[str, float]:
    """`beside_s`: seconds outside the runtime, step by step, over the end of one segment. Closing it is what
    exceeds the median; it happens once in a segment's tokens."""
    usual_s = median(beside_s)
    closing_s = sum(max(0.0, one - usual_s) for one in beside_s)
    each_s = usual_s + closing_s / SEGMENT_TOKENS
    return {
        "bookkeeping_share": each_s / (each_s + forward_s),
        "usual_ms": 1000 * usual_s,
        "closing_ms": 1000 * closing_s,
    }


def _zone_s(figures: Sequence[Sequence[Sequence[float]]]) -> float:
    """Seconds that one look of the adaptive window takes."""
    zone = HotZone(1024)
    start = time.perf_counter()
    for layers in figures:
        zone.observe(layers)
    return (time.perf_counter() - start) / len(figures)


# ------------------------------------------------------------------------------------------------------- drift


def _drift(setup: Setup) -> dict[str, float]:
    """Ten rounds: each engine restores the document from disk, into COLD and WARM in turn, and moves payloads."""
    setup.watched.modes = ("plain",)
    with setup.engine(SUMMARIES_ONLY) as engine:
        setup.ask(engine, setup.document + setup.questions[0], 1, keep=True)
        before, closed = _answers(setup, engine), _digests(setup)
    after: list[list[int]] = []
    changed = 0.0
    for number in range(ROUNDS):
        with setup.engine(SUMMARIES_ONLY, warm_tokens=0 if number % 2 == 0 else 1 << 20) as engine:
            setup.ask(engine, setup.document + setup.questions[number], 20)  # steps, between which payloads move
            if number == ROUNDS - 1:
                after = _answers(setup, engine)
            changed = max(changed, 1 - len(closed & _digests(setup)) / len(closed))
    flips = sum(one != other for one, other in zip(before, after, strict=True)) / len(before)
    return {"drift_bytes_error": changed, "drift_summary_error": flips}


def _answers(setup: Setup, engine: EngineLoop) -> list[list[int]]:
    return [setup.ask(engine, setup.document + question, 12).tokens for question in setup.questions]


def _digests(setup: Setup) -> set[bytes]:
    """Of the document's closed segments, as they lie in the tiers now."""
    tiers = setup.watched.runtime.tiers
    assert tiers is not None
    slots = [slot for slot in range(tiers.spec.slots) if tiers.holds(slot)]
    return {hashlib.sha256(b"".join(bytes(part) for part in tiers.views(slot))).digest() for slot in slots}


# ------------------------------------------------------------------------------------------------------- borders


def _border(setup: Setup) -> list[float]:
    """Error of border tokens over that of the others, by segment after the first, layer and KV head, of the KV that
    `_drift` kept."""
    runtime, blocks = setup.watched.runtime, SEGMENT_TOKENS // BLOCK_TOKENS
    names = block_hashes(setup.document, SALT)
    ratios: list[float] = []
    for first in range(blocks, DOCUMENT_TOKENS // BLOCK_TOKENS, blocks):
        views = [runtime.block_view(block) for block in range(blocks)]
        if setup.stores[0].load(names[first : first + blocks], views) < blocks:
            raise RuntimeError("the document's KV isn't on disk")
        for layer in range(0, runtime.kv_spec.num_layers, 2):
            ratios += _border_ratios(*gather_kv(runtime._pool, layer, torch.arange(blocks), SEGMENT_TOKENS))
    return ratios


def _border_ratios(k: torch.Tensor, v: torch.Tensor) -> list[float]:
    """By KV head of a segment's keys and values [Hkv, n, D]."""
    order = arrange(k)
    take = order[..., None].expand(-1, -1, k.shape[-1])
    records = encode(k.gather(1, take), v.gather(1, take))
    error = _relative(records.keys().flatten(1, 2), k.gather(1, take))
    error += _relative(rotate(records.rotated_values().flatten(1, 2)), v.gather(1, take))
    border = (order < BORDER_TOKENS) | (order >= SEGMENT_TOKENS - BORDER_TOKENS)
    return [float(one[near].mean() / one[~near].mean()) for one, near in zip(error, border, strict=True)]


def _relative(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """[R, n]: length of the difference over the length of the truth."""
    error: torch.Tensor = (found - true).norm(dim=-1) / true.norm(dim=-1).clamp(min=1e-9)
    return error


if __name__ == "__main__":
    main()
