"""A GGUF file's vocabulary, made into a `tokenizers` object and kept as tokenizer.json beside the model.

Knows llama.cpp's two tokenizer models (`gpt2`: byte-level BPE with a named pre-tokenizer; `llama`: SentencePiece
BPE with byte fallback) and how each is said in Hugging Face's terms. Conversion runs once per file, at pull or at
the first load; the conversion of 262,144 SentencePiece tokens takes seconds, loading its result a fraction of one.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from perilune.errors import UnsupportedModel
from perilune.runtime.gguf_file import GGUFFile

CONVERTER_VERSION = 1
"""Raise when the conversion changes; kept conversions of older versions are then made anew."""

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
_SPACE = "▁"

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Names of `tokenizer.ggml.pre` (llama.cpp: llama-vocab.cpp), by the splitting that they mean.
_PLAIN_BPE = ("gpt-2", "default", "")
_DIGIT_BPE = ("smollm", "codeshell", "refact", "command-r")
_REGEX_BPE = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")
_NFC = ("qwen2", "deepseek-r1-qwen")


def converted_path(file: GGUFFile) -> Path:
    """Where the conversion of a file is kept: beside it, named after what it depends on."""
    digest = hashlib.sha256(f"{CONVERTER_VERSION}|{file.header_digest}".encode()).hexdigest()[:12]
    return file.path.with_name(f"{file.path.stem}.tokenizer-{digest}.json")


def convert_tokenizer(gguf_path: Path) -> Path:
    """Convert a model's tokenizer unless that was done; returns the tokenizer.json.

    Raises `UnsupportedModel` for a tokenizer we can't rebuild exactly, OSError where the folder can't be written.
    """
    file = GGUFFile(gguf_path)
    try:
        target = converted_path(file)
        if not target.is_file():
            _write_whole(target, build_tokenizer(file).to_str())
        return target
    finally:
        file.close()


def load_converted(file: GGUFFile) -> tuple[Tokenizer, str | Path]:
    """The tokenizer, and what a second instance can be made from: the kept file, or JSON where none can be kept."""
    target = converted_path(file)
    kept = _read_kept(target)
    if kept is not None:
        return kept, target
    text = build_tokenizer(file).to_str()
    if not os.access(target.parent, os.W_OK):
        return Tokenizer.from_str(text), text
    _write_whole(target, text)
    return Tokenizer.from_file(str(target)), target


def _read_kept(target: Path) -> Tokenizer | None:
    """A kept conversion; None where there is none, or one that was damaged and has to be made again."""
    if not target.is_file():
        return None
    try:
        return Tokenizer.from_file(str(target))
    except Exception:  # the package raises bare Exception for whatever is wrong
        return None


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """Raises `UnsupportedModel` for an unknown tokenizer model or pre-tokenizer."""
    kind = file.text("tokenizer.ggml.model")
    tokens = file.strings("tokenizer.ggml.tokens")
    if not tokens or kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"The model's tokenizer {kind!r} is not supported.", hint="Supported in GGUF: gpt2, llama."
        )
    tokenizer = _byte_level(file, tokens) if kind == "gpt2" else _sentencepiece(file, tokens)
    _add_tokens(file, tokenizer, tokens)
    return tokenizer


def _byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    pre = file.text("tokenizer.ggml.pre")
    known = (*_PLAIN_BPE, *_DIGIT_BPE, *_REGEX_BPE)
    if pre not in known:
        raise UnsupportedModel(
            f"The model's pre-tokenizer {pre!r} is not supported.",
            hint=f"Supported in GGUF: {', '.join(name for name in known if name)}. Use the safetensors version.",
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.strings("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in merges if left + right in vocab]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _REGEX_BPE)
    first: list[pre_tokenizers.PreTokenizer] = []
    if pre in _DIGIT_BPE:
        first = [pre_tokenizers.Digits(individual_digits=True)]
    elif pre in _REGEX_BPE:
        first = [pre_tokenizers.Split(Regex(_REGEX_BPE[pre]), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, bytes_only])
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    scores = file.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise UnsupportedModel("The model's tokenizer has no scores.", hint="Download the model again.")
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = file.integer("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(vocab, scores.tolist()),
            unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    back: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
    return tokenizer


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """BPE merges that repeat SentencePiece: a pair joins into a known piece, best-scored piece first."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocab.items():
        score = scores[index]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                found.append((-score, index, cut, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_tokens(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Control tokens become special; what a user of the vocabulary defined stays text, but is never split."""
    kinds = file.numbers("tokenizer.ggml.token_type")
    if kinds is None:
        return
    special, plain = [], []
    for token, kind in zip(tokens, kinds.tolist(), strict=True):
        if kind in (CONTROL, UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _write_whole(target: Path, text: str) -> None:
    """The file appears complete or not at all."""
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with part.open("w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
