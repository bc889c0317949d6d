"""Chooses which earlier turns enter a prompt: the best that fit a budget of tokens, in the order they were said.

Pure functions over turns and a counting function; doesn't know where turns come from or how prompts look. The order
is that of the sessions and their turns, whatever the scores were, so that equal choices give equal prompts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from perilune.core import SessionTurn, TurnCitation
from perilune.service.compose import Composer, Conversation
from perilune.service.passages import QUOTE_CHARS

CANDIDATES = 32
"""Turns asked of the search."""

RECALL_TOKENS = 1024
"""Most tokens of earlier turns in a prompt."""

WINDOW_SHARE, LONG_SHARE = 1 / 4, 1 / 10
"""And the largest part of the room for a prompt that they take; the second where the conversation doesn't fit.
They differ from question to question, so that their KV is of no use to the next one."""

HEADING = "Earlier turns that may help with the question:\n\n"
SPARE_TOKENS = 64
"""For the template's own tokens and instructions."""

Count = Callable[[SessionTurn], int]
"""Tokens that a turn takes in the prompt, label included."""


def recall_budget(room: int, whole: int, least: int) -> int:
    """Tokens for earlier turns, of `room` for a prompt: the conversation takes `whole`, its question `least`.

    A conversation that fits isn't pushed out by what is recalled; of one that doesn't, the question is sure."""
    taken, share = (whole, WINDOW_SHARE) if whole <= room else (least, LONG_SHARE)
    return min(RECALL_TOKENS, int(room * share), room - taken - SPARE_TOKENS)


def in_view(conversation: Conversation, room: int) -> set[str]:
    """The texts of the newest turns that surely fit `room` tokens: what needs no recalling."""
    texts: set[str] = set()
    for turn in reversed(conversation.turns):
        room -= len(turn.token_ids)
        if room < 0:
            break
        texts.add(turn.text.strip())
    return texts


def choose_turns(
    found: Sequence[SessionTurn], known: set[str], budget_tokens: int, count: Count, session_order: Sequence[str]
) -> list[SessionTurn]:
    """Goes from best to worst, leaves out what is `known` or said twice and what no longer fits, orders the rest.

    Where not even the best fits, its beginning does."""
    chosen: list[SessionTurn] = []
    seen, left = set(known), budget_tokens
    for turn in found:
        text = turn.text.strip()
        if not text or text in seen:
            continue
        cost = count(turn)
        if cost > left and not chosen:
            turn = _cut_to(turn, left, count)
            cost = count(turn)
        if cost <= left and turn.text:
            seen.add(text)
            chosen.append(turn)
            left -= cost
    place = {session_id: index for index, session_id in enumerate(session_order)}
    return sorted(chosen, key=lambda turn: (place[turn.session_id], turn.turn))


def with_turns(
    composer: Composer,
    conversation: Conversation,
    found: Sequence[SessionTurn],
    known: set[str],
    budget_tokens: int,
    sessions: Sequence[str],
    with_session: bool,
    held: Collection[str] = (),
) -> tuple[Conversation, list[SessionTurn]]:
    """The conversation with the turns that help with its question, and which these are; see `choose_turns`. Those
    whose text the prompt has as `held` already are chosen, too, and not repeated."""
    piece = partial(composer.turn_piece, with_session=with_session)
    heading = composer.text_piece(HEADING)

    def count(turn: SessionTurn) -> int:
        return 0 if turn.text.strip() in held else len(piece(turn))

    chosen = choose_turns(found, known, budget_tokens - len(heading), count, sessions)
    ids = array("i")
    for turn in chosen:
        ids.extend(piece(turn) if count(turn) else [])
    return replace(conversation, recalled_ids=tuple([*heading, *ids] if ids else ())), chosen


def turn_citation(turn: SessionTurn) -> TurnCitation:
    quote = turn.text.strip()
    if len(quote) > QUOTE_CHARS:
        quote = quote[:QUOTE_CHARS].rstrip() + "…"
    return TurnCitation(turn.session_id, turn.turn, turn.speaker, turn.at, quote)


def _cut_to(turn: SessionTurn, budget_tokens: int, count: Count) -> SessionTurn:
    """The longest beginning of a turn that fits, by bisection over characters; empty where none does."""
    low, high = 0, len(turn.text)
    while low < high:
        middle = (low + high + 1) // 2
        if count(replace(turn, text=turn.text[:middle])) <= budget_tokens:
            low = middle
        else:
            high = middle - 1
    return replace(turn, text=turn.text[:low])
