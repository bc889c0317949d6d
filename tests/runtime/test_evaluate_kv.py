"""`eval kv`: the forward pass is the decoder's, readers agree where they must, haystacks and counts are right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from perilune.errors import InvalidRequest
from perilune.kernels.reference import ReferenceKernels
from perilune.runtime.evaluate.kv_answers import ask, flips, upper_bound
from perilune.runtime.evaluate.kv_eval import ABLATIONS, KvEvaluation, KvPlan
from perilune.runtime.evaluate.kv_forward import Context, EvalModel, FullReader, forward, logits_of, prefill
from perilune.runtime.evaluate.kv_journal import Journal
from perilune.runtime.evaluate.kv_prefill import ServingPrefill
from perilune.runtime.evaluate.kv_tasks import Question, build_haystack
from perilune.runtime.evaluate.kv_tiers import HybridReader, Int8Reader, Scale, TieredContext, policy_of_units
from tests.runtime.families import make_model, start

TINY = Scale(segment_tokens=96, sink_tokens=16, hot_tokens=32)


@pytest.fixture(scope="module", params=["qwen2-biases", "gemma3-sliding"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EvalModel:
    folder = tmp_path_factory.mktemp(request.param)
    make_model(request.param, folder)
    kernels = ReferenceKernels("test")
    return EvalModel(start(folder, kernels, max_tokens=512).weights, kernels)


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(seed))


def filled(model: EvalModel, ids: torch.Tensor, chunk: int = 1024, room: int = 0) -> Context:
    context = Context(model.weights.config, len(ids) + room)
    for _ in prefill(model, ids, context, chunk=chunk):
        pass
    return context


def logits(model: EvalModel, hidden: torch.Tensor) -> torch.Tensor:
    return torch.cat(list(logits_of(model, hidden)))


@pytest.mark.parametrize("family", ["qwen2-biases", "gemma3-sliding", "qwen3-qk-norm"])
def test_forward_is_the_decoders(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    kernels = ReferenceKernels("test")
    running = start(tmp_path, kernels)
    model = EvalModel(running.weights, kernels)
    ids = tokens(150)
    context = Context(model.weights.config, 150)
    *_, last = prefill(model, ids, context, chunk=47)
    got = logits(model, last[0, -1:])
    torch.testing.assert_close(got, running.prefill([ids.tolist()]), rtol=1e-4, atol=1e-4)


def test_continuations_together_are_continuations_alone(model: EvalModel) -> None:
    context = filled(model, tokens(77), chunk=33)
    questions = torch.stack([tokens(9, 1), tokens(9, 2), tokens(9, 3)])
    reader = FullReader(model, context)
    together = forward(model, questions, 77, reader)
    for row, alone in zip(together, questions, strict=True):
        torch.testing.assert_close(row, forward(model, alone[None], 77, reader)[0], rtol=1e-4, atol=1e-4)


def test_tiers_and_selection_against_full_precision(model: EvalModel) -> None:
    context = filled(model, tokens(300))
    tiered = TieredContext(model, context, TINY)
    more = tokens(12, 5)[None]
    exact = forward(model, more, 300, FullReader(model, context))
    untouched = forward(model, more, 300, Int8Reader(tiered))
    torch.testing.assert_close(untouched, exact, rtol=1e-4, atol=1e-4)  # nothing closed yet
    tiered.close_to(TINY.closed_for_decode(300, 8))
    assert tiered.closed == 3
    int8 = forward(model, more, 300, Int8Reader(tiered))
    everything = HybridReader(tiered, policy_of_units(999, window_tokens=8))
    torch.testing.assert_close(forward(model, more, 300, everything), int8, rtol=1e-3, atol=1e-3)
    assert everything.budget == pytest.approx(1.0)
    few = HybridReader(tiered, policy_of_units(2, window_tokens=8))
    error_few = (forward(model, more, 300, few) - exact).norm() / exact.norm()
    error_int8 = (int8 - exact).norm() / exact.norm()
    assert 0 < error_int8 < 0.02
    assert error_few > error_int8
    # 16 sinks, 2 units of 16, and the tail of 12 + (1 … 12) bf16 tokens.
    assert few.budget == pytest.approx((16 + 32 + 12 + 6.5) / 306.5, rel=0.01)


def test_a_question_is_right_when_its_answer_is_the_argmax(model: EvalModel) -> None:
    context = filled(model, tokens(64))
    reader = FullReader(model, context)
    prompt = tokens(6, 8)
    known: list[int] = []
    for _ in range(3):  # greedy, token by token
        rows = torch.cat([prompt, torch.tensor(known, dtype=torch.int64)])
        known.append(int(logits(model, forward(model, rows[None], 64, reader)[0, -1:]).argmax()))
    right = Question("passkey", "cold", tuple(prompt.tolist()), tuple(known))
    wrong = Question("passkey", "cold", tuple(prompt.tolist()), (*known[:2], (known[2] + 1) % 320))
    longer = Question("passkey", "cold", tuple(tokens(30, 9).tolist()), (5,))
    assert ask(model, [wrong, longer, right], 64, reader)[0::2] == [False, True]


# ------------------------------------------------------------------------------------------ haystacks


def encode(text: str) -> list[int]:
    """A character a token, as ids that the small models have."""
    return [3 + min(ord(char), 300) for char in text]


def decode(ids: tuple[int, ...]) -> str:
    return "".join(chr(index - 3) for index in ids)


FILLER = encode("Somebody wrote a dull sentence about nothing at all. " * 400)


def test_a_haystack_holds_every_answer_once_and_a_needle_on_each_border() -> None:
    hay = build_haystack(encode, FILLER, length=12000, segment_tokens=3000, seed=4, start=[1])
    assert len(hay.token_ids) == 12000
    assert hay.token_ids[0] == 1
    text = decode(hay.token_ids[1:])
    tasks = [question.task for question in hay.questions]
    assert {task: tasks.count(task) for task in set(tasks)} == {
        "passkey": 6, "multikey": 16, "lookup": 4, "distractor": 4, "repeat": 4, "switch": 6, "aggregate": 3,
    }  # fmt: skip
    for question in hay.questions:
        answer, prompt = decode(question.answer), decode(question.prompt)
        if question.task == "aggregate":
            votes = re.findall(re.escape(prompt[1:]) + r" (\w+)\.", text)
            assert max(votes, key=votes.count) == answer.strip()
            assert len(votes) == 10
            continue
        record = prompt[prompt.rindex("\n") + 1 :]
        assert text.count(f"\n{record} ") == 1, record
        assert record + answer in text
    doors = [
        re.findall(r"Door (\d) of the (\w+ \w+)", decode(q.prompt)) for q in hay.questions if q.task == "distractor"
    ]
    assert (len({door[0] for door in doors}), len({door[0][1] for door in doors})) == (4, 2)
    assert sum(question.place == "border" for question in hay.questions) >= 3
    assert {question.place for question in hay.questions} == {"cold", "border", "middle", "late"}


def test_haystacks_follow_their_seed() -> None:
    one, same, other = (build_haystack(encode, FILLER, length=9000, segment_tokens=2048, seed=s) for s in (1, 1, 2))
    assert one == same
    assert one.token_ids != other.token_ids
    with pytest.raises(ValueError, match="too short"):
        build_haystack(encode, FILLER, length=3000, segment_tokens=2048, seed=1)


# ------------------------------------------------------------------------------------------ counts


def test_flips_are_paired() -> None:
    found = flips([True, True, True, False, False], [True, False, True, True, False])
    assert (found.asked, found.dense_right, found.lost, found.gained) == (5, 3, 1, 1)
    assert found.lost_share == pytest.approx(1 / 3)
    assert found.net_share == 0
    assert flips([False], [True]).upper is None


def test_upper_bound_is_clopper_pearsons() -> None:
    assert upper_bound(0, 300) == pytest.approx(1 - 0.05 ** (1 / 300), rel=1e-6)
    assert upper_bound(3, 300) == pytest.approx(0.02569, abs=2e-4)
    assert upper_bound(5, 5) == 1.0
    assert upper_bound(2, 40) < upper_bound(3, 40)


def test_a_journal_gives_back_what_a_cut_run_kept(tmp_path: Path) -> None:
    file, of = tmp_path / "kept.jsonl", {"model": "a"}
    Journal(file, of).put(("answers", 0, "full", 1.0), [[True, False], 1.0])
    with file.open("a") as half:
        half.write('{"of": {"model": "a"}, "key": ["answers", 1')
    again = Journal(file, of)
    assert again.get(("answers", 0, "full", 1.0)) == [[True, False], 1.0]
    assert again.get(("answers", 1, "full", 1.0)) is None
    again.put(("answers", 1, "full", 1.0), [[True], 1.0])
    assert Journal(file, of).get(("answers", 1, "full", 1.0)) == [[True], 1.0]
    assert Journal(file, {"model": "b"}).get(("answers", 0, "full", 1.0)) is None
    (tmp_path / "poem").write_text("Shall I compare thee\n")
    with pytest.raises(InvalidRequest, match="no journal"):
        Journal(tmp_path / "poem", of)


def test_the_serving_prefill_fills_the_same_context(tmp_path: Path) -> None:
    make_model("gemma3-sliding", tmp_path)
    kernels = ReferenceKernels("test")
    model = EvalModel(start(tmp_path, kernels, max_tokens=512).weights, kernels)
    ids = tokens(150)
    want, got = filled(model, ids), ServingPrefill(model.weights, kernels, 160)(ids, 170)
    assert got.length == 150
    for layer in range(model.weights.config.num_layers):
        torch.testing.assert_close(got.keys(layer), want.keys(layer), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.values(layer), want.values(layer), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="pool"):
        ServingPrefill(model.weights, kernels, 96)(ids, 170)


def quiet(stage: str) -> None:
    """Progress that nobody reads."""


def test_the_whole_evaluation(tmp_path: Path) -> None:
    """Every part on a small random model, where nothing is answered: counts and budgets must still be right."""
    make_model("qwen2-biases", tmp_path)
    kernels = ReferenceKernels("test")
    model = EvalModel(start(tmp_path, kernels, max_tokens=512).weights, kernels)
    words = {word: 3 + index % 300 for index, word in enumerate("abcdefghijklmnopqrstuvwxyz")}

    def by_word(text: str) -> list[int]:
        return [words.get(word[0].lower(), 310) for word in text.split()]

    plan = KvPlan(
        TINY, window_tokens=16, haystacks=0, haystack_segments=3, budgets=(0.6, 0.45), int8_tokens=100,
        hybrid_tokens=60, context_tokens=400,
    )  # fmt: skip
    text = "A dull sentence follows the next one and it goes on. " * 200
    fill = ServingPrefill(model.weights, kernels, 512)
    evaluation = KvEvaluation(model, fill, by_word, [1], text, plan, quiet, Journal(tmp_path / "kept.jsonl", {}))
    report = evaluation.report("small")
    assert report.int8 is not None
    assert report.int8.whole.tokens == 100
    assert report.int8.whole.kld_mean.value < 0.01
    assert [found.budget for found in report.hybrid] == [0.6, 0.45]
    assert all(found.measured_budget == pytest.approx(found.budget, abs=0.06) for found in report.hybrid)
    assert report.hybrid[0].fidelity.whole.kld_mean.value <= report.hybrid[1].fidelity.whole.kld_mean.value
    for attention in report.attention:
        assert attention.oracle_error <= attention.error * 1.2
        assert len(attention.heads) == 3 * 4
        assert attention.worst.error == max(head.error for head in attention.heads)

    def never(ids: torch.Tensor, capacity: int) -> Context:
        raise AssertionError("measured again")

    resumed = KvEvaluation(model, never, by_word, [1], text, plan, quiet, Journal(tmp_path / "kept.jsonl", {}))
    assert resumed.report("small") == report
    with pytest.raises(InvalidRequest, match="positions"):
        KvEvaluation(model, fill, by_word, [1], text, KvPlan(TINY, context_tokens=9000), quiet, Journal(None, {}))
    with pytest.raises(InvalidRequest, match="text"):
        KvEvaluation(model, fill, by_word, [1], "short", plan, quiet, Journal(None, {}))
    assert len(ABLATIONS) == 6
