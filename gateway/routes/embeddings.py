"""The handlers of requests of texts. Their answers are whole: a task's log has all that they are made of."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from petiole.gateway.core.failures import ended_early
from petiole.gateway.core.task_plan import Plan
from petiole.gateway.openai import conversation
from petiole.gateway.pooling.interfaces import Classify, Embeddings, PoolingBody, PoolingResult, Rerank, Score
from petiole.gateway.serving import generations, request_body
from petiole.gateway.serving.answering import checked, large_answer, new_id
from petiole.gateway.serving.auth import rate_limits
from petiole.gateway.serving.catalogue import catalogue
from petiole.gateway.serving.retry import patiently
from petiole.gateway.serving.sse import unless_gone
from petiole.gateway.serving.tokenization import count
from petiole.tasks.streams import ends


async def embed(request: Request) -> Response:
    asked = await request_body.read(request, Embeddings)
    found = await catalogue().find(asked.model)
    if asked.messages is not None or asked.ids_to_spell:
        await rate_limits.admit_brief(found.queue)  # a worker makes texts of them first: a request of its own
    if (told := asked.messages) is not None:
        messages = checked(lambda: conversation.messages(told))
        counted = await count(found, {}, messages=messages, with_ids=True, **asked.rendering)
        asked = asked.rendered(counted["token_ids"][0])
    if ids := asked.ids_to_spell:
        counted = await count(found, {"token_ids": "input"}, token_ids=ids, skip_special_tokens=False)
        asked = asked.spelled(counted["texts"])
    return await _answered(request, asked)


async def rerank(request: Request) -> Response:
    return await _answered(request, await request_body.read(request, Rerank))


async def score(request: Request) -> Response:
    return await _answered(request, await request_body.read(request, Score))


async def classify(request: Request) -> Response:
    return await _answered(request, await request_body.read(request, Classify))


async def _answered(request: Request, asked: Embeddings | Rerank | Score | Classify) -> Response:
    found = await catalogue().find(asked.model)
    plan = checked(lambda: asked.plan(new_id(asked.PREFIX), int(time.time()), found))
    made = await unless_gone(request, _made(asked, plan))
    return await large_answer(lambda: asked.answer(plan.record, made))


async def _made(asked: PoolingBody, plan: Plan) -> PoolingResult:
    """What a worker makes of the texts. Raises `Failure`."""
    generation, made = await generations.begin(plan), PoolingResult()
    try:
        async for _, delta in generation.deltas():
            if delta is None:
                continue
            made.vectors += delta.vectors or ()
            made.scores += delta.scores or ()
            if delta.error is not None:
                raise generation.failure(delta.error)
            if delta.finish_reason not in (None, "stop"):
                raise ended_early(delta.finish_reason)
            if delta.usage is not None:
                made.prompt_tokens = delta.usage.prompt_tokens
    finally:
        await generation.aclose()
    if asked.LABELS and (end := await patiently(lambda: ends.aend(plan.record.tasks[0]))) is not None:
        made.labels += end.labels or ()
    return made


def routes() -> list[Route]:
    """Below /v1."""
    return [Route("/embeddings", embed, methods=["POST"]), *_of_scores()]


def routes_at_the_root() -> list[Route]:
    """vLLM has these beside /v1, and Cohere's clients ask below /v2."""
    return [*_of_scores(), Route("/v2/rerank", rerank, methods=["POST"])]


def _of_scores() -> list[Route]:
    handlers = {"rerank": rerank, "score": score, "classify": classify}
    return [Route(f"/{name}", handler, methods=["POST"]) for name, handler in handlers.items()]
