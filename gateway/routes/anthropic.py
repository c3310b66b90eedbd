"""The handlers of Anthropic's paths. They hold nothing but rooms together, as OpenAI's do."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from petiole.gateway.anthropic import blocks, model_list, view
from petiole.gateway.anthropic.answers import NO_THREADS, error_event, spoken
from petiole.gateway.anthropic.request import KIND, NAMES, PREFIX, CountTokens, CreateMessage
from petiole.gateway.anthropic.view import MessagesView
from petiole.gateway.core.failures import Failure, unknown_model
from petiole.gateway.serving import request_body
from petiole.gateway.serving.answering import AnswerKind, checked, fetched, json_answer, new_id
from petiole.gateway.serving.catalogue import catalogue
from petiole.gateway.serving.sse import unless_gone
from petiole.gateway.serving.tokenization import count_alone

MESSAGE = AnswerKind(KIND, PREFIX, MessagesView, view.whole, error_event)


async def create(request: Request) -> Response:
    asked = await request_body.read(request, CreateMessage)
    if asked.thread:
        raise Failure(400, "thread: is not served: send the whole conversation", code=NO_THREADS, param="thread")
    found = await catalogue().find(asked.model)
    pictures = await fetched(blocks.to_fetch(asked.messages))
    plan = checked(lambda: asked.plan(new_id(PREFIX), int(time.time()), found, pictures), NAMES)
    return await MESSAGE.create(request, plan, asked.stream)


async def count_tokens(request: Request) -> Response:
    asked = await request_body.read(request, CountTokens)
    found = await catalogue().find(asked.model)
    pictures = await fetched(blocks.to_fetch(asked.messages))
    options = checked(lambda: asked.options(pictures), NAMES)
    counted = await unless_gone(request, count_alone(found, NAMES, **options))
    return json_answer({"input_tokens": counted["counts"][0]})


async def list_models(_: Request) -> Response:
    return json_answer(model_list.page(model_list.listed(await catalogue().shown())))


async def get_model(request: Request) -> Response:
    name = request.path_params["id"]
    for info in model_list.listed(await catalogue().shown()):
        if info["id"] == name:
            return json_answer(info)
    raise unknown_model(name)


class _AnthropicRoute(Route):
    """A path that other interfaces have, too: this one answers only Anthropic's clients."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(scope) if scope["type"] == "http" and spoken(scope) else (Match.NONE, {})


def routes() -> list[BaseRoute]:
    """Below /v1, before those of other interfaces."""
    return [
        Route("/messages/count_tokens", count_tokens, methods=["POST"]),
        *MESSAGE.routes("/messages", create),
        _AnthropicRoute("/models", list_models, methods=["GET"]),
        _AnthropicRoute("/models/{id:path}", get_model, methods=["GET"]),
    ]
