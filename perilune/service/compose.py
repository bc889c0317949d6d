"""Composes prompts: documents first, then instructions, then the conversation; content is only ever text.

Knows the model's tokenizer and chat template; doesn't know files, plans or engines.

Layout. What every question about a document shares comes first: template head, document texts in order of first
mention, and only then the caller's instructions and turns. All of a document's questions, from any session of a
tenant, therefore start with the same tokens and hit the same KV. Earlier turns that memory found differ from
question to question, so they stand right before the question: what comes before it is the same as last time.

No prompt injection. The template is rendered with an unguessable sentinel in place of every content, split at the
sentinels, and each piece is tokenised alone: the template's pieces with special tokens, contents without. A control
marker inside a document or a message stays text. Consequences: no token spans the border of template and content,
and what a template does to a content itself (trimming, cutting thoughts out) does not happen.

Fallbacks. A template that refuses or drops the system message gets it at the start of the first turn. Where one
still drops, repeats, reorders or changes a sentinel, the contents are rendered plainly and tokenised with the
template; contents that hold control markers are then refused, because nothing could tell them from its own.
"""

from __future__ import annotations

import secrets
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from perilune.core import Message, Passage, SessionTurn
from perilune.errors import ContextTooLong, InvalidRequest
from perilune.service.ports import ChatTemplate, Tokenizer
from perilune.service.thinking import template_variables

SLICE_CHARS = 16_384
"""Documents are tokenised in slices of about this size: one call holds the interpreter for about 10 ms."""

_SLICE_SEARCH_CHARS = 256

MAX_CHARS_PER_TOKEN = 8
"""Text longer than this times the window is taken not to fit before it is tokenised."""

DOCUMENT_INSTRUCTIONS = "Answer the question from the document above. If the answer is not in it, say so."
PASSAGE_INSTRUCTIONS = "Answer the question from the passages above. If the answer is not in them, say so."

_CACHED_DOCUMENT_TOKENS = 2_000_000


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the conversation with its content's tokens; documents are not part of it."""

    role: str
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request's messages as the composer needs them. `instructions` are the leading system messages.

    `omitted_turns` oldest ones, of at least `omitted_tokens`, were not even tokenised: with them it can't fit.
    They are `omitted_bytes` long in UTF-8. `background_ids` tell of the user and the session so far, `recalled_ids`
    are earlier turns that memory found: they stand in this order right before the last user turn.
    """

    instructions: str
    turns: tuple[Turn, ...]
    instruction_ids: tuple[int, ...] = ()
    omitted_turns: int = 0
    omitted_tokens: int = 0
    recalled_ids: tuple[int, ...] = ()
    omitted_bytes: int = 0
    background_ids: tuple[int, ...] = ()
    effort: str | None = None  # how much the model is to think; None: as its template has it
    prefix: str = ""  # how the answer begins

    @property
    def has_history(self) -> bool:
        """There is something older that could be left out."""
        return len(self.turns) > 1 or self.omitted_turns > 0

    @property
    def asked(self) -> int:
        """The place of the last user turn among `turns`."""
        return max(index for index, turn in enumerate(self.turns) if turn.role == "user")

    @property
    def question(self) -> str:
        """The last user turn."""
        return next((turn.text for turn in reversed(self.turns) if turn.role == "user"), "")

    @property
    def query(self) -> str:
        """What to search for: the question, with the one before it where it is too short to stand alone."""
        asked = [turn.text for turn in self.turns if turn.role == "user"]
        if len(asked) > 1 and len(asked[-1].split()) < 4 and len(asked[-1]) < 24:
            return f"{asked[-2]}\n{asked[-1]}"
        return self.question

    def without_oldest(self, count: int) -> Conversation:
        return replace(self, turns=self.turns[count:])


@dataclass(frozen=True, slots=True)
class Prompt:
    """A composed prompt. `context_tokens` lead and are the same for every question about the same context;
    `stable_tokens` (>= context_tokens) is everything before the last user turn."""

    token_ids: array[int]
    context_tokens: int
    stable_tokens: int

    def __len__(self) -> int:
        return len(self.token_ids)


class Composer:
    """Prompts of one model. Thread-safe; calls take milliseconds (long documents more), so run them in a thread.

    `window_tokens` bounds what is tokenised of a conversation; None: all of it. `result_role` is the role that the
    template knows for results of tools.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        window_tokens: int | None = None,
        result_role: str = "user",
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._window = window_tokens
        self._result_role = result_role
        self._documents: OrderedDict[str, array[int]] = OrderedDict()
        self._forgotten: set[str] = set()
        self._lock = threading.Lock()

    # -------------------------------------------------------------------------------------- pieces

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def encode_document(self, key: str, text: str) -> array[int]:
        """A document's tokens, kept by `key` (file id) for its next question."""
        with self._lock:
            known = self._documents.get(key)
            if known is not None:
                self._documents.move_to_end(key)
                return known
        ids = self._encode(text)
        with self._lock:
            if key in self._forgotten:  # deleted while this thread was busy with it
                return ids
            self._documents[key] = ids
            while sum(map(len, self._documents.values())) > _CACHED_DOCUMENT_TOKENS and len(self._documents) > 1:
                self._documents.popitem(last=False)
        return ids

    def drop_document(self, key: str) -> None:
        """Don't keep a document's tokens any longer."""
        with self._lock:
            self._documents.pop(key, None)

    def forget_document(self, key: str) -> None:
        """Drop a deleted document's tokens, and never keep them again."""
        with self._lock:
            self._forgotten.add(key)
            self._documents.pop(key, None)

    def document_piece(self, filename: str, ids: Sequence[int]) -> array[int]:
        """A whole document as context. The name stands behind the text, so that a renamed copy shares its KV."""
        piece = array("i", self._tokenizer.encode("Document:\n"))
        piece.extend(ids)
        piece.extend(self._tokenizer.encode(f"\n(End of the document {filename!r}.)\n\n"))
        return piece

    def passage_piece(self, filename: str, passage: Passage) -> array[int]:
        """A retrieved passage as context, labelled so that the model can say where it is from."""
        place = passage.anchor or f"page {passage.page}"
        return array("i", self._tokenizer.encode(f"[{filename}, {place}]\n{passage.text.strip()}\n\n"))

    def text_piece(self, text: str) -> array[int]:
        """Text of ours as context: headings, the background."""
        return array("i", self._tokenizer.encode(text))

    def turn_piece(self, turn: SessionTurn, with_session: bool) -> array[int]:
        """A recalled turn as context, labelled with who said it and when, and with its session if asked."""
        session = f"session {turn.session_id!r}, " if with_session else ""
        said_at = f", {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(turn.at))}" if turn.at is not None else ""
        label = f"[{session}turn {turn.turn}, {turn.speaker}{said_at}]"
        return array("i", self._tokenizer.encode(f"{label}\n{turn.text.strip()}\n\n"))

    def conversation(
        self, messages: Sequence[Message], effort: str | None = None, prefix: str = ""
    ) -> Conversation:
        """Split off the instructions and tokenise the turns, the newest first where not all can fit.

        Raises `InvalidRequest` without a question, `ContextTooLong` where instructions and question can't fit.
        """
        leading: list[str] = []
        said: list[tuple[str, str]] = []
        for message in messages:
            if message.role in ("system", "developer") and not said:
                leading.append(message.text)
                continue
            if not message.text and message.file_ids:
                continue  # a message that only attaches a document: the document itself stands at the start
            role = "system" if message.role == "developer" else message.role
            said.append((role, message.text))
        if not any(role == "user" and text.strip() for role, text in said):
            raise InvalidRequest(
                "The request has no question: no user message with text.",
                hint="Add a message with role 'user' and some text.",
                param="messages",
            )
        instructions = "\n\n".join(text for text in leading if text)
        first = self._first_that_fits(instructions, said)
        omitted_chars = sum(len(text) for _, text in said[:first])
        turns = (Turn(role, text, tuple(self._encode(text))) for role, text in said[first:])
        return Conversation(
            instructions,
            tuple(turns),
            tuple(self._encode(instructions)),
            first,
            omitted_chars // MAX_CHARS_PER_TOKEN,
            omitted_bytes=sum(len(text.encode()) for _, text in said[:first]),
            effort=effort,
            prefix=prefix,
        )

    def _first_that_fits(self, instructions: str, said: list[tuple[str, str]]) -> int:
        """The oldest user turn worth tokenising: with those before it the text surely can't fit."""
        if self._window is None:
            return 0
        last = max(index for index, (role, _) in enumerate(said) if role == "user")
        limit = self._window * MAX_CHARS_PER_TOKEN
        chars = len(instructions) + sum(len(text) for _, text in said[last:])
        if chars > limit:
            raise ContextTooLong(
                f"Instructions and question hold {chars:,} characters; a window of {self._window:,} tokens "
                f"can't hold more than {limit:,}.",
                hint="Send less; upload a long text as a document, so that passages of it can be chosen.",
                param="messages",
            )
        for index in range(last - 1, -1, -1):
            chars += len(said[index][1])
            if chars > limit:
                return next(at for at in range(index + 1, last + 1) if said[at][0] == "user")
        return 0

    def _encode(self, text: str) -> array[int]:
        """In slices, because one call holds the interpreter for as long as it takes."""
        ids = array("i")
        for piece in slices(text):
            ids.extend(self._tokenizer.encode(piece))
        return ids

    # ------------------------------------------------------------------------------------- prompts

    def compose(self, context: Sequence[array[int]], conversation: Conversation, instructions: str) -> Prompt:
        """Context pieces, the caller's instructions (else `instructions`, where there is context) and the turns."""
        system = array("i")
        for piece in context:
            system.extend(piece)
        head = len(system)
        if conversation.instructions:
            system.extend(conversation.instruction_ids)
        elif context:
            system.extend(self._tokenizer.encode(instructions))
        turns = [(self._role(turn), array("i", turn.token_ids)) for turn in conversation.turns]
        asked = conversation.asked
        turns[asked] = (
            turns[asked][0],
            array("i", [*conversation.background_ids, *conversation.recalled_ids, *turns[asked][1]]),
        )
        ways = [[("system", system), *turns], _folded(system, self._tokenizer, turns)] if len(system) else [turns]
        refusal: InvalidRequest | None = None
        for contents in ways:
            try:
                pieces = self._split(contents, conversation.effort)
            except InvalidRequest as error:
                refusal = error
                continue
            if pieces is not None:
                return self._begun(self._join(pieces, contents, head, len(turns) - asked), conversation.prefix)
        if refusal is not None:
            raise refusal
        return self._begun(self._plain(ways[0], conversation.effort), conversation.prefix)

    def _begun(self, prompt: Prompt, prefix: str) -> Prompt:
        """The prompt, and how the answer begins."""
        if not prefix:
            return prompt
        return replace(prompt, token_ids=prompt.token_ids + array("i", self._tokenizer.encode(prefix)))

    def _role(self, turn: Turn) -> str:
        return self._result_role if turn.role == "tool" else turn.role

    def count_prompt(self, messages: Sequence[Message]) -> int:
        """Tokens of a prompt without its documents. Raises as `conversation` and `compose`."""
        return len(self.compose([], self.conversation(messages), ""))

    def context_prefix(self, context: Sequence[array[int]]) -> array[int]:
        """The tokens that every prompt with this context starts with: what ingest prefills."""
        probe = Conversation("", (Turn("user", "?", tuple(self._tokenizer.encode("?"))),))
        prompt = self.compose(context, probe, DOCUMENT_INSTRUCTIONS)
        return prompt.token_ids[: prompt.context_tokens]

    def _join(self, pieces: list[str], contents: list[tuple[str, array[int]]], head: int, last: int) -> Prompt:
        """Template pieces and contents in turn. The first `head` tokens of the first content are the context; what
        stands before the `last` contents will stand there next time, too."""
        ids = array("i")
        context_end = stable_end = 0
        for index, (fixed, (_, content)) in enumerate(zip(pieces, contents, strict=False)):
            ids.extend(self._tokenizer.encode_template(fixed) if fixed else [])
            if index == 0:
                self._begin(ids)
                context_end = len(ids) + head if head else 0
            if index <= len(contents) - last:
                stable_end = len(ids)
            ids.extend(content)
        ids.extend(self._tokenizer.encode_template(pieces[-1]) if pieces[-1] else [])
        return Prompt(ids, context_end, max(stable_end, context_end))

    def _begin(self, ids: array[int]) -> None:
        """Put the beginning-of-sequence token in front where the template has not."""
        bos = self._tokenizer.bos_ids
        if bos and tuple(ids[: len(bos)]) != tuple(bos):
            ids[0:0] = array("i", bos)

    def _split(self, contents: list[tuple[str, array[int]]], effort: str | None) -> list[str] | None:
        """The template's text around each content, or None where it does not leave contents alone."""
        marks = [f"x{secrets.token_hex(16)}x" for _ in contents]
        text = self._chat_template().render(
            [{"role": role, "content": mark} for (role, _), mark in zip(contents, marks, strict=True)],
            add_generation_prompt=True,
            variables=template_variables(effort),
        )
        pieces: list[str] = []
        at = 0
        for mark in marks:
            found = text.find(mark, at)
            if found < 0 or text.count(mark) != 1:
                return None
            pieces.append(text[at:found])
            at = found + len(mark)
        pieces.append(text[at:])
        return pieces

    def _plain(self, contents: list[tuple[str, array[int]]], effort: str | None) -> Prompt:
        """The fallback of the module header: nothing is known to be shared beyond equal tokens."""
        texts = [self._tokenizer.decode(content) for _, content in contents]
        for text in texts:
            if self._tokenizer.encode_template(text) != self._tokenizer.encode(text):
                raise InvalidRequest(
                    "A document or message holds control markers of the model, and this model's chat template "
                    "gives no way to keep them apart from its own.",
                    hint="Remove the markers, or use another model.",
                    param="messages",
                )
        rendered = self._chat_template().render(
            [{"role": role, "content": text} for (role, _), text in zip(contents, texts, strict=True)],
            add_generation_prompt=True,
            variables=template_variables(effort),
        )
        ids = array("i", self._tokenizer.encode_template(rendered))
        self._begin(ids)
        return Prompt(ids, 0, 0)

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise InvalidRequest(
                "The loaded model has no chat template: it continues text and can't answer messages.",
                hint="Load an instruction-tuned model, for example smollm2-135m-instruct; "
                "`perilune models` lists what there is.",
                param="model",
            )
        return self._template


def slices(text: str) -> Iterator[str]:
    """A text in pieces that depend on the text alone, cut before white space where there is some."""
    start = 0
    while len(text) - start > SLICE_CHARS:
        limit = start + SLICE_CHARS
        low = limit - _SLICE_SEARCH_CHARS
        space = max(text.rfind("\n", low, limit), text.rfind(" ", low, limit))
        end = space if space > low else limit
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _folded(
    system: array[int], tokenizer: Tokenizer, turns: list[tuple[str, array[int]]]
) -> list[tuple[str, array[int]]]:
    """Instructions and context at the start of the first turn, for templates that refuse a system message."""
    role, first = turns[0]
    joined = array("i", system)
    joined.extend(tokenizer.encode("\n\n"))
    joined.extend(first)
    return [(role, joined), *turns[1:]]
