"""The chat template of `petiole-tiny-tools`, and the same in Python, with the parts that the model learns.

Tools come first, a line each, with the names of their parameters: a model this small reads no schemas. Calls are
written as Qwen and Hermes write them. A tool's result is a turn of its own. Without tools and calls a conversation
reads as for `petiole-tiny`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from training.text.dialogue import IM_END, IM_START, Piece

CHAT_TEMPLATE = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\\n<tools>\\n' }}"
    "{%- for tool in tools %}{%- set function = tool.function or tool %}"
    "{{- function.name + '(' + ((function.parameters or {}).properties or {}) | join(', ') + ')\\n' }}"
    "{%- endfor %}"
    "{{- '</tools><|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}{%- set function = call.function or call %}"
    "{{- '\\n' if not loop.first or message.content }}"
    '{{- \'<tool_call>\\n{"name": "\' + function.name + \'", "arguments": \' }}'
    "{{- function.arguments if function.arguments is string else function.arguments | tojson }}"
    "{{- '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def written(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the model writes it."""
    given = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>'


def pieces(tools: Mapping[str, Sequence[str]], messages: Sequence[Mapping[str, Any]]) -> list[Piece]:
    """A whole conversation, as the template renders it; all turns of the assistant are learnt. `tools`: the names
    of the parameters, by tool."""
    found: list[Piece] = []
    if tools:
        listed = "".join(f"{name}({', '.join(parameters)})\n" for name, parameters in tools.items())
        found.append(Piece(f"{IM_START}system\n<tools>\n{listed}</tools>{IM_END}\n", False))
    for message in messages:
        said = "\n".join(
            filter(None, [message.get("content", ""), *(written(*call) for call in message.get("calls", ()))])
        )
        found.append(Piece(f"{IM_START}{message['role']}\n", False))
        found.append(Piece(f"{said}{IM_END}", message["role"] == "assistant"))
        found.append(Piece("\n", False))
    return found[:-1]
