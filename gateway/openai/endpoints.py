"""The handlers of the paths below /v1. They hold nothing together but rooms: bodies, plans, generations, views."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from petiole.gateway.core.failures import Failure, failure_of, invalid
from petiole.gateway.core.record import Record
from petiole.gateway.core.streams import Stream, cursor_of
from petiole.gateway.openai import chat_view, models
from petiole.gateway.openai.answers import DONE, error_event, json_answer, new_id
from petiole.gateway.openai.chat import KIND as CHAT
from petiole.gateway.openai.chat import ChatCompletion
from petiole.gateway.openai.chat_view import ChatView
from petiole.gateway.serving import bodies, generations, records
from petiole.gateway.serving.catalogue import catalogue
from petiole.gateway.serving.generations import Generation
from petiole.gateway.serving.sse import EventStream, events, unless_gone
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.settings import settings

# ---------------------------------------------------------------- chat/completions


async def create_chat(request: Request) -> Response:
    asked = await bodies.read(request, ChatCompletion)
    found = await catalogue().find(asked.model)
    try:
        plan = asked.plan(
            new_id("chatcmpl-"), int(time.time()), found, asked.store and settings().gateway_stored_stay
        )
    except InvalidRequest as error:
        raise failure_of(error) from None
    generation = await unless_gone(request, generations.begin(plan))
    if asked.stream:
        await unless_gone(request, accepted(generation))
        return EventStream(chat_events(generation))
    return await unless_gone(request, chat_answer(generation))


async def get_chat(request: Request) -> Response:
    """The answer of an earlier request: whole, when it has ended, or the events after a number."""
    record = await records.get(request.path_params["id"], CHAT)
    stream = flag(request, "stream")
    after = after_of(request, record) if stream else ()
    generation = await generations.again(record)
    if stream:
        return EventStream(chat_events(generation, after))
    return await unless_gone(request, chat_answer(generation))


async def delete_chat(request: Request) -> Response:
    """Cancel it, if it is not finished, and forget it."""
    record = await records.get(request.path_params["id"], CHAT)
    await generations.cancel(record)
    await records.forget(record.id)
    return json_answer({"id": record.id, "object": f"{CHAT}.deleted", "deleted": True})


def chat_events(generation: Generation, after: Sequence[int] = ()) -> AsyncGenerator[bytes, None]:
    stream = Stream(ChatView(generation.record), generation.record, after)
    return events(generation, stream, error_event, DONE)


async def chat_answer(generation: Generation) -> Response:
    try:
        return json_answer(chat_view.whole(generation.record, await generation.whole()))
    finally:
        await generation.aclose()


# ---------------------------------------------------------------- models


async def list_models(_: Request) -> Response:
    return json_answer({"object": "list", "data": models.cards(await catalogue().known())})


async def get_model(request: Request) -> Response:
    name = request.path_params["id"]
    for card in models.cards(await catalogue().known()):
        if card["id"] == name:
            return json_answer(card)
    raise Failure(404, f"model: no worker has served {name[:256]!r}", code="model_not_found", param="model")


# ---------------------------------------------------------------- shared


async def accepted(generation: Generation) -> None:
    """A stream begins when a worker has accepted its request, or after a time: then a refusal is an event."""
    try:
        await generation.accepted(settings().gateway_prepared_s)
    except BaseException:
        await generation.aclose()
        raise


def flag(request: Request, name: str) -> bool:
    given = request.query_params.get(name, "false")
    if given not in ("true", "false"):
        raise invalid(name, f"{name}: must be true or false, got {given[:64]!r}", "invalid_value")
    return given == "true"


def after_of(request: Request, record: Record) -> list[int]:
    """The number after which a client wants events: `starting_after`, or what an SSE client sends by itself."""
    given = request.query_params.get("starting_after") or request.headers.get("last-event-id") or ""
    return cursor_of(given, len(record.tasks)) if given else []


def routes() -> list[Route]:
    return [
        Route("/chat/completions", create_chat, methods=["POST"]),
        Route("/chat/completions/{id}", get_chat, methods=["GET"]),
        Route("/chat/completions/{id}", delete_chat, methods=["DELETE"]),
        Route("/models", list_models, methods=["GET"]),
        Route("/models/{id:path}", get_model, methods=["GET"]),
    ]
