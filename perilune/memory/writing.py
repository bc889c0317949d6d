"""Facts about scripts that chunking and analysis share."""

from __future__ import annotations

UNSPACED = (
    "\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
    "\u0e00-\u0eff\u1780-\u17ff\U00020000-\U0003134f"
)
"""Ranges (for inside a regular-expression class) of the scripts written without spaces, and of Korean."""
