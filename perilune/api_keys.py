"""API keys of other servers, which settings name by an environment variable and never hold."""

from __future__ import annotations

import os

from perilune.errors import ConfigError


def api_key(variable: str, *, whose: str, param: str) -> str:
    """The key in an environment variable; empty where none is named. Raises `ConfigError` for a variable that isn't
    set, and for what no HTTP header may hold, such as the line break of a file that it was read from."""
    if not variable:
        return ""
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(
            f"{whose}: the environment variable {variable} is not set.",
            hint="Set it to the API key, or leave key_env out.",
            param=param,
        )
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{whose}: the environment variable {variable} holds characters that no HTTP header may.",
            hint="Set it to the API key alone: a line break at its end is enough.",
            param=param,
        )
    return key
