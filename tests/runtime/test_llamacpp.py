"""The MRI's conformance suite against `LlamaCppRuntime`, and llama.cpp's own words on the real model."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from perilune.core import SamplingParams
from perilune.kernels.openmp import mapped_runtimes
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.kv.spec import KVSpec
from perilune.runtime.llamacpp import LlamaCppRuntime
from tests.contracts.mri import Make, MRIContract
from tests.contracts.mri_threads import MRIThreadContract
from tests.contracts.mri_tools import PROMPT, assert_same, draws, generate, piece, run, step, watched
from tests.runtime.families import make_model
from tests.runtime.gguf_models import write_gguf

llama_cpp = pytest.importorskip("llama_cpp", reason="the extra `llamacpp` isn't installed")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    model = make_model("llama-untied", folder / "hf")
    return write_gguf(folder / "tiny.gguf", model, "llama", gguf.GGMLQuantizationType.F32)


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


class TestSmolLM2(MRIContract):
    @pytest.fixture(scope="class")
    def make(self, smollm2_path: Path) -> Make:
        return lambda: runtime_of(smollm2_path)
