"""A model that says what its question asks for, so that agents with long prompts get the calls that they know.

    Recite: ["<tool_call>…</tool_call>", "It is 20 degrees."]

It is petiole-tiny: the engine's constraint makes it write the first of these texts in its first turn after the
question, the second one in the next, and its chat template shows it the beginning of each message alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from petiole.gpu_worker import Engine, Request
from petiole.gpu_worker.request import Constraint
from petiole.gpu_worker.request.handle import Handle
from tests.support.slow_hub import TINY

MARK = "Recite: "
CONTEXT = 65_536
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool.function.name[:20] }} {% endfor %}\
{{ '<tool_call></tool_call><|im_end|>\\n' }}{% endif %}\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}\
{{- (message.content or '')[:40] }}\
{%- for call in message.tool_calls or [] %}{{ call.function.name[:20] }}{% endfor %}\
{{ '<|im_end|>\\n' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


class ScriptedEngine(Engine):
    def submit(self, request: Request, **callbacks: Any) -> Handle:
        if request.messages and (said := recited(request.messages)) is not None:
            request = replace(request, constraint=Constraint("choice", [said]))
        return super().submit(request, **callbacks)


def recited(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """What comes next of the last script; its last text, when all has been said. None: there is no
    script."""
    for at in reversed(range(len(messages))):
        _, mark, script = _text(messages[at]).rpartition(MARK)
        if mark:
            texts, _ = json.JSONDecoder().raw_decode(script)
            said = sum(message["role"] == "assistant" for message in messages[at + 1 :])
            return str(texts[min(said, len(texts) - 1)])
    return None


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def scripted(folder: Path) -> Path:
    """The folder of the model."""
    made = folder / "petiole-scripted"
    shutil.copytree(TINY, made)
    for name, more in (
        ("tokenizer_config.json", {"chat_template": TEMPLATE}),
        ("config.json", {"max_position_embeddings": CONTEXT}),
    ):
        path = made / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    return made
