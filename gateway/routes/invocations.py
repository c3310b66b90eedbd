"""SageMaker's only path, as vLLM has it: what a body has says which interface its client means."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from petiole.gateway.core.failures import invalid
from petiole.gateway.routes import embeddings, openai
from petiole.gateway.serving import request_body
from petiole.gateway.serving.catalogue import catalogue

Handler = Callable[[Request], Awaitable[Response]]

HANDLERS: Mapping[str, Handler] = {
    "messages": openai.create_chat,
    "prompt": openai.create_completion,
    "documents": embeddings.rerank,
    "input": embeddings.embed,
    "text_1": embeddings.score,
    "queries": embeddings.score,
    "data_1": embeddings.score,
}
"""By a field of a body, the first that it has."""


async def invoke(request: Request) -> Response:
    value, again = await request_body.looked_at(request)
    field = next((field for field in HANDLERS if value.get(field) is not None), None)
    if field is None:
        limit = "messages, prompt, documents, input, or a text to score is required"
        raise invalid(None, f"the body: {limit}", "missing_required_parameter")
    if field == "input" and not await _makes_vectors(value.get("model")):
        return await embeddings.classify(again)
    return await HANDLERS[field](again)


async def _makes_vectors(model: Any) -> bool:
    return not isinstance(model, str) or (await catalogue().find(model)).makes_vectors


def routes() -> list[Route]:
    return [Route("/invocations", invoke, methods=["POST"])]
