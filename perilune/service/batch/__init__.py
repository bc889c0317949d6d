"""Batches (spec S7, E11): many requests from a file, run on idle capacity, whose answers are files."""
