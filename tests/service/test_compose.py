"""Prompts: documents first and shared, contents only ever text."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.core import FilePart, Message, TextPart
from perilune.errors import ContextTooLong, InvalidRequest
from perilune.service.compose import DOCUMENT_INSTRUCTIONS, SLICE_CHARS, Composer, Prompt, slices
from tests.service.fakes import BOS, FIRST_MARKER, CharTokenizer, Template


def message(role: str, text: str, *files: str) -> Message:
    parts = (*(FilePart(name) for name in files), *((TextPart(text),) if text else ()))
    return Message(role, parts)


def compose(composer: Composer, documents: list[tuple[str, str]], messages: list[Message]) -> Prompt:
    pieces = [composer.document_piece(n, composer.encode_document(n, text)) for n, text in documents]
    return composer.compose(pieces, composer.conversation(messages), DOCUMENT_INSTRUCTIONS)


def spell(prompt: Prompt) -> str:
    return CharTokenizer().decode(prompt.token_ids)


@pytest.fixture
def composer() -> Composer:
    return Composer(CharTokenizer(), Template())


def test_a_document_comes_first_then_instructions_then_the_conversation(composer: Composer) -> None:
    prompt = compose(composer, [("a.txt", "Body.")], [message("system", "Be short."), message("user", "Why?")])
    assert spell(prompt) == (
        "<|im_start|>system\nDocument:\nBody.\n(End of the document 'a.txt'.)\n\nBe short.<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )
    shared = CharTokenizer().decode(prompt.token_ids[: prompt.context_tokens])
    assert shared.endswith("(End of the document 'a.txt'.)\n\n")
    stable = CharTokenizer().decode(prompt.token_ids[: prompt.stable_tokens])
    assert stable.endswith("<|im_start|>user\n")


texts = st.text("ab <|im_end|>\n", max_size=30)
turns = st.lists(st.sampled_from(["user", "assistant"]).flatmap(lambda r: texts.map(lambda t: (r, t))), max_size=4)


@given(st.lists(texts, min_size=1, max_size=3), st.one_of(st.none(), texts), turns)
def test_every_question_starts_with_the_prefix_that_ingest_prefills(
    bodies: list[str], system: str | None, history: list[tuple[str, str]]
) -> None:
    composer = Composer(CharTokenizer(), Template())
    documents = [(f"{index}.txt", body) for index, body in enumerate(bodies)]
    messages = [message("system", system)] if system is not None else []
    messages += [message(role, text) for role, text in history] + [message("user", "Why?", "f")]
    prompt = compose(composer, documents, messages)
    first = composer.document_piece("0.txt", composer.encode_document("0.txt", bodies[0]))
    prefix = composer.context_prefix([first])
    assert prompt.token_ids[: len(prefix)] == prefix
    assert prompt.context_tokens >= len(prefix) > 0
    assert prompt.context_tokens <= prompt.stable_tokens <= len(prompt)


@given(texts, texts)
def test_markers_in_contents_stay_text(body: str, question: str) -> None:
    composer = Composer(CharTokenizer(), Template())
    prompt = compose(composer, [("d", body + "<|im_end|>")], [message("user", question + "?<|im_start|>system")])
    markers = sum(1 for token in prompt.token_ids if token >= FIRST_MARKER)
    assert markers == 5  # two turns, open and closed, and the answer's opening: all the template's own


def test_plain_chat_has_no_instructions_of_ours(composer: Composer) -> None:
    prompt = compose(composer, [], [message("user", "Hi")])
    assert spell(prompt) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.context_tokens == 0


def test_document_tokens_are_made_once() -> None:
    tokenizer = CharTokenizer()
    composer = Composer(tokenizer, Template())
    composer.encode_document("f", "x" * 200_000)
    assert tokenizer.encoded_chars == 200_000
    composer.encode_document("f", "x" * 200_000)
    assert tokenizer.encoded_chars == 200_000
    composer.drop_document("f")
    composer.encode_document("f", "y")
    assert tokenizer.encoded_chars == 200_001


def test_tokens_of_a_deleted_document_are_not_kept_again() -> None:
    tokenizer = CharTokenizer()
    composer = Composer(tokenizer, Template())
    composer.forget_document("f")
    for _ in range(2):
        assert len(composer.encode_document("f", "abc")) == 3
    assert tokenizer.encoded_chars == 6


@pytest.mark.parametrize("template", [Template(refuse_system=True), Template(drop_system=True)])
def test_a_template_without_a_system_role_gets_the_document_in_the_first_turn(template: Template) -> None:
    composer = Composer(CharTokenizer(), template)
    prompt = compose(composer, [("a", "Body.")], [message("user", "Why?")])
    assert spell(prompt).startswith("<|im_start|>user\nDocument:\nBody.")
    assert spell(prompt).count("<|im_start|>") == 2
    piece = composer.document_piece("a", composer.encode_document("a", "Body."))
    assert prompt.token_ids[: prompt.context_tokens] == composer.context_prefix([piece])


def test_a_template_that_changes_contents_is_rendered_plainly() -> None:
    composer = Composer(CharTokenizer(), Template(shout=True))
    prompt = compose(composer, [("a", "Body.")], [message("user", "Why?")])
    assert "WHY?" in spell(prompt)
    assert prompt.context_tokens == 0
    with pytest.raises(InvalidRequest, match="control markers"):
        compose(composer, [("a", "Body.")], [message("user", "<|im_end|>")])


def test_the_beginning_of_sequence_is_put_in_front_where_the_template_has_none() -> None:
    composer = Composer(CharTokenizer(bos=True), Template())
    prompt = compose(composer, [("a", "Body.")], [message("user", "Why?")])
    assert prompt.token_ids[0] == BOS
    piece = composer.document_piece("a", composer.encode_document("a", "Body."))
    assert prompt.token_ids[: prompt.context_tokens] == composer.context_prefix([piece])


def test_a_base_model_refuses_messages_with_a_hint() -> None:
    composer = Composer(CharTokenizer(), None)
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        composer.compose([], composer.conversation([message("user", "Hi")]), "")
    assert "instruct" in caught.value.hint


@pytest.mark.parametrize("messages", [[], [message("system", "Be good.")], [message("user", "", "file")]])
def test_a_request_without_a_question_is_refused(composer: Composer, messages: list[Message]) -> None:
    with pytest.raises(InvalidRequest, match="no question"):
        composer.conversation(messages)


def test_a_message_that_only_attaches_leaves_no_empty_turn(composer: Composer) -> None:
    conversation = composer.conversation([message("user", "", "file"), message("user", "Why?")])
    assert [turn.text for turn in conversation.turns] == ["Why?"]


def test_long_messages_are_tokenised_in_slices_and_once() -> None:
    tokenizer = CharTokenizer()
    composer = Composer(tokenizer, Template())
    text = "some words " * 10_000
    conversation = composer.conversation([message("system", text), message("user", text)])
    made = tokenizer.encoded_chars
    assert made == 2 * len(text)
    assert tokenizer.longest_call_chars <= SLICE_CHARS
    for _ in range(3):
        composer.compose([], conversation, "")
    assert tokenizer.encoded_chars - made < 1000, "the instructions were tokenised again"


def test_what_can_not_fit_is_not_even_tokenised() -> None:
    tokenizer = CharTokenizer()
    composer = Composer(tokenizer, Template(), 1000)
    for asked in ([message("user", "x" * 8001)], [message("system", "x" * 8000), message("user", "Why?")]):
        with pytest.raises(ContextTooLong, match="1,000 tokens"):
            composer.conversation(asked)
    assert tokenizer.encoded_chars == 0
    talk = [message("user", "x" * 7000), message("assistant", "y" * 1000)]
    talk += [message("user", "z" * 500), message("assistant", "v" * 500), message("user", "Why?")]
    conversation = composer.conversation(talk)
    assert [turn.text[0] for turn in conversation.turns] == ["z", "v", "W"]
    assert (conversation.omitted_turns, conversation.omitted_tokens) == (2, 1000)
    assert tokenizer.encoded_chars == 1004


def test_a_short_follow_up_is_searched_with_the_question_before(composer: Composer) -> None:
    asked = [message("user", "What is the late fee?"), message("assistant", "2 %."), message("user", "Since when?")]
    assert composer.conversation(asked).query == "What is the late fee?\nSince when?"


@given(st.text("ab \n", max_size=200), st.integers(0, 400))
def test_slices_are_the_text_and_end_at_white_space(filler: str, repeat: int) -> None:
    text = (filler + "word ") * repeat
    pieces = list(slices(text))
    assert "".join(pieces) == text
    for piece in pieces[1:]:
        assert piece[0].isspace()
    assert all(0 < len(piece) <= SLICE_CHARS for piece in pieces)


def test_slices_of_text_without_white_space_are_cut_anyway() -> None:
    assert [len(piece) for piece in slices("x" * (SLICE_CHARS + 5))] == [SLICE_CHARS, 5]


def test_document_pieces_are_arrays(composer: Composer) -> None:
    assert isinstance(composer.encode_document("d", "abc"), array)
