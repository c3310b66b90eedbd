"""Chat templates render as `transformers` renders them, and fail with the name of what was wrong."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from petiole.gpu_worker.children import Child
from petiole.gpu_worker.exceptions import InvalidRequest, ModelError
from petiole.gpu_worker.text import Tokenizer, load_tokenizer
from petiole.gpu_worker.text.foreign import _template_process, sandbox
from tests.support import tokenizers as samples
from tests.support.site import eventually

CHATML = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
TOOLS = """\
{{ bos_token }}
{% set state = namespace(calls=0) %}
{% if tools %}
Tools:
{% for tool in tools %}
  {{ tool | tojson(indent=2) }}
{% endfor %}
{% endif %}
{% for message in messages %}
    {% if message.role == 'tool' %}{{ message.name }}: {{ message.content }}
    {% elif message.tool_calls is defined %}
        {% for call in message.tool_calls %}{% set state.calls = state.calls + 1 %}
{{ state.calls }} {{ call.function.name }}({{ call.function.arguments | tojson }})
        {% endfor %}
    {% else %}
{{ message.role | upper }}: {{ message.content }}
        {% if message.reasoning_content %} ({{ message.thinking }}){% endif %}
    {% endif %}
{% endfor %}
{% if not add_generation_prompt %}{{ eos_token }}{% endif %}
"""
TYPED_CONTENT = """\
{%- for message in messages -%}
    [{{ message.role }}]
    {%- if message.content is string %}{{ message.content }}{% else %}
        {%- for part in message.content %}
            {%- if part.type != 'text' %}{% continue %}{% endif %}{{ part.text }}
        {%- endfor %}
    {%- endif %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
{%- endfor -%}
"""
TRAINING = "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
THINKING = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if '</think>' in message.content %}{%- set content = message.content.split('</think>')[-1] %}
    {%- else %}{%- set content = message.content %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if loop.last and message.role == 'assistant' %}
        {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if documents %}{{ documents | tojson }}{% endif %}
{%- if effort %}{{ effort.level }}{% endif %}
{%- if max_tokens %}{{ max_tokens }}{% endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
DATED = "{{ strftime_now('%Y') }}{% for m in messages %}{{ dict(a=m.content).a }}{% endfor %}"
ALTERNATING = """\
{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant') }}{% endif %}[{{ m.content }}]{% endfor %}"""

QUESTION = [{"role": "user", "content": "  hello <world> & 日本語 😀  "}]
TALK = [
    {"role": "system", "content": "be brief"},
    *QUESTION,
    {"role": "assistant", "content": "hello", "reasoning": "greet", "refusal": None},
    {"role": "user", "content": "more"},
]
CALLS = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "n": 1.5}}}
        ],
    },
    {"role": "tool", "name": "weather", "content": "rain"},
]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "image"}]}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def model_folder(folder: Path, template: object, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    samples.save(folder, samples.byte_level())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template, **more}))
    return folder


FIRST = "{{ messages[0].content }}"
USERS_ALONE = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [WEATHER]])
@pytest.mark.parametrize(
    ("template", "messages"),
    [
        *itertools.product([CHATML, TOOLS, TYPED_CONTENT, TRAINING, DATED], [QUESTION, TALK, CALLS]),
        (TYPED_CONTENT, PARTS),
    ],
)
def test_a_conversation_becomes_the_same_tokens_as_in_transformers(
    tmp_path: Path, template: str, messages: Any, tools: Any, add_generation_prompt: bool
) -> None:
    folder = model_folder(tmp_path, template)
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    try:
        expected = oracle.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, return_dict=False
        )
    except Exception:
        with pytest.raises(InvalidRequest, match=r"^messages: "):
            load_tokenizer(folder).apply_chat_template(
                messages, tools, add_generation_prompt=add_generation_prompt
            )
    else:
        ours = load_tokenizer(folder).apply_chat_template(
            messages, tools, add_generation_prompt=add_generation_prompt
        )
        assert ours == expected


VARIABLES: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"enable_thinking": True, "bos_token": "<|im_end|>", "max_tokens": 5, "no such variable": [1]},
    {"documents": [{"title": "a", "text": "b"}], "effort": {"level": "high"}},
]


@pytest.mark.parametrize("variables", VARIABLES, ids=["one", "special tokens and odd names", "nested"])
def test_variables_reach_the_template_as_in_transformers(tmp_path: Path, variables: dict[str, Any]) -> None:
    folder = model_folder(tmp_path, THINKING)
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    expected = oracle.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False, **variables)
    assert load_tokenizer(folder).chat_template.render(TALK, variables=variables) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"tools": []}, "chat_template_kwargs: must not have .*, got tools"),
        ({"tokenize": True, "messages": []}, "chat_template_kwargs: must not have .*, got messages, tokenize"),
        ({"x": {"y": b"z"}}, "chat_template_kwargs.x.y: must be JSON data, got bytes"),
        ({"x": "\ud800"}, "chat_template_kwargs.x: must be valid Unicode text"),
        ({1: "x"}, r"chat_template_kwargs \(a key\): must be a string, got int"),
        ("x", "chat_template_kwargs: must be an object, got str"),
    ],
)
def test_variables_that_a_template_cannot_have_are_refused(tmp_path: Path, variables: Any, expected: str) -> None:
    made = load_tokenizer(model_folder(tmp_path, CHATML))
    with pytest.raises(InvalidRequest, match=f"^{expected}"):
        made.apply_chat_template(QUESTION, None, variables)


def test_what_a_template_raises_names_the_variables(tmp_path: Path) -> None:
    made = load_tokenizer(
        model_folder(tmp_path, "{{ raise_exception('no such level') if level == 'x' }}{{ messages }}")
    )
    with pytest.raises(InvalidRequest, match=r"roles \['user'\] and chat_template_kwargs \['level'\]$"):
        made.apply_chat_template(QUESTION, None, {"level": "x"})


@pytest.mark.parametrize(
    ("template", "final"),
    [
        *itertools.product(
            [CHATML, TOOLS, TYPED_CONTENT, TRAINING, THINKING],
            ["1, 2,", "  1, 2, \n", "", " ", "THE_FINAL_MESSAGE_ENDS_HERE or not"],
        ),
        (TYPED_CONTENT, [{"type": "text", "text": "hello "}]),
        (TYPED_CONTENT, [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}, {"type": "image"}]),
    ],
)
def test_a_final_message_is_left_open_as_in_transformers(tmp_path: Path, template: str, final: Any) -> None:
    folder = model_folder(tmp_path, template)
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [*QUESTION, {"role": "assistant", "content": final, "reasoning_content": "let me see"}]
    ours = load_tokenizer(folder)
    try:
        expected = oracle.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    except Exception:
        with pytest.raises(InvalidRequest):
            ours.apply_chat_template(messages, continue_final_message=True)
    else:
        assert ours.apply_chat_template(messages, continue_final_message=True) == expected


def test_the_message_that_is_continued_is_not_changed(tmp_path: Path) -> None:
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "hello"}]}]
    made = load_tokenizer(model_folder(tmp_path, TYPED_CONTENT))
    assert made.chat_template.render(messages, continue_final_message=True) == "[assistant]hello"
    assert messages == [{"role": "assistant", "content": [{"type": "text", "text": "hello"}]}]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (CHATML, QUESTION, "needs a final message of the assistant, got user"),
        (CHATML, [{"role": "assistant", "content": None}], "needs text in the final message, got NoneType"),
        (TYPED_CONTENT, [{"role": "assistant", "content": [{"type": "image"}]}], "needs text .*, got list"),
        (USERS_ALONE, TALK[:3], r"the chat template must show .*, got roles \['system', 'user', 'assistant'\]"),
        ("{{ messages[-1].content | upper }}", TALK[:3], "the chat template must show the final message"),
        ("{{ messages[-1].content[2:] }}", TALK[:3], "the chat template must show the final message"),
    ],
    ids=["another's", "no content", "no text", "left out", "changed", "cut"],
)
def test_a_message_that_cannot_be_continued_is_refused(
    tmp_path: Path, template: str, messages: Any, expected: str
) -> None:
    made = load_tokenizer(model_folder(tmp_path, template))
    with pytest.raises(InvalidRequest, match=f"^continue_final_message: {expected}"):
        made.apply_chat_template(messages, continue_final_message=True)


def rendered(folder: Path, template: str, messages: Any) -> str:
    made = load_tokenizer(model_folder(folder, template))
    return made.decode(made.apply_chat_template(messages, add_generation_prompt=False), skip_special_tokens=False)


@pytest.mark.parametrize("template", [CHATML, TOOLS, TYPED_CONTENT, TRAINING, DATED, ALTERNATING])
def test_text_parts_are_read_as_their_text(tmp_path: Path, template: str) -> None:
    """Most templates would write the list as Python does, or leave it out."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert rendered(tmp_path, template, parts) == rendered(
        tmp_path, template, [{"role": "user", "content": "hello"}]
    )


def test_several_text_parts_are_a_line_each(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "one\ntwo" in rendered(tmp_path, CHATML, [{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("part", "kind"),
    [({"type": "image_url", "image_url": {}}, "image_url"), ("x", "str"), ({"text": "x"}, "None")],
)
def test_a_part_that_the_template_does_not_read_is_refused(tmp_path: Path, part: object, kind: str) -> None:
    """Left out without a word, it would be an answer to another question."""
    content = [{"type": "text", "text": "what is this?"}, part]
    expected = rf"messages\[1\].content\[1\]: must be a text part: this model reads no others, got {kind}"
    with pytest.raises(InvalidRequest, match=expected):
        rendered(tmp_path, CHATML, [*QUESTION, {"role": "user", "content": content}])


def test_the_template_for_tools_is_taken_when_tools_are_given(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain" + FIRST}, {"name": "tool_use", "template": "tools" + FIRST}]
    made = load_tokenizer(model_folder(tmp_path, named))
    render = made.chat_template.render
    said = QUESTION[0]["content"]
    assert (render(QUESTION), render(QUESTION, [WEATHER])) == (f"plain{said}", f"tools{said}")


def test_a_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "from the configuration" + FIRST)
    (folder / "chat_template.jinja").write_text("from the file" + FIRST)
    assert load_tokenizer(folder).chat_template.render(QUESTION) == "from the file" + QUESTION[0]["content"]


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"^messages: the model has no chat template"):
        Tokenizer(samples.byte_level()).apply_chat_template(QUESTION)


def test_what_a_template_raises_is_the_messages_fault(tmp_path: Path) -> None:
    made = load_tokenizer(model_folder(tmp_path, ALTERNATING))
    with pytest.raises(InvalidRequest, match=r"roles must alternate user/assistant, got roles \['user', 'user'\]"):
        made.apply_chat_template([*QUESTION, *QUESTION])


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ messages[0].content.nothing.more }}", "undefined|no attribute"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_fails_on_the_messages_fails_that_request(
    tmp_path: Path, template: str, problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        load_tokenizer(model_folder(tmp_path, template)).apply_chat_template(QUESTION)


@pytest.mark.parametrize(
    "template",
    [
        "{% set n = messages[0].content|length %}{{ ('a' * (10**10 * n))|length }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{{ messages[0].content.ljust(10**10) }}",
        "{{ '{:10000000000}'.format(messages[0].content) }}",
        "{{ messages[0].content * (2**24) }}",
    ],
)
def test_a_template_without_bounds_fails_its_request_and_the_next_is_served(tmp_path: Path, template: str) -> None:
    hostile = load_tokenizer(model_folder(tmp_path / "hostile", template))
    with pytest.raises(InvalidRequest, match=r"the chat template (must|takes|failed)"):
        hostile.apply_chat_template(QUESTION)
    other = load_tokenizer(model_folder(tmp_path / "other", CHATML))
    assert other.apply_chat_template(QUESTION)


@pytest.fixture
def little_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process of the templates has a fifth of its time; nothing else is changed."""
    job = tmp_path / "little_time.py"
    source = Path(_template_process.__file__).read_text()
    assert f"CPU_S = {_template_process.CPU_S}" in source
    job.write_text(source.replace(f"CPU_S = {_template_process.CPU_S}", f"CPU_S = {_template_process.CPU_S / 5}"))
    child = Child(str(job))
    monkeypatch.setattr(sandbox, "_child", child)
    yield
    child.close()


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = messages[0].content|length %}{{ 10 ** (10 ** (10 + n)) }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(100) }}",
    ],
)
def test_a_template_without_end_fails_its_request_and_the_next_is_served(
    tmp_path: Path, template: str, little_time: None
) -> None:
    test_a_template_without_bounds_fails_its_request_and_the_next_is_served(tmp_path, template)


def test_a_template_that_computes_without_end_while_it_is_compiled_is_the_models_fault(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chat template 'default' does not compile: the chat template must take"):
        load_tokenizer(model_folder(tmp_path, "{{ 10 ** (10 ** 10) }}"))


def test_the_process_of_the_templates_ends_with_its_user(tmp_path: Path) -> None:
    code = """
from petiole.gpu_worker.text.foreign import sandbox
assert sandbox.render("{{ a }}", {"a": 1}) == "1"
print(sandbox._child.process.pid)
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    eventually(lambda: not Path(f"/proc/{int(ran.stdout)}").exists(), "it ends with its input")


def test_a_template_cannot_change_the_request(tmp_path: Path) -> None:
    made = load_tokenizer(model_folder(tmp_path, "{{ messages.append('x') }}"))
    with pytest.raises(InvalidRequest, match=r"^messages: "):
        made.apply_chat_template(QUESTION)


def test_a_template_that_does_not_compile_is_the_models_fault(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"chat template 'default' does not compile: line 2"):
        load_tokenizer(model_folder(tmp_path, "hello\n{% if %}"))


@pytest.mark.parametrize(
    ("messages", "tools", "expected"),
    [
        ([], None, "messages: must not be empty"),
        ("hello", None, "messages: must be a list of messages, got str"),
        (["hello"], None, r"messages\[0\]: must be an object, got str"),
        ([{"content": "hello"}], None, r"messages\[0\].role: must be a string, got None"),
        ([{"role": "user", "content": b"x"}], None, r"messages\[0\].content: must be JSON data, got bytes"),
        ([{"role": "user", "content": "a\ud800"}], None, r"messages\[0\].content: must be valid Unicode text"),
        ([{"role": "user", "content": {1: 2}}], None, r"messages\[0\].content \(a key\): must be a string"),
        (QUESTION, {"a": 1}, "tools: must be a list of JSON schemas, got dict"),
        (QUESTION, ["weather"], r"tools\[0\]: must be an object, got str"),
    ],
)
def test_malformed_messages_are_refused_by_name(tmp_path: Path, messages: Any, tools: Any, expected: str) -> None:
    made = load_tokenizer(model_folder(tmp_path, CHATML))
    with pytest.raises(InvalidRequest, match=f"^{expected}"):
        made.apply_chat_template(messages, tools)


def test_messages_nested_without_end_are_refused(tmp_path: Path) -> None:
    content: list[Any] = []
    for _ in range(5000):
        content = [content]
    with pytest.raises(InvalidRequest, match="must be nested at most 64 deep"):
        load_tokenizer(model_folder(tmp_path, CHATML)).apply_chat_template([{"role": "user", "content": content}])
