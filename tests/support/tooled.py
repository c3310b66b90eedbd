"""petiole-tiny with a chat template that knows tools and reasoning: it never learnt either, but a constraint makes
it write them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.support.slow_hub import TINY

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool.function.name }} {% endfor %}\
{{ '<tool_call></tool_call><|im_end|>\\n' }}{% endif %}\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}\
{%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}\
{{- message.content or '' }}\
{%- for call in message.tool_calls or [] %}{{ '\\n<tool_call>\\n{"name": "' + call.function.name + \
'", "arguments": ' + call.function.arguments|tojson + '}\\n</tool_call>' }}{% endfor %}\
{{ '<|im_end|>\\n' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}\
{%- if enable_thinking is defined %}{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}\
{% endif %}\
{% endif %}"""


def tooled(folder: Path) -> Path:
    """The folder of a copy of the model."""
    made = folder / "petiole-tooled"
    shutil.copytree(TINY, made)
    path = made / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return made
