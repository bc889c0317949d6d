"""The planted set: messages with known identifiers, to measure what a de-identifier lets through.

Reads the hand-written frames in `bench/data/privacy/frames`, fills their slots with invented values and writes
`messages.jsonl` (see the README there). Same seed, same file. Knows frames, slots, spans and wrappings; how
values look is in `bench.privacy_values`. Knows no detector.

    python -m bench.privacy_set        # writes bench/data/privacy/messages.jsonl
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

from bench.privacy_values import GROUPS, MAKERS

DATA = Path(__file__).parent / "data" / "privacy"
SEED = 20261130
FILLS = 4
LANGUAGES = ("en", "zh", "mixed")
SLOT = re.compile(
    r"\{\{(?:(?P<kind>[a-z_]+)=(?P<literal>[^{}|]+)(?:\|(?P<letter>[rulc]))?(?:\|(?P<name>\w+))?"
    r"|(?P<form>[a-z_0-9]+\.[a-z0-9]+)(?P<styles>(?:\+[a-z]+)*)(?:@(?P<label>\w+))?(?:!(?P<need>[rulc]))?)\}\}"
)
NEEDS = {"r": "rule", "u": "cue", "l": "list", "c": "context"}
CUE_KINDS = {"passport", "account", "order", "birth_date", "chat_id", "username", "staff_id", "medical_record"}
CUE_FORMS = {"phone.us10", "plate.en", "secret.password", "secret.hex", "national_id.uk", "tax_id.eu", "mac.bare"}
CUE_FORMS |= {"national_id.hk", "national_id.es", "national_id.br"}
CONTEXT_FORMS = {"address.eu", "email.hash"}
CONTEXT_STYLES = {"words", "enwords", "part", "enpart"}
LISTED_EN = {"full", "title", "rev", "up", "mid", "zw"}
LISTED_ZH = {"full", "sur", "old", "zw"}
EMOJI = ("🙏", "😀", "📞", "✅", "🎉", "👉", "❗", "🌸")
NO_WRAP = {"json", "code", "log", "table", "nowrap"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a message; `kind` is empty for text that nobody planted."""

    text: str
    kind: str = ""
    need: str = ""
    entity: str = ""


@dataclass(frozen=True, slots=True)
class Frame:
    number: int
    language: str
    tags: tuple[str, ...]
    fills: int
    body: str


@cache
def names() -> dict[str, list[str]]:
    loaded: dict[str, list[str]] = json.loads((DATA / "names.json").read_text(encoding="utf-8"))
    return loaded


def group_digits(text: str, separator: str) -> str:
    """Cards and IBANs by four, mainland mobiles 3-4-4, resident ids 6-8-4."""
    plain = re.sub(r"[ -]", "", text)
    known = {11: (3, 4, 4), 18: (6, 8, 4)} if plain[0].isdigit() else {}
    sizes = known.get(len(plain), (4,) * (len(plain) // 4 + 1))
    parts, at = [], 0
    for size in sizes:
        parts.append(plain[at : at + size])
        at += size
    return separator.join(part for part in parts if part)


def in_words(text: str, chinese: bool) -> str:
    if chinese:
        return text.translate(str.maketrans("0123456789", "零一二三四五六七八九"))
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    return " ".join(words[int(c)] for c in text if c.isdigit())


def styled(text: str, style: str) -> str:
    middle = len(text) // 2
    match style:
        case "fw":
            return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)
        case "zw":
            return f"{text[:middle]}\u200b{text[middle:]}"
        case "nl":
            return f"{text[:middle].rstrip(' -')}\n{text[middle:].lstrip(' -')}"
        case "sp":
            return group_digits(text, " ")
        case "dash":
            return group_digits(text, "-")
        case "words" | "enwords":
            return in_words(text, style == "words")
        case "part":
            return text[:-4] + in_words(text[-4:], True)
        case "enpart":
            return text[:-4] + in_words(text[-4:], False)
        case "low":
            return text.lower()
        case _:
            raise ValueError(f"no style {style!r}")


class Filler:
    """Values of one message: the same label gives the same value, the same person keeps all parts of the name."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._count = 0

    def _rng(self, key: str) -> Random:
        return Random(f"{SEED}:{self._seed}:{key}")

    def piece(self, slot: re.Match[str]) -> Piece:
        if slot["literal"]:
            kind = slot["kind"]
            need = (
                NEEDS[slot["letter"]]
                if slot["letter"]
                else "context"
                if kind == "person"
                else self._need(kind, "", [])
            )
            return Piece(slot["literal"], kind, "" if kind == "keep" else need, slot["name"] or "")
        kind, form = slot["form"].split(".")
        styles = [style for style in slot["styles"].split("+") if style]
        if re.fullmatch(r"[ez]\d", kind):
            piece = self._person(kind, form)
            kind = piece.kind
        else:
            piece, styles = self._value(slot["form"], slot["label"] or "", styles)
        text = piece.text
        for style in styles:
            text = styled(text, style)
        need = NEEDS[slot["need"]] if slot["need"] else piece.need
        if CONTEXT_STYLES & set(styles):
            need = "context"
        return replace(piece, text=text, need="" if kind == "keep" else need)

    def _value(self, form: str, label: str, styles: list[str]) -> tuple[Piece, list[str]]:
        self._count += 1
        rng = self._rng(f"{form}@{label}" if label else f"{form}#{self._count}")
        kind = form.split(".")[0]
        chosen = rng.choice(GROUPS[form]) if form in GROUPS else form
        base, *own = chosen.split("+")
        text = MAKERS[base](rng)
        return Piece(text, kind, self._need(kind, base, styles), f"{kind}-{label}" if label else ""), own + styles

    @staticmethod
    def _need(kind: str, form: str, styles: list[str]) -> str:
        if kind == "amount" or form in CONTEXT_FORMS:
            return "context"
        return "cue" if kind in CUE_KINDS or form in CUE_FORMS else "rule"

    def _person(self, who: str, form: str) -> Piece:
        rng = self._rng(who)
        rare = rng.random() < 0.2
        chinese = who.startswith("z")
        text = (
            self._chinese(int(who[1:]), rng, rare, form)
            if chinese
            else self._western(int(who[1:]), rng, rare, form)
        )
        if form in {"mail", "user"}:
            return Piece(
                text,
                "email" if form == "mail" else "username",
                "rule" if form == "mail" else "cue",
                f"{who}-{form}",
            )
        if form == "title":
            need = "list"
        else:
            need = "list" if form in (LISTED_ZH if chinese else LISTED_EN) and not rare else "context"
        return Piece(text, "person", need, who)

    def _name(self, pool: str, nth: int) -> str:
        """The nth of the pool in this message's order, so that two persons of a message never share a name."""
        return self._rng(pool).sample(names()[pool], nth + 1)[nth]

    def _western(self, nth: int, rng: Random, rare: bool, form: str) -> str:
        if rare:
            given, family, nick = self._name("en_rare", nth).split("|")
        else:
            given, nick = self._name("en_given", nth).split()
            family = self._name("en_family", nth)
        middle = rng.choice("ABCDEFGHJKLMRST")
        plain = "".join(c for c in f"{given}.{family}".lower() if c.isascii() and (c.isalpha() or c == "."))
        return {
            "full": f"{given} {family}",
            "first": given,
            "last": family,
            "title": family,
            "rev": f"{family}, {given}",
            "up": f"{given} {family}".upper(),
            "low": f"{given} {family}".lower(),
            "mid": f"{given} {middle}. {family}",
            "ini": f"{given[0]}.{family[0]}.",
            "fi": f"{given[0]}. {family}",
            "nick": nick,
            "zw": f"{given} {family[:2]}\u200b{family[2:]}",
            "mail": f"{plain}@example.com",
            "user": f"{plain.replace('.', '')[:9]}{rng.randint(10, 99)}",
        }[form]

    def _chinese(self, nth: int, rng: Random, rare: bool, form: str) -> str:
        if rare:
            family, given, family_py, given_py = self._name("zh_rare", nth).split("|")
        else:
            family, family_py = self._name("zh_family", nth).split()
            given, given_py = self._name("zh_given", nth).split()
        return {
            "full": family + given,
            "sur": family,
            "given": given if len(given) > 1 else f"阿{given}",
            "old": (rng.choice("老小") if len(family) == 1 else "") + family,
            "mou": f"{family}某",
            "spaced": " ".join(family + given),
            "zw": f"{family}\u200b{given}",
            "py": f"{family_py} {given_py}",
            "pyr": f"{given_py} {family_py}",
            "ini": f"{family_py[0]}{given_py[0]}",
            "en": f"{given_py.lower()}",
            "mail": f"{given_py.lower()}.{family_py.lower()}@example.com",
            "user": f"{family_py.lower()}{given_py.lower()}{rng.randint(10, 99)}",
        }[form]


def read_frames(language: str) -> Iterator[Frame]:
    """Blocks that start with `%% tags`; one without a slot to fill is used once."""
    number = 0
    for path in sorted((DATA / "frames").glob(f"{language}*.txt")):
        for block in re.split(r"(?m)^%% ", path.read_text(encoding="utf-8"))[1:]:
            head, body = block.split("\n", 1)
            fills = FILLS if any(slot["form"] for slot in SLOT.finditer(body)) else 1
            number += 1
            yield Frame(number, language, tuple(head.split()), fills, body.strip("\n").replace("\\t", "\t"))


def pieces_of(frame: Frame, seed: str) -> list[Piece]:
    filler, pieces, at = Filler(seed), [], 0
    for slot in SLOT.finditer(frame.body):
        pieces += [Piece(frame.body[at : slot.start()]), filler.piece(slot)]
        at = slot.end()
    pieces.append(Piece(frame.body[at:]))
    for piece in pieces:
        if "{{" in piece.text and not {"code", "json"} & set(frame.tags):
            raise ValueError(f"{frame.language} frame {frame.number} has a slot that can't be read: {piece.text!r}")
    return [piece for piece in pieces if piece.text]


def replaced(pieces: list[Piece], old: str, new: str) -> list[Piece]:
    return [replace(piece, text=piece.text.replace(old, new)) for piece in pieces]


def ends_a_phrase(piece: Piece, following: Piece) -> bool:
    """Whether an emoji may stand between: not within a link, nor between a name and its title."""
    return bool(piece.kind) and piece.kind != "url_token" and following.text[0] in " ，。,.;；!！?？\n"


def wrapped(pieces: list[Piece], frame: Frame, fill: int) -> tuple[list[Piece], str]:
    """The message as it stands, with emoji, as a quoted reply, or inside a JSON string; and the tag of that."""
    broken = any(piece.kind and "\n" in piece.text for piece in pieces)
    if fill == 0 or broken or NO_WRAP & set(frame.tags):
        return pieces, ""
    if fill == 1:
        mark = EMOJI[frame.number % len(EMOJI)]
        at = next((i for i in range(len(pieces) - 1) if ends_a_phrase(pieces[i], pieces[i + 1])), len(pieces) - 1)
        return [*pieces[: at + 1], Piece(mark), *pieces[at + 1 :]], "emoji"
    if fill == 2:
        head = "> " if frame.language == "en" else "在 2026年11月3日 写道：\n> "
        return [Piece(head), *replaced(pieces, "\n", "\n> ")], "quoted"
    escaped = replaced(replaced(replaced(pieces, "\\", "\\\\"), '"', '\\"'), "\n", "\\n")
    return [Piece('{"role": "user", "content": "'), *escaped, Piece('"}')], "json-string"


def message(frame: Frame, fill: int) -> dict[str, object]:
    pieces, tag = wrapped(pieces_of(frame, f"{frame.language}{frame.number}.{fill}"), frame, fill)
    planted: list[dict[str, object]] = []
    at = 0
    for piece in pieces:
        end = at + len(piece.text)
        if piece.kind:
            item: dict[str, object] = {"kind": piece.kind, "start": at, "end": end, "value": piece.text}
            planted.append(item | {k: v for k in ("need", "entity") if (v := getattr(piece, k))})
        at = end
    return {
        "id": f"{frame.language}-{frame.number:03d}-{fill}",
        "language": frame.language,
        "text": "".join(piece.text for piece in pieces),
        "planted": planted,
        "tags": [*frame.tags, *([tag] if tag else [])],
    }


def messages() -> list[dict[str, object]]:
    """Every message, in a fixed order; a frame without slots gives the same text twice only once."""
    seen: set[object] = set()
    kept = []
    for language in LANGUAGES:
        for frame in read_frames(language):
            for fill in range(frame.fills):
                made = message(frame, fill)
                if made["text"] not in seen:
                    seen.add(made["text"])
                    kept.append(made)
    return kept


def dump(made: list[dict[str, object]]) -> str:
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in made)


if __name__ == "__main__":
    (DATA / "messages.jsonl").write_text(dump(messages()), encoding="utf-8")
