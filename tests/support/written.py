"""How each family of models writes a message: what a chat template renders, by hand, for any message."""

# ruff: noqa: RUF001 - DeepSeek's marks have letters that look like others

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Said:
    """A message. `calls`: names and arguments."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _thought(said: Said) -> str:
    return f"<think>\n{said.reasoning}\n</think>\n\n" if said.reasoning else ""


def _lines(said: Said, calls: Sequence[str]) -> str:
    return _thought(said) + "\n".join([*([said.content] if said.content else []), *calls])


def hermes(said: Said) -> str:
    calls = [f'{{"name": {_json(name)}, "arguments": {_json(given)}}}' for name, given in said.calls]
    return _lines(said, [f"<tool_call>\n{call}\n</tool_call>" for call in calls])


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def qwen_xml(said: Said) -> str:
    calls = []
    for name, given in said.calls:
        tags = "".join(f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in given.items())
        calls.append(f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>")
    return _lines(said, calls)


def glm_xml(said: Said) -> str:
    calls = []
    for name, given in said.calls:
        tags = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_bare(value)}</arg_value>\n" for key, value in given.items()
        )
        calls.append(f"<tool_call>{name}\n{tags}</tool_call>")
    return _lines(said, calls)


def llama(said: Said) -> str:
    calls = [f'{{"name": {_json(name)}, "parameters": {_json(given)}}}' for name, given in said.calls]
    return "\n".join([*([said.content] if said.content else []), "; ".join(calls)] if calls else [said.content])


def mistral(said: Said) -> str:
    calls = [{"name": name, "arguments": given} for name, given in said.calls]
    return said.content + (f"[TOOL_CALLS]{_json(calls)}" if calls else "")


def mistral_args(said: Said) -> str:
    thought = f"[THINK]{said.reasoning}[/THINK]" if said.reasoning else ""
    return (
        thought + said.content + "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(given)}" for name, given in said.calls)
    )


def _python(value: Any) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{_python(key)}: {_python(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_python, value)) + "]"
        case str():
            return _json(value)
    return repr(value)


def gemma3(said: Said) -> str:
    calls = [
        f"{name}({', '.join(f'{key}={_python(value)}' for key, value in given.items())})"
        for name, given in said.calls
    ]
    return "\n".join([*([said.content] if said.content else []), *([f"[{', '.join(calls)}]"] if calls else [])])


def _gemma(value: Any) -> str:
    match value:
        case dict():
            return "{" + ",".join(f"{key}:{_gemma(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_gemma, value)) + "]"
        case str():
            return f'<|"|>{value}<|"|>'
    return _json(value)


def gemma4(said: Said) -> str:
    thought = f"<|channel>thought\n{said.reasoning}\n<channel|>" if said.reasoning else ""
    calls = "".join(f"<|tool_call>call:{name}{_gemma(given)}<tool_call|>" for name, given in said.calls)
    return thought + said.content + calls


def deepseek(said: Said) -> str:
    calls = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(given)}\n```<｜tool▁call▁end｜>"
        for name, given in said.calls
    )
    return _thought(said) + said.content + (f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else "")


def deepseek_31(said: Said) -> str:
    calls = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(given)}<｜tool▁call▁end｜>" for name, given in said.calls
    )
    return _thought(said) + said.content + (f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else "")


def _thought_alone(said: Said) -> str:
    return _thought(said) + said.content


def glm4(said: Said) -> str:
    return _lines(said, [f"{name}\n{_json(given)}" for name, given in said.calls])


def phi4(said: Said) -> str:
    calls = [{"name": name, "arguments": given} for name, given in said.calls]
    return _thought(said) + said.content + (f"<|tool_call|>{_json(calls)}<|/tool_call|>" if calls else "")


def harmony(said: Said) -> str:
    parts = [f"<|channel|>analysis<|message|>{said.reasoning}"] if said.reasoning else []
    final = "commentary" if said.calls else "final"
    parts += [f"<|channel|>{final}<|message|>{said.content}"] if said.content else []
    parts += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(given)}"
        for name, given in said.calls
    ]
    return "<|end|><|start|>assistant".join(parts)


WRITERS = {
    "hermes": hermes,
    "qwen-xml": qwen_xml,
    "glm-xml": glm_xml,
    "llama": llama,
    "mistral": mistral,
    "mistral-args": mistral_args,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "deepseek": deepseek,
    "deepseek-3.1": deepseek_31,
    "think": _thought_alone,
    "glm4": glm4,
    "phi4": phi4,
    "harmony": harmony,
}
"""By the name of a format."""
WITHOUT_REASONING = {"llama", "mistral", "gemma3"}
WITHOUT_CALLS = {"think"}
