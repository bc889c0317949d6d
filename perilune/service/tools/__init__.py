"""Tools that a caller offers: how a model is told of them, held to them, and understood (spec S1)."""
