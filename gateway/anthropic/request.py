"""The request of a message: which task it becomes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from petiole.contract.errors import shorten
from petiole.contract.limits import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS
from petiole.contract.requests.bounds import Entries, Object
from petiole.gateway.anthropic import blocks, tools
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.requests import NONE, Images, RequestBody, Seed, given
from petiole.gateway.core.task_plan import Plan, TaskCall
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet.models import ModelRoute

KIND = "message"
PREFIX = "msg_"

NAMES = {
    "stop": "stop_sequences",
    "salt": "cache_salt",
    "max_reasoning_tokens": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "json_schema": "output_config.format.schema",
}
"""By an option of the task: the client's field, where the two differ."""

_THINKING = {"enable_thinking": True, "thinking": True}
"""What chat templates call it."""


class MessagesBody(RequestBody):
    """What a message and a count share."""

    REFUSED: ClassVar = {
        "container": "is not served",
        "mcp_servers": "is not served",
        "compaction": "is not served",
    }
    IGNORED: ClassVar = frozenset(
        {"cache_control", "metadata", "service_tier", "inference_geo", "speed", "diagnostics", "betas",
         "context_management", "user_profile_id", "workspace_id"}
    )  # fmt: skip

    model: str = Field(min_length=1, max_length=1024)
    messages: Annotated[list[Object], Entries(MAX_MESSAGES, least=1)]
    system: str | Annotated[list[Object], Entries(MAX_MESSAGES)] | None = None
    tools: Annotated[list[Object], Entries(MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Object = Field(default_factory=lambda: {"type": "auto"})
    thinking: Object = Field(default_factory=dict)
    output_config: Object = Field(default_factory=dict)
    chat_template_kwargs: Object = Field(default_factory=dict)
    thread: Object = Field(default_factory=dict)

    @classmethod
    def translated(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The format had a parameter of its own."""
        config = given.get("output_config", {})
        if "output_format" not in given or not isinstance(config, dict):
            return given
        rest = {name: value for name, value in given.items() if name != "output_format"}
        return rest | {"output_config": {"format": given["output_format"], **config}}

    @model_validator(mode="after")
    def _sensible(self) -> Any:
        self.reasoning()
        tools.calling(self.tools, self.tool_choice)
        match self.output_config.get("format"):
            case None | {"type": "json_schema", "schema": dict()}:
                return self
        form = self.output_config["format"]
        raise InvalidRequest("output_config.format", "must be of type json_schema with a schema", shorten(form))

    def reasoning(self) -> dict[str, Any]:
        """The options of a task that are about thinking. Without `thinking` the model does as its template has
        it. Raises `InvalidRequest`."""
        options: dict[str, Any] = {}
        effort = self.output_config.get("effort")
        if effort is not None and not isinstance(effort, str):
            raise InvalidRequest("output_config.effort", "must be text", shorten(effort))
        variables: Mapping[str, Any] = {}
        match self.thinking:
            case {"type": "enabled", "budget_tokens": int(budget)} if not isinstance(budget, bool):
                options["max_reasoning_tokens"], variables = budget, _THINKING
            case {"type": "adaptive"}:
                variables = _THINKING
            case {"type": "disabled" | "between_tools"}:
                effort = "none"
            case {**other} if other:
                limit = "must be of type adaptive, disabled, between_tools, or enabled with budget_tokens"
                raise InvalidRequest("thinking", limit, shorten(self.thinking.get("type")))
        if effort is not None:
            options["reasoning_effort"] = effort
        if variables or self.chat_template_kwargs:
            options["chat_template_kwargs"] = {**variables, **self.chat_template_kwargs}
        return options

    def skipped(self) -> list[str]:
        return [*tools.skipped(self.tools), *blocks.skipped(self.messages)]

    def conversation(self, images: Images) -> dict[str, Any]:
        """Raises `InvalidRequest`."""
        told: dict[str, Any] = {"messages": blocks.messages(self.system, self.messages, images)}
        return told | ({"continue_final_message": True} if blocks.continues(self.messages) else {})


class CountTokens(MessagesBody):
    """The body of count_tokens."""

    def options(self, images: Images = NONE) -> dict[str, Any]:
        """The options of the count. Raises `InvalidRequest`."""
        counted = self.conversation(images)
        for name, value in (tools.calling(self.tools, self.tool_choice) | self.reasoning()).items():
            if name in ("tools", "chat_template_kwargs"):
                counted[name] = value
        return counted


class CreateMessage(MessagesBody):
    """The body of a request. What Anthropic has no parameter for has the name of the task's option."""

    DEFAULTED: ClassVar = frozenset({"temperature", "top_p", "top_k", "min_p"})

    max_tokens: int
    stream: bool = False
    stop_sequences: Annotated[list[str], Entries(MAX_STOPS)] = Field(default_factory=list)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: Seed | None = None
    cache_salt: str | None = None

    def plan(self, name: str, now: int, found: ModelRoute, images: Images = NONE) -> Plan:
        """The task that the request becomes, under this id. Raises `InvalidRequest`."""
        options = self.conversation(images) | tools.calling(self.tools, self.tool_choice) | self.reasoning()
        options |= {"max_tokens": self.max_tokens, "cancel_on_disconnect": True}
        for option in ("temperature", "top_p", "top_k", "min_p", "seed"):
            if (value := getattr(self, option)) is not None:
                options[option] = value
        if self.stop_sequences:
            options["stop"] = self.stop_sequences
        if self.cache_salt is not None:
            options["salt"] = self.cache_salt
        if form := self.output_config.get("format"):
            options["json_schema"] = form["schema"]
        if found.adapter is not None:
            options["adapter"] = found.adapter
        shown = {
            "parts": True,
            "stop": self.stop_sequences or None,
            "hidden": self.thinking.get("display") == "omitted",
        }
        record = RequestRecord(
            id=name,
            kind=KIND,
            created=now,
            model=self.model,
            tasks=[name],
            asked=given(shown),
            queue=found.queue,
            readers=True,
        )
        return Plan(record, [TaskCall("chat", options)], {}, NAMES)
