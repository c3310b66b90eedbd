"""The handlers of /responses."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from petiole.gateway.core.failures import Failure, invalid
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.streams import ClientStream
from petiole.gateway.core.task_plan import Plan, TaskCall
from petiole.gateway.openai.answers import DONE, listed
from petiole.gateway.openai.responses import (
    compaction,
    conversation_store,
    conversations,
    items,
    resource,
    store as kept,
    submitting,
    websocket,
)
from petiole.gateway.openai.responses.request import KIND, NAMES, Compact, CountInput, CreateResponse
from petiole.gateway.openai.responses.view import ResponsesView, error_event
from petiole.gateway.serving import generations, records, request_body
from petiole.gateway.serving.answering import accepted, after_of, checked, flag, json_answer, new_id
from petiole.gateway.serving.catalogue import catalogue
from petiole.gateway.serving.generations import Generation
from petiole.gateway.serving.sse import EventStream, events, unless_gone
from petiole.gateway.serving.tokenization import count_alone
from petiole.gateway.serving.webhooks import queue

_CANCELLED_WITHIN_S = 3.0


async def create(request: Request) -> Response:
    asked = await request_body.read(request, CreateResponse)
    generation = await unless_gone(request, submitting.once(asked))
    if asked.background and not asked.stream:
        await generation.aclose()
        return json_answer(await conversation_store.known(generation.record))
    if not asked.stream:
        return await unless_gone(request, whole(generation))
    if not asked.background:
        await unless_gone(request, accepted(generation))
    return EventStream(streamed(generation))


async def streamed(generation: Generation, after: Sequence[int] = ()) -> AsyncGenerator[bytes, None]:
    record, view = generation.record, ResponsesView(generation.record)
    stream = ClientStream(view, record, after)
    written = events(generation, stream, lambda failure: error_event(failure, stream.cursor), DONE)
    kept = False
    async with contextlib.aclosing(written) as parts:
        async for part in parts:
            if not kept and view.whole.ended is not None:  # before the last event: whoever has it may leave
                kept = True
                with contextlib.suppress(Failure):
                    await conversation_store.ended(record, view.whole)
            yield part


async def whole(generation: Generation) -> Response:
    async with contextlib.aclosing(generation):
        [output] = await generation.whole()
    return json_answer(await conversation_store.ended(generation.record, output))


async def get(request: Request) -> Response:
    """As it is now, or its events after a number. What is not stored can be followed to its end all the same: so
    its client may lose the connection."""
    name = request.path_params["id"]
    if not flag(request, "stream"):
        return json_answer(await conversation_store.known(await conversation_store.response(name)))
    record = await records.get(name, KIND)
    after = after_of(request, record)
    return EventStream(streamed(generations.again(record), after))


async def cancel(request: Request) -> Response:
    record = await conversation_store.response(request.path_params["id"])
    answer = await conversation_store.known(record)
    if answer["status"] in resource.RUNNING:
        await generations.cancel(record)
        await _ended(record)
        answer = await conversation_store.known(record)
        await queue.look_now(record.id)  # it may end in its queue, where no worker sees it
    return json_answer(answer)


async def _ended(record: RequestRecord) -> None:
    """Wait for the end, but not for a worker to begin."""
    with contextlib.suppress(Failure):
        async with contextlib.aclosing(generations.again(record)) as generation:
            await generation.ended(_CANCELLED_WITHIN_S)


async def delete(request: Request) -> Response:
    """Cancel it, if it is not finished, and forget it."""
    record = await conversation_store.response(request.path_params["id"])
    if (await conversation_store.known(record))["status"] in resource.RUNNING:
        await generations.cancel(record)
        await _ended(record)
    await conversation_store.forget(record)
    return json_answer({"id": record.id, "object": f"{KIND}.deleted", "deleted": True})


async def input_items(request: Request) -> Response:
    """What the response was told, with the turns before it."""
    record = await conversation_store.response(request.path_params["id"])
    entries = record.asked.get("before", [])
    before = await conversation_store.read([*filter(conversation_store.is_turn, entries)])
    [told] = await kept.get(f"{record.id}:input")
    said = [
        *conversation_store.items_of(before, conversation_store.deleted_in(entries)),
        *(told or {}).get("items", ()),
    ]
    return json_answer(listed(said, request.query_params))


# ---------------------------------------------------------------- counted, made short


async def input_tokens(request: Request) -> Response:
    asked = await request_body.read(request, CountInput)
    own, past = await submitting.told(asked), await submitting.before(asked)
    model = asked.model
    if model is None and asked.previous_response_id is not None:
        model = (await conversation_store.response(asked.previous_response_id)).model
    if model is None:
        raise invalid("model", "model: is required", "missing_required_parameter")
    found = await catalogue().find(model)
    options = checked(lambda: asked.options(past, own), NAMES)
    counted = await unless_gone(request, count_alone(found, NAMES, **options))
    return json_answer({"object": "response.input_tokens", "input_tokens": counted["counts"][0]})


async def compact(request: Request) -> Response:
    """The model's summary. Its record is kept no longer than it takes."""
    asked = await request_body.read(request, Compact)
    found = await catalogue().find(asked.model)
    own, past = await submitting.told(asked), await submitting.before(asked)
    name, now = new_id("cmp_"), int(time.time())
    said = [*past.items, *own]
    messages = checked(lambda: items.messages(asked.instructions, past.items, own), NAMES)
    options: dict[str, Any] = {
        "messages": [*messages, {"role": "user", "content": compaction.ASKED}],
        "max_tokens": compaction.MOST_TOKENS,
        "temperature": 0,
        "cancel_on_disconnect": True,
    }
    options |= {"adapter": found.adapter} if found.adapter is not None else {}
    options |= {"affinity": asked.prompt_cache_key} if asked.prompt_cache_key is not None else {}
    record = RequestRecord(
        id=name,
        kind=compaction.KIND,
        created=now,
        model=asked.model,
        tasks=[name],
        queue=found.queue,
        readers=True,
    )
    generation = await unless_gone(
        request, generations.begin(Plan(record, [TaskCall("chat", options)], {}, NAMES))
    )
    try:
        [output] = await unless_gone(request, generation.whole())
    finally:
        await generation.aclose()
        await records.forget(name)
    if output.ended is None or output.ended.usage is None:
        raise Failure(500, "the summary has failed", code="server_error")
    return json_answer(
        {
            "id": name,
            "object": compaction.KIND,
            "created_at": now,
            "output": compaction.shortened(said, items.new_id("compaction"), output.text()),
            "usage": resource.used(output.ended.usage),
        }
    )


def routes() -> list[BaseRoute]:
    """Below /v1."""
    return [
        Route("/responses", create, methods=["POST"]),
        WebSocketRoute("/responses", websocket.serve),
        Route("/responses/input_tokens", input_tokens, methods=["POST"]),
        Route("/responses/compact", compact, methods=["POST"]),
        Route("/responses/{id}", get, methods=["GET"]),
        Route("/responses/{id}", delete, methods=["DELETE"]),
        Route("/responses/{id}/cancel", cancel, methods=["POST"]),
        Route("/responses/{id}/input_items", input_items, methods=["GET"]),
        *conversations.routes(),
    ]
