"""An answer whose documents lack what was asked says so: before the model's words, instead of them, or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from perilune.core import ChoiceFinished, Completed, ContextPolicy, SearchResult
from perilune.service.abstain import CODE, Abstain
from tests.service.fakes import MemoryLibrary
from tests.service.harness import running, text_of


class Doubting(MemoryLibrary):
    """Finds passages and trusts none of them."""

    doubtful = True

    def find(self, tenant: str, file_ids: Sequence[str], query: str, limit: int) -> SearchResult:
        sure = 0.05 if self.doubtful else 0.9
        return replace(super().find(tenant, file_ids, query, limit), confidence=sure, doubtful=self.doubtful)


async def _asked(
    library: Doubting, abstain: Abstain, policy: ContextPolicy, language: str = "en", n: int = 1
) -> tuple[str, Completed, int, int]:
    """(text of the first choice, its report, finished choices, sequences that ran)."""
    async with running(library=library, language=lambda text: language) as bench:
        bench.service._parts = replace(bench.service._parts, abstain=abstain)
        file_id = await bench.upload("The brown cat sleeps. The red dog barks.", "notes.txt")
        before = len(bench.engine.specs)
        events = await bench.ask("Who sings?", files=(file_id,), policy=policy, n=n)
        done = next(event for event in events if isinstance(event, Completed))
        finished = sum(isinstance(event, ChoiceFinished) for event in events)
        return text_of(events), done, finished, len(bench.engine.specs) - before


@pytest.mark.parametrize(("language", "words"), [("en", "The sources don't contain this"), ("zh", "资料中没有")])
async def test_it_is_said_before_the_answer(language: str, words: str) -> None:
    text, done, _, ran = await _asked(Doubting(), Abstain.SAY, ContextPolicy.REFINED, language)
    assert text.startswith(words) or words in text.split("\n\n")[0]
    assert "notes.txt" in text
    assert text.split("\n\n", 1)[1]
    assert ran == 1
    assert CODE in [item.code for item in done.report.degradations]
    assert done.report.confidence == 0.05


async def test_it_is_the_whole_answer() -> None:
    text, done, finished, ran = await _asked(Doubting(), Abstain.REFUSE, ContextPolicy.REFINED, n=2)
    assert text.startswith("The sources don't contain this")
    assert "\n\n" not in text
    assert (finished, ran) == (2, 0)
    assert (done.usage.completion_tokens, done.report.tokens.exact) == (0, 0)


@pytest.mark.parametrize(
    ("abstain", "policy", "doubtful"),
    [
        (Abstain.OFF, ContextPolicy.REFINED, True),
        (Abstain.SAY, ContextPolicy.REFINED, False),
        (Abstain.REFUSE, ContextPolicy.FULL, True),  # the whole document was read
    ],
)
async def test_when_nothing_is_said(abstain: Abstain, policy: ContextPolicy, doubtful: bool) -> None:
    library = Doubting()
    library.doubtful = doubtful
    text, done, _, ran = await _asked(library, abstain, policy)
    assert "sources don't" not in text
    assert ran == 1
    assert CODE not in [item.code for item in done.report.degradations]
