"""What each weight precision costs in accuracy, on long text (spec R3).

Both sides compute in fp32 with fp32 KV over the same tokens; only the weights differ: the reference multiplies by
exactly what the model file holds, a candidate by the numbers that its packed decode copy holds. So a figure is the
weights' error alone, KV computed from them included. One candidate more is the prefill's own bf16 arithmetic. Knows
models and tokens; nothing of files that people name, or of printing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import linear

from perilune.errors import InvalidRequest
from perilune.kernels import packing
from perilune.kernels.interface import Kernels
from perilune.kernels.reference import ReferenceKernels
from perilune.runtime.checkpoint import LAYER_MATRICES, Checkpoint, open_checkpoint
from perilune.runtime.evaluate.kv_forward import LOGIT_ROWS, Context, EvalModel, prefill
from perilune.runtime.evaluate.metrics import (
    Comparison,
    Fidelity,
    bucket_edges,
    by_position,
    compare,
    join,
    summarise,
)
from perilune.runtime.loader import with_lora
from perilune.runtime.memory import free_memory_bytes
from perilune.runtime.stored import StoredTensor
from perilune.runtime.tokenizer import ModelTokenizer, load_tokenizer
from perilune.runtime.weights import (
    DecodeWeights,
    Precision,
    WeightBuilder,
    keeps,
    memory_need,
    pack_matrix,
    packable,
    precision_of,
)

CHUNK_TOKENS = 512
LEAST_TOKENS = 256
PREFILL = "prefill"
"""Name of the candidate that multiplies in bf16 instead of by other weights."""

Report = Callable[[str, int, int], None]
"""Told what is being computed, tokens done and tokens to do."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """One candidate. `weight_bytes` is what its decode copy takes; `by_position` goes by position in the text."""

    name: str
    weight_bytes: int
    overall: Fidelity
    by_position: tuple[tuple[tuple[int, int], Fidelity], ...]


@dataclass(frozen=True, slots=True)
class WeightsResult:
    """`tokens` were compared, in stretches of `length`; `cut` if the time limit ended them early."""

    tokens: int
    length: int
    cut: bool
    elapsed_s: float
    accuracies: tuple[Accuracy, ...]


class RoundedCheckpoint(Checkpoint):
    """A checkpoint whose matrices are what the packed decode copy under `policy` holds, in fp32.

    Embeddings are looked up where serving looks them up: in the packed copy where that is exact, else in bf16.
    """

    def __init__(self, base: Checkpoint, kernels: Kernels, policy: DecodeWeights) -> None:
        # The head is packed and the embeddings are not, so they part where the file has one matrix for both.
        self.config = replace(base.config, tied_head=False)
        self._base = base
        self._kernels = kernels
        self._policy = policy

    def optional(self, part: str, layer: int | None = None) -> StoredTensor | None:
        source = "embed" if part == "head" and self._base.config.tied_head else part
        stored = self._base.optional(source, layer)
        if stored is None or part not in (*LAYER_MATRICES, "embed", "head"):
            return stored
        precision = precision_of(self._policy, part, self._base.config.tied_head)
        if keeps(stored.kind, precision):
            return stored
        if part == "embed":
            values = stored.float32().to(torch.bfloat16).float()
        else:
            values = packing.unpack(pack_matrix(self._kernels, stored, precision)).contiguous()
        return StoredTensor(stored.name, "F32", stored.rows, stored.cols, values.view(torch.uint8).numpy())

    @property
    def files(self) -> tuple[Path, ...]:
        return self._base.files

    def close(self) -> None:
        self._base.close()


@dataclass(frozen=True, slots=True)
class WeightsEvaluation:
    """An opened model, and the kernels that pack its weights."""

    checkpoint: Checkpoint
    tokenizer: ModelTokenizer
    kernels: Kernels

    @classmethod
    def open(cls, path: Path, lora: Path | None, kernels: Kernels) -> WeightsEvaluation:
        """Raises `UnsupportedModel`, for rows that can't be packed too."""
        base = open_checkpoint(path)
        if not packable(base.config):
            raise InvalidRequest(
                "This model's rows are no multiples of 32: it has no packed weights, only bf16.",
                hint="There is nothing to compare.",
            )
        return cls(with_lora(base, lora), load_tokenizer(base), kernels)

    def run(
        self,
        token_ids: Sequence[int],
        candidates: Sequence[tuple[str, DecodeWeights]],
        *,
        length: int,
        limit_s: float,
        report: Report = lambda stage, done, total: None,
    ) -> WeightsResult:
        """Compare over `token_ids`, cut into stretches of `length`. A candidate named `PREFILL` is bf16 arithmetic.

        The reference gets its share of `limit_s`; what it computed by then is what everything is compared on.
        Raises `InvalidRequest` for too little text, `Overloaded` for weights that don't fit.
        """
        length = min(length, self.checkpoint.config.max_context_tokens)
        stretches = [torch.tensor(token_ids[at : at + length]) for at in range(0, len(token_ids), length)]
        stretches = [stretch for stretch in stretches if len(stretch) >= min(length, LEAST_TOKENS)]
        if not stretches or len(token_ids) < LEAST_TOKENS:
            raise InvalidRequest(
                f"The text has {len(token_ids)} tokens; an evaluation needs {LEAST_TOKENS} at least.",
                hint="Give a longer text, or none for the default one.",
            )
        began = time.monotonic()
        share_s = limit_s / (len(candidates) + 1)
        model = eval_model(self.checkpoint, "fp32", length)
        hidden = _hidden(model, stretches, share_s, lambda done, total: report("reference", done, total))
        head = model.weights.head
        assert isinstance(head, torch.Tensor)
        del model
        done = sum(map(len, hidden))
        accuracies = []
        for name, policy in candidates:
            accuracies.append(self._measure(name, policy, stretches, hidden, head, length, report))
        return WeightsResult(
            done, length, done < sum(map(len, stretches)), time.monotonic() - began, tuple(accuracies)
        )

    def _measure(
        self,
        name: str,
        policy: DecodeWeights,
        stretches: Sequence[torch.Tensor],
        reference: Sequence[torch.Tensor],
        reference_head: torch.Tensor,
        length: int,
        report: Report,
    ) -> Accuracy:
        if name == PREFILL:
            weight_bytes = memory_need(self.checkpoint, "bf16", "auto").prefill_bytes
            model = eval_model(self.checkpoint, "bf16", length)
        else:
            weight_bytes = memory_need(self.checkpoint, "bf16", policy).decode_bytes
            model = eval_model(RoundedCheckpoint(self.checkpoint, self.kernels, policy), "fp32", length)
        kept = [stretch[: len(rows)] for stretch, rows in zip(stretches, reference, strict=False)]
        hidden = _hidden(model, kept, None, lambda done, total: report(name, done, total))
        head = model.weights.head
        assert isinstance(head, torch.Tensor)
        heads = reference_head, head.float()
        joined = join(_compare(heads, *pair) for pair in zip(reference, hidden, kept, strict=True))
        return Accuracy(name, weight_bytes, summarise(joined), by_position(joined, bucket_edges(length)))


def eval_model(checkpoint: Checkpoint, precision: Precision, positions: int) -> EvalModel:
    """Dense weights for that many positions. Raises `UnsupportedModel`, or `Overloaded` where they don't fit."""
    kernels = ReferenceKernels("evaluation")
    builder = WeightBuilder(checkpoint, kernels, precision, "stored", positions)
    need = memory_need(checkpoint, precision, "stored").one_copy_bytes
    # No room for a packed copy beside it: nothing here decodes.
    return EvalModel(builder.build(min(free_memory_bytes(), need)), kernels)


def _hidden(
    model: EvalModel, stretches: Sequence[torch.Tensor], limit_s: float | None, report: Callable[[int, int], None]
) -> list[torch.Tensor]:
    """Normed hidden rows fp32 [T, H] of each stretch, until the time is over; never less than `LEAST_TOKENS`."""
    began, total = time.monotonic(), sum(map(len, stretches))
    found: list[torch.Tensor] = []
    done = 0
    for stretch in stretches:
        context, rows = Context(model.weights.config, len(stretch)), []
        for part in prefill(model, stretch, context, chunk=CHUNK_TOKENS):
            rows.append(part[0])
            done += part.shape[1]
            report(done, total)
            if limit_s is not None and time.monotonic() - began > limit_s and done >= LEAST_TOKENS:
                return [*found, torch.cat(rows)]
        found.append(torch.cat(rows))
    return found


@torch.inference_mode()
def _compare(
    heads: tuple[torch.Tensor, torch.Tensor],
    reference: torch.Tensor,
    candidate: torch.Tensor,
    token_ids: torch.Tensor,
) -> Comparison:
    """Of one stretch: hidden rows [T, H] of both sides, every row but the last, which nothing follows."""
    parts = []
    for at in range(0, len(token_ids) - 1, LOGIT_ROWS):
        rows = slice(at, min(at + LOGIT_ROWS, len(token_ids) - 1))
        exact, rounded = linear(reference[rows], heads[0]), linear(candidate[rows], heads[1])
        parts.append(compare(exact, rounded, token_ids[rows.start + 1 : rows.stop + 1], at))
    return join(parts)
