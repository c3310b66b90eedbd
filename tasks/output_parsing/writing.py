"""How families write calls: for the worker, which makes the model write them. As data, by the name of a format.

`composed` makes of tools and of what may be said instead the value of an engine's constraint of kind "calls". A
format that is not in `WRITINGS` can be read, but not enforced."""

# ruff: noqa: RUF001 - DeepSeek's marks have letters that look like others

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from petiole.tasks.output_parsing.json_values import typed
from petiole.tasks.output_parsing.types import EVERY, Schema, Values, parameters_of


@dataclass(frozen=True)
class ReasoningMarks:
    """Marks around reasoning, and what follows them."""

    open: str
    close: str
    after: str = ""


@dataclass(frozen=True)
class ArgumentTags:
    """How one argument is written: `begin`, its name, `after`, its value, `end`. Text is written as it is, between
    `quotes`, and all else as JSON. `between`: what is between two arguments. `as_json`: text is JSON, too, and
    truth values and nothing are Python's."""

    begin: str
    after: str
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
    template's words for efforts that it does not know. `whole`: texts that begin like this pattern may be read as
    calls, too, so a strict tool forbids them."""

    begin: str = ""
    end: str = ""
    first: str = ""
    between: str = ""
    last: str = ""
    trigger: str = ""
    begins: Begins | None = None
    thought: ReasoningMarks | None = None
    tags: ArgumentTags | None = None
    most: int | None = None
    answer_begin: str = ""
    efforts: Mapping[str, str] = field(default_factory=dict)
    whole: str = ""

    @property
    def calls(self) -> bool:
        return bool(self.begin)


_THINK = ReasoningMarks("<think>", "</think>")
_OBJECT = '{"name": "{name}", "arguments": '
_WHOLE = r"[ \t\r\n]*(```json|(```[ \t\r\n]*)?[\[{])(.|\n)*"

WRITINGS: dict[str, Writing] = {
    "hermes": Writing(
        begin=f"<tool_call>\n{_OBJECT}",
        end="}\n</tool_call>",
        between="\n",
        trigger="<tool_call>",
        thought=_THINK,
        whole=_WHOLE,
    ),
    "qwen-xml": Writing(
        begin="<tool_call>\n<function={name}>\n",
        end="</function>\n</tool_call>",
        between="\n",
        trigger="<tool_call>",
        thought=_THINK,
        tags=ArgumentTags("<parameter=", ">\n", "\n</parameter>\n"),
        whole=_WHOLE,
    ),
    "glm-xml": Writing(
        begin="<tool_call>{name}\n",
        end="</tool_call>",
        between="\n",
        trigger="<tool_call>",
        thought=_THINK,
        tags=ArgumentTags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "llama": Writing(begin='{"name": "{name}", "parameters": ', end="}", between="; ", trigger='{"name": "'),
    "mistral": Writing(
        first="[TOOL_CALLS][", begin=_OBJECT, end="}", between=", ", last="]", trigger="[TOOL_CALLS]"
    ),
    "mistral-args": Writing(
        begin="[TOOL_CALLS]{name}[ARGS]", trigger="[TOOL_CALLS]", thought=ReasoningMarks("[THINK]", "[/THINK]")
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
        tags=ArgumentTags("", "=", "", between=", ", as_json=True),
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
        thought=ReasoningMarks("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"),
        most=1,
        answer_begin="<|channel|>final<|message|>",
        efforts={"none": "low", "minimal": "low", "xhigh": "high", "max": "high"},
    ),
    "gemma4": Writing(
        begin="<|tool_call>call:{name}{",
        end="}<tool_call|>",
        trigger="<|tool_call>",
        thought=ReasoningMarks("<|channel>thought\n", "<channel|>"),
        tags=ArgumentTags("", ":", "", quotes='<|"|>', between=","),
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
        "whole": writing.whole if any(tool.get("strict") is True for tool in tools) else "",
        **({} if budget is None else {"budget": budget, "free": not tools and answer is None}),
    }


def _call(writing: Writing, tool: Mapping[str, Any]) -> dict[str, Any]:
    name, schema = str(tool["name"]), tool.get("parameters")
    in_quotes = '"{name}"' in writing.begin
    written = json.dumps(name, ensure_ascii=False)[1:-1] if in_quotes else name
    call = {
        "name": name,
        "strict": tool.get("strict") is True,
        "begin": writing.begin.replace("{name}", written),
        "end": writing.end,
    }
    if writing.tags is None:
        return {**call, "schema": schema}
    marks = {key: value for key, value in vars(writing.tags).items() if key != "as_json"}
    return {**call, "tags": marks, "arguments": _arguments(writing.tags, schema)}


def _arguments(tags: ArgumentTags, schema: Any) -> list[dict[str, Any]]:
    """The arguments in the order of the schema's properties."""
    found, root = parameters_of(schema), Schema(schema)
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema} if found.schemas else {}
    arguments = []
    for key, one in found.schemas.items():
        refers = isinstance(one, Mapping) and '"$ref"' in json.dumps(one)
        whole = {**one, **shared} if refers else one
        way = _python if tags.as_json else _value
        arguments.append({"key": key, "needed": key in found.needed, **way(tags, whole, root.values(one))})
    return arguments


def _value(tags: ArgumentTags, schema: Any, values: Values) -> dict[str, Any]:
    """What is text for certain is written without JSON's quotes. So is text beside null or among listed values,
    unless it would be read as something else. All else is JSON, which says exactly what the schema says."""
    kinds, listed = values.kinds, values.listed
    if "string" not in kinds or kinds == EVERY.kinds:
        return {"schema": schema}
    if listed is not None:
        return {"choice": [_written(tags, value, values) for value in listed]}
    if kinds == {"string", "null"} and tags.quotes:
        return {"text": True, "schema": {"type": "null"}}
    return {"text": True} if kinds <= {"string", "null"} else {"schema": schema}


def _written(tags: ArgumentTags, value: Any, values: Values) -> str:
    as_json = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        return as_json
    if tags.quotes:
        return as_json if tags.quotes in value else f"{tags.quotes}{value}{tags.quotes}"
    return value if values.kinds == {"string"} or typed(value, values.named) == as_json else as_json


def _python(tags: ArgumentTags, schema: Any, values: Values) -> dict[str, Any]:
    """A value of JSON that is one of Python, too, or words that only Python has."""
    words = {True: "True", False: "False", None: "None"}
    if values.kinds and values.kinds <= {"boolean", "null"}:
        return {"choice": [words[value] for value in values.listed or ()]}
    return {"schema": schema}
