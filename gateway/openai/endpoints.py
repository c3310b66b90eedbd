"""The handlers of OpenAI's paths, and of those that vLLM added. They hold nothing but rooms together: bodies,
plans, generations, views."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from petiole.gateway.core.failures import Failure, failure_of, invalid
from petiole.gateway.core.parts import Whole
from petiole.gateway.core.plan import Plan
from petiole.gateway.core.record import Record
from petiole.gateway.core.streams import Stream, View, cursor_of
from petiole.gateway.openai import chat, chat_view, completions, completions_view, conversation, models, tokens
from petiole.gateway.openai.answers import DONE, error_event, json_answer, new_id
from petiole.gateway.openai.chat import ChatCompletion
from petiole.gateway.openai.chat_view import ChatView
from petiole.gateway.openai.completions import TextCompletion
from petiole.gateway.openai.completions_view import CompletionsView
from petiole.gateway.openai.sampling import Sampling
from petiole.gateway.openai.tokens import Detokenize, Tokenize
from petiole.gateway.serving import bodies, generations, images, records
from petiole.gateway.serving.callers import usage
from petiole.gateway.serving.catalogue import catalogue
from petiole.gateway.serving.counting import count
from petiole.gateway.serving.generations import Generation
from petiole.gateway.serving.sse import EventStream, events, unless_gone
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.settings import settings


@dataclass(frozen=True)
class Kind:
    """How requests of one kind are answered, now and later."""

    name: str
    prefix: str
    view: Callable[[Record], View]
    whole: Callable[[Record, Sequence[Whole]], dict[str, Any]]

    def events(self, generation: Generation, after: Sequence[int] = ()) -> AsyncGenerator[bytes, None]:
        record = generation.record
        return events(generation, Stream(self.view(record), record, after), error_event, DONE)

    async def answer(self, generation: Generation) -> Response:
        try:
            return json_answer(self.whole(generation.record, await generation.whole()))
        finally:
            await generation.aclose()

    async def create(self, request: Request, plan: Plan, stream: bool) -> Response:
        return await unless_gone(request, self._begun(plan, stream))

    async def _begun(self, plan: Plan, stream: bool) -> Response:
        generation = await generations.begin(plan)
        if not stream:
            return await self.answer(generation)
        await accepted(generation)
        return EventStream(self.events(generation))

    async def get(self, request: Request) -> Response:
        """The answer of an earlier request: whole, when it has ended, or its events after a number."""
        record = await records.get(request.path_params["id"], self.name)
        if not flag(request, "stream"):
            return await unless_gone(request, self.answer(generations.again(record)))
        after = after_of(request, record)
        return EventStream(self.events(generations.again(record), after))

    async def delete(self, request: Request) -> Response:
        """Cancel it, if it is not finished, and forget it."""
        record = await records.get(request.path_params["id"], self.name)
        await generations.cancel(record)
        await records.forget(record.id)
        return json_answer({"id": record.id, "object": f"{self.name}.deleted", "deleted": True})


CHAT = Kind(chat.KIND, "chatcmpl-", ChatView, chat_view.whole)
COMPLETION = Kind(completions.KIND, "cmpl-", CompletionsView, completions_view.whole)


async def create_chat(request: Request) -> Response:
    asked = await bodies.read(request, ChatCompletion)
    found = await catalogue().find(asked.model)
    pictures = await fetched(conversation.to_fetch(asked.messages))
    plan = checked(lambda: asked.plan(new_id(CHAT.prefix), int(time.time()), found, stays(asked), pictures))
    if settings().gateway_reasoning != "both":
        plan = plan.noting(reasoning_as=settings().gateway_reasoning)
    if asked.return_token_ids:
        counted = await count(found, plan.names, **tokens.of_a_chat(plan.calls[0].options))
        plan = plan.noting(prompt_ids=counted["token_ids"][0])
    return await CHAT.create(request, plan, asked.stream)


async def create_completion(request: Request) -> Response:
    asked = await bodies.read(request, TextCompletion)
    found = await catalogue().find(asked.model)
    spelled: list[str] = []
    if ids := asked.ids_to_spell:
        counted = await count(found, {"token_ids": "prompt"}, token_ids=ids, skip_special_tokens=False)
        spelled = counted["texts"]
    plan = checked(lambda: asked.plan(new_id(COMPLETION.prefix), int(time.time()), found, stays(asked), spelled))
    if asked.return_token_ids:
        texts = [prompt for prompt in asked.prompt if isinstance(prompt, str)]
        read = iter((await count(found, tokens.NAMES, texts=texts, with_ids=True))["token_ids"] if texts else ())
        plan = plan.noting(prompt_ids=[next(read) if isinstance(one, str) else one for one in asked.prompt])
    return await COMPLETION.create(request, plan, asked.stream)


# ---------------------------------------------------------------- tokens, models


async def tokenize(request: Request) -> Response:
    asked = await bodies.read(request, Tokenize)
    found = await catalogue().find(asked.model)
    counted = await count(found, tokens.NAMES, **checked(asked.options))
    texts = None
    if asked.return_token_strs:
        texts = (await count(found, tokens.NAMES, **checked(lambda: asked.one_by_one(counted))))["texts"]
    return json_answer(tokens.tokenized(counted, texts))


async def detokenize(request: Request) -> Response:
    asked = await bodies.read(request, Detokenize)
    counted = await count(await catalogue().find(asked.model), tokens.NAMES, **asked.options())
    return json_answer({"prompt": counted["texts"][0]})


async def list_models(_: Request) -> Response:
    return json_answer({"object": "list", "data": models.cards(await catalogue().shown())})


async def get_model(request: Request) -> Response:
    name = request.path_params["id"]
    for card in models.cards(await catalogue().shown()):
        if card["id"] == name:
            return json_answer(card)
    raise Failure(404, f"model: no worker has served {name[:256]!r}", code="model_not_found", param="model")


async def list_usage(request: Request) -> Response:
    days = request.query_params.get("days", "1")
    return json_answer({"object": "list", "data": await usage.used(days)})


# ---------------------------------------------------------------- shared


def checked(plan: Callable[[], Any], names: Mapping[str, str] | None = None) -> Any:
    """What it returns. Raises `Failure` in place of `InvalidRequest`. `names`: by an option of a task, the
    client's field."""
    try:
        return plan()
    except InvalidRequest as error:
        raise failure_of(error, names) from None


def stays(asked: Sampling) -> bool:
    """Whether a generation goes on when its client has gone."""
    return asked.store and settings().gateway_stored_stay


async def fetched(urls: list[tuple[str, str]]) -> dict[str, str]:
    """By URL, the data URL of its image. Raises `Failure`."""
    try:
        return await images.fetched(urls) if urls else {}
    except InvalidRequest as error:
        raise failure_of(error) from None


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


def _kept(path: str, kind: Kind, create: Callable[[Request], Any]) -> list[Route]:
    return [
        Route(path, create, methods=["POST"]),
        Route(f"{path}/{{id}}", kind.get, methods=["GET"]),
        Route(f"{path}/{{id}}", kind.delete, methods=["DELETE"]),
    ]


def routes() -> list[Route]:
    """Below /v1."""
    return [
        *_kept("/chat/completions", CHAT, create_chat),
        *_kept("/completions", COMPLETION, create_completion),
        Route("/models", list_models, methods=["GET"]),
        Route("/models/{id:path}", get_model, methods=["GET"]),
        Route("/usage", list_usage, methods=["GET"]),
        *routes_at_the_root(),
    ]


def routes_at_the_root() -> list[Route]:
    """vLLM has these beside /v1."""
    return [Route("/tokenize", tokenize, methods=["POST"]), Route("/detokenize", detokenize, methods=["POST"])]
