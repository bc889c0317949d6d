"""What the service knows about the model it serves: names, window, vocabulary size, languages. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from perilune.core import Degradation
from perilune.errors import ModelNotFound
from perilune.runtime.evaluate.length_record import EffectiveLength
from perilune.service.ports import ModelCard


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The loaded model. `aliases` are other names a request may use; `languages` are those it answers in
    (ISO 639-1), empty where that isn't known; `effective` is what `perilune eval length` measured of it."""

    model_id: str
    window_tokens: int
    licence: str
    created_at: int
    vocab_size: int
    aliases: frozenset[str] = frozenset()
    languages: frozenset[str] = frozenset()
    backend: str = "local"
    effective: EffectiveLength | None = None
    file_bytes: int = 0

    def means(self, name: str) -> bool:
        """Whether `name` means this model."""
        return name == self.model_id or name in self.aliases

    def require(self, name: str) -> None:
        """Raise `ModelNotFound` unless `name` means this model."""
        if not self.means(name):
            raise ModelNotFound(
                f"There is no model {name[:80]!r} here; {self.model_id!r} is loaded.",
                hint=f"Use model {self.model_id!r}, or start the server with `--model` for another one.",
                param="model",
            )

    def past_its_length(self, tokens: int) -> tuple[Degradation, ...]:
        """What is said of a prompt longer than the model was measured to answer from (spec R16)."""
        found = self.effective
        if found is None or found.fails_at is None or tokens <= found.tokens:
            return ()
        return (
            Degradation(
                "effective_length",
                f"The prompt has {tokens:,} tokens. By measurement {self.model_id} still finds facts in "
                f"{found.tokens:,}; in {found.fails_at:,} it finds {100 * found.accuracy(found.fails_at):.0f} % of "
                "them. Ask about a part, or use a model with a longer effective length.",
            ),
        )

    def card(self) -> ModelCard:
        return ModelCard(self.model_id, self.created_at, self.window_tokens, self.licence)
