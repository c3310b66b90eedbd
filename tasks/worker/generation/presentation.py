"""What the worker makes of a conversation's text: it says how readers divide the text, and divides it once itself,
for the result.

A conversation is divided if its model has a format, and if it has tools or the format has reasoning. The marks of
the format that are special tokens stay in the text then."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from petiole.contract.errors import shorten
from petiole.contract.requests.generation import ChatRequest, Common
from petiole.contract.results.outputs import Prepared
from petiole.contract.results.task_result import Reasoning, ToolCall
from petiole.gpu_worker.request import Request, Result
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.output_parsing import formats, message
from petiole.tasks.output_parsing.formats import ToolFormat
from petiole.tasks.output_parsing.message import ParsedMessage
from petiole.tasks.output_parsing.tool_calls import MOST_NAME
from petiole.tasks.output_parsing.types import names_in, parameters_of, types_of
from petiole.tasks.output_parsing.writing import WRITINGS, Writing, composed
from petiole.tasks.worker.generation.engines import EngineLike

SHORT = 64
"""Characters of a variable of the chat template that readers may need to know."""


@dataclass(frozen=True)
class Presentation:
    """The presentation of one model. `shown`: the special tokens that its marks consist of. `family`: the format
    in which calls are enforced. `reasons`: whether its template knows reasoning; families have models without.
    `offers`: whether its template shows a model the tools."""

    format: ToolFormat | None = None
    family: ToolFormat | None = None
    shown: Sequence[str] = ()
    reasons: bool = True
    offers: bool = True

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Presentation:
        """`facts`: `Engine.facts()`."""
        if facts.get("images") and not facts.get("chat_template"):  # it answers conversations by a skill
            return cls()
        format = formats.of_checkpoint(facts)
        shown = format.shown(facts.get("special_tokens", {}).values()) if format else ()
        family = formats.of_family(facts)
        offers = facts.get("tools", True)
        return cls(format, family, shown, formats.reasons(facts, family), offers)

    @property
    def _writing(self) -> Writing:
        return WRITINGS.get(self.family.name if self.family else "", Writing())

    def divides(self, request: Request) -> ToolFormat | None:
        """The format in which the output of this request is divided."""
        format = self.format
        if format is None or (request.messages is None and request.skill is None):
            return None
        calls, reasons = bool(request.tools) and format.template.has_calls, format.template.has_reasoning
        return format if calls or reasons else None

    def with_marks(self, request: Request) -> Request:
        """The request of which readers can divide the output. Its effort is a word of its template's."""
        effort = request.chat_template_kwargs.get("reasoning_effort")
        own = self._writing.efforts.get(effort) if isinstance(effort, str) else None
        if own is not None:
            variables = {**request.chat_template_kwargs, "reasoning_effort": own}
            request = replace(request, chat_template_kwargs=variables)
        if not self.shown or self.divides(request) is None:
            return request
        return replace(request, shown_tokens=tuple(self.shown))

    def constraint(self, asked: Common) -> tuple[str, Any] | None:
        """The constraint on the output: the request's own, the calls that it enforces, and, where the family
        thinks, the thought before both. Raises InvalidRequest."""
        own = asked.constraint()
        if not isinstance(asked, ChatRequest):
            return own
        self._check_names(asked)
        budget = asked.max_reasoning_tokens
        calling, writing = asked.calling, self._writing
        if asked.tools and asked.tool_choice != "none" and not self.offers:
            limit = "must not be given: the model's chat template has no place for them"
            raise InvalidRequest("tools", limit, shorten(asked.tools))
        if not self.reasons and budget is None:
            writing = replace(writing, thought=None)
        if calling.enforced:
            if not writing.calls:
                known = ", ".join(sorted(name for name, one in WRITINGS.items() if one.calls))
                limit = f"must be auto or none: calls are enforced in the formats {known}"
                raise InvalidRequest("tool_choice", limit, "a model that has none of them")
            tools, least, most = calling.tools, calling.least, calling.most
            return "calls", composed(writing, tools, least=least, most=most, answer=own, budget=budget)
        if writing.thought is None or (own is None and budget is None):
            return own
        return "calls", composed(writing, (), least=0, most=None, answer=own, budget=budget)

    def _check_names(self, asked: ChatRequest) -> None:
        """Whether the format has calls of these tools with these parameters. Raises InvalidRequest."""
        format = self.format
        if format is None or asked.tool_choice == "none":
            return
        for place, tool in enumerate(asked.tools or ()):
            match tool:
                case {"function": {"name": str(name), **rest}}:
                    field = f"tools[{place}].function"
                case {"name": str(name), **rest}:
                    field = f"tools[{place}]"
                case _:
                    continue
            carries, schema = format.template.carries_name, rest.get("parameters")
            keys, inner = partial(format.template.carries_key, inside=False), f"{field}.parameters"
            _check_name(f"{field}.name", name, carries, format)
            for key in (own := parameters_of(schema).schemas):
                _check_name(f"{inner}.properties", key, keys, format)
            for key in names_in(schema) - own.keys():
                _check_name(inner, key, partial(format.template.carries_key, inside=True), format)

    def described(self, prepared: Prepared, request: Request) -> Prepared:
        """`prepared` with what the request says about its output: its tools, its format, and how the template was
        to reason."""
        short = {
            name: value
            for name, value in request.chat_template_kwargs.items()
            if isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= SHORT)
        }
        format = self.divides(request)
        announced = None if format is None else format.announced
        return replace(
            prepared,
            tool_types=(types_of(request.tools) or None) if request.tools else None,
            reasoning=short or None,
            format=announced if announced is None or isinstance(announced, str) else dict(announced),
        )

    def parts(
        self, task_id: str, request: Request, result: Result, prompt_end: str, lengths: Callable[[], Sequence[int]]
    ) -> dict[str, Any]:
        """The fields of the result that follow from its text. `lengths`: for each token, how many characters the
        text up to it has."""
        format = self.divides(request)
        if format is None:
            return {}
        tools = types_of(request.tools) if request.tools else None
        read = message.read(format, result.text, prompt_end=prompt_end, tools=tools)
        found: dict[str, Any] = {}
        if read.content != result.text:
            found |= (
                {"content": read.content} if request.messages else dict.fromkeys(result.answer or (), read.content)
            )
        if read.calls:
            found["tool_calls"] = calls_of(task_id, read)
        if read.spans:
            found["reasoning"] = Reasoning(text=read.reasoning, grounding=[])
            found["usage"] = replace(result.usage, reasoning_tokens=_within(read.spans, lengths()))
        return found


class Presentations:
    """The presentation of the model that an engine serves at the moment. Thread-safe."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._made: tuple[str, Presentation] | None = None

    def now(self) -> Presentation:
        fingerprint = self._engine.limits.fingerprint
        with self._lock:
            if self._made is None or self._made[0] != fingerprint:
                self._made = fingerprint, Presentation.of(self._engine.facts())
            return self._made[1]


def calls_of(task_id: str, read: ParsedMessage) -> list[ToolCall]:
    return [
        ToolCall(index=index, id=message.call_id(task_id, index), name=call.name, arguments=call.arguments)
        for index, call in enumerate(read.calls)
    ]


def _check_name(field: str, name: str, carries: Callable[[str], bool], format: ToolFormat) -> None:
    if carries(name):
        return
    wrong = "".join(sorted({letter for letter in name if not carries(f"a{letter}a")}))
    limit = f"must not have {wrong!r}" if wrong else f"must have 1 to {MOST_NAME} characters, no space at its ends"
    raise InvalidRequest(
        field, f"{limit}: this model writes calls as {format.name or 'its checkpoint says'}", shorten(name)
    )


def _within(spans: Sequence[tuple[int, int]], lengths: Sequence[int]) -> int:
    """How many tokens have text in these spans, or none between two tokens that do."""
    found = 0
    for begin, end in spans:
        first, last = bisect_right(lengths, begin), min(bisect_left(lengths, end), len(lengths) - 1)
        found += last + 1 - first if end > begin else 0
    return found
