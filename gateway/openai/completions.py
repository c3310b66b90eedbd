"""The request of completions: which tasks it becomes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.requests import given, one_or_many
from petiole.gateway.core.task_plan import Plan, TaskCall
from petiole.gateway.openai.answers import task_ids
from petiole.gateway.openai.sampling_options import MOST_LOGPROBS, SamplingBody
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet.models import ModelRoute

KIND = "text_completion"
MAX_TOKENS = 16
"""OpenAI's default, here only."""
MOST_PROMPTS = 256

Prompt = str | list[int]


class TextCompletion(SamplingBody):
    """The body of a request. Each prompt has `n` choices, those of the first prompt first. With `echo`,
    `max_tokens` may be 0: a token is generated then, and is not shown."""

    REFUSED: ClassVar = SamplingBody.REFUSED | {"prompt_embeds": "is not served"}

    prompt: Any
    suffix: str | None = None
    max_tokens: int = MAX_TOKENS
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False
    add_special_tokens: bool = True

    @field_validator("prompt", mode="after")
    @classmethod
    def _prompts(cls, prompt: object) -> list[Prompt]:
        return one_or_many("prompt", prompt, MOST_PROMPTS, "prompts", may_be_empty=True)

    @model_validator(mode="after")
    def _sensible(self) -> Any:
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens", "must be at least 1 without echo", 0)
        if not self.add_special_tokens and any(isinstance(one, str) for one in self.prompt):
            raise InvalidRequest(
                "add_special_tokens", "must be true: a prompt without them is one of token ids", False
            )
        if self.echo and self.truncate_prompt_tokens is not None:
            limit = "cannot be combined with echo, which shows the whole prompt"
            raise InvalidRequest("truncate_prompt_tokens", limit, self.truncate_prompt_tokens)
        for name in ("echo", "truncate_prompt_tokens", "return_token_ids") if self.suffix else ():
            if (given := getattr(self, name)) not in (None, False):
                raise InvalidRequest(name, "cannot be combined with suffix", given)
        if self.n * len(self.prompt) > MOST_PROMPTS:
            limit = f"must give at most {MOST_PROMPTS} choices in all"
            raise InvalidRequest("n", limit, f"{self.n} for each of {len(self.prompt)} prompts")
        return self

    @property
    def ids_to_spell(self) -> list[list[int]]:
        """The prompts whose texts are asked for, and given as token ids."""
        return [one for one in self.prompt if isinstance(one, list)] if self.echo else []

    def cut(self, ids: list[int]) -> list[int]:
        """What `truncate_prompt_tokens` leaves of a prompt. With -1 a worker knows how much: here it is all."""
        most = self.truncate_prompt_tokens
        if most in (None, -1):
            return ids
        return ids[:most] if self.truncation_side == "right" else ids[-most:]

    def plan(self, name: str, now: int, found: ModelRoute, stays: bool, spelled: Sequence[str] = ()) -> Plan:
        """The task that the request becomes, under this id. `spelled`: the texts of `ids_to_spell`. Raises
        `InvalidRequest`."""
        options, names = self.options(found, stays, self.logprobs)
        options["max_tokens"] = max(1, self.max_tokens) if self.echo else self.max_tokens
        if self.suffix:
            options["suffix"] = self.suffix
        scored = self.echo and self.logprobs is not None
        if scored and "prompt_logprobs" not in options:
            names["prompt_logprobs"] = "logprobs"
        if scored:
            options["prompt_logprobs"] = max(self.logprobs or 0, self.prompt_logprobs or 0)
        texts = iter(spelled)
        echoes = [one if isinstance(one, str) else next(texts) for one in self.prompt] if self.echo else None
        known = {
            **self.usages,
            "logprobs": self.beside(self.logprobs),
            "as_ids": self.return_tokens_as_token_ids,
            "token_ids": self.return_token_ids,
            "echoes": echoes,
            "scored": scored,
            "prompt_logprobs": self.prompt_logprobs,
            "nothing_more": self.max_tokens == 0,
            "each": self.n,
        }
        record = RequestRecord(
            id=name,
            kind=KIND,
            created=now,
            model=self.model,
            tasks=task_ids(name, self.n * len(self.prompt)),
            asked=given(known),
            queue=found.queue,
            readers=not stays,
        )
        calls = [
            TaskCall("generate", {**options, "prompt": prompt, **self.sampling(choice)})
            for prompt in self.prompt
            for choice in range(self.n)
        ]
        return Plan(record, calls, self.submission(), names)
