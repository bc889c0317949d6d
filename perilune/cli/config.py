"""`perilune config`: every setting, its value, its meaning and where it came from."""

from __future__ import annotations

from typing import Any

from perilune.cli.console import print_json, table
from perilune.config import Origins, Settings, describe


def show(settings: Settings, origins: Origins, with_origin: bool, as_json: bool) -> None:
    """Print the settings as rows, or as one JSON object keyed by dotted name."""
    values = settings.model_dump(mode="json")
    rows = [(key, _value(values, key), origins.get(key, "default"), text) for key, text in describe()]
    if as_json:
        fields = ("value", "origin", "description") if with_origin else ("value", "description")
        print_json(
            {
                key: {
                    name: item
                    for name, item in zip(("value", "origin", "description"), rest, strict=True)
                    if name in fields
                }
                for key, *rest in rows
            }
        )
        return
    if with_origin:
        table(("KEY", "VALUE", "ORIGIN"), [row[:3] for row in rows])
    else:
        table(("KEY", "VALUE", "MEANING"), [(key, value, text) for key, value, _, text in rows])


def schema() -> None:
    """Print the JSON schema of the settings file."""
    print_json(Settings.model_json_schema())


def _value(values: dict[str, Any], dotted: str) -> object:
    node: Any = values
    for part in dotted.split("."):
        node = node[part]
    return node
