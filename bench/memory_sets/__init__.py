"""Writes the evaluation data of `bench/data/memory` from its hand-written sources, and checks it.

It knows the sources' format and the questions' invariants, and nothing of the memory that is measured with them.
"""
