"""Perilune: long documents and endless conversations, answered within a deadline."""

import os

__version__ = "0.1.0"

# Read by the OpenMP runtime when torch loads it, so it is set before anything can import torch. Its default lets a
# thread that waits for another spin for milliseconds: beside a busy neighbour, prefill was measured three to five
# times slower, because the waiting thread burns the time slice that the late one needs (docs/log.md, Threads).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
