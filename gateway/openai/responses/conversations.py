"""The handlers of /conversations. A conversation is a record and a list of turns: see `turns`."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from petiole.contract.requests.bounds import Entries
from petiole.gateway.core.caller import caller
from petiole.gateway.core.failures import Failure
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.requests import Metadata, RequestBody
from petiole.gateway.openai.answers import listed
from petiole.gateway.openai.responses import conversation_store, items, store
from petiole.gateway.openai.responses.items import Item
from petiole.gateway.serving import records, request_body
from petiole.gateway.serving.answering import checked, fetched, json_answer, new_id
from petiole.tasks.settings import settings

MOST_ITEMS = 20
"""In one request, as OpenAI takes them."""


class CreateConversation(RequestBody):
    items: Annotated[list[Any], Entries(MOST_ITEMS)] = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=dict)


class UpdateConversation(RequestBody):
    metadata: Metadata


class CreateItems(RequestBody):
    items: Annotated[list[Any], Entries(MOST_ITEMS, least=1)]


def shown(record: RequestRecord) -> dict[str, Any]:
    metadata = record.asked.get("metadata", {})
    return {"id": record.id, "object": record.kind, "created_at": record.created, "metadata": metadata}


async def create(request: Request) -> Response:
    asked = await request_body.read(request, CreateConversation)
    told = await _told(asked.items)
    record = RequestRecord(
        id=new_id("conv_"),
        kind=conversation_store.CONVERSATION,
        created=int(time.time()),
        model="",
        tasks=[],
        asked={"metadata": asked.metadata} if asked.metadata else {},
    )
    await records.put(record, settings().gateway_keep_s)
    if told:
        await _append(record, told)
    if asked.metadata.get(conversation_store.LISTED) == "true":
        await conversation_store.note_use(record.id, new=True)
    return json_answer(shown(record))


async def list_all(request: Request) -> Response:
    """The tenant's that are marked so, which OpenAI does not list."""
    if not caller().name:
        raise Failure(
            403, "the list of conversations needs a key, whose tenant they are of", code="missing_api_key"
        )
    return json_answer(listed([shown(one) for one in await conversation_store.of_tenant()], request.query_params))


async def get(request: Request) -> Response:
    return json_answer(shown(await conversation_store.conversation(request.path_params["id"])))


async def update(request: Request) -> Response:
    asked = await request_body.read(request, UpdateConversation)
    record = await conversation_store.conversation(request.path_params["id"])
    record = msgspec.structs.replace(record, asked={**record.asked, "metadata": asked.metadata})
    await records.put(record, settings().gateway_keep_s)
    return json_answer(shown(record))


async def delete(request: Request) -> Response:
    """The conversation. Its responses stay, as OpenAI's do."""
    record = await conversation_store.conversation(request.path_params["id"])
    await store.forget(record.id, f"{record.id}:turns")
    return json_answer({"id": record.id, "object": f"{conversation_store.CONVERSATION}.deleted", "deleted": True})


# ---------------------------------------------------------------- items


async def create_items(request: Request) -> Response:
    asked = await request_body.read(request, CreateItems)
    record = await conversation_store.conversation(request.path_params["id"])
    told = await _told(asked.items)
    await _append(record, told)
    return json_answer(listed(told, {"order": "asc", "limit": str(max(1, len(told)))}))


async def list_items(request: Request) -> Response:
    record = await conversation_store.conversation(request.path_params["id"])
    return json_answer(listed(await _said(record), request.query_params))


async def get_item(request: Request) -> Response:
    return json_answer(await _item(request, await conversation_store.conversation(request.path_params["id"])))


async def delete_item(request: Request) -> Response:
    record = await conversation_store.conversation(request.path_params["id"])
    item = await _item(request, record)
    await conversation_store.note(record, [f"-{item['id']}"])
    return json_answer(shown(record))


async def _told(given: list[Any]) -> list[Item]:
    pictures = await fetched(items.to_fetch("items", given))
    kept = checked(lambda: items.kept("items", given, pictures))
    return items.remembered(await conversation_store.referred(kept))


async def _append(record: RequestRecord, told: list[Item]) -> None:
    name = await conversation_store.tell_as_turn(told, settings().gateway_keep_s)
    await conversation_store.note(record, [name])


async def _said(record: RequestRecord) -> list[Item]:
    entries = await conversation_store.entries_of(record)
    return conversation_store.items_of(
        await conversation_store.said_in(record, entries), conversation_store.deleted_in(entries)
    )


async def _item(request: Request, record: RequestRecord) -> Item:
    name = request.path_params["item"]
    for item in await _said(record):
        if item["id"] == name:
            return item
    raise Failure(404, f"the conversation has no item with id {name[:128]!r}", code="not_found", param="item_id")


def routes() -> list[BaseRoute]:
    return [
        Route("/conversations", create, methods=["POST"]),
        Route("/conversations", list_all, methods=["GET"]),
        Route("/conversations/{id}", get, methods=["GET"]),
        Route("/conversations/{id}", update, methods=["POST"]),
        Route("/conversations/{id}", delete, methods=["DELETE"]),
        Route("/conversations/{id}/items", create_items, methods=["POST"]),
        Route("/conversations/{id}/items", list_items, methods=["GET"]),
        Route("/conversations/{id}/items/{item}", get_item, methods=["GET"]),
        Route("/conversations/{id}/items/{item}", delete_item, methods=["DELETE"]),
    ]
