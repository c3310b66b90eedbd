"""Each family's template gets tool calls in the forms that it reads, as in `transformers` where that works.

The templates below write tool calls in the ways of the public families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from petiole.gpu_worker.text import load_tokenizer
from petiole.gpu_worker.text.forms import Forms
from tests.gpu_worker.text.test_chat import model_folder

TEXT = '{"city": "Köln", "days": 2}'
DATA = {"city": "Köln", "days": 2}

R1 = """{% for m in messages %}{% if m['role'] == 'user' %}[U]{{ m['content'] }}{% endif %}
{%- if m['role'] == 'assistant' and m['content'] is none %}
{%- for t in m['tool_calls'] %}[C]{{ t['type'] + '|' + t['function']['name'] }}
{{ '```json' + t['function']['arguments'] + '```' }}{% endfor %}
{%- elif m['role'] == 'assistant' %}[A]{{ '' + m['content'] }}{% endif %}
{%- if m['role'] == 'tool' %}[T]{{ m['content'] }}{% endif %}{% endfor %}"""
HERMES = """{% for m in messages %}<{{ m.role }}>{% if m.content %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}{% set f = call.function or call %}<call>
{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</call>{% endfor %}
{%- endfor %}"""
EITHER = HERMES.replace(
    "{{ f.arguments | tojson }}",
    "{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}",
)
CODER = """{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<function={{ call.function.name }}>
{%- for name, value in call.function.arguments | items %}<{{ name }}>{{ value }}</{{ name }}>{% endfor %}
{%- endfor %}{% endfor %}"""
LLAMA = """{% for m in messages %}<{{ m.role }}>{% if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}
{%- else %}{{ m.content | trim }}{% endif %}{% endfor %}"""
MISTRAL = """{% for m in messages %}{% if m.tool_calls is defined %}[TOOL_CALLS][
{%- for call in m.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('9 letters') }}{% endif %}
{{ call.function | tojson }}, {{ call.id }}{% endfor %}]
{%- else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"""
PYTHON = """{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments }}){% endfor %}
{%- endfor %}"""
ONLY_WITH_TOOLS = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}" + HERMES
FAMILIES = {
    "DeepSeek-R1": (R1, Forms(False, True, True, False)),
    "Qwen2.5, hermes": (HERMES, Forms(False, False, False, True)),
    "Qwen3": (EITHER, Forms(False, False, True, True)),
    "Qwen3-Coder, GLM": (CODER, Forms(False, False, False, True)),
    "Llama 3": (LLAMA, Forms(False, False, False, True)),
    "Mistral": (MISTRAL, Forms(False, False, False, True)),
    "writes what it gets": (PYTHON, Forms(False, False, True, False)),
    "refuses calls without tools": (ONLY_WITH_TOOLS, Forms(False, False, False, True)),
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "it", "parameters": {}}}]


def conversation(arguments: object, **content: object) -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    return [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", **content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "rain"},
    ]


def in_transformers(folder: Path, messages: Any) -> str | None:
    """As the release before 5.24 renders it, which passes null on; None if the template fails."""
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    render = transformers.utils.chat_template_utils.render_jinja_template
    try:
        (text,), _ = render([messages], tools=TOOLS, chat_template=oracle.chat_template)
    except Exception:
        return None
    return text


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=["missing", "null", "empty"])
@pytest.mark.parametrize("arguments", [TEXT, DATA], ids=["text", "object"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tool_call_is_written_as_json_whatever_its_form(
    tmp_path: Path, family: str, arguments: object, content: dict[str, Any]
) -> None:
    template, forms = FAMILIES[family]
    if forms.null_content and content == {"content": ""}:
        pytest.skip("an answer of no text, to this template")
    folder = model_folder(tmp_path, template)
    messages = conversation(arguments, **content)
    text = load_tokenizer(folder).chat_template.render(messages, TOOLS, add_generation_prompt=False)
    assert "<city>Köln</city><days>2</days>" in text if family.startswith("Qwen3-Coder") else TEXT in text
    given_is_read = forms.text_arguments if arguments == TEXT else forms.object_arguments
    if given_is_read and (content or not forms.null_content):
        expected = in_transformers(folder, messages)
        assert expected is None or text == expected or "None" in expected


@pytest.mark.parametrize("family", FAMILIES)
def test_forms_are_found_by_rendering(tmp_path: Path, family: str) -> None:
    template, expected = FAMILIES[family]
    made = load_tokenizer(model_folder(tmp_path, template)).chat_template
    found = Forms.of(lambda messages, tools: made._rendered(template, messages, tools))
    assert found == expected


@pytest.mark.parametrize("arguments", ["[1]", "no JSON", "", "1", "[" * 100_000])
def test_arguments_that_are_no_object_stay_text(tmp_path: Path, arguments: str) -> None:
    made = load_tokenizer(model_folder(tmp_path, HERMES)).chat_template
    text = made.render(conversation(arguments), TOOLS)
    assert f'"arguments": "{arguments}"' in text


def test_the_callers_messages_are_not_changed(tmp_path: Path) -> None:
    messages = conversation(TEXT)
    load_tokenizer(model_folder(tmp_path, R1)).chat_template.render(messages, TOOLS)
    assert messages == conversation(TEXT)
