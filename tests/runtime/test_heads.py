"""`eval heads` and its profile: measured is what the product's own attention would change, and shares follow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from perilune.errors import ConfigError
from perilune.kernels.interface import HeadBudgets
from perilune.kernels.reference import ReferenceKernels
from perilune.kernels.tier_attention import dense, hybrid
from perilune.runtime.evaluate import heads
from perilune.runtime.evaluate.heads_share import HeadCosts, allocate
from perilune.runtime.evaluate.heads_text import calibration_haystack, calibration_text
from perilune.runtime.evaluate.kv_forward import Context, EvalModel, FullReader, forward, prefill
from perilune.runtime.evaluate.kv_tasks import Question
from perilune.runtime.evaluate.kv_tiers import HybridReader, Scale, TieredContext, policy_of_units
from perilune.runtime.head_profile import (
    HeadProfile,
    find_profile,
    profile_path,
    read_profile,
    write_profile,
)
from tests.runtime.families import make_model, start

TINY = Scale(segment_tokens=96, sink_tokens=16, hot_tokens=32)


@pytest.fixture(scope="module", params=["qwen3-qk-norm", "gemma3-sliding"])
def tiered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TieredContext:
    folder = tmp_path_factory.mktemp(request.param)
    make_model(request.param, folder)
    kernels = ReferenceKernels("test")
    model = EvalModel(start(folder, kernels, max_tokens=512).weights, kernels)
    ids = torch.randint(3, 320, (300,), generator=torch.Generator().manual_seed(0))
    context = Context(model.weights.config, 300)
    for _ in prefill(model, ids, context):
        pass
    found = TieredContext(model, context, TINY)
    found.close_to(3)
    return found


def questions(count: int) -> list[Question]:
    rows = torch.randint(3, 320, (count, 7), generator=torch.Generator().manual_seed(3)).tolist()
    return [Question("lookup", "middle", tuple(row[: 4 + i % 2]), (row[5], row[6])) for i, row in enumerate(rows)]


def test_the_forward_pass_is_the_evaluations(tiered: TieredContext) -> None:
    asked = questions(3)
    ids = heads._padded(asked)
    got = heads._forward(tiered.model, ids, tiered, [], [])
    everything = HybridReader(tiered, policy_of_units(999, window_tokens=8))
    torch.testing.assert_close(got.detach(), forward(tiered.model, ids, 300, everything), rtol=1e-3, atol=1e-3)


def test_changes_are_those_of_the_products_attention(tiered: TieredContext) -> None:
    """Each form of each head: gradient times (hybrid attention's output - that of everything)."""
    model, asked = tiered.model, questions(2)
    rows: list[heads._Rows] = []
    outputs: list[torch.Tensor] = []
    hidden = heads._forward(model, heads._padded(asked), tiered, rows, outputs)
    gradients = torch.autograd.grad(heads._margins(model, asked, hidden).sum(), outputs)
    layer = model.tiered_layers[-1]
    gradient = gradients[layer]
    found = heads._layer_changes(tiered, layer, rows[layer], gradient)
    count, kv_heads = len(heads.COUNTS), model.heads.num_kv_heads
    length = rows[layer].q.shape[1]
    positions = torch.arange(300, 300 + length)
    for place, units, sketched, share in ((1, 2, 1, 1.0), (count + 2, 5, 0, 1.0), (2 * count, 5, 0, 0.0)):
        shares = torch.full((layer + 1, kv_heads), share)
        budgets = HeadBudgets(shares, torch.full((layer + 1, kv_heads), sketched, dtype=torch.uint8))
        for question in range(2):
            q, k, v = (part[question] for part in (rows[layer].q, rows[layer].k, rows[layer].v))
            near, far = tiered.near(layer, k.transpose(0, 1), v.transpose(0, 1), 300), tiered.far(layer)
            shape, policy = replace(model.heads, scale=1.0), policy_of_units(units, window_tokens=8)
            less, _ = hybrid(q, positions, near, far, shape, policy, layer, budgets=budgets)
            change = ((less - dense(q, positions, near, far, shape)) * gradient[question]).sum((0, 2))
            wanted = change.view(kv_heads, -1).sum(-1)
            torch.testing.assert_close(found[question, place], wanted, rtol=1e-3, atol=1e-5)


def test_costs_count_right_answers_only(tiered: TieredContext) -> None:
    model, context = tiered.model, tiered.context
    prompt = (5, 6, 7)
    rows = forward(model, torch.tensor([prompt]), 300, FullReader(model, context))
    best = int(model.weights.logits(model.kernels, rows[0, -1:]).argmax())
    right = Question("lookup", "middle", prompt, (best,))
    wrong = Question("lookup", "middle", prompt, ((best + 1) % 320,))
    one, both = (heads.head_costs(model, [(tiered, asked)]) for asked in ([right], [right, wrong]))
    torch.testing.assert_close(one.sketched, both.sketched)
    assert one.nothing[list(model.tiered_layers)].max() > 0
    assert one.sketched.shape == (len(heads.COUNTS), *one.nothing.shape)


def test_budget_goes_where_it_helps() -> None:
    """Head 0 needs many units and sketches, head 1 few and no sketch, head 2 nothing."""
    counts = (1, 10, 50)
    sketched = torch.tensor([[[9.0, 0.2, 0.0]], [[4.0, 0.01, 0.0]], [[0.1, 0.01, 0.0]]])
    means = torch.tensor([[[9.5, 0.2, 0.0]], [[9.0, 0.01, 0.0]], [[8.0, 0.01, 0.0]]])
    costs = HeadCosts(counts, sketched, means, torch.tensor([[9.8, 0.4, 0.0]]))
    units, ranked = allocate(costs, 18.0, 20.0)
    assert units.tolist()[0][0] == 50
    assert ranked.tolist() == [[True, False, False]]
    assert units.sum() <= 54
    none, _ = allocate(costs, 0.0, 20.0)
    assert none.sum() == 0


def test_a_calibration_haystack_answers_its_questions() -> None:
    def encode(text: str) -> list[int]:
        return [3 + min(ord(char), 300) for char in text]

    filler = encode(calibration_text().text[:20000])
    hay = calibration_haystack(encode, filler, length=8000, seed=1, start=[1])
    assert len(hay.token_ids) == 8000
    text = "".join(chr(index - 3) for index in hay.token_ids[1:])
    assert len(hay.questions) == 32
    for question in hay.questions:
        prompt, answer = ("".join(chr(index - 3) for index in part) for part in (question.prompt, question.answer))
        assert text.count(f"{prompt} ") == 1
        assert prompt + answer in text
    assert calibration_haystack(encode, filler, length=8000, seed=1, start=[1]) == hay
    with pytest.raises(ValueError, match="too short"):
        calibration_haystack(encode, filler, length=900, seed=1)


def test_a_profile_is_found_beside_its_model_only(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    profile = HeadProfile("aa" * 32, ((0.5, 1.5),), ((False, True),))
    assert find_profile(model, profile.content, 1, 2) is None
    write_profile(profile, profile_path(model))
    assert find_profile(model, profile.content, 1, 2) == profile
    assert profile.budgets().sketched.tolist() == [[0, 1]]
    with pytest.raises(ConfigError, match="other files"):
        find_profile(model, "bb" * 32, 1, 2)
    with pytest.raises(ConfigError, match="1 layers of 3"):
        find_profile(model, profile.content, 1, 3)


@pytest.mark.parametrize(
    "told",
    ["", "[]", '{"content": "a"}', '{"content": "a", "shares": [[1]], "sketched": [[true], [true]]}',
     '{"content": "a", "shares": [[-1]], "sketched": [[true]]}',
     '{"content": "a", "shares": [[NaN]], "sketched": [[1]]}'],
)  # fmt: skip
def test_what_is_no_profile_is_refused(tmp_path: Path, told: str) -> None:
    (tmp_path / "x.json").write_text(told)
    with pytest.raises(ConfigError):
        read_profile(tmp_path / "x.json", 1, 1)


def test_shipped_profiles_are_profiles() -> None:
    folder = Path(heads.__file__).parent.parent / "profiles"
    for path in folder.glob("*.json"):
        told = json.loads(path.read_text())
        found = read_profile(path, len(told["shares"]), len(told["shares"][0]))
        assert path.stem == found.content[:16]
        mean = sum(map(sum, found.shares)) / (len(found.shares) * len(found.shares[0]))
        assert mean == pytest.approx(1.0, abs=0.02)
