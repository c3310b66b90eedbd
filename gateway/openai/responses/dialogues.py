"""The handlers of /conversations. A conversation is a record and a list of turns: see `turns`."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from petiole.gateway.core.asking import Asked
from petiole.gateway.core.failures import Failure
from petiole.gateway.core.record import Record
from petiole.gateway.openai.responses import items, turns
from petiole.gateway.openai.responses.items import Item
from petiole.gateway.openai.responses.listing import listed
from petiole.gateway.serving import bodies, kept, records
from petiole.gateway.serving.answering import checked, fetched, json_answer, new_id
from petiole.tasks.settings import settings

MOST_ITEMS = 20
"""In one request, as OpenAI takes them."""


class CreateConversation(Asked):
    items: list[Any] = Field(default_factory=list, max_length=MOST_ITEMS)
    metadata: dict[str, str] = Field(default_factory=dict)


class UpdateConversation(Asked):
    metadata: dict[str, str]


class CreateItems(Asked):
    items: list[Any] = Field(min_length=1, max_length=MOST_ITEMS)


def shown(record: Record) -> dict[str, Any]:
    metadata = record.asked.get("metadata", {})
    return {"id": record.id, "object": record.kind, "created_at": record.created, "metadata": metadata}


async def create(request: Request) -> Response:
    asked = await bodies.read(request, CreateConversation)
    told = await _told(asked.items)
    record = Record(
        id=new_id("conv_"),
        kind=turns.CONVERSATION,
        created=int(time.time()),
        model="",
        tasks=[],
        asked={"metadata": asked.metadata} if asked.metadata else {},
    )
    await records.put(record, settings().gateway_keep_s)
    if told:
        await _append(record, told)
    return json_answer(shown(record))


async def get(request: Request) -> Response:
    return json_answer(shown(await turns.conversation(request.path_params["id"])))


async def update(request: Request) -> Response:
    asked = await bodies.read(request, UpdateConversation)
    record = await turns.conversation(request.path_params["id"])
    record = msgspec.structs.replace(record, asked={**record.asked, "metadata": asked.metadata})
    await records.put(record, settings().gateway_keep_s)
    return json_answer(shown(record))


async def delete(request: Request) -> Response:
    """The conversation. Its responses stay, as OpenAI's do."""
    record = await turns.conversation(request.path_params["id"])
    await kept.forget(record.id, f"{record.id}:turns")
    return json_answer({"id": record.id, "object": f"{turns.CONVERSATION}.deleted", "deleted": True})


# ---------------------------------------------------------------- items


async def create_items(request: Request) -> Response:
    asked = await bodies.read(request, CreateItems)
    record = await turns.conversation(request.path_params["id"])
    told = await _told(asked.items)
    await _append(record, told)
    return json_answer(listed(told, {"order": "asc", "limit": str(len(told))}))


async def list_items(request: Request) -> Response:
    record = await turns.conversation(request.path_params["id"])
    return json_answer(listed(await _said(record), request.query_params))


async def get_item(request: Request) -> Response:
    return json_answer(await _item(request, await turns.conversation(request.path_params["id"])))


async def delete_item(request: Request) -> Response:
    record = await turns.conversation(request.path_params["id"])
    item = await _item(request, record)
    await turns.note(record, [f"-{item['id']}"])
    return json_answer(shown(record))


async def _told(given: list[Any]) -> list[Item]:
    pictures = await fetched(items.to_fetch("items", given))
    return await turns.referred(checked(lambda: items.kept("items", given, pictures)))


async def _append(record: Record, told: list[Item]) -> None:
    name = await turns.tell_as_turn(told, settings().gateway_keep_s)
    await turns.note(record, [name])


async def _said(record: Record) -> list[Item]:
    entries = await turns.entries_of(record)
    return turns.items_of(await turns.said_in(record, entries), turns.deleted_in(entries))


async def _item(request: Request, record: Record) -> Item:
    name = request.path_params["item"]
    for item in await _said(record):
        if item["id"] == name:
            return item
    raise Failure(404, f"the conversation has no item with id {name[:128]!r}", code="not_found", param="item_id")


def routes() -> list[BaseRoute]:
    return [
        Route("/conversations", create, methods=["POST"]),
        Route("/conversations/{id}", get, methods=["GET"]),
        Route("/conversations/{id}", update, methods=["POST"]),
        Route("/conversations/{id}", delete, methods=["DELETE"]),
        Route("/conversations/{id}/items", create_items, methods=["POST"]),
        Route("/conversations/{id}/items", list_items, methods=["GET"]),
        Route("/conversations/{id}/items/{item}", get_item, methods=["GET"]),
        Route("/conversations/{id}/items/{item}", delete_item, methods=["DELETE"]),
    ]
