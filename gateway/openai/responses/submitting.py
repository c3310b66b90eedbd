"""From a request to a generation: what comes before it is read, it is kept, and its task is submitted. The same
for HTTP and for a WebSocket."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from petiole.gateway.core.failures import Failure
from petiole.gateway.openai.responses import conversation_store, items, store
from petiole.gateway.openai.responses.items import Item
from petiole.gateway.openai.responses.request import KIND, NAMES, PREFIX, CreateResponse, History, ItemsBody, Times
from petiole.gateway.serving import generations
from petiole.gateway.serving.answering import checked, fetched, new_id
from petiole.gateway.serving.auth import idempotency
from petiole.gateway.serving.catalogue import catalogue
from petiole.gateway.serving.generations import Generation
from petiole.tasks.settings import settings


async def told(asked: ItemsBody) -> list[Item]:
    """The request's own items. Raises `Failure`."""
    pictures = await fetched(items.to_fetch("input", asked.input))
    own: list[Item] = checked(lambda: asked.own(pictures), NAMES)
    return await conversation_store.referred(own)


async def before(asked: ItemsBody) -> History:
    """Raises `Failure`."""
    if asked.previous_response_id is not None:
        return await conversation_store.after_response(asked.previous_response_id)
    if asked.conversation_id is not None:
        return await conversation_store.in_conversation(asked.conversation_id)
    return History()


async def once(asked: CreateResponse) -> Generation:
    """What answers the request: the response to an earlier one that it repeats, or a new one. Raises `Failure`."""
    name = new_id(PREFIX)
    try:
        if (earlier := await idempotency.earlier(name, KIND)) is not None:
            return generations.again(earlier)
        return await begin(asked, await told(asked), await before(asked), name)
    except BaseException:  # a client that leaves, too
        await idempotency.abandon(name)
        raise


async def begin(asked: CreateResponse, own: Sequence[Item], past: History, name: str | None = None) -> Generation:
    """Keep the turn, let it join its conversation, and submit its task. Raises `Failure`; then the turn is
    gone."""
    found = await catalogue().find(asked.model)
    name, times = name or new_id(PREFIX), Times(int(time.time()), settings().gateway_keep_s)
    stay = asked.background or asked.stays
    plan = checked(lambda: asked.plan(name, times, found, stay, past, own), NAMES)
    if not asked.store:
        return await generations.begin(plan)
    await conversation_store.tell(name, own, asked.kept_s(times))
    try:
        if past.conversation is not None:
            await conversation_store.join(past.conversation, name, past.seen)
        return await generations.begin(plan)
    except BaseException:
        with contextlib.suppress(Failure):
            if not idempotency.submitting():
                await store.forget(f"{name}:input")
        raise
