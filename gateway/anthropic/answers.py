"""Usage, stop reasons and errors, as Anthropic's clients know them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from petiole.contract.results.outputs import Usage
from petiole.gateway.core.events import encode
from petiole.gateway.core.failures import Failure
from petiole.gateway.core.parts import OutputEnded

VERSION = "anthropic-version"
"""The header that all of Anthropic's clients send."""

NO_THREADS = "thread_unsupported_request"
"""The code by which SDKs go on without a thread."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def spoken(scope: Scope) -> bool:
    """Whether the client of this request reads Anthropic's answers."""
    return "/v1/messages/" in f"{scope['path']}/" or VERSION in Headers(scope=scope)


def usage(known: Usage | None) -> dict[str, Any]:
    """What was in the cache is not in `input_tokens`."""
    if known is None:
        return _usage(0, 0, 0)
    shown = _usage(known.prompt_tokens, known.cached_prompt_tokens, known.completion_tokens)
    return shown | {"output_tokens_details": {"thinking_tokens": known.reasoning_tokens or 0}}


def usage_so_far(prompt_tokens: int) -> dict[str, Any]:
    """Before anything is generated. What was in the cache is known at the end."""
    return _usage(prompt_tokens, 0, 0)


def _usage(prompt: int, cached: int, made: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": made,
    }


def stopped(ended: OutputEnded, called: bool, sequences: Sequence[str]) -> dict[str, Any]:
    """Why the output has ended. `called`: it has a call of a tool. `sequences`: those that the client gave."""
    reason, sequence = "end_turn", None
    if ended.finish_reason in ("length", "deadline"):
        reason = "model_context_window_exceeded" if ended.stop_reason == "max_model_len" else "max_tokens"
    elif isinstance(ended.stop_reason, str) and ended.stop_reason in sequences:
        reason, sequence = "stop_sequence", ended.stop_reason
    elif called:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": sequence}


def error_body(failure: Failure) -> dict[str, Any]:
    """The body of an error; a prompt that is too long is told in Anthropic's words: agents that read them shorten
    their dialogue."""
    kind = _TYPES.get(failure.status, "api_error" if failure.status >= 500 else "invalid_request_error")
    long = failure.code == "context_length_exceeded"
    error = {"type": kind, "message": f"prompt is too long: {failure.message}" if long else failure.message}
    if failure.code == NO_THREADS:
        return {"type": "error", "error": {**error, "details": {"error_code": NO_THREADS, "unsupported": []}}}
    return {"type": "error", "error": error}


def error_event(failure: Failure) -> bytes:
    return b"event: error\ndata: %b\n\n" % encode(error_body(failure))
