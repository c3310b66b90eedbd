"""Each family's template gets tool calls in the forms that it reads, as in `transformers` where that works.

The templates below write tool calls in the ways of the public families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from petiole.gpu_worker import InvalidRequest
from petiole.gpu_worker.text import load_tokenizer
from petiole.gpu_worker.text.forms import Calls, Texts
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
    "DeepSeek-R1": (R1, Calls(True, True, False)),
    "Qwen2.5, hermes": (HERMES, Calls(False, False, True)),
    "Qwen3": (EITHER, Calls(False, True, True)),
    "Qwen3-Coder, GLM": (CODER, Calls(False, False, True)),
    "Llama 3": (LLAMA, Calls(False, False, True)),
    "Mistral": (MISTRAL, Calls(False, False, True)),
    "writes what it gets": (PYTHON, Calls(False, True, False)),
    "refuses calls without tools": (ONLY_WITH_TOOLS, Calls(False, False, True)),
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
    found = Calls.of(lambda messages, tools: made._rendered(template, messages, tools))
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


SMOLVLM = """<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}
{%- if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}
{%- for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}
{%- elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}"""
BOTH = """{% for m in messages %}{% if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"""
SAYS = "{% for m in messages %}{{ m.content }}{% endfor %}"
AS_JSON = "{{ messages | tojson }}"
LISTS_ALONE = "{% for m in messages %}{{ m.content[0].text + '' }}{% endfor %}"
AFTER_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}" + SAYS
CONTENTS = {
    "SmolVLM2": (SMOLVLM, Texts(strings=False, parts=True)),
    "Qwen3-VL": (BOTH, Texts(strings=True, parts=True)),
    "most": (SAYS, Texts(strings=True, parts=False)),
    "as JSON": (AS_JSON, Texts(strings=True, parts=False)),
    "in capitals": ("{{ messages[0].content | upper }}", Texts(strings=True, parts=False)),
    "cut": ("{{ messages[0].content[2:] }}", Texts(strings=True, parts=False)),
    "refuses strings": (LISTS_ALONE, Texts(strings=False, parts=True)),
    "refuses one message": (AFTER_SYSTEM, Texts(strings=True, parts=False)),
    "none": ("hello", Texts(strings=False, parts=False)),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_forms_of_texts_are_found_by_rendering(tmp_path: Path, kind: str) -> None:
    template, expected = CONTENTS[kind]
    made = load_tokenizer(model_folder(tmp_path, template)).chat_template
    assert Texts.of(lambda messages, tools: made._rendered(template, messages, tools)) == expected


def test_a_template_of_parts_alone_gets_strings_as_parts(tmp_path: Path) -> None:
    """It would leave them out, and the model would answer nothing."""
    render = load_tokenizer(model_folder(tmp_path, SMOLVLM)).chat_template.render
    picture, text = {"type": "image"}, {"type": "text", "text": "What is it?"}
    asked = {"role": "user", "content": [picture, text]}
    answered = {"role": "assistant", "content": "A cat."}
    expected = "<|im_start|>User:<image>What is it?<end_of_utterance>\nAssistant: A cat.<end_of_utterance>\n"
    assert render([asked, answered]) == expected
    assert render([asked, answered], continue_final_message=True) == expected.removesuffix("<end_of_utterance>\n")
    said = [{"role": "user", "content": "What is it?"}]
    assert "User: What is it?<" in render(said)
    assert render(said) == render([{"role": "user", "content": [text]}])


def test_a_template_that_leaves_texts_out_is_refused(tmp_path: Path) -> None:
    render = load_tokenizer(model_folder(tmp_path, "hello")).chat_template.render
    with pytest.raises(
        InvalidRequest, match=r"^messages: the chat template must show texts, .*, got roles \['user'\]"
    ):
        render([{"role": "user", "content": "secret"}])


def test_a_template_may_show_roles_of_its_own(tmp_path: Path) -> None:
    template = "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    render = load_tokenizer(model_folder(tmp_path, template)).chat_template.render
    assert render([{"role": "query", "content": "owls"}, {"role": "document", "content": "mice"}]) == "owls"
    with pytest.raises(InvalidRequest, match="must show texts"):
        render([{"role": "user", "content": "owls"}])
