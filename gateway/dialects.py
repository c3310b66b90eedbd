"""Which interface a request speaks, and so in which form its client is told of an error."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from petiole.gateway.anthropic import answers as _anthropic
from petiole.gateway.core.failures import Failure
from petiole.gateway.openai import answers as _openai


def error_answer(scope: Scope, failure: Failure) -> Response:
    if _anthropic.spoken(scope):
        return _anthropic.error_answer(failure)
    return _openai.error_answer(failure)
