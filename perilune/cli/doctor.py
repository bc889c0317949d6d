"""`perilune doctor`: will it run here? Checks before anything is loaded; a failure names the command that helps.

A warning costs speed or room, a failure costs the answer. Exit code 1 when anything fails.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from perilune.cli.client import find_server
from perilune.cli.console import print_json, say
from perilune.cli.ports import is_free, owner_of
from perilune.config import Settings
from perilune.errors import PeriluneError
from perilune.runtime.hub.catalogue import load_catalogue
from perilune.runtime.hub.pull import ModelFiles, resolve
from perilune.runtime.memory import free_memory_bytes, human_bytes
from perilune.service.checks import BASE_BYTES, Check, disk_check, kernels_check

_LOG = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 120
KV_RAM_SHARE = 4
KV_RAM_LIMIT_BYTES = 4 * 1024**3

_MARKS = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}


def run(settings: Settings, as_json: bool) -> int:
    """Print every check; returns the exit code."""
    checks = examine(settings)
    failed = any(check.state == "failed" for check in checks)
    if as_json:
        print_json({"ok": not failed, "checks": [asdict(check) for check in checks]})
        return int(failed)
    for check in checks:
        print(f"{_MARKS[check.state]}  {check.name}: {check.detail}")
        if check.fix:
            print(f"         run: {check.fix}")
    say("Something must be fixed first." if failed else "Ready.")
    return int(failed)


def examine(settings: Settings) -> list[Check]:
    """All checks, in the order in which they matter."""
    model, model_check = _model(settings)
    facts = _probe(settings, model)
    if isinstance(facts, dict) and not facts.get("chat_template", True) and model_check.state == "ok":
        model_check = replace(model_check, state="warning", detail=f"{model_check.detail}; no chat template.")
    checks = [_home(settings), model_check]
    if isinstance(facts, Check):
        checks.append(facts)
    else:
        checks += [_torch(facts), kernels_check(facts["kernels"]), *_backend(settings, facts), _openmp(facts)]
        if model is not None:
            checks += _fit(settings, facts)
    tiers = facts.get("tiers") if isinstance(facts, dict) else None
    return [*checks, disk_check(settings, tiers["cold_bytes"] if tiers else 0), _port(settings)]


def _home(settings: Settings) -> Check:
    home = settings.home
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=home):
            return Check("home", "ok", str(home))
    except OSError as error:
        fix = f"perilune --home {Path(tempfile.gettempdir()) / 'perilune'} doctor"
        return Check("home", "failed", f"{home} can't be written ({error.strerror}).", fix)


def _model(settings: Settings) -> tuple[ModelFiles | None, Check]:
    name = settings.model.path
    try:
        files = resolve(name, settings.home)
    except PeriluneError as error:
        known = load_catalogue().find(name)
        fix = f"perilune pull {known.name if known else load_catalogue().default}"
        return None, Check("model", "failed", error.message, fix)
    card = files.card
    spoken = f", speaks {', '.join(card.languages)}" if card.languages else ""
    detail = f"{card.name}, {human_bytes(files.size_bytes)}{spoken}"
    if card.kind == "base":
        return files, Check("model", "warning", f"{detail}; a base model without chat template: it can't answer.")
    return files, Check("model", "ok", detail)


def _probe(settings: Settings, model: ModelFiles | None) -> dict[str, Any] | Check:
    """Facts from a child that loads what serving would load."""
    path = str(model.path) if model else ""
    command = [sys.executable, "-m", "perilune.cli.probe", path]
    command += [settings.model.dtype, json.dumps(settings.model.decode_weights), settings.model.lora]
    kv = settings.kv_cache.model_copy(update={"ram": _kv_bytes(settings, free_memory_bytes())})
    command += [settings.runtime.backend, kv.model_dump_json()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)  # noqa: S603 - our own
    except subprocess.TimeoutExpired:
        return Check("torch", "failed", f"Loading torch took more than {PROBE_TIMEOUT_S} s.", "make setup")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        fix = f"{sys.executable} -m pip install --force-reinstall torch"
        return Check("torch", "failed", f"torch and the kernels can't be loaded: {last}", fix)
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def _torch(facts: dict[str, Any]) -> Check:
    if facts["torch_cuda"] and not facts["cuda_available"]:
        fix = f"{sys.executable} -m pip install torch --index-url https://download.pytorch.org/whl/cpu"
        detail = f"{facts['torch']} is a CUDA build ({facts['torch_cuda']}) on a machine without a usable GPU."
        return Check("torch", "warning", f"{detail} It works, and costs gigabytes and start-up time.", fix)
    return Check("torch", "ok", f"{facts['torch']}, {'CUDA' if facts['torch_cuda'] else 'CPU'} build")


def warn_if_slow(settings: Settings, described: str) -> None:
    """One line on stderr, and one in the log, where answers will be slow for want of native kernels."""
    check = kernels_check(described)
    if check.state == "ok" or settings.model.dtype == "fp32":  # which asks for the reference
        return
    say(f"warning: answers will be slow. {check.detail} Stop, then run: {check.fix}")
    if _LOG.hasHandlers():  # else the line above would come twice
        _LOG.warning("native kernels are missing", extra={"fields": {"detail": check.detail, "fix": check.fix}})


def _backend(settings: Settings, facts: dict[str, Any]) -> list[Check]:
    """llama.cpp where it is asked for; our own runtime is what the checks before this one are about."""
    if settings.runtime.backend == "torch":
        return []
    if "backend_error" in facts:
        fix = "CMAKE_ARGS=-DGGML_OPENMP=OFF pip install 'perilune[llamacpp]'"
        return [Check("backend", "failed", str(facts["backend_error"]), fix)]
    return [Check("backend", "ok", str(facts["backend"]))]


def _openmp(facts: dict[str, Any]) -> Check:
    runtimes = [Path(path).name for path in facts["openmp"]]
    if len(runtimes) > 1:
        # Two runtimes fight for the cores: decode was measured several times slower, and results can be wrong.
        detail = f"{len(runtimes)} OpenMP runtimes are loaded ({', '.join(runtimes)})."
        fix = f"{sys.executable} -m pip uninstall PACKAGE, for the package that brings the one outside torch"
        return Check("openmp", "failed", detail, fix)
    return Check("openmp", "ok", runtimes[0] if runtimes else "none loaded")


def _fit(settings: Settings, facts: dict[str, Any]) -> list[Check]:
    if "model_error" in facts:
        detail = f"{facts['model_error']} {facts['model_hint']}".strip()
        return [Check("fit", "failed", detail, f"perilune pull {load_catalogue().default}")]
    free = free_memory_bytes()
    weights = int(facts["weights_bytes"])
    one_copy = int(facts["prefill_bytes"])
    kv = _kv_bytes(settings, free)
    tokens, held = _kv_held(facts, kv)
    # The loader's rule: both copies of the weights where they fit beside KV, else the one that prefill reads.
    both = weights + kv <= free
    resident = weights if both else one_copy
    need = resident + kv + BASE_BYTES
    parts = f"weights {human_bytes(resident)}, KV {human_bytes(kv)} ({held})"
    detail = f"needs {human_bytes(need)} of {human_bytes(free)} free ({parts})"
    smaller = f"perilune --set kv_cache.ram={max(0, free - one_copy - BASE_BYTES) // 2 // 1024**2}M doctor"
    if one_copy + (kv if not settings.kv_cache.ram else 0) > free:
        return [
            Check("fit", "failed", f"{detail}: the weights don't fit.", f"perilune pull {load_catalogue().default}")
        ]
    if one_copy + kv > free:
        return [Check("fit", "failed", f"{detail}: the KV pool doesn't fit.", smaller)]
    if not both:
        why = f"{detail}: only one copy of the weights will be resident, so decoding is slower."
        return [Check("fit", "warning", why)]
    if need > free:
        return [Check("fit", "warning", f"{detail}: nothing is left for the process itself.", smaller)]
    window = int(facts["window_tokens"])
    if tokens < window:
        return [Check("fit", "warning", f"{detail}: less than one window of {window:,} tokens.")]
    return [Check("fit", "ok", detail)]


def _kv_bytes(settings: Settings, free: int) -> int:
    """What KV takes, by the loader's rule."""
    return settings.kv_cache.ram or min(free // KV_RAM_SHARE, KV_RAM_LIMIT_BYTES)


def _kv_held(facts: dict[str, Any], kv: int) -> tuple[int, str]:
    """How many tokens of one context KV holds, and in words."""
    tiers = facts["tiers"]
    if tiers is None:
        tokens = kv // int(facts["kv_token_bytes"])
        return tokens, f"{tokens:,} tokens"
    warm, cold = int(tiers["warm_tokens"]), int(tiers["cold_tokens"])
    summaries = human_bytes(tiers["summary_bytes"])
    held = f"{tiers['block_tokens']:,} tokens bf16, {warm:,} INT8, {summaries} of summaries"
    if cold:
        held += f"; on disk {human_bytes(tiers['cold_bytes'])} for {cold:,} tokens more"
    return warm + cold, held


def _port(settings: Settings) -> Check:
    server = find_server(settings.home)
    if server is not None:
        return Check("port", "ok", f"a server runs at {server.url} (process {server.pid})")
    host, port = settings.server.host, settings.server.port
    if is_free(host, port):
        return Check("port", "ok", f"{port} on {host} is free")
    owner = owner_of(port)
    who = f" by {owner.name} (process {owner.pid})" if owner else ""
    return Check("port", "failed", f"{port} on {host} is used{who}.", f"perilune serve --port {port + 1}")
