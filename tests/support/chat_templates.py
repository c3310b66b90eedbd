"""Small chat templates, one a format: they frame turns, and write reasoning, calls and results as the families'
own templates do, and leave out everything else."""

# ruff: noqa: RUF001 - DeepSeek's marks have letters that look like others

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """`user`, `tool`: their turns; {} stands for the content. `begin`, `end`: around the assistant's turn. In
    jinja: `think`, its reasoning; `call`, a call `f` with the arguments `f.arguments`, between `first`, `between`
    and `last`. `apart`: between content and the first call."""

    user: str
    begin: str
    end: str
    tool: str
    think: str = ""
    call: str = ""
    first: str = ""
    between: str = ""
    last: str = ""
    apart: str = ""

    @property
    def source(self) -> str:
        def text(one: str) -> str:
            return "{{ " + repr(one) + " }}" if one else ""

        def around(one: str) -> str:
            before, after = one.split("{}")
            return text(before) + "{{ m.content }}" + text(after)

        calls = (
            "{% for c in m.tool_calls or [] %}{% set f = c.function or c %}"
            "{% if loop.first %}{% if m.content %}" + text(self.apart) + "{% endif %}" + text(self.first)
            + "{% else %}" + text(self.between) + "{% endif %}" + self.call
            + "{% if loop.last %}" + text(self.last) + "{% endif %}{% endfor %}"
        )  # fmt: skip
        thought = "{% if m.reasoning_content %}" + self.think + "{% endif %}" if self.think else ""
        said = thought + "{{ m.content or '' }}" + calls
        return (
            "{% if tools %}" + text(self.user.format("Tools: ")) + "{{ tools | tojson }}{% endif %}"
            "{% for m in messages %}{% if m.role == 'assistant' %}" + text(self.begin) + said + text(self.end)
            + "{% elif m.role == 'tool' %}" + around(self.tool) + "{% else %}" + around(self.user) + "{% endif %}"
            "{% endfor %}{% if add_generation_prompt %}" + text(self.begin) + "{% endif %}"
        )  # fmt: skip


_THINK = "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}"
_OBJECT = "{{ '{\"name\": ' + f.name|tojson + ', \"KEY\": ' + f.arguments|tojson + '}' }}"
_USER = "<|im_start|>user\n{}<|im_end|>\n"
_CHATML = {
    "user": _USER,
    "begin": "<|im_start|>assistant\n",
    "end": "<|im_end|>\n",
    "tool": "<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n",
    "think": _THINK,
    "between": "\n",
    "apart": "\n",
}
_DEEPSEEK = {
    "user": "<｜User｜>{}",
    "begin": "<｜Assistant｜>",
    "end": "<｜end▁of▁sentence｜>",
    "tool": "<｜tool▁output▁begin｜>{}<｜tool▁output▁end｜>",
    "think": _THINK,
    "first": "<｜tool▁calls▁begin｜>",
    "last": "<｜tool▁calls▁end｜>",
}
_GLM = {
    "user": "<|user|>\n{}",
    "begin": "<|assistant|>\n",
    "end": "",
    "tool": "<|observation|>\n{}",
    "think": _THINK,
    "between": "\n",
    "apart": "\n",
}
_VALUE = "(v if v is string else v|tojson)"
_GEMMA_VALUE = "('<|\"|>' + v + '<|\"|>' if v is string else v|tojson)"
_PYTHON_VALUE = "(v|tojson if v is string or v is not boolean else ('True' if v else 'False'))"


def _each(item: str, comma: str = "") -> str:
    """All arguments, each as `item` with its key k and its value v."""
    between = "{{ " + repr(comma) + " if not loop.last }}" if comma else ""
    return "{% for k, v in f.arguments.items() %}{{ " + item + " }}" + between + "{% endfor %}"


STYLES = {
    "hermes": Style(
        **_CHATML,
        call="<tool_call>\n" + _OBJECT.replace("KEY", "arguments") + "{{ '\\n</tool_call>' }}",
    ),
    "qwen-xml": Style(
        **_CHATML,
        call="{{ '<tool_call>\\n<function=' + f.name + '>\\n' }}"
        + _each(f"'<parameter=' + k + '>\\n' + {_VALUE} + '\\n</parameter>\\n'")
        + "{{ '</function>\\n</tool_call>' }}",
    ),
    "glm-xml": Style(
        **_GLM,
        call="{{ '<tool_call>' + f.name + '\\n' }}"
        + _each(f"'<arg_key>' + k + '</arg_key>\\n<arg_value>' + {_VALUE} + '</arg_value>\\n'")
        + "</tool_call>",
    ),
    "glm4": Style(**_GLM, call="{{ f.name + '\\n' + f.arguments|tojson }}"),
    "llama": Style(
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|start_header_id|>ipython<|end_header_id|>\n\n{}<|eot_id|>",
        call=_OBJECT.replace("KEY", "parameters"),
        between="; ",
        apart="\n",
    ),
    "mistral": Style(
        "[INST] {}[/INST]",
        "",
        "</s>",
        "[TOOL_RESULTS] {}[/TOOL_RESULTS]",
        call=_OBJECT.replace("KEY", "arguments"),
        first="[TOOL_CALLS] [",
        between=", ",
        last="]",
    ),
    "mistral-args": Style(
        "[INST]{}[/INST]",
        "",
        "</s>",
        "[TOOL_RESULTS]{}[/TOOL_RESULTS]",
        think="{{ '[THINK]' + m.reasoning_content + '[/THINK]' }}",
        call="{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments|tojson }}",
    ),
    "gemma3": Style(
        "<start_of_turn>user\n{}<end_of_turn>\n",
        "<start_of_turn>model\n",
        "<end_of_turn>\n",
        "<start_of_turn>user\n{}<end_of_turn>\n",
        call="{{ f.name + '(' }}" + _each(f"k + '=' + {_PYTHON_VALUE}", ", ") + ")",
        first="[",
        between=", ",
        last="]",
        apart="\n",
    ),
    "gemma4": Style(
        "<|turn>user\n{}<turn|>\n",
        "<|turn>model\n",
        "<turn|>\n",
        "<|tool_response>{}<tool_response|>",
        think="{{ '<|channel>thought\\n' + m.reasoning_content + '\\n<channel|>' }}",
        call="{{ '<|tool_call>call:' + f.name + '{' }}"
        + _each(f"k + ':' + {_GEMMA_VALUE}", ",")
        + "{{ '}<tool_call|>' }}",
    ),
    "deepseek": Style(
        **_DEEPSEEK,
        call="{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name + '\\n```json\\n' + f.arguments|tojson"
        " + '\\n```<｜tool▁call▁end｜>' }}",
        between="\n",
    ),
    "deepseek-3.1": Style(
        **_DEEPSEEK,
        call="<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments|tojson }}<｜tool▁call▁end｜>",
    ),
    "phi4": Style(
        "<|user|>{}<|end|>",
        "<|assistant|>",
        "<|end|>",
        "<|tool_response|>{}<|end|>",
        think=_THINK,
        call=_OBJECT.replace("KEY", "arguments"),
        first="<|tool_call|>[",
        between=", ",
        last="]<|/tool_call|>",
    ),
    "think": Style(_USER, "<|im_start|>assistant\n", "<|im_end|>\n", _USER, think=_THINK),
    "harmony": Style(
        "<|start|>user<|message|>{}<|end|>",
        "<|start|>assistant",
        "<|call|>",
        "<|start|>functions.f to=assistant<|channel|>commentary<|message|>{}<|end|>",
        think="{{ '<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|><|start|>assistant' }}",
        call="{{ '<|channel|>commentary to=functions.' + f.name + ' <|constrain|>json<|message|>' }}"
        "{{ f.arguments|tojson }}",
    ),
}  # fmt: skip
"""By the name of a format. A harmony message with content has no call here: its channel would be another."""
