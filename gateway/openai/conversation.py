"""Messages and tools as clients of chat/completions write them, as a task takes them. Pure.

Most chat templates know no role `developer`: it becomes `system`. Images are data URLs, or http URLs whose images
`serving.images` has fetched. All other keys of a message, such as tool calls, go to the template as they are.

A tool of type `custom` takes text (`foreign.text_tools`). Tools of other types, but functions, are skipped: no
model here can call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from petiole.contract.errors import shorten
from petiole.contract.requests import images
from petiole.gateway.core.foreign import text_tools, unknown
from petiole.gateway.core.requests import NONE, Images, image
from petiole.tasks.errors import InvalidRequest

_LONGEST_ROLE = 64
"""Characters of a role. Which roles there are is the chat template's."""
_WITHOUT_CONTENT = ("tool_calls", "function_call", "refusal", "audio", "reasoning", "reasoning_content")
"""What an assistant's message may have in place of content."""


def messages(
    given: list[dict[str, Any]], fetched: Images = NONE, view: Mapping[str, Any] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """view: how the model is to look at images of which their parts do not say it. Raises `InvalidRequest`."""
    return [_message(f"messages[{k}]", message, fetched, view) for k, message in enumerate(given)]


def to_fetch(given: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The http URLs of images, each with its field. Raises `InvalidRequest` for too many images or frames."""
    found = []
    for field, part in images.parts_of_all(given):
        for name, url in part.files.items():
            fetched = not part.video or name  # of videos frames alone
            if fetched and isinstance(url, str) and url[:5].lower() in ("http:", "https"):
                found.append((f"{field}.{part.field}{name or '.image_url.url'}", url))
    return found


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return "".join(text for text in parts if isinstance(text, str))


def _message(field: str, message: dict[str, Any], fetched: Images, view: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= _LONGEST_ROLE:
        raise InvalidRequest(f"{field}.role", f"must be text of 1 to {_LONGEST_ROLE} characters", shorten(role))
    taken = {**message, "role": "system" if role == "developer" else role}
    if isinstance(calls := message.get("tool_calls"), list):
        taken["tool_calls"] = [as_function_call(call) for call in calls]
    content = message.get("content")
    if isinstance(content, list):
        taken["content"] = [_part(f"{field}.content[{k}]", part, fetched, view) for k, part in enumerate(content)]
    elif content is None:
        if role != "assistant" or not any(message.get(name) for name in _WITHOUT_CONTENT):
            raise InvalidRequest(f"{field}.content", "is required", "nothing")
        taken.setdefault("content", None)
    elif not isinstance(content, str):
        raise InvalidRequest(f"{field}.content", "must be text or a list of parts", shorten(content))
    return taken


def _part(field: str, part: object, fetched: Images, view: Mapping[str, Any]) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": {"url": str(url)}} | {"type": "image_url", "image_url": str(url)}:
            more = _said(f"{field}.image_url", part, view, video=False)
            url = image(f"{field}.image_url.url", fetched.get(url, url))
            return {"type": "image_url", "image_url": {"url": url, **more}}
        case {"type": "video", "video": str(url)}:
            return _video(field, part, url, view)
        case {"type": "video_url", "video_url": {"url": str(url)} | str(url)}:
            return _video(field, part, url, view)
        case {"type": "video", "video": [*urls]} if all(isinstance(url, str) for url in urls):
            more = _said(field, part, view, video=True)
            frames = [image(f"{field}.video[{k}]", fetched.get(url, url)) for k, url in enumerate(urls)]
            return {"type": "video", "video": frames, **more}
        case {"type": str(kind)}:
            limit = "must be a complete part of type text, image_url, video_url or video"
            raise InvalidRequest(field, limit, shorten(kind))
    raise InvalidRequest(field, "must be an object with a type", shorten(part))


def _video(field: str, part: object, url: str, view: Mapping[str, Any]) -> dict[str, Any]:
    """A part whose video is a file."""
    more = _said(field, part, view, video=True)
    if url.lstrip()[:5].lower() != "data:" and not images.is_handle(url):
        raise InvalidRequest(f"{field}.video_url.url", "must be a data URL", shorten(url))
    return {"type": "video_url", "video_url": {"url": url, **more}}


def _said(field: str, part: object, view: Mapping[str, Any], *, video: bool) -> dict[str, Any]:
    """How the model is to look at a part: what is said of all, but for `fps` of images, and what the part says."""
    more = {name: value for name, value in view.items() if video or name != "fps"} | images.said(part)
    images.View(**more).check(field, video=video)
    return more


Tool = Mapping[str, Any]

_CALLED = ("function", "custom")


def functions(given: Sequence[Tool]) -> list[Any]:
    """The tools of a task, which checks functions. Raises `InvalidRequest`."""
    found: list[Any] = []
    for place, tool in enumerate(given):
        match tool:
            case {"type": "custom", "custom": {"name": str(name)} as inner}:
                made = text_tools.function(f"tools[{place}].custom", name, inner, place)
                found.append({"type": "function", "function": made})
            case {"type": "custom"}:
                raise InvalidRequest(f"tools[{place}].custom", "must be an object with a name", shorten(tool))
            case {"type": str(kind)} if kind not in _CALLED:
                pass
            case _:
                found.append(tool)
    return found


def custom_tools(given: Sequence[Tool]) -> list[str]:
    """The names of the tools that take text."""
    return [tool["custom"]["name"] for tool in given if tool.get("type") == "custom"]


def skipped(given: Sequence[Tool]) -> list[str]:
    """The tools that no model here can call, by their types."""
    return unknown.kinds("tools", given, _CALLED)


def tool_choice(given: Any) -> Any:
    """`tool_choice` as a task takes it, which checks it."""
    match given:
        case {"type": "custom", "custom": {"name": str(name)}}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "allowed_tools": {"tools": [*allowed], **more}}:
            return {**given, "allowed_tools": {**more, "tools": [tool_choice(tool) for tool in allowed]}}
    return given


def as_function_call(call: Any) -> Any:
    """A call in a conversation, of a function in place of one that takes text."""
    match call:
        case {"type": "custom", "custom": {"name": str(name), "input": str(text)}, **more}:
            function = {"name": name, "arguments": text_tools.arguments(text)}
            return {**more, "type": "function", "function": function}
    return call
