"""Wires the layers together. The only place that knows every layer.

`models` loads, `opened` opens what is slow side by side; `engine`, `rooms`, `backends` and `services` make the
parts of it; `application` puts them together.
"""

from perilune.build.application import Application, build

__all__ = ["Application", "build"]
