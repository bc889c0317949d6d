"""The MRI's conformance suite against `LlamaCppRuntime`, and llama.cpp's own words on the real model."""

from __future__ import annotations

import queue
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from perilune.core import EngineEvent, EngineFinished, EngineProgress, EngineToken, SamplingParams, SequenceSpec
from perilune.engine.loop import EngineLoop
from perilune.engine.policy import EngineLimits
from perilune.errors import UnsupportedModel
from perilune.kernels import select as kernel_choice
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.kv.spec import KVSpec
from perilune.runtime.llamacpp import LlamaCppRuntime
from perilune.runtime.llamacpp_loader import load_llamacpp
from perilune.runtime.loader import LoadedModel
from perilune.runtime.tokenizer import load_tokenizer
from perilune.runtime.torch_runtime import TorchRuntime
from perilune.runtime.weights import WeightBuilder
from tests.contracts.mri import Make, MRIContract
from tests.contracts.mri_threads import MRIThreadContract
from tests.contracts.mri_tools import PROMPT, Draw, draws, generate, piece, run, step, watched
from tests.runtime.families import PLENTY, make_model
from tests.runtime.gguf_models import write_gguf

llama_cpp = pytest.importorskip("llama_cpp", reason="the extra `llamacpp` isn't installed")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    model = make_model("llama-untied", folder / "hf")
    return write_gguf(folder / "tiny.gguf", model, "llama", gguf.GGMLQuantizationType.F32, merges=["a b"])


def runtime_of(path: Path, *, blocks: int = 16, window: int | None = 512, threads: int = 1) -> LlamaCppRuntime:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    checkpoint.close()
    spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, "f16", "test")
    return LlamaCppRuntime(
        path, spec, num_blocks=blocks, max_context_tokens=window, threads=threads, entropy=lambda: 1
    )


class TestTiny(MRIContract, MRIThreadContract):
    @pytest.fixture(scope="class")
    def make(self, tiny: Path) -> Make:
        return lambda: runtime_of(tiny)


@pytest.mark.soak
class TestSmolLM2(MRIContract):
    @pytest.fixture(scope="class")
    def make(self, smollm2_path: Path) -> Make:
        return lambda: runtime_of(smollm2_path)


# ------------------------------------------------------------------------------------------------ the real model


QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def question(smollm2_path: Path) -> list[int]:
    checkpoint = open_checkpoint(smollm2_path)
    tokens = load_tokenizer(checkpoint).encode_template(QUESTION)
    checkpoint.close()
    return tokens


def test_greedy_tokens_are_llama_cpps_own(smollm2_path: Path, question: list[int]) -> None:
    """Through blocks, rows and our sampler, beside another sequence: what llama-cpp-python's own API says."""
    own = llama_cpp.Llama(str(smollm2_path), n_ctx=512, n_threads=1, flash_attn=True, verbose=False)
    stream = own.generate(question, temp=0.0, top_k=1, repeat_penalty=1.0)
    expected = [next(stream) for _ in range(16)]
    own.close()
    runtime = runtime_of(smollm2_path)
    runtime.init_context("other", PROMPT, watched(runtime))
    step(runtime, piece("other", PROMPT, 0, [9, 8, 7]))
    found = generate(runtime, "a", question, [3, 1, 2], count=16)
    runtime.close()
    assert [token for token, _ in found] == expected


def test_answers_are_near_torchs(smollm2_path: Path, question: list[int]) -> None:
    """Two engines, one file: the same greedy answer, and nearly the same probabilities."""
    kernels = kernel_choice.load(1)
    weights = WeightBuilder(open_checkpoint(smollm2_path), kernels, "bf16", "auto", 512).build(PLENTY)
    ours = TorchRuntime(weights, kernels, num_blocks=16, fingerprint="test")
    theirs = runtime_of(smollm2_path)
    found, expected = (generate(runtime, "a", question, [0, 1, 2], count=8) for runtime in (theirs, ours))
    assert [token for token, _ in found] == [token for token, _ in expected]
    for (_, mine), (_, reference) in zip(found, expected, strict=True):
        assert mine is not None
        assert reference is not None
        assert abs(mine.logprob - reference.logprob) < 0.25, "llama.cpp rounds activations to 8 bits"
    theirs.close()
    ours.close()


def test_windows_of_shared_blocks_stay(gemma_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's local layers look 512 tokens back. llama.cpp gives cells behind a sequence's window to others; a
    branch that starts before them must still find them, bit for bit."""
    for bound in ("MIN_BATCH_ROWS", "MAX_BATCH_ROWS"):
        monkeypatch.setattr(f"perilune.runtime.llamacpp.{bound}", 128)  # the same cuts in both runs
    prompt = [PROMPT[index % len(PROMPT)] for index in range(1024)]
    expected = _branch(gemma_path, prompt, disturbed=False)
    assert _branch(gemma_path, prompt, disturbed=True) == expected


def _branch(path: Path, prompt: list[int], *, disturbed: bool) -> Draw:
    """The first token after 320 tokens of a long prompt and 20 others."""
    runtime = runtime_of(path, blocks=48, window=None)
    late, early = list(range(32)), [*prompt[:320], *PROMPT[5:25]]
    generate(runtime, "before", PROMPT[:40], [33, 34], count=1)
    generate(runtime, "long", [*prompt, 7], [*late, 32], count=1)
    if disturbed:
        runtime.evict_kv([33, 34])  # the search for cells starts here, and goes on among those of the long one
        generate(runtime, "after", prompt[3:203], list(range(33, 40)), count=1)
    runtime.init_context("branch", early, watched(runtime))
    branch = draws(run(runtime, piece("branch", early[320:], 320, [*late[:10], 41], sample=True)))["branch"]
    runtime.close()
    return branch


def test_one_openmp_runtime_beside_torch(tiny: Path) -> None:
    """Two would fight for the cores: build llama-cpp-python with GGML_OPENMP=OFF. Asked of a process of its own:
    other tests load embedders into this one."""
    program = (
        "from pathlib import Path; from perilune.kernels.openmp import mapped_runtimes; "
        "from tests.runtime.test_llamacpp import runtime_of; "
        f"runtime = runtime_of(Path({str(tiny)!r})); print(*mapped_runtimes(), sep='\\n'); runtime.close()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    runtimes = done.stdout.split()
    assert len(runtimes) == 1, runtimes


def test_a_file_that_llama_cpp_cannot_load(tmp_path: Path, tiny: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny.read_bytes()[:2000])
    spec = KVSpec(1, 1, 16, "f16", "test")
    with pytest.raises(UnsupportedModel, match=r"llama\.cpp can't load broken\.gguf: "):
        LlamaCppRuntime(broken, spec, num_blocks=16)


# ------------------------------------------------------------------------------------------------- the engine


def test_the_engine_shares_prefixes_on_llama_cpp(smollm2_path: Path, question: list[int]) -> None:
    """A prompt computed once is reused by the next one, whose answer is what it would be alone."""
    loaded = load_llamacpp(smollm2_path, num_blocks=32, threads=1)
    document = [500 + index % 400 for index in range(160)]
    prompts = [document + question, document + question[:-4]]
    alone = []
    for prompt in prompts:
        engine = Running(loaded)
        alone.append(engine.answer("x", prompt)[1])
        engine.close()
    engine = Running(loaded)
    first, second = engine.answer("a", prompts[0]), engine.answer("b", prompts[1])
    assert (first[0], second[0]) == (0, 160), "tokens that came from the cache"
    assert [first[1], second[1]] == alone
    engine.close()
    loaded.close()


class Running:
    """An engine over a loaded model, whose blocks are all free again at the end."""

    def __init__(self, loaded: LoadedModel) -> None:
        loaded.runtime.evict_kv(range(loaded.runtime.num_blocks))
        self.engine = EngineLoop(loaded.runtime, None, EngineLimits(batch=4))
        self.engine.start()

    def answer(self, name: str, prompt: list[int]) -> tuple[int, list[int]]:
        """Cached tokens, and the answer."""
        events: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
        spec = SequenceSpec(
            name, prompt, salt=b"s" * 32, sampling=SamplingParams(), max_new_tokens=8, shared_tokens=len(prompt)
        )
        self.engine.submit(spec, events.put)
        tokens, cached = [], 0
        while not isinstance(event := events.get(timeout=60), EngineFinished):
            if isinstance(event, EngineToken):
                tokens.append(event.token_id)
            elif isinstance(event, EngineProgress):
                cached = event.cached_ram_tokens
        assert event.error is None
        return cached, tokens

    def close(self) -> None:
        self.engine.close()
        self.engine.check_integrity()
