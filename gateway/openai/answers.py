"""What all answers share: usage, finish reasons, errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from petiole.contract.results.outputs import Usage
from petiole.gateway.core.events import encode
from petiole.gateway.core.failures import Failure
from petiole.gateway.core.parts import OutputEnded
from petiole.gateway.serving.answering import json_answer

DONE = b"data: [DONE]\n\n"


def task_ids(name: str, choices: int) -> list[str]:
    return [name] if choices == 1 else [f"{name}-{choice}" for choice in range(choices)]


def usage(ends: Sequence[Usage | None], each: int | None = None) -> dict[str, Any]:
    """The usage of a request with these outputs. `each`: how many are of one prompt; None: all."""
    known = [one for one in ends if one is not None]
    groups = [ends[at : at + (each or len(ends))] for at in range(0, len(ends), each or len(ends))]
    prompts = [
        max(((one.prompt_tokens, one.cached_prompt_tokens) for one in group if one), default=(0, 0))
        for group in groups
    ]
    prompt, cached = sum(tokens for tokens, _ in prompts), sum(tokens for _, tokens in prompts)
    made, thought = sum(one.completion_tokens for one in known), sum(one.reasoning_tokens or 0 for one in known)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


def finish_reason(ended: OutputEnded) -> str:
    """OpenAI's name. A deadline cuts the output as a limit does."""
    return "length" if ended.finish_reason in ("length", "deadline") else "stop"


def stop_reason(ended: OutputEnded) -> str | int | None:
    """vLLM's: the stop string or the stop token's id, if one ended the output."""
    reason = ended.stop_reason
    known = ("eos", "max_tokens", "max_model_len", "constraint")
    return None if ended.finish_reason != "stop" or reason in known else reason


def error_body(failure: Failure) -> dict[str, Any]:
    return {
        "error": {
            "message": failure.message,
            "type": failure.kind,
            "param": failure.param,
            "code": failure.code,
        }
    }


def error_event(failure: Failure) -> bytes:
    return b"data: %b\n\n" % encode(error_body(failure))


def error_answer(failure: Failure) -> Response:
    headers = {} if failure.retry_after_s is None else {"retry-after": str(failure.retry_after_s)}
    return json_answer(error_body(failure), failure.status, headers)
