"""Memory of pools: zero at first, and `populate` brings pages without changing them."""

from __future__ import annotations

import resource

import torch

from perilune.kernels.memory import populate, zeroed_bytes


def test_populated_pages_cost_no_fault_later() -> None:
    data = zeroed_bytes(64 << 20)
    data[5] = 7
    if not populate(data):  # an old kernel: nothing is promised
        assert data[5] == 7
        return
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    data[:: 1 << 12] += 1
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 64  # of 16,384 pages
    assert data[5] == 7
    assert int(torch.count_nonzero(data)) == (64 << 20 >> 12) + 1
