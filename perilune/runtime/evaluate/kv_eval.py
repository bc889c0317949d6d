"""`eval kv` from a model and a text to a report: what tiered KV and hybrid attention cost in accuracy.

Decides what is run and on how much text; the runs themselves are in the `kv_*` modules beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from perilune.errors import InvalidRequest
from perilune.kernels.tier_attention import Chooser
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.evaluate.kv_answers import Flips, ask, flips
from perilune.runtime.evaluate.kv_choosers import no_units, oracle, quest, random_units
from perilune.runtime.evaluate.kv_fidelity import (
    HeadError,
    attention_errors,
    hybrid_fidelity,
    int8_fidelity,
    open_stretch,
)
from perilune.runtime.evaluate.kv_forward import Context, EvalModel, FullReader, load_eval_model, prefill
from perilune.runtime.evaluate.kv_tasks import Encode, Haystack, Question, build_haystack
from perilune.runtime.evaluate.kv_tiers import (
    HybridReader,
    Scale,
    TieredContext,
    contiguous,
    policy_of_units,
    units_of_budget,
)
from perilune.runtime.evaluate.metrics import Comparison, Fidelity, bucket_edges, by_position, join, summarise
from perilune.runtime.tokenizer import load_tokenizer
from perilune.runtime.weights import Precision

PRECISIONS: tuple[Precision, Precision] = ("fp32", "bf16")
"""What both sides of a comparison compute in, and what a context they share is prefilled in."""

ABLATIONS = ("no-summary", "random-k", "local-only", "oracle", "quest")
LEAST_DENSE_SHARE = 0.5
"""A task that full precision answers less often than this says nothing about KV (spec of the harness, B3)."""

MIN_PAIRS = 300
"""Fewer dense-correct pairs support no claim."""

QUESTION_TOKENS = 120  # room after the haystack for a question and its answer
_PROBED_ROWS = 64

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class KvPlan:
    """What to run. Token counts; `budgets` are shares of the context read exactly."""

    scale: Scale
    window_tokens: int = 128
    haystacks: int = 1
    haystack_segments: int = 3
    budgets: tuple[float, ...] = (0.10, 0.05)
    ablations: tuple[str, ...] = ()
    int8_tokens: int = 4096
    hybrid_tokens: int = 512
    context_tokens: int = 8192
    seed: int = 0

    @property
    def haystack_tokens(self) -> int:
        """Whole segments and one window: the rows after it read all of them as closed."""
        return self.haystack_segments * self.scale.segment_tokens + self.window_tokens

    @property
    def positions(self) -> int:
        """The longest sequence of the plan."""
        lengths = [self.context_tokens if self.int8_tokens else 0]
        if self.haystacks:
            lengths.append(self.haystack_tokens + QUESTION_TOKENS)
        if self.hybrid_tokens:
            lengths.append(self.haystack_tokens + self.hybrid_tokens + 1)
        return max(lengths)


@dataclass(frozen=True, slots=True)
class ByPosition:
    """A fidelity over all rows and by bucket of positions."""

    whole: Fidelity
    buckets: tuple[tuple[tuple[int, int], Fidelity], ...]


@dataclass(frozen=True, slots=True)
class HybridFidelity:
    """Logits under hybrid attention, at a target and a measured budget."""

    budget: float
    measured_budget: float
    fidelity: ByPosition


@dataclass(frozen=True, slots=True)
class AttentionReport:
    """Attention outputs at one budget: means over heads, the worst head, and all of them."""

    budget: float
    error: float
    recall: float
    oracle_error: float
    worst: HeadError
    heads: tuple[HeadError, ...]


@dataclass(frozen=True, slots=True)
class TaskFlips:
    """Answers of one variant on one group of questions: a task, a place, or all."""

    variant: str
    budget: float
    measured_budget: float
    group: str
    flips: Flips

    @property
    def usable(self) -> bool:
        """Whether full precision answers enough of it for the pairs to mean something."""
        return self.flips.dense_right >= LEAST_DENSE_SHARE * self.flips.asked

    @property
    def claim(self) -> bool:
        return self.usable and self.flips.dense_right >= MIN_PAIRS


@dataclass(frozen=True, slots=True)
class KvReport:
    """Everything that was measured; parts that were not asked for are None or empty."""

    model: str
    scale: Scale
    int8: ByPosition | None
    hybrid: tuple[HybridFidelity, ...]
    attention: tuple[AttentionReport, ...]
    tasks: tuple[TaskFlips, ...]


def evaluate_kv(path: Path, text: str, plan: KvPlan, say: Progress) -> KvReport:
    """Load a model and run a plan on real text. Raises `InvalidRequest` where text or window is too short."""
    checkpoint = open_checkpoint(path)
    try:
        tokenizer = load_tokenizer(checkpoint)
    finally:
        checkpoint.close()
    say("loading")
    model, fast = (load_eval_model(path, plan.positions, precision) for precision in PRECISIONS)
    evaluation = KvEvaluation(model, fast, tokenizer.encode, tokenizer.bos_ids, text, plan, say)
    return evaluation.report(path.name)


class KvEvaluation:
    """One evaluation of a model. `fast` is the same model in a cheaper precision, for what both sides share.

    Raises `InvalidRequest` where the text or the model's window is too short for the plan.
    """

    def __init__(
        self,
        model: EvalModel,
        fast: EvalModel,
        encode: Encode,
        bos_ids: Sequence[int],
        text: str,
        plan: KvPlan,
        say: Progress,
    ) -> None:
        self._model, self._fast, self._encode, self._plan, self._say = model, fast, encode, plan, say
        self._bos_ids = list(bos_ids)
        window = model.weights.config.max_context_tokens
        if plan.positions > window:
            raise InvalidRequest(
                f"The evaluation needs {plan.positions} positions; the model has {window}.",
                hint="Choose a shorter context or fewer segments.",
            )
        self._ids = encode(text)
        if len(self._ids) < plan.positions:
            raise InvalidRequest(
                f"The text has {len(self._ids)} tokens; {plan.positions} are needed.", hint="Give a longer text."
            )

    def report(self, name: str) -> KvReport:
        """Run every part of the plan."""
        plan = self._plan
        int8 = self.int8() if plan.int8_tokens else None
        hybrid, attention = self.hybrid() if plan.hybrid_tokens else ((), ())
        tasks = tuple(self.tasks()) if plan.haystacks else ()
        return KvReport(name, plan.scale, int8, hybrid, attention, tasks)

    def _tiered(self, context: Context) -> TieredContext:
        return TieredContext(self._model, context, self._plan.scale)

    def _stretches(self, length: int) -> Iterator[torch.Tensor]:
        """Pieces of the text, bos first, until it ends; then again, shifted by half a piece."""
        bos = self._bos_ids
        step = length - len(bos)
        for first in (*range(0, len(self._ids) - step + 1, step), *range(step // 2, len(self._ids) - step, step)):
            yield torch.tensor(bos + self._ids[first : first + step])

    # ------------------------------------------------------------------------------------------------ logits

    def int8(self) -> ByPosition:
        """Rows from the first that reads a closed segment, over as many stretches as the tokens need."""
        plan, scale = self._plan, self._plan.scale
        start = scale.hot_tokens + scale.segment_tokens
        parts: list[Comparison] = []
        for ids in self._stretches(plan.context_tokens):
            missing = plan.int8_tokens - sum(map(len, parts))
            if missing <= 0:
                break
            self._say(f"INT8 tier: {plan.int8_tokens - missing} of {plan.int8_tokens} tokens")
            stretch = open_stretch(self._fast, ids[: start + missing + 1], start)
            parts.append(int8_fidelity(self._model, stretch, self._tiered))
        return _by_position(parts)

    def hybrid(self) -> tuple[tuple[HybridFidelity, ...], tuple[AttentionReport, ...]]:
        """Every row sparse, after a context of whole segments and a window; and its attention outputs."""
        plan, length = self._plan, self._plan.haystack_tokens
        stretch = open_stretch(self._fast, next(self._stretches(length + plan.hybrid_tokens + 1)), length)
        found, attention = [], []
        for budget in plan.budgets:
            self._say(f"hybrid attention at {budget:.0%}: {plan.hybrid_tokens} tokens")
            policy = policy_of_units(self._units(budget, plan.hybrid_tokens // 2), window_tokens=plan.window_tokens)
            comparison, measured = hybrid_fidelity(self._model, stretch, self._tiered, policy)
            found.append(HybridFidelity(budget, measured, _by_position([comparison])))
            tiered = self._tiered(stretch.context)
            tiered.close_to(plan.haystack_segments)
            rows = stretch.token_ids[length : length + _PROBED_ROWS]
            attention.append(_attention(budget, attention_errors(self._model, rows, tiered, policy)))
        return tuple(found), tuple(attention)

    def _units(self, budget: float, rows: int) -> int:
        plan = self._plan
        tail = plan.window_tokens + rows
        return units_of_budget(plan.scale, budget, plan.haystack_tokens, tail)

    # ------------------------------------------------------------------------------------------------- tasks

    def tasks(self) -> list[TaskFlips]:
        """Every haystack's questions under full precision and each variant, paired."""
        plan = self._plan
        questions: list[Question] = []
        dense: list[bool] = []
        answers: dict[tuple[str, float], list[bool]] = defaultdict(list)
        budgets: dict[tuple[str, float], list[float]] = defaultdict(list)
        for number in range(plan.haystacks):
            self._say(f"haystack {number + 1} of {plan.haystacks}")
            hay = self._haystack(plan.seed + number)
            context = Context(self._model, len(hay.token_ids))
            for _ in prefill(self._fast, torch.tensor(hay.token_ids), context):
                pass
            questions += hay.questions
            dense += ask(self._model, hay.questions, context.length, FullReader(self._model, context))
            for variant, budget, reader in self._readers(context, hay):
                answers[variant, budget] += ask(self._model, hay.questions, context.length, reader)
                budgets[variant, budget].append(reader.budget)
        return [
            TaskFlips(variant, budget, sum(shares) / len(shares), group, flips(before, after))
            for (variant, budget), shares in budgets.items()
            for group, before, after in _groups(questions, dense, answers[variant, budget])
        ]

    def _haystack(self, seed: int) -> Haystack:
        plan = self._plan
        return build_haystack(
            self._encode,
            self._ids,
            length=self._plan.haystack_tokens,
            segment_tokens=plan.scale.segment_tokens,
            seed=seed,
            start=self._bos_ids,
        )

    def _readers(self, context: Context, hay: Haystack) -> Iterator[tuple[str, float, HybridReader]]:
        """Variants one by one, so that only one holds its dequantised segments."""
        plan = self._plan
        rows = sum(len(q.prompt) + len(q.answer) for q in hay.questions) // len(hay.questions) // 2
        tiered = self._tiered(context)
        tiered.close_to(plan.haystack_segments)
        for budget in plan.budgets:
            policy = policy_of_units(self._units(budget, rows), window_tokens=plan.window_tokens)
            yield "hybrid", budget, HybridReader(tiered, policy)
            bare = replace(policy, summary_weight=0.0)
            units = policy.topk_units
            choosers: dict[str, Chooser] = {
                "random-k": random_units(units, plan.seed),
                "local-only": no_units(),
                "oracle": oracle(units),
            }
            for name in plan.ablations:
                if name == "no-summary":
                    yield name, budget, HybridReader(tiered, bare)
                elif name == "quest":
                    pages = TieredContext(self._model, context, plan.scale, contiguous)
                    pages.close_to(plan.haystack_segments)
                    yield name, budget, HybridReader(pages, bare, choose=_quest(units, pages))
                else:
                    chooser = choosers[name]
                    given = bare if name == "local-only" else policy
                    yield name, budget, HybridReader(tiered, given, choose=_always(chooser))


def _always(chooser: Chooser) -> Callable[[int], Chooser]:
    return lambda layer: chooser


def _quest(units: int, pages: TieredContext) -> Callable[[int], Chooser]:
    return lambda layer: quest(units, pages.far(layer))


def _by_position(parts: Sequence[Comparison]) -> ByPosition:
    joined = join(parts)
    edges = bucket_edges(int(joined.positions.max()) + 1)
    return ByPosition(summarise(joined), by_position(joined, edges))


def _attention(budget: float, heads: Sequence[HeadError]) -> AttentionReport:
    count = len(heads)
    return AttentionReport(
        budget=budget,
        error=sum(head.error for head in heads) / count,
        recall=sum(head.recall for head in heads) / count,
        oracle_error=sum(head.oracle_error for head in heads) / count,
        worst=max(heads, key=lambda head: head.error),
        heads=tuple(heads),
    )


def _groups(
    questions: Sequence[Question], dense: Sequence[bool], other: Sequence[bool]
) -> Iterator[tuple[str, list[bool], list[bool]]]:
    """Answers by task and by place, and of all tasks that full precision can do (`LEAST_DENSE_SHARE`)."""
    by: dict[str, list[int]] = defaultdict(list)
    for index, question in enumerate(questions):
        by[question.task].append(index)
    able = [
        i for group in by.values() if sum(dense[j] for j in group) >= LEAST_DENSE_SHARE * len(group) for i in group
    ]
    for index in able:
        by[f"at {questions[index].place}"].append(index)
    for name, group in (("all", able), *sorted(by.items())):
        yield name, [dense[index] for index in group], [other[index] for index in group]
