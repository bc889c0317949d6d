"""Attributes of files in vector stores, and filters over them: which files a search may see.

Knows values and comparisons as OpenAI's filters have them; not where attributes are kept. A file without the key,
or with a value of another kind, equals nothing: `ne` and `nin` hold then, every other comparison doesn't.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from perilune.core import AttributeComparison, AttributeFilter, AttributeValue

Attributes = Mapping[str, AttributeValue]

_ORDERED: Mapping[str, Callable[[Any, Any], bool]] = {
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}


def matches(wanted: AttributeFilter | None, attributes: Attributes) -> bool:
    """Whether a file with these attributes is wanted; None wants all."""
    if wanted is None:
        return True
    if isinstance(wanted, AttributeComparison):
        return _compares(wanted, attributes.get(wanted.key))
    found = (matches(each, attributes) for each in wanted.filters)
    return all(found) if wanted.type == "and" else any(found)


def _compares(wanted: AttributeComparison, value: AttributeValue | None) -> bool:
    if isinstance(wanted.value, tuple):
        among = any(_same(value, each) for each in wanted.value)
        return among if wanted.type == "in" else not among
    if wanted.type in ("eq", "ne"):
        return _same(value, wanted.value) == (wanted.type == "eq")
    if value is None or _kind(value) is not _kind(wanted.value) or isinstance(value, bool):
        return False
    return bool(_ORDERED[wanted.type](value, wanted.value))


def _same(value: AttributeValue | None, other: AttributeValue) -> bool:
    return value is not None and _kind(value) is _kind(other) and value == other


def _kind(value: AttributeValue) -> type:
    """Numbers are of one kind; true is no number."""
    return type(value) if isinstance(value, str | bool) else float
