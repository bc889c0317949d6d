"""`eval kv` from a model and a text to a report: what tiered KV and hybrid attention cost in accuracy.

Decides what is run and on how much text; the runs themselves are in the `kv_*` modules beside it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from perilune.errors import InvalidRequest
from perilune.kernels import tier_attention, tier_reference, tiers
from perilune.kernels.interface import HeadBudgets
from perilune.kernels.tier_attention import Chooser, by_mass
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.evaluate.kv_answers import Flips, ask, flips
from perilune.runtime.evaluate.kv_choosers import no_units, oracle, quest, random_units
from perilune.runtime.evaluate.kv_fidelity import (
    HeadError,
    Stretch,
    attention_errors,
    hybrid_fidelity,
    int8_fidelity,
    open_stretch,
)
from perilune.runtime.evaluate.kv_forward import Context, EvalModel, FullReader, load_eval_model
from perilune.runtime.evaluate.kv_journal import Journal, code_digest
from perilune.runtime.evaluate.kv_prefill import Fill, open_prefill
from perilune.runtime.evaluate.kv_tasks import Encode, Haystack, Question, build_haystack
from perilune.runtime.evaluate.kv_tiers import (
    HybridReader,
    Scale,
    TieredContext,
    contiguous,
    policy_of_units,
    units_of_budget,
)
from perilune.runtime.evaluate.metrics import (
    Comparison,
    Fidelity,
    bucket_edges,
    by_position,
    from_lists,
    join,
    summarise,
    to_lists,
)
from perilune.runtime.head_profile import HeadProfile, find_profile
from perilune.runtime.loader import content_name
from perilune.runtime.tokenizer import load_tokenizer

ABLATIONS = ("uniform", "no-summary", "random-k", "local-only", "oracle", "quest")
LEAST_DENSE_SHARE = 0.5
"""A task that full precision answers less often than this says nothing about KV (spec of the harness, B3)."""

MIN_PAIRS = 300
"""Fewer dense-correct pairs support no claim."""

_FULL = ("full", 1.0)  # the variant that the others are paired with
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


def evaluate_kv(path: Path, text: str, plan: KvPlan, say: Progress, journal: Path | None = None) -> KvReport:
    """Load a model and run a plan on real text; `journal` keeps what is measured and gives it back to a later run.

    Raises `InvalidRequest` where text or window is too short.
    """
    checkpoint = open_checkpoint(path)
    try:
        tokenizer, content, config = load_tokenizer(checkpoint), content_name(checkpoint), checkpoint.config
        profile = find_profile(path, content, config.num_layers, config.num_kv_heads)
    finally:
        checkpoint.close()
    say("loading")
    evaluation = KvEvaluation(
        load_eval_model(path, plan.positions),
        open_prefill(path, plan.positions),
        tokenizer.encode,
        tokenizer.bos_ids,
        text,
        plan,
        say,
        Journal(journal, _measured(content, text, plan, profile)),
        None if profile is None else profile.budgets(),
    )
    return evaluation.report(path.name)


def _measured(content: str, text: str, plan: KvPlan, profile: HeadProfile | None) -> dict[str, Any]:
    """What pieces of this plan are measured of; how many there are is not part of it."""
    here = Path(__file__).parent
    sources = [Path(str(module.__file__)) for module in (tier_attention, tier_reference, tiers)]
    return {
        "model": content,
        "text": hashlib.sha256(text.encode()).hexdigest()[:16],
        "code": code_digest([*sources, *here.glob("kv_*.py")]),
        "scale": asdict(plan.scale),
        "heads": None if profile is None else hashlib.sha256(repr(profile).encode()).hexdigest()[:16],
        "window_tokens": plan.window_tokens,
        "context_tokens": plan.context_tokens,
        "haystack_segments": plan.haystack_segments,
    }


class KvEvaluation:
    """One evaluation of a model. `model` computes in fp32; `fill` makes the contexts that both sides share;
    `budgets`: how hybrid attention's heads differ.

    Raises `InvalidRequest` where the text or the model's window is too short for the plan.
    """

    def __init__(
        self,
        model: EvalModel,
        fill: Fill,
        encode: Encode,
        bos_ids: Sequence[int],
        text: str,
        plan: KvPlan,
        say: Progress,
        journal: Journal,
        budgets: HeadBudgets | None = None,
    ) -> None:
        self._model, self._fill, self._encode, self._plan, self._say = model, fill, encode, plan, say
        self._journal, self._budgets = journal, budgets
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
        return TieredContext(self._model, context, self._plan.scale, budgets=self._budgets)

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
        for number, ids in enumerate(self._stretches(plan.context_tokens)):
            missing = plan.int8_tokens - sum(map(len, parts))
            if missing <= 0:
                break
            self._say(f"INT8 tier: {plan.int8_tokens - missing} of {plan.int8_tokens} tokens")
            wanted = ids[: start + missing + 1]
            key = ("int8", number, len(wanted))
            kept = self._journal.get(key)
            if kept is None:
                found = int8_fidelity(self._model, open_stretch(self._fill, wanted, start), self._tiered)
                self._journal.put(key, to_lists(found))
            else:
                found = from_lists(kept)
            parts.append(found)
        return _by_position(parts)

    def hybrid(self) -> tuple[tuple[HybridFidelity, ...], tuple[AttentionReport, ...]]:
        """Every row sparse, after a context of whole segments and a window; and its attention outputs."""
        plan, length = self._plan, self._plan.haystack_tokens
        ids = next(self._stretches(length + plan.hybrid_tokens + 1))
        stretch: Stretch | None = None
        found, attention = [], []
        for budget in plan.budgets:
            key = ("hybrid", budget, plan.hybrid_tokens)
            kept = self._journal.get(key)
            if kept is None:
                self._say(f"hybrid attention at {budget:.0%}: {plan.hybrid_tokens} tokens")
                stretch = stretch or open_stretch(self._fill, ids, length)
                kept = self._hybrid_piece(stretch, budget)
                self._journal.put(key, kept)
            found.append(HybridFidelity(budget, kept["budget"], _by_position([from_lists(kept["rows"])])))
            attention.append(_attention(budget, [HeadError(**head) for head in kept["heads"]]))
        return tuple(found), tuple(attention)

    def _hybrid_piece(self, stretch: Stretch, budget: float) -> dict[str, Any]:
        plan, length = self._plan, self._plan.haystack_tokens
        policy = policy_of_units(self._units(budget, plan.hybrid_tokens // 2), window_tokens=plan.window_tokens)
        rows, measured = hybrid_fidelity(self._model, stretch, self._tiered, policy)
        tiered = self._tiered(stretch.context)
        tiered.close_to(plan.haystack_segments)
        probed = stretch.token_ids[length : length + _PROBED_ROWS]
        heads = attention_errors(self._model, probed, tiered, policy)
        return {"budget": measured, "rows": to_lists(rows), "heads": [asdict(head) for head in heads]}

    def _units(self, budget: float, rows: int) -> int:
        plan = self._plan
        tail = plan.window_tokens + rows
        return units_of_budget(plan.scale, budget, plan.haystack_tokens, tail)

    # ------------------------------------------------------------------------------------------------- tasks

    def tasks(self) -> list[TaskFlips]:
        """Every haystack's questions under full precision and each variant, paired."""
        plan = self._plan
        questions: list[Question] = []
        answers: dict[tuple[str, float], list[bool]] = defaultdict(list)
        shares: dict[tuple[str, float], list[float]] = defaultdict(list)
        for number in range(plan.haystacks):
            hay = self._haystack(plan.seed + number)
            questions += hay.questions
            for variant, (right, share) in self._answers(hay, number).items():
                answers[variant] += right
                shares[variant].append(share)
        dense = answers.pop(_FULL, [])
        return [
            TaskFlips(*variant, sum(shares[variant]) / len(shares[variant]), group, flips(before, after))
            for variant, right in answers.items()
            for group, before, after in _groups(questions, dense, right)
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

    def _answers(self, hay: Haystack, number: int) -> dict[tuple[str, float], tuple[list[bool], float]]:
        """By variant and budget: which questions are answered right, and the measured budget."""
        plan = self._plan
        wanted = [_FULL, *((name, budget) for budget in plan.budgets for name in ("hybrid", *plan.ablations))]
        found: dict[tuple[str, float], tuple[list[bool], float]] = {}
        tiered: TieredContext | None = None
        for variant, budget in wanted:
            key = ("answers", plan.seed + number, variant, budget)
            kept = self._journal.get(key)
            if kept is None:
                self._say(f"haystack {number + 1} of {plan.haystacks}: {variant} {budget:.0%}")
                tiered = tiered or self._tiered(self._fill(torch.tensor(hay.token_ids), len(hay.token_ids)))
                kept = self._asked(hay, tiered, variant, budget)
                self._journal.put(key, kept)
            found[variant, budget] = kept[0], kept[1]
        return found

    def _asked(self, hay: Haystack, tiered: TieredContext, variant: str, budget: float) -> tuple[list[bool], float]:
        start = tiered.context.length
        if (variant, budget) == _FULL:
            return ask(self._model, hay.questions, start, FullReader(self._model, tiered.context)), 1.0
        rows = sum(len(q.prompt) + len(q.answer) for q in hay.questions) // len(hay.questions) // 2
        tiered.close_to(self._plan.haystack_segments)
        reader = self._reader(tiered, variant, self._units(budget, rows))
        return ask(self._model, hay.questions, start, reader), reader.budget

    def _reader(self, tiered: TieredContext, variant: str, units: int) -> HybridReader:
        plan = self._plan
        policy = policy_of_units(units, window_tokens=plan.window_tokens)
        bare = replace(policy, summary_weight=0.0)
        match variant:
            case "hybrid":
                return HybridReader(tiered, policy)
            case "uniform":
                return HybridReader(tiered, policy, choose=lambda layer: by_mass(policy, layer))
            case "no-summary":
                return HybridReader(tiered, bare)
            case "random-k":
                return HybridReader(tiered, policy, choose=_always(random_units(units, plan.seed)))
            case "local-only":
                return HybridReader(tiered, bare, choose=_always(no_units()))
            case "oracle":
                return HybridReader(tiered, policy, choose=_always(oracle(units)))
            case "quest":
                pages = TieredContext(self._model, tiered.context, plan.scale, contiguous)
                pages.close_to(plan.haystack_segments)
                return HybridReader(pages, bare, choose=_quest(units, pages))
        raise ValueError(f"no variant {variant}")


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
