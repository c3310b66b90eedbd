"""The request of a response: which task it becomes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from petiole.contract.errors import shorten
from petiole.contract.limits import MAX_TOOLS
from petiole.contract.requests.bounds import Entries, Object
from petiole.gateway.core.foreign import spellings
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.requests import NONE, Images, RequestBody
from petiole.gateway.core.task_plan import Plan, TaskCall
from petiole.gateway.openai import response_format, sampling_options
from petiole.gateway.openai.responses import items, tools
from petiole.gateway.openai.responses.items import Item
from petiole.gateway.openai.sampling_options import MOST_LOGPROBS, SamplingBody, ThinkingBody
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet.models import ModelRoute

KIND = "response"
PREFIX = "resp_"

NAMES = {
    **sampling_options.NAMES,
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "json_schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
}
"""By an option of the task: the client's field."""

_LOGPROBS = "message.output_text.logprobs"
_SHORTEST_S = 3600


@dataclass(frozen=True)
class History:
    """What comes before a request: its turns, oldest first, by their names and as items. `seen`: how many entries
    the list of its conversation has."""

    turns: Sequence[str] = ()
    items: Sequence[Item] = ()
    conversation: str | None = None
    seen: int = 0


@dataclass(frozen=True)
class Times:
    """`now`: when the request was received. `keep_s`: how long it is kept, if it does not say so itself."""

    now: int
    keep_s: int


class ItemsBody(RequestBody):
    """What all requests with items share."""

    input: Annotated[Any, BeforeValidator(Entries(items.MOST).check)] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=128)
    conversation: Any = None
    tools: Annotated[list[Object], Entries(MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Any = None

    @property
    def conversation_id(self) -> str | None:
        given: str | None = self.conversation["id"] if isinstance(self.conversation, dict) else self.conversation
        return given

    @field_validator("conversation", mode="after")
    @classmethod
    def _is_an_id(cls, given: Any) -> Any:
        match given:
            case None | str() | {"id": str()}:
                return given
        raise InvalidRequest("conversation", "must be an id, or an object with an id", shorten(given))

    @model_validator(mode="after")
    def _one_past(self) -> Any:
        if self.previous_response_id is not None and self.conversation is not None:
            raise InvalidRequest("conversation", "cannot be combined with previous_response_id", "both")
        return self

    @model_validator(mode="after")
    def _tools_are_sensible(self) -> Any:
        for field, given in self._lists(()):
            tools.functions(given, field)
        return self

    def offered(self, before: Sequence[Item] = ()) -> list[dict[str, Any]]:
        """The request's tools, and those that items name. `before`: the items of earlier turns."""
        return [tool for _, given in self._lists(before) for tool in given]

    def _lists(self, before: Sequence[Item]) -> list[tuple[str, list[dict[str, Any]]]]:
        named = items.additional_tools
        return [*named(before), ("tools", self.tools), *named(self.input)]

    def calling(self, before: Sequence[Item] = ()) -> dict[str, Any]:
        """The options of a task that are about tools. Of several with one name, the last counts. Raises
        `InvalidRequest`."""
        made = [one for field, given in self._lists(before) for one in tools.functions(given, field)]
        functions = [*{one["function"]["name"]: one for one in made}.values()]
        if self.tool_choice == "none" or not functions:
            if self.tool_choice not in (None, "auto", "none"):
                raise InvalidRequest("tool_choice", "needs tools that are functions", shorten(self.tool_choice))
            return {}
        choice = tools.choice(self.tool_choice)
        return {"tools": functions} | ({} if choice in (None, "auto") else {"tool_choice": choice})

    def skipped(self) -> list[str]:
        return [*tools.skipped(self.offered()), *items.skipped(self.input)]

    def own(self, fetched: Images = NONE) -> list[Item]:
        """Raises `InvalidRequest`."""
        return items.kept("input", self.input, fetched)


class CreateResponse(ThinkingBody, ItemsBody):
    """The body of a request."""

    REFUSED: ClassVar = SamplingBody.REFUSED | {
        "n": "is not served: a response has one output",
        "prompt": "is not served: give instructions and input",
        "response_format": "is not a parameter of responses: use text.format",
        "context_management": "is not served: use /responses/compact",
        "return_token_ids": "is not served for responses",
    }
    IGNORED: ClassVar = SamplingBody.IGNORED | {
        "access_programs",
        "background_options",
        "client_metadata",
        "image",
    }

    background: bool = False
    store: bool = True
    expires_after: Object | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    parallel_tool_calls: bool = True
    include: Annotated[list[str], Entries(64)] = Field(default_factory=list)
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    reasoning: Object | None = None
    text: Object = Field(default_factory=dict)
    truncation: Literal["auto", "disabled"] = "disabled"

    @classmethod
    def translated(cls, given: dict[str, Any]) -> dict[str, Any]:
        own = {name: given[name] for name in ("reasoning",) if name in given}
        rest = {name: value for name, value in super().translated(given).items() if name not in own}
        rest = spellings.thinking(rest)
        effort = rest.pop("reasoning_effort", None)
        if effort is not None and not own:
            own = {"reasoning": {"effort": effort}}
        return rest | own

    @model_validator(mode="after")
    def _sensible(self) -> Any:
        effort = (self.reasoning or {}).get("effort")
        if effort is not None and not isinstance(effort, str):
            raise InvalidRequest("reasoning.effort", "must be text", shorten(effort))
        if self.background and not self.store:
            raise InvalidRequest("background", "needs store", "store false")
        if self.expires_after is not None:
            match self.expires_after:
                case {"anchor": "created_at", "seconds": int(seconds), **more} if not more:
                    if seconds < _SHORTEST_S:
                        raise InvalidRequest("expires_after.seconds", f"must be at least {_SHORTEST_S}", seconds)
                case _:
                    limit = 'must be {"anchor": "created_at", "seconds": a number}'
                    raise InvalidRequest("expires_after", limit, shorten(self.expires_after))
        return self

    def kept_s(self, times: Times) -> int:
        """How long this response is kept: as long as it asks for, at most as the setting says."""
        asked = self.expires_after["seconds"] if self.expires_after else times.keep_s
        return min(asked, times.keep_s)

    def constraint(self) -> response_format.FormatOption | None:
        return response_format.constraint(self.text.get("format"), self.structured_outputs, "text.format")

    def plan(
        self, name: str, times: Times, found: ModelRoute, stays: bool, before: History, own: Sequence[Item]
    ) -> Plan:
        """The task that the request becomes, under this id. `stays`: the task goes on when its client has gone.
        `own`: the request's items. Raises `InvalidRequest`."""
        likeliest = self.top_logprobs or 0 if _LOGPROBS in self.include or self.top_logprobs else None
        options, names = self.options(found, stays, likeliest)
        options["messages"] = items.messages(self.instructions, before.items, own)
        options["max_tokens"] = "rest" if self.max_output_tokens is None else self.max_output_tokens
        options |= self.thinking((self.reasoning or {}).get("effort"))
        options |= self.calling(before.items)
        if "tools" in options and not self.parallel_tool_calls:
            options["parallel_tool_calls"] = False
        record = RequestRecord(
            id=name,
            kind=KIND,
            created=times.now,
            model=self.model,
            tasks=[name],
            asked=self._shown(times, before, likeliest),
            queue=found.queue,
            readers=not stays,
            patient=self.background,
        )
        call = TaskCall("chat", {**options, **self.sampling(0)})
        submission = self.submission() | ({"registered": True} if self.background else {})  # known while it waits
        return Plan(record, [call], submission, {**NAMES, **names}, self.kept_s(times))

    def _shown(self, times: Times, before: History, likeliest: int | None) -> dict[str, Any]:
        """What the view reads. What is as it is by default is left out."""
        offered = self.offered(before.items)
        known = {
            **{name: getattr(self, name) for name in _SHOWN},
            "background": self.background or None,
            "store": None if self.store else False,
            "parallel_tool_calls": None if self.parallel_tool_calls else False,
            "text": self.text or None,
            "tools": tools.shown(offered),
            "parts": True,
            "custom": tools.custom(offered),
            "logprobs": self.beside(likeliest),
            "before": list(before.turns),
            "conversation": before.conversation,
            "keep_s": None if self.expires_after is None else self.kept_s(times),
            "as_ids": self.return_tokens_as_token_ids or None,
        }
        return {name: value for name, value in known.items() if value is not None and value not in ([], {})}


_SHOWN = (
    "frequency_penalty", "instructions", "max_output_tokens", "max_tool_calls", "metadata",
    "presence_penalty", "previous_response_id", "prompt_cache_key", "reasoning", "temperature", "tool_choice",
    "top_logprobs", "top_p",
)  # fmt: skip
"""What a response says of its request under the same name."""


class CountInput(ItemsBody):
    """The body of input_tokens. All else that a response may be asked changes no number."""

    IGNORED: ClassVar = frozenset(
        {"parallel_tool_calls", "personality", "reasoning", "text", "truncation", "include", "metadata"}
    )

    model: str | None = Field(default=None, min_length=1, max_length=1024)
    chat_template_kwargs: Object = Field(default_factory=dict)

    def options(self, before: History, own: Sequence[Item]) -> Mapping[str, Any]:
        """The options of the count. Raises `InvalidRequest`."""
        told = {"messages": items.messages(self.instructions, before.items, own)}
        if functions := self.calling(before.items).get("tools"):
            told["tools"] = functions
        return told | ({"chat_template_kwargs": self.chat_template_kwargs} if self.chat_template_kwargs else {})


class Compact(ItemsBody):
    """The body of compact."""

    IGNORED: ClassVar = frozenset({"prompt_cache_options", "prompt_cache_retention", "service_tier", "image"})

    model: str = Field(min_length=1, max_length=1024)
    prompt_cache_key: str | None = Field(default=None, max_length=256)
    conversation: None = None
