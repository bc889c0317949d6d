"""No engine at all: a worker that only calibrates the machine, in turn with the engines."""

from __future__ import annotations

from bench.worker import BenchEngine, LoadSpec


def load(spec: LoadSpec) -> BenchEngine:
    raise RuntimeError("the machine worker only calibrates")
