"""Messages as clients write them, in blocks, as a task takes them. Pure.

Text that came in blocks is joined, because many chat templates take text alone. The result of a tool is a message
of its own there. A thought goes back to the template with what the model said next; its signature says nothing.
A dialogue that Anthropic's own models have begun has blocks of tools that Anthropic ran: these are skipped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from petiole.contract.errors import shorten
from petiole.gateway.core.foreign import unknown
from petiole.gateway.core.requests import NONE, Images, image
from petiole.tasks.errors import InvalidRequest

Block = Mapping[str, Any]
Message = dict[str, Any]

ROLES = ("user", "assistant", "system")
_TOLD = ("text", "image", "document", "search_result", "thinking", "redacted_thinking", "tool_use", "tool_result",
         "compaction")  # fmt: skip
_OF_ANTHROPIC = ("fallback", "container_upload", "tool_reference")


def to_fetch(given: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The http URLs of images, each with its field."""
    return [
        (f"{field}.source.url", source["url"])
        for k, message in enumerate(given)
        for field, block in _everywhere(f"messages[{k}].content", message.get("content"))
        if isinstance(source := block.get("source"), Mapping)
        and block.get("type") == "image"
        and source.get("type") == "url"
        and isinstance(source.get("url"), str)
    ]


def skipped(given: Sequence[Mapping[str, Any]]) -> list[str]:
    """The blocks that no model here is told, by their types."""
    found = [block for message in given for _, block in _everywhere("", message.get("content"))]
    return unknown.kinds("messages", found, _TOLD)


def _is_skipped(block: Block) -> bool:
    """Whether it is about a tool that Anthropic runs, or about its servers."""
    kind = block.get("type")
    return isinstance(kind, str) and (kind in _OF_ANTHROPIC or kind.endswith(("_tool_use", "_tool_result")))


def _everywhere(field: str, content: object) -> Iterator[tuple[str, Block]]:
    """All blocks, and those in results of tools and in documents."""
    for k, block in enumerate(content if isinstance(content, list) else ()):
        if isinstance(block, Mapping):
            yield f"{field}[{k}]", block
            match block:
                case {"type": "tool_result", "content": inner}:
                    yield from _everywhere(f"{field}[{k}].content", inner)
                case {"type": "document", "source": {"type": "content", "content": inner}}:
                    yield from _everywhere(f"{field}[{k}].source.content", inner)


def messages(system: object, given: Sequence[Mapping[str, Any]], fetched: Images = NONE) -> list[Message]:
    """Raises `InvalidRequest`."""
    found: list[Message] = []
    if system:
        found.append({"role": "system", "content": _text("system", system, "\n\n")})
    calls: set[str] = set()
    for k, message in enumerate(given):
        field, content = f"messages[{k}].content", message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise InvalidRequest(field, "must be text or a list of blocks", shorten(content))
        match message.get("role"):
            case "user":
                found += _of_user(field, blocks, calls, fetched)
            case "assistant":
                found.append(_of_assistant(field, blocks, calls))
            case "system":
                found.append({"role": "system", "content": _text(field, blocks, "\n\n")})
            case role:
                raise InvalidRequest(f"messages[{k}].role", f"must be one of {', '.join(ROLES)}", shorten(role))
    return found


def continues(given: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the model goes on with the last message."""
    return bool(given) and given[-1].get("role") == "assistant"


def _of_user(field: str, blocks: Sequence[Block], calls: set[str], fetched: Images) -> list[Message]:
    found: list[Message] = []
    said: list[dict[str, Any]] = []
    for k, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            said += _parts(f"{field}[{k}]", block, fetched)
            continue
        if said:
            found.append({"role": "user", "content": _joined(said)})
            said = []
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str) or call_id not in calls:
            limit = "must be the id of a tool_use before it"
            raise InvalidRequest(f"{field}[{k}].tool_use_id", limit, shorten(call_id))
        content = _result(f"{field}[{k}].content", block.get("content"), fetched)
        found.append({"role": "tool", "tool_call_id": call_id, "content": content})
    if said or not found:
        found.append({"role": "user", "content": _joined(said)})
    return found


def _result(field: str, content: object, fetched: Images) -> str | list[dict[str, Any]]:
    match content:
        case None:
            return ""
        case str():
            return content
        case list() if all(isinstance(block, dict) for block in content):
            parts = [_parts(f"{field}[{k}]", block, fetched) for k, block in enumerate(content)]
            return _joined([part for some in parts for part in some])
    raise InvalidRequest(field, "must be text or a list of blocks", shorten(content))


def _of_assistant(field: str, blocks: Sequence[Block], calls: set[str]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    called: list[dict[str, Any]] = []
    for k, block in enumerate(blocks):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)}:
                thoughts += [text] if text else []
            case {"type": "compaction", "content": str(text)}:
                texts.append(text)
            case {"type": "redacted_thinking" | "compaction"}:
                pass
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(arguments)}:
                calls.add(call_id)
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                called.append({"id": call_id, "type": "function", "function": function})
            case _ if not _is_skipped(block):
                limit = "must be a complete block of type text, thinking, redacted_thinking or tool_use"
                raise InvalidRequest(f"{field}[{k}]", limit, shorten(block.get("type")))
    said: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        said["reasoning_content"] = "\n".join(thoughts)
    return said | ({"tool_calls": called} if called else {})


def _parts(field: str, block: Block, fetched: Images) -> list[dict[str, Any]]:
    """What a block is as parts of a message: usually one."""
    match block:
        case {"type": "text", "text": str(text)}:
            return [{"type": "text", "text": text}]
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return [{"type": "text", "text": text}]
        case {"type": "document", "source": {"type": "content", "content": content}}:
            told = _result(f"{field}.source.content", content, fetched)
            return [{"type": "text", "text": told}] if isinstance(told, str) else told
        case {"type": "search_result", "title": str(title), "source": str(source), "content": content}:
            text = _text(f"{field}.content", content, "\n")
            return [{"type": "text", "text": f"{title} ({source})\n{text}"}]
        case {"type": "image", "source": {"type": "base64", "media_type": str(kind), "data": str(data)}}:
            return [{"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}]
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            url = image(f"{field}.source.url", fetched.get(url, url))
            return [{"type": "image_url", "image_url": {"url": url}}]
    if _is_skipped(block):
        return []
    limit = "must be a complete block of type text, image, tool_result, search_result, or document of plain text"
    raise InvalidRequest(field, limit, shorten(block.get("type")))


def _text(field: str, given: object, between: str) -> str:
    match given:
        case str():
            return given
        case [*blocks]:
            texts = [block.get("text") if isinstance(block, dict) else None for block in blocks]
            if all(isinstance(text, str) for text in texts):
                return between.join([str(text) for text in texts])
    raise InvalidRequest(field, "must be text or a list of blocks of type text", shorten(given))


def _joined(parts: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Text, or a list of parts if there are images."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join([str(part["text"]) for part in parts])
    return [*parts]
