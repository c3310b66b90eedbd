"""What a client is told of an error, in words by which others route."""

from __future__ import annotations

from petiole.gateway.core.failures import failure_of
from petiole.tasks.errors import InvalidRequest


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
