"""The request of chat/completions: which tasks it becomes. Pure."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from petiole.contract.errors import shorten
from petiole.contract.limits import MAX_MESSAGES, MAX_TOOLS
from petiole.contract.requests.bounds import Entries, Object
from petiole.contract.results.vectors import MOST_TEXTS
from petiole.gateway.core.foreign import spellings
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.requests import NONE, Images, given
from petiole.gateway.core.task_plan import Plan, TaskCall
from petiole.gateway.openai import conversation
from petiole.gateway.openai.answers import task_ids
from petiole.gateway.openai.sampling_options import MOST_LOGPROBS, SamplingBody, ThinkingBody
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet.models import ModelRoute

KIND = "chat.completion"


class ChatCompletion(ThinkingBody):
    """The body of a request."""

    REFUSED: ClassVar = SamplingBody.REFUSED | {
        "functions": "is not served: use tools",
        "function_call": "is not served: use tools",
        "audio": "is not served",
        "web_search_options": "is not served",
        "chat_template": "is not served: the model's own is used",
    }
    IGNORED: ClassVar = SamplingBody.IGNORED | {"prediction", "verbosity"}

    messages: Annotated[list[Object], Entries(MAX_MESSAGES, least=1)]
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    tools: Annotated[list[Object], Entries(MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    modalities: Annotated[list[str], Entries(8)] = Field(default_factory=lambda: ["text"])

    documents: Annotated[list[Object], Entries(MOST_TEXTS)] | None = None
    mm_processor_kwargs: Object = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = False

    @classmethod
    def translated(cls, given: dict[str, Any]) -> dict[str, Any]:
        return spellings.thinking(super().translated(given))

    @model_validator(mode="after")
    def _sensible(self) -> Any:
        if self.modalities != ["text"]:
            raise InvalidRequest("modalities", 'must be ["text"]', shorten(self.modalities))
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs", "no logprobs")
        if self.return_token_ids and not self.include_reasoning:
            raise InvalidRequest("include_reasoning", "must be true with return_token_ids", False)
        if not self.add_generation_prompt and not self.continue_final_message:
            raise InvalidRequest("add_generation_prompt", "must be true unless a message is continued", False)
        return self

    def plan(self, name: str, now: int, found: ModelRoute, stays: bool, images: Images = NONE) -> Plan:
        """The task that the request becomes, under this id. `stays`: the task goes on when its client has gone.
        `images`: the images at the http URLs in the messages. Raises `InvalidRequest`."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        options, names = self.options(found, stays, self._likeliest)
        options["messages"] = conversation.messages(
            self.messages, images, spellings.view(self.mm_processor_kwargs)
        )
        options["max_tokens"] = "rest" if limit is None else limit
        names["logprobs"] = "top_logprobs"
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        options |= self.thinking(self.reasoning_effort, documents=self.documents)
        if (offered := conversation.functions(self.tools or ())) and self.tool_choice != "none":
            options["tools"] = offered
            if self.tool_choice not in (None, "auto"):
                options["tool_choice"] = conversation.tool_choice(self.tool_choice)
            if self.parallel_tool_calls is False:
                options["parallel_tool_calls"] = False
        elif self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice", "needs tools that are functions", shorten(self.tool_choice))
        if self.continue_final_message:
            options["continue_final_message"] = True
        record = RequestRecord(
            id=name,
            kind=KIND,
            created=now,
            model=self.model,
            tasks=task_ids(name, self.n),
            asked=self._shown(),
            queue=found.queue,
            readers=not stays,
        )
        return Plan(
            record,
            [TaskCall("chat", {**options, **self.sampling(choice)}) for choice in range(self.n)],
            self.submission(),
            names,
        )

    def skipped(self) -> list[str]:
        return conversation.skipped(self.tools or ())

    @property
    def _likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def _continued(self) -> str | None:
        """The text that the answer continues, if the answer shall have it, too."""
        last = self.messages[-1]
        continued = self.echo and last.get("role") == "assistant"
        return conversation.text_of(last) or None if continued else None

    def _shown(self) -> dict[str, Any]:
        """What the view reads."""
        known = {
            **self.usages,
            "top_logprobs": self.beside(self._likeliest),
            "as_ids": self.return_tokens_as_token_ids,
            "with_chosen": bool(self.logprob_token_ids),
            "token_ids": self.return_token_ids,
            "echo": self._continued,
            "prompt_logprobs": self.prompt_logprobs,
            "unthought": not self.include_reasoning,
            "metadata": self.metadata,
            "store": self.store,
            "custom": conversation.custom_tools(self.tools or ()),
            "parts": True,
        }
        return given(known)
