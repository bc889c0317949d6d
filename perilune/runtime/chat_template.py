"""The model's chat template, rendered in a sandbox (`service.ports.ChatTemplate`).

Templates come with model files, so they are untrusted code: no attribute tricks (jinja2's immutable sandbox), no
endless loops (every turn of a loop and every macro call is counted), no huge strings or numbers, bounded output.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from perilune.errors import InvalidRequest, UnsupportedModel
from perilune.runtime.checkpoint import FolderCheckpoint, GGUFCheckpoint
from perilune.runtime.safetensors_file import read_json
from perilune.runtime.tokenizer import special_text

MAX_TURNS = 200_000
"""Loop turns and macro calls of one rendering."""

MAX_OPERAND = 1 << 20
"""Longest sequence or largest number that a template may multiply."""

MAX_SOURCE_CHARS = 1 << 20
_TICK = "__tick"


class _Refused(TemplateError):
    """The template called `raise_exception`: the messages are not what it accepts."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with counted loops and bounded operators."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "*" and _large(left, right)):
            raise SecurityError(f"operator {operator} on large values")
        if operator in "+%" and _length(left) + _length(right) > MAX_OPERAND * 64:
            raise SecurityError("a value grew too large")
        return super().call_binop(context, operator, left, right)

    def compile_counted(self, source: str) -> Template:
        """Compile with a call of `__tick` at the start of every loop turn and macro."""
        tree = self._parse(source, None, None)
        loops: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for node in loops:
            call = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
            node.body.insert(0, nodes.Output([call]).set_lineno(node.lineno))
        tree.set_environment(self)
        code = self.compile(tree)
        return Template.from_code(self, code, self.globals)


class _Counter:
    """Turns of one rendering."""

    def __init__(self) -> None:
        self._turns = 0

    def __call__(self) -> str:
        self._turns += 1
        if self._turns > MAX_TURNS:
            raise SecurityError(f"more than {MAX_TURNS} loop turns")
        return ""


class JinjaChatTemplate:
    """A `service.ports.ChatTemplate`. `now` is the clock that templates may print the date from.

    Raises `UnsupportedModel` when the source is no template.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        if len(source) > MAX_SOURCE_CHARS:
            raise UnsupportedModel("The model's chat template is too large.", hint="Download the model again.")
        try:
            self._template = environment.compile_counted(source)
        except (TemplateError, RecursionError, SyntaxError) as error:
            raise UnsupportedModel(
                f"The model's chat template is damaged: {error}.", hint="Download the model again."
            ) from None

    def render(
        self,
        messages: Sequence[dict[str, str]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text; `variables` are what the template may be told beside. Raises `InvalidRequest` when the
        template refuses the messages or misbehaves."""
        limit = 2 * MAX_SOURCE_CHARS + 8 * sum(len(text) for message in messages for text in message.values())
        given = {
            **(variables or {}),
            **self._tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            _TICK: _Counter(),
        }
        try:
            return "".join(_bounded(self._template.generate(given), limit))
        except _Refused as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}",
                hint="Most models want an optional system message, then user and assistant in turn.",
                param="messages",
            ) from None
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise _failed(error) from None
        except (RecursionError, MemoryError) as error:
            raise _failed(error) from None


def _failed(error: BaseException) -> InvalidRequest:
    return InvalidRequest(
        f"The model's chat template failed: {error or type(error).__name__}.",
        hint="Check the roles and contents of the messages.",
        param="messages",
    )


def _bounded(pieces: Iterator[str], limit: int) -> Iterator[str]:
    total = 0
    for piece in pieces:
        total += len(piece)
        if total > limit:
            raise SecurityError("the rendered prompt is too long")
        yield piece


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _large(left: Any, right: Any) -> bool:
    for value, other in ((left, right), (right, left)):
        if _length(value) and isinstance(other, int) and _length(value) * other > MAX_OPERAND:
            return True
    return all(isinstance(value, int) and abs(value) > MAX_OPERAND for value in (left, right))


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    """JSON as models were trained on it: not escaped for HTML, not reordered."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


# --------------------------------------------------------------------------------------------- where it is kept


def load_chat_template(
    checkpoint: GGUFCheckpoint | FolderCheckpoint, *, now: Callable[[], datetime] = datetime.now
) -> JinjaChatTemplate | None:
    """The model's template, or None for a base model. Raises `UnsupportedModel` for a damaged one."""
    if isinstance(checkpoint, GGUFCheckpoint):
        return _from_gguf(checkpoint, now)
    folder = checkpoint.folder.path
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    source = _source(settings.get("chat_template"))
    if (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if source is None:
        return None
    return JinjaChatTemplate(
        source,
        bos_token=special_text(settings.get("bos_token")) or "",
        eos_token=special_text(settings.get("eos_token")) or "",
        now=now,
    )


def _source(value: object) -> str | None:
    """A template, or the one named `default` of several."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _from_gguf(checkpoint: GGUFCheckpoint, now: Callable[[], datetime]) -> JinjaChatTemplate | None:
    file = checkpoint.file
    source = file.text("tokenizer.chat_template")
    if not source:
        return None

    def token(name: str) -> str:
        return file.string_at("tokenizer.ggml.tokens", file.integer(f"tokenizer.ggml.{name}_token_id", -1))

    return JinjaChatTemplate(source, bos_token=token("bos"), eos_token=token("eos"), now=now)
