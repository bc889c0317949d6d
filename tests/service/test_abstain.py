"""An answer whose documents lack what was asked says so: before the model's words, instead of them, or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from perilune.core import ChoiceFinished, Completed, ContextPolicy, SearchResult
from perilune.memory.memory import Memory, Turn
from perilune.memory.sessions import Sessions
from perilune.memory.store import Store
from perilune.memory.vectors.lance import LanceIndex
from perilune.service.abstain import CODE, Abstain, asks_back
from perilune.service.ports import SessionStore
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


class Unsure:
    """Sessions that find turns and trust none of them."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sessions, name)

    def search(self, *given: Any) -> SearchResult:
        return replace(self._sessions.search(*given), confidence=0.05, doubtful=True)


async def _recalled(
    tmp_path: Path, question: str, abstain: Abstain, language: str = "en", history: tuple[tuple[str, str], ...] = ()
) -> tuple[str, Completed, int]:
    """The same of a question whose session was searched, without documents."""
    store = Store(tmp_path)
    memory = Memory(store, LanceIndex(tmp_path / "index", "none", 1), None)
    memory.add_turns("local", "s", [Turn("user", "The red dog barks.", 1.0)])
    kept = cast(SessionStore, Unsure(Sessions(store, memory)))
    async with running(kept=kept, language=lambda text: language) as bench:
        bench.service._parts = replace(bench.service._parts, abstain=abstain)
        events = await bench.ask(question, session="s", history=history)
        done = next(event for event in events if isinstance(event, Completed))
        ran = len(bench.engine.specs)
    memory.close()
    store.close()
    return text_of(events), done, ran


@pytest.mark.parametrize(
    ("question", "language", "words"),
    [
        ("What is my locker number?", "en", "No earlier turn contains this"),
        ("我的储物柜是几号？", "zh", "就检索所及，之前的对话里没有提到过"),
    ],
)
async def test_a_conversation_that_lacks_it_says_so(
    tmp_path: Path, question: str, language: str, words: str
) -> None:
    text, done, ran = await _recalled(tmp_path, question, Abstain.SAY, language)
    assert text.startswith(words)
    assert text.split("\n\n", 1)[1]
    assert ran == 1
    assert CODE in [item.code for item in done.report.degradations]


async def test_of_a_conversation_it_can_be_the_whole_answer(tmp_path: Path) -> None:
    text, _, ran = await _recalled(tmp_path, "Did I tell you where the boat lies?", Abstain.REFUSE)
    assert text.endswith("Searched: one conversation.")
    assert ran == 0


@pytest.mark.parametrize(
    ("question", "abstain", "history"),
    [
        ("Write a poem about my dog.", Abstain.SAY, ()),
        ("What is my locker number?", Abstain.OFF, ()),
        ("What is my locker number?", Abstain.SAY, (("user", "My locker is 7."), ("assistant", "Noted."))),
    ],
)
async def test_when_nothing_is_said_of_a_conversation(
    tmp_path: Path, question: str, abstain: Abstain, history: tuple[tuple[str, str], ...]
) -> None:
    text, done, ran = await _recalled(tmp_path, question, abstain, history=history)
    assert "earlier turn" not in text
    assert ran == 1
    assert CODE not in [item.code for item in done.report.degradations]


@pytest.mark.parametrize(
    ("question", "back"),
    [
        ("Do you remember where I left the key?", True),
        ("Where does my sister live?", True),
        ("When did we agree to meet?", True),
        ("How many rooms does our house have?", True),
        ("我上次跟你说过的那家店叫什么？", True),
        ("还记得我的航班号吗？", True),
        ("我妹妹住在哪个城市？", True),
        ("What should I cook tonight?", False),
        ("How do I remove a stain from my shirt?", False),
        ("What do I need for a pancake?", False),
        ("Who wrote Faust?", False),
        ("Summarise this for my boss: sales rose.", False),
        ("我该怎么做红烧肉？", False),
        ("写一首关于大海的诗。", False),
        ("浮士德是谁写的？", False),
    ],
)
def test_who_asks_back(question: str, back: bool) -> None:
    assert asks_back(question) is back
