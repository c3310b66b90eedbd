"""Which format a checkpoint has: its own template, or that of its family, known by marks in its chat template."""

# ruff: noqa: RUF001 - DeepSeek's marks have letters that look like others

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from petiole.tasks.output_parsing.formats import FAMILIES, ToolFormat
from petiole.tasks.output_parsing.writing import WRITINGS, Writing

logger = logging.getLogger(__name__)

_MARKS = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|tool_call>",)),
    ("gemma4", ("<|channel>",)),
    ("qwen-xml", ("<tool_call>", "<function=")),
    ("glm-xml", ("<tool_call>", "<arg_key>")),
    ("hermes", ("<tool_call>",)),
    ("mistral-args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek", ("<｜Assistant｜>", "```json")),
    ("deepseek-3.1", ("<｜Assistant｜>",)),
    ("phi4", ("<|tool_call|>",)),
    ("llama", ("<|start_header_id|>", "tools")),
    ("glm4", ("<|observation|>",)),
    ("gemma3", ("<start_of_turn>",)),
    ("think", ("<think>",)),
)
"""By format: texts that are all in its chat templates. The first one counts."""
_NAMES = {
    "json_tools": "hermes", "hermes": "hermes", "qwen3_coder": "qwen-xml", "qwen3_5": "qwen-xml",
    "mistral": "mistral-args", "gemma4": "gemma4", "glm47": "glm-xml", "llama3_json": "llama",
}  # fmt: skip
"""What other projects call some of these."""


def of_checkpoint(described: Mapping[str, Any]) -> ToolFormat | None:
    """The format of a checkpoint: `response_template` and `tool_format` as in `ModelFacts`; `chat_template`, the
    source of its templates. None: its text is only text."""
    family = of_family(described)
    own = described.get("response_template")
    if own is not None:
        try:
            made = ToolFormat(family.name if family else "", own)
            made.template  # noqa: B018 - compiles it
            return made
        except ValueError as error:
            logger.warning("the checkpoint's response_template cannot be used: %s", error)
    return family


def of_family(described: Mapping[str, Any]) -> ToolFormat | None:
    """The format of the checkpoint's family."""
    source = described.get("chat_template") or ""
    name = _NAMES.get(described.get("tool_format") or "", "")
    return FAMILIES.get(name or next((name for name, marks in _MARKS if all(one in source for one in marks)), ""))


def reasons(described: Mapping[str, Any], family: ToolFormat | None) -> bool:
    """Whether the checkpoint's templates know reasoning, or its family has nothing else."""
    own, source = described.get("response_template"), described.get("chat_template") or ""
    marks = WRITINGS.get(family.name if family else "", Writing()).thought
    if described.get("reasoning") or isinstance(own, Mapping):
        return True
    return marks is not None and (marks.open.strip() in source or marks.close in source)


def named(given: str | Mapping[str, Any] | None) -> ToolFormat | None:
    """The format of a task, as its announcement says it. None: one that this version does not know."""
    if isinstance(given, str):
        return FAMILIES.get(given)
    try:
        made = None if given is None else ToolFormat("", given)
        return made if made is None or made.template else None
    except ValueError:
        return None
