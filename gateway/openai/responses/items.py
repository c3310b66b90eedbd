"""Items: what a response is told and what it answers. Pure.

`kept` makes items of what a client has written, whole and with ids: they are stored and listed so. `messages`
makes a task's messages of them. Text that came in parts is joined, because many chat templates take text alone.

Calls of tools and their outputs go to the template as it knows them. So does reasoning: it belongs to what the
model said next. Most templates leave out that of earlier turns."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from petiole.contract.errors import shorten
from petiole.contract.requests.images import View
from petiole.gateway.core.foreign import text_tools, unknown
from petiole.gateway.core.requests import NONE, Images, image
from petiole.gateway.openai.responses import compaction, tools
from petiole.tasks.errors import InvalidRequest

Item = dict[str, Any]

MOST = 10_000
_TOLD = (
    "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "local_shell_call", "local_shell_call_output", "reasoning", "compaction", "item_reference",
    "additional_tools",
)  # fmt: skip
"""The types of items that a model is told. Others, such as searches of other providers, are skipped."""
_PARTS_IN = {"message": "content", "function_call_output": "output", "custom_tool_call_output": "output"}
"""The types of items that may have images, and the field of their parts."""
_STATUSES = ("in_progress", "completed", "incomplete")
ROLES = ("user", "assistant", "system", "developer")
_PREFIXES = {
             "message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_",
             "custom_tool_call": "ctc_", "custom_tool_call_output": "ctco_"}  # fmt: skip


def new_id(kind: str) -> str:
    return f"{_PREFIXES.get(kind, 'item_')}{secrets.token_hex(16)}"


def output_id(response_id: str, kind: str, index: int) -> str:
    """The id of an item of an output. It follows from the response's id, and leads back to it."""
    return f"{_PREFIXES[kind]}{response_id.removeprefix('resp_')}{index:02x}"


def response_of(item_id: str) -> str:
    """The response in whose output an item with this id would be."""
    return f"resp_{item_id.partition('_')[2][:32]}"


# ---------------------------------------------------------------- as they are kept


def to_fetch(field: str, given: object) -> list[tuple[str, str]]:
    """The http URLs of images that a model is shown, each with its field."""
    found = []
    for k, item in enumerate(given if isinstance(given, list) else ()):
        kind = _kind(item) if isinstance(item, dict) else None
        name = _PARTS_IN.get(kind) if isinstance(kind, str) else None
        parts = item.get(name) if name else None
        for place, part in enumerate(parts if isinstance(parts, list) else ()):
            if not isinstance(part, dict) or part.get("type") != "input_image":
                continue
            url = part.get("image_url")
            if isinstance(url, str) and url[:5].lower() in ("http:", "https"):
                found.append((f"{field}[{k}].{name}[{place}].image_url", url))
    return found


def kept(field: str, given: object, fetched: Images = NONE) -> list[Item]:
    """What is fetched is kept, too: later turns see the same image. Raises `InvalidRequest`."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise InvalidRequest(field, "must be text or a list of items", shorten(given))
    if len(given) > MOST:
        raise InvalidRequest(field, f"must have at most {MOST} items", len(given))
    return [_item(f"{field}[{k}]", one, fetched) for k, one in enumerate(given)]


def _kind(given: Item) -> object:
    return given.get("type", "message" if "role" in given else "item_reference" if "id" in given else None)


def _item(field: str, given: object, fetched: Images) -> Item:
    if not isinstance(given, dict):
        raise InvalidRequest(field, "must be an item", shorten(given))
    kind = _kind(given)
    if not isinstance(kind, str):
        raise InvalidRequest(f"{field}.type", "must be text", shorten(kind))
    if kind not in _TOLD:
        return {"type": kind}  # skipped: nothing is read of it
    item: Item = {"type": kind, "id": _text(field, given, "id") if given.get("id") else new_id(kind)}
    match kind:
        case "message":
            role = given.get("role")
            if role not in ROLES:
                raise InvalidRequest(f"{field}.role", f"must be one of {', '.join(ROLES)}", shorten(role))
            item |= {
                "status": "completed",
                "role": role,
                "content": _content(field, role, given.get("content"), fetched),
            }
            return item | ({"phase": given["phase"]} if isinstance(given.get("phase"), str) else {})
        case "function_call" | "custom_tool_call":
            said = ["call_id", "name", "arguments" if kind == "function_call" else "input"]
            said += ["namespace"] if given.get("namespace") is not None else []
            return {**item, "status": "completed", **{name: _text(field, given, name) for name in said}}
        case "function_call_output" | "custom_tool_call_output":
            output = given.get("output")
            if not isinstance(output, str):
                output = _parts(f"{field}.output", "user", output, fetched)
            call_id = _text(field, given, "call_id")
            return {**item, "status": "completed", "call_id": call_id, "output": output}
        case "reasoning":
            item["summary"] = _texts("summary_text", given.get("summary"))
            if isinstance(given.get("content"), list):
                item["content"] = _texts("reasoning_text", given["content"])
            if given.get("status") in _STATUSES:
                item["status"] = given["status"]
            if isinstance(given.get("encrypted_content"), str):
                item["encrypted_content"] = given["encrypted_content"]
            return item
        case "local_shell_call":
            command = {"type": "exec", "command": _words(given.get("action")), "env": {}}
            return {**item, "status": "completed", "call_id": _call_id(item, given), "action": command}
        case "local_shell_call_output":
            output = given.get("output")
            shown = output if isinstance(output, str) else ""
            return {**item, "status": "completed", "call_id": _call_id(item, given), "output": shown}
        case "compaction":
            packed = _text(field, given, "encrypted_content")
            compaction.unpacked(f"{field}.encrypted_content", packed)
            return {**item, "encrypted_content": packed}
        case "additional_tools":
            if (role := given.get("role", "developer")) != "developer":
                raise InvalidRequest(f"{field}.role", "must be developer", shorten(role))
            return {**item, "role": role, "tools": tools.callable_only(f"{field}.tools", given.get("tools"))}
        case "item_reference":
            return {"type": kind, "id": _text(field, given, "id")}
    raise AssertionError(kind)


def skipped(given: object) -> list[str]:
    """The items that no model here is told, by their types."""
    return unknown.kinds("input", given if isinstance(given, list) else (), _TOLD)


def remembered(items: Sequence[Item]) -> list[Item]:
    """The items that are not skipped: they alone are stored and listed."""
    return [item for item in items if item["type"] in _TOLD]


def additional_tools(given: object) -> list[tuple[str, list[Item]]]:
    """The tools that each item of this type names, with the list's field."""
    return [
        (f"input[{place}].tools", [tool for tool in one["tools"] if isinstance(tool, dict)])
        for place, one in enumerate(given if isinstance(given, list | tuple) else ())
        if isinstance(one, dict) and one.get("type") == "additional_tools" and isinstance(one.get("tools"), list)
    ]


def _text(field: str, given: Item, name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{field}.{name}", "must be text", shorten(value))
    return value


def _call_id(item: Item, given: Item) -> str:
    name = given.get("call_id")
    return name if isinstance(name, str) else str(item["id"])


def _texts(kind: str, given: object) -> list[Item]:
    """The parts that are texts. Of a history that others have made, what cannot be read is left out."""
    parts = [part.get("text") for part in given if isinstance(part, dict)] if isinstance(given, list) else []
    return [{"type": kind, "text": text} for text in parts if isinstance(text, str)]


def _words(action: object) -> list[str]:
    """The words of a command."""
    command = action.get("command") if isinstance(action, dict) else None
    words = command if isinstance(command, list) else [command]
    return [word for word in words if isinstance(word, str)]


def _content(field: str, role: str, given: object, fetched: Images) -> list[Item]:
    if isinstance(given, str):
        given = [{"type": "output_text" if role == "assistant" else "input_text", "text": given}]
    return _parts(f"{field}.content", role, given, fetched)


def _parts(field: str, role: str, given: object, fetched: Images) -> list[Item]:
    if not isinstance(given, list):
        raise InvalidRequest(field, "must be text or a list of parts", shorten(given))
    return [_part(f"{field}[{k}]", role, part, fetched) for k, part in enumerate(given)]


def _part(field: str, role: str, part: object, fetched: Images) -> Item:
    match part:
        case {"type": "output_text", "text": str(text)}:
            return {"type": "output_text", "text": text, "annotations": []}
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "refusal", "refusal": text}
        case {"type": "input_text" | "text" | "summary_text" | "reasoning_text" as kind, "text": str(text)}:
            return {"type": kind, "text": text}
        case {"type": "input_image", "image_url": str(url), **more} if role != "assistant":
            detail = more.get("detail") or "auto"
            View(str(detail)).check(field)
            url = image(f"{field}.image_url", fetched.get(url, url))
            return {"type": "input_image", "detail": detail, "image_url": url}
        case {"type": "input_image", "file_id": str(name)}:
            raise InvalidRequest(f"{field}.file_id", "is not served: give the image as image_url", shorten(name))
        case {"type": str(kind)}:
            limit = "must be a complete part of type input_text, output_text, refusal or input_image"
            raise InvalidRequest(field, limit, shorten(kind))
    raise InvalidRequest(field, "must be an object with a type", shorten(part))


# ---------------------------------------------------------------- as messages


def messages(instructions: str | None, before: Sequence[Item], own: Sequence[Item]) -> list[dict[str, Any]]:
    """The messages of a task. What stands at the beginning and is no turn of the dialogue is one system message,
    because many templates take one only. Raises `InvalidRequest`."""
    found: list[dict[str, Any]] = []
    if instructions:
        found.append({"role": "system", "content": instructions})
    calls: set[str] = set()
    thoughts: list[str] = []
    for place, item in enumerate((*before, *own), -len(before)):
        match item["type"]:
            case "reasoning":
                thoughts += _thought(item)
            case "message" if item["role"] == "assistant":
                found.append({"role": "assistant", "content": _shown(item["content"]), **_thinking(thoughts)})
                thoughts = []
            case "message":
                thoughts = []
                role = "system" if item["role"] == "developer" else item["role"]
                content = _shown(item["content"])
                if role == "system" and _is_told(found) and isinstance(content, str):
                    found[-1] = {"role": "system", "content": f"{found[-1]['content']}\n\n{content}"}
                else:
                    found.append({"role": role, "content": content})
            case "function_call" | "custom_tool_call" as kind:
                calls.add(item["call_id"])
                name = tools.Name(item.get("namespace"), item["name"]).joined
                called = item["arguments"] if kind == "function_call" else text_tools.arguments(item["input"])
                function = {"name": name, "arguments": called}
                call = {"id": item["call_id"], "type": "function", "function": function}
                if not found or found[-1]["role"] != "assistant" or thoughts:
                    found.append({"role": "assistant", "content": "", **_thinking(thoughts)})
                    thoughts = []
                found[-1] = {**found[-1], "tool_calls": [*found[-1].get("tool_calls", ()), call]}
            case "function_call_output" | "custom_tool_call_output":
                if item["call_id"] not in calls:
                    limit = "must be that of a call before it"
                    raise InvalidRequest(f"input[{place}].call_id", limit, shorten(item["call_id"]))
                output = item["output"] if isinstance(item["output"], str) else _shown(item["output"])
                found.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
            case "local_shell_call":
                found.append({"role": "assistant", "content": f"$ {' '.join(_words(item.get('action')))}"})
            case "local_shell_call_output" if isinstance(item.get("output"), str):
                found.append({"role": "user", "content": item["output"]})
            case "compaction":
                found.append({"role": "user", "content": compaction.told(item["encrypted_content"])})
    if not found:
        raise InvalidRequest("input", "must have a message", "none")
    return found


def _thought(item: Item) -> list[str]:
    """The texts of an item of reasoning; none if it has only what this model cannot read."""
    return [part["text"] for part in _texts("reasoning_text", item.get("content")) if part["text"]]


def _thinking(thoughts: Sequence[str]) -> dict[str, str]:
    return {"reasoning_content": "\n".join(thoughts)} if thoughts else {}


def _is_told(found: Sequence[dict[str, Any]]) -> bool:
    return len(found) == 1 and found[0]["role"] == "system" and isinstance(found[0]["content"], str)


def _detail(part: Item) -> Item:
    """How closely an image is looked at, if not as usual."""
    detail = part.get("detail", "auto")
    return {} if detail == "auto" else {"detail": detail}


def _shown(parts: Sequence[Item]) -> str | list[Item]:
    """Content as a task takes it: text, or a list of parts if there are images."""
    shown = [
        {"type": "image_url", "image_url": {"url": part["image_url"]}, **_detail(part)}
        if part["type"] == "input_image"
        else {"type": "text", "text": part.get("text", part.get("refusal", ""))}
        for part in parts
    ]
    if all(part["type"] == "text" for part in shown):
        return "".join([str(part["text"]) for part in shown])
    return shown
