"""Which interface a request speaks, and so in which form its client is told of an error."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from petiole.gateway.anthropic import answers as _anthropic
from petiole.gateway.core.failures import Failure
from petiole.gateway.openai import answers as _openai
from petiole.gateway.serving.answering import json_answer


def error_answer(scope: Scope, failure: Failure) -> Response:
    headers = {} if failure.retry_after_s is None else {"retry-after": str(failure.retry_after_s)}
    if failure.allow is not None:
        headers["allow"] = failure.allow
    spoken = _anthropic if _anthropic.spoken(scope) else _openai
    return json_answer(spoken.error_body(failure), failure.status, headers)
