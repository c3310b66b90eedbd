"""Chat templates: messages to prompt text, as `transformers` renders them, but from JSON data only.

A template comes with the checkpoint and is a program of somebody else's. So it runs in a process of its own,
within limits of time and memory (see `sandbox`), and sees nothing but plain data. An error while it runs is nearly
always the messages' fault (an unknown role, roles that do not alternate), so it is an `InvalidRequest`. A template
that does not compile is the checkpoint's fault, a `ModelError`.

Messages in forms of OpenAI's API that the template does not read take the forms that it reads: see `forms`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from petiole.gpu_worker.exceptions import InvalidRequest, ModelError
from petiole.gpu_worker.models.checkpoint.configuration import shown
from petiole.gpu_worker.request.requests import plain_data
from petiole.gpu_worker.text.foreign import sandbox
from petiole.gpu_worker.text.foreign.sandbox import TemplateFailed
from petiole.gpu_worker.text.forms import Calls, Texts

RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
"""Names that a request's own variables must not have: they are arguments of `apply_chat_template`, as in
`transformers`."""

_REASONING = ("reasoning_content", "thinking", "reasoning")

_REASONING_MARKS = ("enable_thinking", "reasoning_content", "reasoning_effort", "<think>")
_PROBE = {
    "type": "function",
    "function": {
        "name": "petiole_probe",
        "description": "a",
        "parameters": {"type": "object", "properties": {}},
    },
}

_MOST_PROBED = 64
"""Templates and roles of which it is remembered how they read texts."""
_END = "THE_FINAL_MESSAGE_ENDS_HERE "
"""Marks the end of a message that is continued. If its space is missing, the template has trimmed the message."""


class ChatTemplate:
    """The compiled templates of a checkpoint: one, or several by name ("default", "tool_use").

    `special_tokens`: "bos_token" and the like, which templates read. Thread-safe.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, Any]) -> None:
        self._special_tokens = dict(special_tokens)
        self._sources = dict(sources)
        self._texts = lru_cache(_MOST_PROBED)(self._probed)
        self._calls: dict[str, Calls] = {}  # by source
        for name, source in self._sources.items():
            try:
                sandbox.compile_template(source)
            except TemplateFailed as error:
                raise ModelError(f"chat template {shown(name)} does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        hide: Callable[[list[dict[str, Any]]], None] | None = None,
    ) -> str:
        """The prompt text. The template reads `variables` by name (Qwen3's `enable_thinking`, for one).

        With `continue_final_message` the prompt ends with the final message, which must be the assistant's, and
        does not begin a new one. `hide` may change the messages' contents before the template sees them."""
        template = self._choose(tools)
        chat = self._readable(template, _messages(messages))
        if hide is not None:
            hide(chat)
        tool_data = None if tools is None else _tools(tools)
        given = _variables(variables or {})
        outline = _outline(chat, given)
        final = _mark_end(chat) if continue_final_message else None
        given = {
            **self._special_tokens,
            "documents": None,
            **given,
            "messages": chat,
            "tools": tool_data,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            text = sandbox.render(template, given)
        except TemplateFailed as error:
            problem = f"refused by the chat template: {error}" if error.refused else str(error)
            raise InvalidRequest("messages", problem, outline) from error
        return text if final is None else _up_to_end(text, final, outline)

    @property
    def known(self) -> bool:
        """Whether the checkpoint has a template at all."""
        return bool(self._sources)

    @property
    def source(self) -> str:
        """The sources of all templates."""
        return "\n".join(self._sources.values())

    def shows_tools(self) -> bool:
        """Whether a template writes the names of tools into a prompt. Some take no conversation without a system's
        turn, some none with one."""
        turns = [{"role": role, "content": "a"} for role in ("system", "user")]
        chats = [(source, chat) for source in self._sources.values() for chat in (turns, turns[1:])]
        return any("petiole_probe" in (self._rendered(*one, [_PROBE]) or "") for one in chats)

    def knows_reasoning(self) -> bool:
        """Whether a template mentions reasoning. No rendering would tell: most templates leave out the reasoning
        of earlier turns, and many let it begin without a mark."""
        return any(mark in source for source in self._sources.values() for mark in _REASONING_MARKS)

    def framed_turns(self) -> str:
        """What the templates write for a short conversation: their marks for the turns, and nothing of tools."""
        turns = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")]
        sources = self._sources.values()
        return "".join(
            self._rendered(source, turns) or self._rendered(source, turns[1:]) or "" for source in sources
        )

    def _readable(self, template: str, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages in forms that the template reads."""
        render = partial(self._rendered, template)
        reads = self._texts(template, "user")
        if not (reads.strings or reads.parts):  # some show a query and a document, but no user
            reads = self._texts(template, *dict.fromkeys(message["role"] for message in chat))
        if not (reads.strings or reads.parts):
            raise InvalidRequest(
                "messages", "the chat template must show texts, but leaves them out", _outline(chat)
            )
        if not reads.strings:
            chat = [_in_parts(message) for message in chat]
        elif not reads.parts:
            chat = [_with_text(f"messages[{k}].content", message) for k, message in enumerate(chat)]
        if any(message.get("tool_calls") for message in chat):
            if template not in self._calls:
                self._calls[template] = Calls.of(render)
            chat = [self._calls[template].adapt(message) for message in chat]
        return chat

    def _probed(self, template: str, *roles: str) -> Texts:
        return Texts.of(partial(self._rendered, template), roles)

    def _rendered(
        self, template: str, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> str | None:
        """A conversation of Petiole's own; None if the template refuses it."""
        rest = {"documents": None, "tools": tools, "add_generation_prompt": False, "messages": messages}
        try:
            return sandbox.render(template, {**self._special_tokens, **rest})
        except TemplateFailed:
            return None

    def _choose(self, tools: object) -> str:
        templates = self._sources
        if not templates:
            raise InvalidRequest("messages", "the model has no chat template; use a prompt", "messages")
        if tools is not None and "tool_use" in templates:
            return templates["tool_use"]
        if "default" in templates:
            return templates["default"]
        names = ", ".join(sorted(templates))
        raise InvalidRequest("messages", "the model has no default chat template", f"only {names}")


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Plain copies, without keys that are None, and reasoning under every name that templates read it by."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages", "must be a list of messages", type(messages).__name__)
    if not messages:
        raise InvalidRequest("messages", "must not be empty", "[]")
    chat = []
    for k, message in enumerate(messages):
        plain = _mapping(f"messages[{k}]", message)
        if not isinstance(plain.get("role"), str):
            raise InvalidRequest(f"messages[{k}].role", "must be a string", repr(plain.get("role")))
        given = {key: value for key, value in plain.items() if value is not None}
        reasoning = next((given[key] for key in _REASONING if key in given), None)
        if reasoning is not None:
            given = {"thinking": reasoning, **given, "reasoning_content": reasoning}
        chat.append(given)
    return chat


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose `content` is no string: it becomes a text part."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _with_text(field: str, message: dict[str, Any]) -> dict[str, Any]:
    """A message whose `content` is text. A list of text parts becomes a line for each part."""
    if not isinstance(message.get("content"), list):
        return message
    texts = []
    for k, part in enumerate(message["content"]):
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise InvalidRequest(f"{field}[{k}]", "must be a text part: this model reads no others", kind)
    return {**message, "content": "\n".join(texts)}


def _tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise InvalidRequest("tools", "must be a list of JSON schemas", type(tools).__name__)
    return [_mapping(f"tools[{k}]", tool) for k, tool in enumerate(tools)]


def _mapping(field: str, value: object) -> dict[str, Any]:
    plain = plain_data(field, value)
    if not isinstance(plain, dict):
        raise InvalidRequest(field, "must be an object", type(value).__name__)
    return plain


def _variables(given: Mapping[str, Any]) -> dict[str, Any]:
    plain = _mapping("chat_template_kwargs", given)
    reserved = sorted(RESERVED_VARIABLES & plain.keys())
    if reserved:
        limit = f"must not have {', '.join(sorted(RESERVED_VARIABLES))}"
        raise InvalidRequest("chat_template_kwargs", limit, ", ".join(reserved))
    return plain


def _outline(chat: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
    """A conversation as an error shows it: the roles and the names of variables, but nothing that was said."""
    roles = f"roles {[message['role'] for message in chat]}"
    return f"{roles} and chat_template_kwargs {list(variables)}" if variables else roles


def _mark_end(chat: Sequence[dict[str, Any]]) -> str:
    """Append `_END` to the final message, or to the last text in its parts. Returns that text without it."""
    final = chat[-1]
    if final["role"] != "assistant":
        raise InvalidRequest("continue_final_message", "needs a final message of the assistant", final["role"])
    content = final.get("content")
    parts = content if isinstance(content, list) else []
    texts = [(part, "text") for part in reversed(parts) if isinstance(part, dict)]
    for holder, key in [(final, "content"), *texts]:
        text = holder.get(key)
        if isinstance(text, str):
            holder[key] = text + _END
            return text
    raise InvalidRequest("continue_final_message", "needs text in the final message", type(content).__name__)


def _up_to_end(rendered: str, final: str, outline: str) -> str:
    """The prompt up to the mark. If the template has trimmed the message, the space before the mark goes, too."""
    end = rendered.rfind(_END.rstrip())
    prompt = rendered[: max(end, 0)]
    if not rendered.startswith(_END, end):
        prompt = prompt.rstrip()
    if end < 0 or not prompt.rstrip().endswith(final.strip()):
        problem = "the chat template must show the final message, but leaves it out or changes it"
        raise InvalidRequest("continue_final_message", problem, outline)
    return prompt
