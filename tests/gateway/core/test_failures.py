"""What a client is told of an error, in words by which others route."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError, TimeoutError as GaveUp

from petiole.gateway.core.failures import Failure, failure_of
from petiole.gateway.serving import tokenization
from petiole.tasks.errors import InvalidRequest, describe, rebuild
from petiole.tasks.fleet.models import ModelRoute
from petiole.tasks.submission import definitions


def test_a_request_that_is_too_long_is_told_as_openai_tells_it() -> None:
    """LiteLLM's fallbacks for long contexts read the beginning."""
    long = failure_of(InvalidRequest("messages", "must have at most 2047 tokens", "9000 tokens"))
    assert long.message.startswith("This model's maximum context length is 2048 tokens. messages: must have")
    full = "must fit, with the prompt, into the KV cache: 10 pages of 16 tokens"
    cache = failure_of(InvalidRequest("max_tokens", full, "20 pages"), {"max_tokens": "max_completion_tokens"})
    assert cache.message.startswith("This model's maximum context length is 160 tokens. max_completion_tokens: ")
    assert {long.code, cache.code} == {"context_length_exceeded"}


def test_a_model_of_another_kind_leads_to_its_route() -> None:
    limit = "the model m makes vectors of texts, and generates nothing: embed asks for them"
    assert failure_of(InvalidRequest("messages", limit, "a messages")).message == (
        "messages: the model m makes vectors of texts, and generates nothing: use /v1/embeddings"
    )
    limit = "the model m generates, and makes no vectors: embed needs another"
    assert failure_of(InvalidRequest("texts", limit, "vectors"), {"texts": "input"}).message == (
        "input: the model m generates, and makes no vectors: use one with the capability embeddings in /v1/models"
    )


def test_a_model_without_a_chat_template_leads_to_what_needs_none() -> None:
    limit = "the model has no chat template; use a prompt"
    assert failure_of(InvalidRequest("messages", limit, "messages")).message == (
        "messages: the model has no chat template: use /v1/completions, or the input of /v1/embeddings"
    )


def test_a_revoked_task_is_a_cancelled_generation() -> None:
    revoked = failure_of(rebuild(describe(TaskRevokedError("terminated"))))
    assert (revoked.status, revoked.code) == (499, "cancelled")


@pytest.mark.parametrize("late", [GaveUp("The operation timed out."), TaskRevokedError("expired")])
def test_a_count_that_nobody_made_in_time_can_be_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, late: Exception
) -> None:
    """A busy worker revokes it shortly before the gateway gives up, or after that."""

    class Counted:
        async def aget(self, timeout: float) -> None:
            raise late

    async def adelay(**options: Any) -> Counted:
        return Counted()

    monkeypatch.setattr(definitions.count, "adelay", adelay)
    route = ModelRoute("petiole", None)
    with pytest.raises(Failure) as told:
        asyncio.run(tokenization.count(route, {}, texts=["a"]))
    assert (told.value.status, told.value.code) == (503, "no_worker")
