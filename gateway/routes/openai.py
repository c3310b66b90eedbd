"""The handlers of OpenAI's paths, and of those that vLLM added. They hold nothing but rooms together: bodies,
plans, generations, views."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from petiole.gateway.core.failures import unknown_model
from petiole.gateway.openai import (
    chat,
    chat_view,
    completions,
    completions_view,
    conversation,
    model_list,
    tokenization,
)
from petiole.gateway.openai.answers import DONE, error_event
from petiole.gateway.openai.chat import ChatCompletion
from petiole.gateway.openai.chat_view import ChatView
from petiole.gateway.openai.completions import TextCompletion
from petiole.gateway.openai.completions_view import CompletionsView
from petiole.gateway.openai.tokenization import Detokenize, Tokenize
from petiole.gateway.serving import request_body
from petiole.gateway.serving.answering import AnswerKind, checked, fetched, json_answer, new_id
from petiole.gateway.serving.auth import usage_report
from petiole.gateway.serving.catalogue import catalogue
from petiole.gateway.serving.tokenization import count, count_alone
from petiole.tasks.settings import settings

CHAT = AnswerKind(chat.KIND, "chatcmpl-", ChatView, chat_view.whole, error_event, DONE)
COMPLETION = AnswerKind(completions.KIND, "cmpl-", CompletionsView, completions_view.whole, error_event, DONE)


async def create_chat(request: Request) -> Response:
    asked = await request_body.read(request, ChatCompletion)
    found = await catalogue().find(asked.model)
    pictures = await fetched(conversation.to_fetch(asked.messages))
    plan = checked(lambda: asked.plan(new_id(CHAT.prefix), int(time.time()), found, asked.stays, pictures))
    if settings().gateway_reasoning != "both":
        plan = plan.noting(reasoning_as=settings().gateway_reasoning)
    if asked.return_token_ids:
        counted = await count(found, plan.names, **tokenization.of_a_chat(plan.calls[0].options))
        plan = plan.noting(prompt_ids=counted["token_ids"][0])
    return await CHAT.create(request, plan, asked.stream)


async def create_completion(request: Request) -> Response:
    asked = await request_body.read(request, TextCompletion)
    found = await catalogue().find(asked.model)
    spelled: list[str] = []
    if ids := asked.ids_to_spell:
        counted = await count(found, {"token_ids": "prompt"}, token_ids=ids, skip_special_tokens=False)
        spelled = counted["texts"]
    plan = checked(lambda: asked.plan(new_id(COMPLETION.prefix), int(time.time()), found, asked.stays, spelled))
    if asked.return_token_ids:
        texts = [prompt for prompt in asked.prompt if isinstance(prompt, str)]
        read = iter(
            (await count(found, tokenization.NAMES, texts=texts, with_ids=True))["token_ids"] if texts else ()
        )
        whole = [next(read) if isinstance(one, str) else one for one in asked.prompt]
        plan = plan.noting(prompt_ids=[*map(asked.cut, whole)])
    return await COMPLETION.create(request, plan, asked.stream)


# ---------------------------------------------------------------- tokens, models


async def tokenize(request: Request) -> Response:
    asked = await request_body.read(request, Tokenize)
    found = await catalogue().find(asked.model)
    counted = await count_alone(found, tokenization.NAMES, **checked(asked.options))
    return json_answer(tokenization.tokenized(counted))


async def detokenize(request: Request) -> Response:
    asked = await request_body.read(request, Detokenize)
    counted = await count_alone(await catalogue().find(asked.model), tokenization.NAMES, **asked.options())
    return json_answer({"prompt": counted["texts"][0]})


async def tokenizer_info(request: Request) -> Response:
    known, name = await catalogue().shown(), request.query_params.get("model")
    for model in known:
        if name in model.names or (name is None and model.names):
            return json_answer(tokenization.described(model))
    raise unknown_model(name or "")


async def list_models(_: Request) -> Response:
    return json_answer(model_list.listed(await catalogue().shown()))


async def get_model(request: Request) -> Response:
    name = request.path_params["id"]
    for card in model_list.cards(await catalogue().shown()):
        if card["id"] == name:
            return json_answer(card)
    raise unknown_model(name)


async def list_usage(request: Request) -> Response:
    days = request.query_params.get("days", "1")
    return json_answer({"object": "list", "data": await usage_report.used(days)})


def busiest() -> list[Route]:
    """Below /v1, before all others: the routes are looked at one after the other."""
    return [
        *CHAT.routes("/chat/completions", create_chat),
        *COMPLETION.routes("/completions", create_completion),
    ]


def routes() -> list[Route]:
    """Below /v1."""
    return [
        Route("/models", list_models, methods=["GET"]),
        Route("/models/{id:path}", get_model, methods=["GET"]),
        Route("/usage", list_usage, methods=["GET"]),
        *routes_at_the_root(),
    ]


def routes_at_the_root() -> list[Route]:
    """vLLM has these beside /v1."""
    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
    ]
