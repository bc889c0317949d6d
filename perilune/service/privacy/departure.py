"""What leaves for a remote backend: a request's JSON body with its identifiers replaced, and the way back.

Knows the shape of JSON, not of a dialect: every string in the body is read, keys and numbers too, except fields whose
values are fixed words or chosen by the operator. Knows no network. Images and other parts that can't be read as text
don't leave. What was replaced is counted by kind; values are never logged.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from perilune.errors import Forbidden, InvalidRequest
from perilune.service.privacy.detect import Detector, normal
from perilune.service.privacy.kinds import DEFAULT_TREATMENTS, LABELS, Found, Kind, Treatment
from perilune.service.privacy.placeholders import Escape, Restorer, Vault, plain, replaced, with_literals
from perilune.telemetry import Telemetry

_log = logging.getLogger(__name__)

_FIXED = frozenset(
    {"model", "role", "type", "object", "stream", "id", "tool_call_id", "call_id", "finish_reason", "service_tier"}
)
"""Fields with values that are words of the dialect, ids that we or the backend made, or the operator's choice."""

_LEFT_OUT = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "session_id"})
"""Fields of the whole body that say who asks; they don't leave at all."""

_MAX_VAULTS = 1024
_LEAST_NUMBER = 1_000_000


@dataclass(frozen=True, slots=True)
class Policy:
    """What happens to each kind; kinds that aren't named follow `DEFAULT_TREATMENTS`, and else are replaced."""

    treatments: Mapping[Kind, Treatment] = field(default_factory=dict)
    terms: tuple[str, ...] = ()

    def of(self, kind: Kind) -> Treatment:
        if kind is Kind.TEXT:
            return Treatment.REPLACE
        return self.treatments.get(kind, DEFAULT_TREATMENTS.get(kind, Treatment.REPLACE))


@dataclass(frozen=True, slots=True)
class Departure:
    """A body that may leave, how to turn back what comes, and how many identifiers of each kind were taken out."""

    body: Any
    vault: Vault
    counts: Mapping[str, int]

    def restore(self, text: str, escape: Escape = plain) -> str:
        return self.vault.restore(text, escape)

    def restorer(self, escape: Escape = plain) -> Restorer:
        """For one stream of text; `in_json` for the arguments of a tool call."""
        return Restorer(self.vault, escape)


class Deidentifier:
    """Takes identifiers out of what leaves. Keeps each conversation's stand-ins, so that they stay the same."""

    def __init__(self, policy: Policy, telemetry: Telemetry) -> None:
        self._policy = policy
        self._telemetry = telemetry
        self._detector = Detector(policy.terms, (kind for kind in Kind if policy.of(kind) is not Treatment.KEEP))
        self._vaults: OrderedDict[str, Vault] = OrderedDict()

    def depart(self, body: Any, conversation: str | None = None) -> Departure:
        """The body as it may leave. `conversation` names one of a tenant, whose stand-ins last; None: this request's.

        Raises `Forbidden` where a kind that the settings refuse was found, `InvalidRequest` for parts that can't be
        read. Takes milliseconds per 10,000 characters: run it in a thread.
        """
        texts = _Texts()
        _walk(body, texts.collect)
        found = self._detector.find_all(texts.all)
        counts = _counted(texts.all, found)
        self._refuse(counts)
        vault = self._vault(conversation)

        def stand_in(kind: Kind, value: str) -> str:
            if self._policy.of(kind) is Treatment.DROP:
                return f"[{LABELS[kind]}]"
            return vault.stand_in(kind, value)

        by_text = {text: replaced(text, items, stand_in) for text, items in zip(texts.all, found, strict=True)}
        self._tell(counts)
        return Departure(_walk(body, by_text.__getitem__), vault, counts)

    def forget(self, conversation: str) -> None:
        """Drop the stand-ins of a conversation that was deleted."""
        self._vaults.pop(conversation, None)

    def _vault(self, conversation: str | None) -> Vault:
        if conversation is None:
            return Vault(normal)
        vault = self._vaults.setdefault(conversation, Vault(normal))
        self._vaults.move_to_end(conversation)
        while len(self._vaults) > _MAX_VAULTS:
            self._vaults.popitem(last=False)
        return vault

    def _refuse(self, counts: Mapping[str, int]) -> None:
        refused = [kind for kind in counts if self._policy.of(Kind(kind)) is Treatment.REFUSE]
        if refused:
            raise Forbidden(
                f"The request holds {', '.join(sorted(refused))}, which may not leave this machine.",
                hint="Take it out, use a model that runs here, or have the operator change privacy.kinds.",
                param="messages",
            )

    def _tell(self, counts: Mapping[str, int]) -> None:
        for kind, count in counts.items():
            self._telemetry.count("privacy_taken_out", count, kind=kind)
        if counts:
            _log.info(
                "Taken out of a request to a remote backend: %s", ", ".join(f"{n} {k}" for k, n in counts.items())
            )


class _Texts:
    """Every different string of a body once, in order."""

    def __init__(self) -> None:
        self._seen: dict[str, None] = {}

    def collect(self, text: str) -> str:
        self._seen[text] = None
        return text

    @property
    def all(self) -> list[str]:
        return list(self._seen)


def _counted(texts: Iterable[str], found: Iterable[list[Found]]) -> dict[str, int]:
    """Different values by kind."""
    values: set[tuple[Kind, str]] = set()
    for text, items in zip(texts, found, strict=True):
        values.update((item.kind, text[item.start : item.end]) for item in with_literals(text, items))
    counts = Counter(kind for kind, _ in values if kind is not Kind.TEXT)
    return {kind.value: counts[kind] for kind in Kind if counts[kind]}


def _walk(body: Any, change: Callable[[str], str]) -> Any:
    """A copy of the body with every text changed."""
    if not isinstance(body, Mapping):
        return _inside(body, change)
    return {
        key: value if not isinstance(value, (str, list, Mapping)) or key in _FIXED else _inside(value, change, key)
        for key, value in body.items()
        if key not in _LEFT_OUT
    }


def _inside(value: Any, change: Callable[[str], str], key: str = "") -> Any:
    if isinstance(value, str):
        return _arguments(value, change) if key == "arguments" else change(value)
    if isinstance(value, list):
        return [_inside(item, change) for item in value]
    if isinstance(value, Mapping):
        _require_readable(value)
        return {
            change(name): item if name in _FIXED and isinstance(item, str) else _inside(item, change, name)
            for name, item in value.items()
        }
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) >= _LEAST_NUMBER:
        text = str(value)
        changed = change(text)
        return value if changed == text else changed
    return value


def _arguments(value: str, change: Callable[[str], str]) -> str:
    """A tool call's arguments are JSON inside a string: its escapes would hide what it says."""
    try:
        parsed = json.loads(value)
    except ValueError:
        return change(value)
    return (
        json.dumps(_inside(parsed, change), ensure_ascii=False)
        if isinstance(parsed, dict | list)
        else change(value)
    )


def _require_readable(value: Mapping[str, Any]) -> None:
    unreadable = {
        "image_url",
        "input_audio",
        "file",
        "input_image",
        "input_file",
        "audio",
        "image",
        "video_url",
    } & value.keys()
    if unreadable:
        raise InvalidRequest(
            f"A message holds {sorted(unreadable)[0]}, which can't be searched for personal identifiers.",
            hint="Send text only, or use a model that runs here.",
            param="messages",
        )
