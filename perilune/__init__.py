"""Perilune: long documents and endless conversations, answered within a deadline."""

__version__ = "0.1.0"
