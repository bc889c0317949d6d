"""Chat templates: what models ship renders as transformers renders it; what is hostile is stopped."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path

import pytest

from perilune.errors import InvalidRequest, UnsupportedModel
from perilune.runtime.chat_template import JinjaChatTemplate, load_chat_template
from perilune.runtime.checkpoint import open_checkpoint
from tests.runtime.families import make_model

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Name a <b>moon</b> & "quote" 月'},
    {"role": "assistant", "content": "Io"},
    {"role": "user", "content": "Another?"},
]
LLAMA3 = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}"
    "{%- endif %}"
    "{%- for message in messages %}\n{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}{{ date_string }}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ m | tojson }}{% endfor %}"
)


def fixed_now() -> datetime:
    return datetime(2026, 11, 30)


def test_smollm2_says_what_transformers_says(smollm2_path: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = load_chat_template(open_checkpoint(smollm2_path))
    assert template is not None
    source = open_checkpoint(smollm2_path).file.text("tokenizer.chat_template")  # type: ignore[union-attr]
    for turns in (TURNS, TURNS[1:], TURNS[1:2]):
        for prompt in (True, False):
            expected, _ = render_jinja_template(
                conversations=[turns], chat_template=source, add_generation_prompt=prompt
            )
            assert template.render(turns, add_generation_prompt=prompt) == expected[0]
    assert template.render(TURNS).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_base_model_has_none(gemma_path: Path) -> None:
    assert load_chat_template(open_checkpoint(gemma_path)) is None


def test_llama3_style_with_the_date() -> None:
    text = JinjaChatTemplate(LLAMA3, bos_token="<s>", now=fixed_now).render(TURNS[1:2])
    assert text.startswith(
        '<s><|start_header_id|>user<|end_header_id|>\n\nName a <b>moon</b> & "quote" 月<|eot_id|>'
    )
    assert "30 Nov 2026" in text


def test_tojson_escapes_nothing_for_html() -> None:
    assert JinjaChatTemplate(STRICT).render(TURNS[1:2]) == json.dumps(TURNS[1], ensure_ascii=False)


def test_refusal_is_the_callers_error() -> None:
    with pytest.raises(InvalidRequest, match="must alternate"):
        JinjaChatTemplate(STRICT).render(TURNS)
    with pytest.raises(InvalidRequest):
        JinjaChatTemplate("{{ messages[5]['content'] }}").render(TURNS[:1])
    with pytest.raises(InvalidRequest):
        JinjaChatTemplate("{{ messages[0]['content'] + 1 }}").render(TURNS[:1])


HOSTILE = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "huge range": "{% for a in range(10**12) %}{% endfor %}",
    "loop over text": "{% for a in 'x' * 100000 %}{% for b in 'x' * 100000 %}{% endfor %}{% endfor %}",
    "recursive macro": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "long text": "{{ 'x' * 10**10 }}",
    "long list": "{{ [0] * 10**10 }}",
    "power": "{{ 10 ** 10 ** 8 }}",
    "doubling": "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "long output": "{% for a in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['__builtins__']['open']('/etc/passwd').read() }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "format": "{{ '{0.__class__}'.format(messages) }}{{ messages.append(1) }}",
    "import": "{% import 'os' as os %}{{ os.system('true') }}",
    "include": "{% include '/etc/passwd' %}",
    "changing the messages": "{% do messages.clear() %}{{ messages.pop() }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_stopped(name: str) -> None:
    began = time.process_time()
    with pytest.raises((InvalidRequest, UnsupportedModel)) as caught:
        JinjaChatTemplate(HOSTILE[name]).render(TURNS)
    assert "root:" not in str(caught.value)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("source", ["{% for %}", "{{ unclosed", "{% endif %}", "x" * (1 << 21)])
def test_damaged_template(source: str) -> None:
    with pytest.raises(UnsupportedModel):
        JinjaChatTemplate(source)


def test_from_a_folder(tmp_path: Path) -> None:
    make_model("llama-untied", tmp_path)
    assert load_chat_template(open_checkpoint(tmp_path)) is None
    settings = {
        "chat_template": [{"name": "default", "template": "{{ bos_token }}A"}],
        "bos_token": {"content": "<s>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    template = load_chat_template(open_checkpoint(tmp_path))
    assert template is not None
    assert template.render([]) == "<s>A"
    (tmp_path / "chat_template.jinja").write_text("B{{ bos_token }}")
    template = load_chat_template(open_checkpoint(tmp_path))
    assert template is not None
    assert template.render([]) == "B<s>"
