"""Text to token ids and back, exactly as the model was trained (`service.ports.Tokenizer`).

Knows the `tokenizers` package and where a model keeps its tokenizer. User text can't smuggle in control tokens: one
instance treats their markers as text, a second one, used for templates only, parses them. Thread-safe.
"""

from __future__ import annotations

import codecs
import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from perilune.errors import UnsupportedModel
from perilune.runtime.checkpoint import FolderCheckpoint, GGUFCheckpoint
from perilune.runtime.safetensors_file import read_json
from perilune.runtime.tokenizer_gguf import load_converted

# Ends of turns that chat models emit and that some files forget to list as end of sequence.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|eom_id|>")


class ModelTokenizer:
    """A `service.ports.Tokenizer`. `source` is a tokenizer.json, or its text."""

    def __init__(
        self,
        source: Path | str,
        *,
        eos_ids: Iterable[int] = (),
        bos_ids: Sequence[int] = (),
        first: Tokenizer | None = None,
    ) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._plain = self._prepared(first or _load(source), markers_are_text=True)
        self._parsing: Tokenizer | None = None
        self._bos_ids = tuple(bos_ids)
        added = self._plain.get_added_tokens_decoder()
        self._special = frozenset(index for index, token in added.items() if token.special)
        ends = {index for index, token in added.items() if token.special and token.content in _TURN_ENDS}
        self._stop_ids = frozenset(eos_ids) | ends
        self._added = {index: token.content for index, token in added.items()}
        self._byte_of_char, self._strips_first_space = _decoding(self._plain)

    @property
    def bos_ids(self) -> tuple[int, ...]:
        return self._bos_ids

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._stop_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: they end or structure text and never appear in it."""
        return self._special

    @property
    def vocab_size(self) -> int:
        return int(self._plain.get_vocab_size())

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact content."""
        found: int | None = self._plain.token_to_id(token)
        return found

    def encode(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def encode_template(self, text: str) -> list[int]:
        return list(self._for_templates.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without control tokens; bytes that are no UTF-8 become U+FFFD."""
        stream = self.stream()
        return "".join(map(stream.push, token_ids)) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; its marker for a control token; nothing for an id without a token."""
        if token_id in self._added:
            content = self._added[token_id]
            plain = content if token_id in self._special or self._byte_of_char else content.replace("▁", " ")
            return plain.encode()
        token = self._plain.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of_char:
            return bytes(self._byte_of_char.get(char, 0x3F) for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return str(token).replace("▁", " ").encode()

    def stream(self) -> TextStream:
        return TextStream(self)

    @property
    def strips_first_space(self) -> bool:
        """Whether the vocabulary puts a space before every text, which decoding takes away again."""
        return self._strips_first_space

    @property
    def _for_templates(self) -> Tokenizer:
        with self._lock:
            if self._parsing is None:
                self._parsing = self._prepared(_load(self._source), markers_are_text=False)
            return self._parsing

    @staticmethod
    def _prepared(tokenizer: Tokenizer, *, markers_are_text: bool) -> Tokenizer:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = markers_are_text
        return tokenizer


class TextStream:
    """A `service.ports.StreamDecoder`: holds back the bytes of an unfinished character."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strips_first_space

    def push(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def _load(source: Path | str) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(source)) if isinstance(source, Path) else Tokenizer.from_str(source)
    except Exception as error:  # the package raises bare Exception for whatever is wrong
        raise UnsupportedModel(
            f"The model's tokenizer can't be loaded: {error}.", hint="Download the model again."
        ) from None


def _decoding(tokenizer: Tokenizer) -> tuple[dict[str, int], bool]:
    """Byte-level: the byte of each character. SentencePiece: nothing, and whether a leading space is stripped."""
    described = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    steps: list[dict[str, Any]] = described.get("decoders", [described])
    if any(step.get("type") == "ByteLevel" for step in steps):
        return _byte_alphabet(), False
    strips = any(step.get("type") == "Strip" and step.get("start") for step in steps)
    metaspace = any(step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never" for step in steps)
    return {}, strips or metaspace


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (openai/gpt-2, encoder.py)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in visible}
    hidden = [byte for byte in range(256) if byte not in visible]
    table.update({chr(256 + offset): byte for offset, byte in enumerate(hidden)})
    return table


# --------------------------------------------------------------------------------------------- where it is kept


def load_tokenizer(checkpoint: GGUFCheckpoint | FolderCheckpoint) -> ModelTokenizer:
    """Raises `UnsupportedModel` when the model has none that we can rebuild."""
    if isinstance(checkpoint, GGUFCheckpoint):
        return _from_gguf(checkpoint)
    return _from_folder(checkpoint.folder.path)


def _from_gguf(checkpoint: GGUFCheckpoint) -> ModelTokenizer:
    file = checkpoint.file
    tokenizer, source = load_converted(file)
    ends = [file.integer(f"tokenizer.ggml.{name}_token_id", -1) for name in ("eos", "eot", "eom")]
    bos = file.integer("tokenizer.ggml.bos_token_id", -1)
    by_default = file.text("tokenizer.ggml.model") == "llama" or file.text("tokenizer.ggml.pre") in (
        "llama-bpe",
        "llama3",
        "llama-v3",
        "tekken",
    )
    adds = file.flag("tokenizer.ggml.add_bos_token", by_default)
    return ModelTokenizer(
        source,
        eos_ids=[end for end in ends if end >= 0],
        bos_ids=[bos] if adds and bos >= 0 else [],
        first=tokenizer,
    )


def _from_folder(folder: Path) -> ModelTokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModel(
            "The model folder has no tokenizer.json.",
            hint="Use a folder with a fast tokenizer, or the GGUF version of the model.",
        )
    tokenizer = _load(path)
    # What the model's own post-processor puts before an empty text is what a prompt must begin with.
    bos_ids = list(tokenizer.encode("", add_special_tokens=True).ids)
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    eos = tokenizer.token_to_id(special_text(settings.get("eos_token")) or "")
    eos_ids = {eos} if eos is not None else set()
    if eos is not None and bos_ids[-1:] == [eos]:
        bos_ids.pop()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            eos_ids |= _ids(read_json(folder / name).get("eos_token_id"))
    return ModelTokenizer(path, eos_ids=eos_ids, bos_ids=bos_ids, first=tokenizer)


def special_text(value: object) -> str | None:
    """A special token of tokenizer_config.json, which is a string or an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _ids(value: object) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int)}
