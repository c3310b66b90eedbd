"""How families write calls: for the worker, which makes the model write them. As data, by the name of a format.

`composed` makes of tools and of what may be said instead the value of an engine's constraint of kind "calls". A
format that is not in `WRITINGS` can be read, but not enforced."""

# ruff: noqa: RUF001 - DeepSeek's marks have letters that look like others

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Thought:
    """Marks around reasoning, and what follows them."""

    open: str
    close: str
    after: str = ""


@dataclass(frozen=True)
class Tags:
    """How one argument is written; "{key}" stands for its name. Text is written as it is, between `quotes`, and
    all else as JSON. `between`: what is between two arguments. `as_json`: text is JSON, too, and truth values and
    nothing are Python's."""

    begin: str
    end: str
    quotes: str = ""
    between: str = ""
    as_json: bool = False


@dataclass(frozen=True)
class Begins:
    """Where a call without a mark has begun: patterns of the text before the tool's name, of what comes after the
    name, and of the character that decides. `then`: what a call writes after these, up to its arguments."""

    before: str
    after: str
    next: str
    then: str = ""


@dataclass(frozen=True)
class Writing:
    """`begin`, `end`: around the arguments of a call; "{name}" stands for the tool's name. `first`, `between`,
    `last`: around and between calls. `trigger`: what a call begins with, which no other text has; `begins`: where
    calls have no such mark. `most`: calls in one turn. `answer_begin`: before text that is no call. `efforts`: the
    template's words for efforts that it does not know."""

    begin: str = ""
    end: str = ""
    first: str = ""
    between: str = ""
    last: str = ""
    trigger: str = ""
    begins: Begins | None = None
    thought: Thought | None = None
    tags: Tags | None = None
    most: int | None = None
    answer_begin: str = ""
    efforts: Mapping[str, str] = field(default_factory=dict)

    @property
    def calls(self) -> bool:
        return bool(self.begin)


_THINK = Thought("<think>", "</think>")
_OBJECT = '{"name": "{name}", "arguments": '

WRITINGS: dict[str, Writing] = {
    "hermes": Writing(
        begin=f"<tool_call>\n{_OBJECT}", end="}\n</tool_call>", between="\n", trigger="<tool_call>", thought=_THINK
    ),
    "qwen-xml": Writing(
        begin="<tool_call>\n<function={name}>\n",
        end="</function>\n</tool_call>",
        between="\n",
        trigger="<tool_call>",
        thought=_THINK,
        tags=Tags("<parameter={key}>\n", "\n</parameter>\n"),
    ),
    "glm-xml": Writing(
        begin="<tool_call>{name}\n",
        end="</tool_call>",
        between="\n",
        trigger="<tool_call>",
        thought=_THINK,
        tags=Tags("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "llama": Writing(begin='{"name": "{name}", "parameters": ', end="}", between="; ", trigger='{"name": "'),
    "mistral": Writing(
        first="[TOOL_CALLS][", begin=_OBJECT, end="}", between=", ", last="]", trigger="[TOOL_CALLS]"
    ),
    "mistral-args": Writing(
        begin="[TOOL_CALLS]{name}[ARGS]", trigger="[TOOL_CALLS]", thought=Thought("[THINK]", "[/THINK]")
    ),
    "deepseek": Writing(
        first="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        between="\n",
        last="<｜tool▁calls▁end｜>",
        trigger="<｜tool▁calls▁begin｜>",
        thought=_THINK,
    ),
    "deepseek-3.1": Writing(
        first="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
        last="<｜tool▁calls▁end｜>",
        trigger="<｜tool▁calls▁begin｜>",
        thought=_THINK,
    ),
    "glm4": Writing(
        begin="{name}\n",
        between="\n",
        begins=Begins(r"((.|\n)*[^A-Za-z0-9_.\-])?[0-9.\-]*", r"\n[ \t\r\n]*", r"\{"),
        thought=_THINK,
    ),
    "gemma3": Writing(
        first="[",
        begin="{name}(",
        end=")",
        between=", ",
        last="]",
        begins=Begins(r"(.|\n)*\[[ \t\r\n]*", "", r"\(", then="("),
        tags=Tags("{key}=", "", between=", ", as_json=True),
    ),
    "phi4": Writing(
        first="<|tool_call|>[",
        begin=_OBJECT,
        end="}",
        between=", ",
        last="]<|/tool_call|>",
        trigger="<|tool_call|>",
        thought=_THINK,
    ),
    "harmony": Writing(
        begin="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        trigger="<|channel|>commentary to=functions.",
        thought=Thought("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"),
        most=1,
        answer_begin="<|channel|>final<|message|>",
        efforts={"none": "low", "minimal": "low", "xhigh": "high", "max": "high"},
    ),
    "gemma4": Writing(
        begin="<|tool_call>call:{name}{",
        end="}<tool_call|>",
        trigger="<|tool_call>",
        thought=Thought("<|channel>thought\n", "<channel|>"),
        tags=Tags("{key}:", "", quotes='<|"|>', between=","),
    ),
    "think": Writing(thought=_THINK),
}


def composed(
    writing: Writing,
    tools: Sequence[Mapping[str, Any]],
    *,
    least: int,
    most: int | None,
    answer: tuple[str, Any] | None,
    budget: int | None = None,
) -> dict[str, Any]:
    """The value of a constraint of kind "calls". `tools`: name, parameters and strict of each. No tools: only the
    thought and the answer. `budget`: how many tokens the thought may have."""
    thought = writing.thought
    bounds = [bound for bound in (most, writing.most) if bound is not None]
    return {
        "thought": thought and {"open": thought.open, "close": thought.close, "after": thought.after},
        "first": writing.first,
        "between": writing.between,
        "last": writing.last,
        "trigger": writing.trigger,
        "begins": writing.begins and vars(writing.begins),
        "calls": [_call(writing, tool) for tool in tools],
        "least": least,
        "most": min(bounds, default=None),
        "answer": None if answer is None else {"kind": answer[0], "value": answer[1]},
        "answer_begin": writing.answer_begin,
        **({} if budget is None else {"budget": budget, "free": not tools and answer is None}),
    }


def _call(writing: Writing, tool: Mapping[str, Any]) -> dict[str, Any]:
    name, schema = str(tool["name"]), tool.get("parameters")
    written = json.dumps(name, ensure_ascii=False)[1:-1] if writing.tags is None else name
    call = {
        "name": name,
        "strict": tool.get("strict") is True,
        "begin": writing.begin.replace("{name}", written),
        "end": writing.end,
    }
    if writing.tags is None:
        return {**call, "schema": schema}
    arguments = _arguments(writing.tags, schema if isinstance(schema, Mapping) else {})
    return {**call, "arguments": arguments, "between": writing.tags.between}


def _arguments(tags: Tags, schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The arguments in the order of the schema's properties."""
    properties, needed = schema.get("properties"), schema.get("required")
    rest = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    found = []
    for key, one in (properties if isinstance(properties, Mapping) else {}).items():
        schema_of = {**rest, **one} if isinstance(one, Mapping) else one
        value = _python(schema_of) if tags.as_json else _value(schema_of)
        quotes = "" if "schema" in value else tags.quotes
        found.append(
            {
                "begin": tags.begin.replace("{key}", key) + quotes,
                "end": quotes + tags.end,
                "needed": isinstance(needed, list) and key in needed,
                **value,
            }
        )
    return found


def _value(schema: Any) -> dict[str, Any]:
    """A value that is text is written without quotes, so its schema says no more than which texts there are."""
    if not isinstance(schema, Mapping):
        return {"schema": schema}
    texts = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(texts, list) and texts and all(isinstance(one, str) for one in texts):
        return {"choice": texts}
    kinds = schema.get("type")
    parts = [part for name in ("anyOf", "oneOf", "allOf") for part in schema.get(name) or ()]
    return {"text": True} if "string" in (kinds, *_listed(kinds)) or _has_text(parts) else {"schema": schema}


def _python(schema: Any) -> dict[str, Any]:
    """A value of JSON that is one of Python, too, or a word that only Python has."""
    words = {"boolean": ["True", "False"], "null": ["None"]}
    match schema:
        case {"type": str(kind)} if kind in words and not {"enum", "const"} & schema.keys():
            return {"choice": words[kind]}
    return {"schema": schema}


def _listed(kinds: Any) -> list[Any]:
    return kinds if isinstance(kinds, list) else []


def _has_text(parts: Sequence[Any]) -> bool:
    """Whether an alternative may be text."""
    return any("text" in _value(part) or "choice" in _value(part) for part in parts if isinstance(part, Mapping))
