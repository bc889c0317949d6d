"""De-identification at the place where text leaves for a remote backend (M12); implements `backends.departure`.

Knows what a request holds and what the settings say of each kind; not how identifiers are found, nor any
network. All of a request's texts are read together, so that one person has one stand-in in the system prompt,
in passages of documents, in recalled turns and in the question; numbers go by first mention, so that the same
conversation gets the same ones again. No value is kept when the answer has ended. What was taken out is counted by
kind, never logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from perilune.errors import Forbidden
from perilune.service.backends.departure import Departed, Leaving, Stream
from perilune.service.privacy.blocks import Memo
from perilune.service.privacy.kinds import DEFAULT_TREATMENTS, LABELS, Kind, Treatment
from perilune.service.privacy.placeholders import Restorer, Vault, as_it_is, in_json, replaced
from perilune.telemetry import Telemetry

if TYPE_CHECKING:
    from perilune.service.privacy.detect import Detector

_log = logging.getLogger(__name__)
_AT_ONCE_CHARS, _KNOWN_AT_ONCE_CHARS = 2048, 1 << 20
"""Reading so little, behind so much that was read before, takes less than handing it to a thread and back."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What happens to each kind (others follow `DEFAULT_TREATMENTS`, else they are replaced), the user's own terms,
    and the tenants whose text stays here whatever it holds."""

    treatments: Mapping[Kind, Treatment] = field(default_factory=dict)
    terms: tuple[str, ...] = ()
    local_only: frozenset[str] = frozenset()

    def of(self, kind: Kind) -> Treatment:
        if kind is Kind.TEXT:
            return Treatment.REPLACE
        return self.treatments.get(kind, DEFAULT_TREATMENTS.get(kind, Treatment.REPLACE))


class Deidentified:
    """Implements `Departure`: identifiers are taken out of what leaves and put back into the answer."""

    def __init__(self, policy: Policy, telemetry: Telemetry) -> None:
        self._policy = policy
        self._telemetry = telemetry
        self._memo = Memo()

    @cached_property
    def _detector(self) -> Detector:
        """Made when text is first to leave, or by `prepare`: it takes a second, which a process that sends nothing
        away doesn't have to wait for."""
        from perilune.service.privacy.detect import Detector

        return Detector(self._policy.terms, (kind for kind in Kind if self._policy.of(kind) is not Treatment.KEEP))

    def prepare(self) -> None:
        """Be ready for the first text that leaves."""
        self._detector.find("")

    async def leave(self, leaving: Leaving) -> Departed:
        """See `Departure.leave`. Raises `Forbidden` for a tenant whose text stays here, and where a kind was found
        that the settings refuse."""
        if leaving.tenant in self._policy.local_only:
            raise Forbidden(
                "This tenant's text stays on this machine.",
                hint="Use a model that runs here, or have the operator change privacy.local_only.",
            )
        texts = leaving.said.texts()
        if self._is_short(leaving.tenant, texts):
            changed, vault, counts = self._changed(leaving.tenant, texts)
        else:
            changed, vault, counts = await asyncio.to_thread(self._changed, leaving.tenant, texts)
        self._tell(leaving, counts)
        return Departed(
            leaving.said.rewritten(changed),
            Restoring(vault, formed=leaving.said.form is not None),
            altered=changed != texts,
            taken_out=counts,
        )

    def _is_short(self, tenant: str, texts: Sequence[str]) -> bool:
        """Little has to be read."""
        if sum(map(len, texts)) > _KNOWN_AT_ONCE_CHARS:
            return False
        known = self._memo.begun(tenant, texts).size
        return sum(map(len, texts[known:])) <= _AT_ONCE_CHARS

    def _changed(self, tenant: str, texts: Sequence[str]) -> tuple[list[str], Vault, dict[str, int]]:
        """The texts as they may leave, the way back, and how many identifiers were taken out by kind."""
        found, vault = self._detector.find_all(texts, self._memo, tenant), Vault()
        names: dict[tuple[Kind, str], str] = {}

        def stand_in(kind: Kind, value: str) -> str:
            name = names.get((kind, value))
            if name is None:
                dropped = self._policy.of(kind) is Treatment.DROP
                name = f"[{LABELS[kind]}]" if dropped else vault.stand_in(kind, value)
                names[kind, value] = name
            return name

        changed = [replaced(text, items, stand_in) for text, items in zip(texts, found, strict=True)]
        numbers = Counter(kind for kind, _ in names)
        counts = {kind.value: numbers[kind] for kind in Kind if numbers[kind] and kind is not Kind.TEXT}
        refused = [kind for kind in counts if self._policy.of(Kind(kind)) is Treatment.REFUSE]
        if refused:
            raise Forbidden(
                f"The request holds {', '.join(sorted(refused))}, which may not leave this machine.",
                hint="Take it out, use a model that runs here, or have the operator change privacy.kinds.",
                param="messages",
            )
        return changed, vault, counts

    def _tell(self, leaving: Leaving, counts: Mapping[str, int]) -> None:
        for kind, count in counts.items():
            self._telemetry.count("privacy_taken_out", count, kind=kind)
        said = ", ".join(f"{kind} {count}" for kind, count in counts.items()) or "nothing"
        _log.info("Request %s leaves for %s; taken out: %s.", leaving.request_id, leaving.backend, said)


class Restoring:
    """Implements `Reverser` over one request's stand-ins. `formed`: answers are JSON, not only calls."""

    def __init__(self, vault: Vault, formed: bool = False) -> None:
        self._vault = vault
        self._formed = formed
        self._streams: dict[Stream, Restorer] = {}

    def push(self, stream: Stream, text: str) -> str:
        if stream not in self._streams:
            is_json = isinstance(stream, tuple) or (self._formed and isinstance(stream, int))
            written = in_json if is_json else as_it_is
            self._streams[stream] = Restorer(self._vault, written)
        return self._streams[stream].push(text)

    def flush(self, stream: Stream) -> str:
        restorer = self._streams.pop(stream, None)
        return restorer.flush() if restorer is not None else ""
