"""How families of models write reasoning and calls of tools: their templates, as data.

A template has the form of `response_template` in transformers, so one of a checkpoint and one from here are read
alike. A checkpoint's own comes first, if it can be read. `FAMILIES` has the formats by name; a checkpoint that
brings none has that of its family, known by marks in its chat template."""

# ruff: noqa: RUF001 - DeepSeek's marks have letters that look like others

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from petiole.tasks.output_parsing.template import Template, compiled
from petiole.tasks.output_parsing.writing import WRITINGS, Writing

logger = logging.getLogger(__name__)

_THOUGHT = {"open": "<think>", "close": "</think>"}
_CALLED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_OBJECT = {"type": "function", "function": "{content}"}
_CHATML = "<|im_start|>assistant\n"


@dataclass(frozen=True)
class ToolFormat:
    """`needs_tool`: a call has no mark of its own, so only the name of a tool that the request has begins one.
    `whole`: models also write a call as a whole message of JSON without marks: see `unmarked_tool_calls`."""

    name: str
    given: Mapping[str, Any]
    needs_tool: bool = False
    whole: bool = False

    def shown(self, special: Iterable[str]) -> list[str]:
        """The special tokens that its marks consist of."""
        fields = self.given["fields"]
        marks = _flat([field for name, field in fields.items() if name != "content"])
        special = sorted(special)
        if not any(token in marks for token in special):
            return []
        every = _flat(list(fields.values()))
        return [token for token in special if token in every]

    @property
    def template(self) -> Template:
        return compiled(self.given, needs_tool=self.needs_tool, whole=self.whole)

    @property
    def announced(self) -> str | Mapping[str, Any]:
        """As tasks announce it: by its name, so that old streams are read as a later version reads them."""
        return self.name if FAMILIES.get(self.name) == self else self.given


def _flat(fields: Sequence[Mapping[str, Any]]) -> str:
    """All texts of these fields. In patterns, a mark may be escaped."""
    found, waiting = list[str](), list[Any](fields)
    for part in waiting:
        if isinstance(part, Mapping):
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
        elif isinstance(part, str):
            found.append(re.sub(r"\\([^A-Za-z0-9])", r"\1", part))
    return "\n".join(found)


def _template(anchor: str | list[str], **fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"start_anchor": anchor, "fields": fields}


def _qwen_xml() -> dict[str, Any]:
    return _template(
        _CHATML,
        reasoning_content=_THOUGHT,
        tool_calls={
            "open_pattern": r"<tool_call>\s*<function(?:\s+name)?\s*=(?P<name>[^>\n]+)>",
            "close_pattern": r"(?:</function>\s*)?</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter(?P<slip>(?:\s+name)?\s*)=(?P<key>[^>\n]+)>"
                r"\n?(?P<value>.*?)\n?</parameter>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": _CALLED,
        },
        content={"close_pattern": r"<\|im_end\|>|<\|endoftext\|>"},
    )


def _deepseek() -> dict[str, Any]:
    return _template(
        "<｜Assistant｜>",
        reasoning_content=_THOUGHT,
        tool_calls={
            "open_pattern": r"<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>)?(?P<name>[^<{`\n]+)"
            r"\s*(?:<｜tool▁sep｜>|```json)",
            "close_pattern": r"(?:```\s*)?<｜tool▁call▁end｜>",
            "repeats": True,
            "content": "json",
            "transform": _CALLED,
        },
        content={"close": ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>"]},
    )


_MISTRAL_TEXT = {"close": "</s>"}
_MISTRAL_THOUGHT = {"open": "[THINK]", "close": "[/THINK]"}

FAMILIES: dict[str, ToolFormat] = {
    made.name: made
    for made in (
        # Qwen 2.5, Qwen 3, Hermes, and all that learnt from them
        ToolFormat(
            "hermes",
            _template(
                _CHATML,
                reasoning_content=_THOUGHT,
                tool_calls={
                    "open": "<tool_call>",
                    "close": "</tool_call>",
                    "repeats": True,
                    "content": "json",
                    "transform": _OBJECT,
                },
                content={"close_pattern": r"<\|im_end\|>|<\|endoftext\|>"},
            ),
            whole=True,
        ),
        # Qwen3-Coder, Qwen 3.5 and later
        ToolFormat("qwen-xml", _qwen_xml(), whole=True),
        # Llama 3.1 and later: a call is the whole answer, or after a mark
        ToolFormat(
            "llama",
            _template(
                "<|start_header_id|>assistant<|end_header_id|>\n\n",
                tool_calls={
                    "open_pattern": r"(?:<\|python_tag\|>\s*)?\{\s*"
                    r'(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:parameters|arguments)"\s*:',
                    "close_pattern": r"\}\s*;?",
                    "repeats": True,
                    "content": "json",
                    "transform": _CALLED,
                },
                content={"close_pattern": r"<\|eot_id\|>|<\|eom_id\|>|<\|python_tag\|>"},
            ),
            needs_tool=True,
        ),
        # Mistral up to Nemo and Small 3.0: one list
        ToolFormat(
            "mistral",
            _template(
                "[/INST]",
                tool_calls={
                    "open": "[TOOL_CALLS]",
                    "content": "json",
                    "transform_each": True,
                    "transform": {
                        "type": "function",
                        "function": {"name": "{name}", "arguments": "{arguments}"},
                    },
                },
                content=_MISTRAL_TEXT,
            ),
        ),
        # Mistral since Small 3.2, Magistral, Devstral, Ministral 3
        ToolFormat(
            "mistral-args",
            _template(
                ["[/INST]", "[/TOOL_RESULTS]"],
                reasoning_content=_MISTRAL_THOUGHT,
                tool_calls={
                    "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[^\[\]{}\n]+)"
                    r"(?:\[CALL_ID\][^\[\]{}]*)?\[ARGS\]",
                    "repeats": True,
                    "content": "json",
                    "transform": _CALLED,
                },
                content=_MISTRAL_TEXT,
            ),
        ),
        # Gemma 3 has no marks: Python's calls, in a list
        ToolFormat(
            "gemma3",
            _template(
                "<start_of_turn>model\n",
                tool_calls={
                    "open_pattern": r"(?:```(?:tool_code|python)\s*)?(?P<list>\[)",
                    "close": "```",
                    "content": "python-call-list",
                    "transform_each": True,
                    "transform": {
                        "type": "function",
                        "function": {"name": "{name}", "arguments": "{arguments}"},
                    },
                },
                content={"close": "<end_of_turn>"},
            ),
            needs_tool=True,
        ),
        ToolFormat(
            "gemma4",
            _template(
                ["<|turn>model\n", "<tool_response|>"],
                reasoning_content={"open": "<|channel>thought\n", "close": "<channel|>"},
                tool_calls={
                    "open_pattern": r"<\|tool_call>call:(?P<name>[^{\n]+)",
                    "close": "<tool_call|>",
                    "repeats": True,
                    "content": "json",
                    "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                    "transform": _CALLED,
                },
                content={"close": ["<turn|>", "<|tool_response>", "<eos>"]},
            ),
        ),
        # DeepSeek V3, R1 and V3.1, which write calls differently, and are read alike
        *(ToolFormat(name, _deepseek()) for name in ("deepseek", "deepseek-3.1")),
        # GLM-4 of 2024 and 2025: a name and a line of JSON
        ToolFormat(
            "glm4",
            _template(
                "<|assistant|>",
                reasoning_content=_THOUGHT,
                tool_calls={
                    "open_pattern": r"(?P<name>[A-Za-z0-9_.-]+)\n",
                    "repeats": True,
                    "content": "json",
                    "transform": _CALLED,
                },
                content={"close": ["<|observation|>", "<|user|>", "<|assistant|>"]},
            ),
            needs_tool=True,
        ),
        # GLM-4.5 and later
        ToolFormat(
            "glm-xml",
            _template(
                "<|assistant|>",
                reasoning_content=_THOUGHT,
                tool_calls={
                    "open_pattern": r"<tool_call>\s*(?P<name>[^<\n]+)",
                    "close": "</tool_call>",
                    "repeats": True,
                    "content": "xml-inline",
                    "content_args": {
                        "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>"
                        r"(?P<value>.*?)</arg_value>",
                        "value_parser": {"name": "json", "args": {"allow_non_json": True}},
                    },
                    "transform": _CALLED,
                },
                content={"close": ["<|observation|>", "<|user|>", "<|assistant|>"]},
            ),
        ),
        # Phi-4-mini
        ToolFormat(
            "phi4",
            _template(
                "<|assistant|>",
                reasoning_content=_THOUGHT,
                tool_calls={
                    "open": ["<|tool_call|>", "functools"],
                    "close": "<|/tool_call|>",
                    "content": "json",
                    "transform_each": True,
                    "transform": {
                        "type": "function",
                        "function": {"name": "{name}", "arguments": "{arguments}"},
                    },
                },
                content={"close": ["<|end|>", "<|endoftext|>"]},
            ),
        ),
        # Any other family that thinks, and calls no tools
        ToolFormat(
            "think",
            _template(
                [_CHATML, "<|start_header_id|>assistant<|end_header_id|>", "[/INST]", "<|assistant|>"],
                reasoning_content=_THOUGHT,
                content={"close": ["<|im_end|>", "<|endoftext|>"]},
            ),
        ),
        # gpt-oss
        ToolFormat(
            "harmony",
            _template(
                "<|start|>assistant",
                reasoning_content={
                    "open_pattern": r"(?:assistant)*<\|channel\|>analysis<\|message\|>",
                    "close": ["<|end|>", "<|return|>"],
                },
                tool_calls={
                    "open_pattern": r"(?:(?:<\|start\|>)?(?:assistant\s*)*<\|channel\|>\w+\s*"
                    r"|(?:<\|start\|>)?(?:assistant\s*)+| ?)to=(?:functions\.)?(?P<name>[^<\n]+?)"
                    r"(?:\s*<\|channel\|>\w+)?(?:\s*<\|constrain\|>\s*\w+|\s+\w+)?\s*<\|message\|>",
                    "close": ["<|call|>", "<|end|>"],
                    "repeats": True,
                    "content": "json",
                    "transform": _CALLED,
                },
                content={
                    "close_pattern": r"(?:assistant)*<\|channel\|>(?:final|commentary)"
                    r"(?:\s*<\|constrain\|>\w+)?<\|message\|>"
                    r"|<\|start\|>(?:assistant)+|<\|end\|>|<\|return\|>|<\|call\|>",
                },
            ),
        ),
    )
}


# ------------------------------------------------------------ which format a checkpoint has

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
