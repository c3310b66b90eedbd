"""Turns and conversations in Redis, as any gateway reads them.

    NAME:input     what a turn was told, and how long it is kept
    NAME:output    the response when it has ended. It follows from the record and the log, so whoever reads it
                   first writes it, and it may be needed longer than a log is kept
    CONV:turns     a conversation's list: names of turns, and `-ITEM` for an item that was deleted
    :talks         a tenant's conversations that are listed, by when they were used

A response joins its conversation before its task is submitted, so no gateway must live until its end."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from petiole.gateway.core.caller import caller
from petiole.gateway.core.failures import Failure, invalid
from petiole.gateway.core.parts import CollectedOutput
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.openai.responses import resource, store
from petiole.gateway.openai.responses.items import Item, remembered, response_of
from petiole.gateway.openai.responses.request import KIND, PREFIX, History
from petiole.gateway.serving import generations, records
from petiole.tasks.settings import settings

logger = logging.getLogger("petiole.gateway.conversations")

CONVERSATION = "conversation"
LISTED = "petiole_listed"
"""Metadata of a conversation that all keys of its tenant shall see: the page's, if its user asks for it."""
_TALKS = ":talks"
"""No record has such a name."""
MOST_LISTED = 1000
_TRIES = 5


def is_turn(entry: str) -> bool:
    return not entry.startswith("-")


# ---------------------------------------------------------------- responses


async def response(name: str) -> RequestRecord:
    """A stored response. Raises `Failure`: 404 if there is none."""
    record = await records.get(name, KIND)
    if not record.asked.get("store", True):
        raise Failure(404, f"no response with id {name!r} is stored", code="not_found", param="id")
    return record


async def known(record: RequestRecord) -> dict[str, Any]:
    """The response as it is now. Raises `Failure` if it has expired."""
    [answer] = await store.get(f"{record.id}:output")
    if answer is not None:
        return dict(answer)
    snapshot = await generations.snapshot(record)
    if snapshot is not None and snapshot.whole.ended is None:
        waiting: resource.Status = "cancelled" if snapshot.flagged else "queued"  # flagged: no worker will begin
        return resource.resource(record, "in_progress" if snapshot.begun else waiting, snapshot.whole)
    if snapshot is not None:
        whole = snapshot.whole
    elif not await generations.has_result(record):
        if time.time() - record.created < settings().stream_ttl_s:  # no log of it has expired yet
            return resource.resource(record, "queued", CollectedOutput())
        raise Failure(404, f"the output of response {record.id} has expired", code="expired", param="id")
    else:  # a reader takes the result
        generation = generations.again(record)
        async with contextlib.aclosing(generation):
            [whole] = await generation.whole(failed=True)
    return await ended(record, whole)


async def ended_as(name: str) -> str | None:
    """How the response of this name has ended, such as `response.completed`. None: it runs. Raises `Failure`: 404
    if it is known no longer."""
    status = (await known(await response(name)))["status"]
    return None if status in resource.RUNNING else f"{KIND}.{status}"


async def ended(record: RequestRecord, whole: CollectedOutput) -> dict[str, Any]:
    """The response, which has ended. If it is stored, its output no longer needs its log. Raises `Failure`."""
    answer = resource.finished(record, whole)
    if record.asked.get("store", True):
        await store.put(f"{record.id}:output", answer, keep_s(record))
    return answer


def keep_s(record: RequestRecord) -> int:
    return int(record.asked.get("keep_s") or settings().gateway_keep_s)


async def tell(name: str, items: Sequence[Item], keep_s: int) -> None:
    await store.put(f"{name}:input", {"items": remembered(items), "keep_s": keep_s}, keep_s)


async def tell_as_turn(items: Sequence[Item], keep_s: int) -> str:
    """A turn of its own, without a response. Returns its name."""
    name = f"turn_{secrets.token_hex(16)}"
    await tell(name, items, keep_s)
    return name


async def forget(record: RequestRecord) -> None:
    """The response. Its turn stays in its conversation."""
    if "conversation" in record.asked:
        with contextlib.suppress(Failure):
            await known(record)  # writes the output, while the record still says how to
    else:
        await store.forget(f"{record.id}:input", f"{record.id}:output")
    await records.forget(record.id)


# ---------------------------------------------------------------- turns


class Turn(NamedTuple):
    name: str
    told: Sequence[Item]
    answered: Mapping[str, Any]
    """The response as it is now; empty for a turn without one."""

    @property
    def status(self) -> str:
        return str(self.answered.get("status", "completed"))


async def read(names: Sequence[str]) -> list[Turn]:
    """The turns that are there, of those named."""
    found = await store.get(*(f"{name}:{half}" for name in names for half in ("input", "output")))
    turns = []
    for name, told, answered in zip(names, found[::2], found[1::2], strict=True):
        if told is None:
            continue
        if answered is None and name.startswith(PREFIX):
            with contextlib.suppress(Failure):
                answered = await known(await records.get(name, KIND))
        turns.append(Turn(name, told["items"], answered or {}))
    return turns


def items_of(turns: Iterable[Turn], deleted: Container[str]) -> list[Item]:
    """The items of these turns, in order."""
    said = [item for turn in turns for item in (*turn.told, *turn.answered.get("output", ()))]
    return [item for item in said if item["id"] not in deleted]


def deleted_in(entries: Iterable[str]) -> set[str]:
    return {entry[1:] for entry in entries if not is_turn(entry)}


async def keep(turns: Iterable[str]) -> None:
    """A dialogue that goes on is kept as a whole: each turn for its own time from now."""
    names = [name for name in turns if is_turn(name)]
    told = await store.get(*(f"{name}:input" for name in names))
    times = {name: int(one["keep_s"]) for name, one in zip(names, told, strict=True) if one}
    await store.keep({f"{name}:{half}": keep_s for name, keep_s in times.items() for half in ("input", "output")})


# ---------------------------------------------------------------- what comes before a request


async def after_response(name: str) -> History:
    """What comes before a request that continues this response. Raises `Failure`."""
    try:
        record = await response(name)
    except Failure as failure:
        raise failure if failure.status != 404 else not_found(name) from None
    status = (await known(record))["status"]
    if status in resource.RUNNING:
        limit = f"previous_response_id: response {name} must have ended, but is {status}"
        raise invalid("previous_response_id", limit, "previous_response_not_ended")
    entries = [*record.asked.get("before", ()), name]
    names = [entry for entry in entries if is_turn(entry)]
    turns = await read(names)
    if len(turns) < len(names):
        raise not_found(name, ": a turn before it was deleted or has expired")
    await keep(names)
    return History(entries, items_of(turns, deleted_in(entries)))


def not_found(name: str, why: str = "") -> Failure:
    message = f"previous_response_id: no response with id {name[:128]!r} can be continued{why}"
    return invalid("previous_response_id", message, "previous_response_not_found")


async def referred(items: Sequence[Item]) -> list[Item]:
    """The items, with those of earlier responses in place of references. Raises `Failure`."""
    return [await _referred(place, item) for place, item in enumerate(items)]


async def _referred(place: int, item: Item) -> Item:
    if item["type"] != "item_reference":
        return item
    with contextlib.suppress(Failure):
        answered = await known(await response(response_of(item["id"])))
        for other in answered["output"]:
            if other["id"] == item["id"]:
                return dict(other)
    field = f"input[{place}].id"
    raise invalid(field, f"{field}: no stored response has an item with id {item['id'][:128]!r}", "not_found")


# ---------------------------------------------------------------- conversations


async def conversation(name: str) -> RequestRecord:
    return await records.get(name, CONVERSATION)


async def note_use(name: str, *, new: bool = False) -> None:
    """A tenant's list, if it has the conversation or this is `new` in it, has it first. Without keys there is no
    list: an id is what reads it. What has used the conversation does not fail for the list."""
    if caller().name:
        try:
            await store.used(_TALKS, name, settings().gateway_keep_s, MOST_LISTED, new=new)
        except Failure as failure:
            logger.warning("the list of conversations is not up to date: %s", failure)


async def of_tenant() -> list[RequestRecord]:
    """The caller's conversations that are listed, the one that was used first first."""
    names = await store.last_used(_TALKS)
    known = await records.known(names)
    return [known[name] for name in names if name in known]


async def entries_of(record: RequestRecord) -> list[str]:
    return await store.entries(f"{record.id}:turns")


async def said_in(record: RequestRecord, entries: Sequence[str]) -> list[Turn]:
    """The turns of a conversation with these entries. One that has failed, or was never submitted, is none."""
    return [turn for turn in await read([*filter(is_turn, entries)]) if turn.status != "failed"]


async def in_conversation(name: str) -> History:
    """What comes before a request in this conversation. Raises `Failure`: 409 while another one runs."""
    record = await conversation(name)
    entries = await entries_of(record)
    turns = await said_in(record, entries)
    if any(turn.status in resource.RUNNING for turn in turns):
        raise locked(name)
    names = [turn.name for turn in turns]
    await keep(names)
    deleted = deleted_in(entries)
    before = [*names, *(f"-{item}" for item in sorted(deleted))]
    return History(before, items_of(turns, deleted), name, len(entries))


def locked(name: str) -> Failure:
    message = f"conversation: {name} has a response that has not ended; try again when it has"
    return invalid("conversation", message, "conversation_locked", 409)


async def join(name: str, turn: str, seen: int) -> None:
    """Let the conversation go on with this turn. Raises `Failure` if another one was faster."""
    if not await store.append(f"{name}:turns", [turn], seen, settings().gateway_keep_s):
        raise locked(name)
    await store.keep({name: settings().gateway_keep_s})
    await note_use(name)


async def note(record: RequestRecord, entries: Sequence[str]) -> None:
    """Append these entries, after whatever is there. Raises `Failure`."""
    for _ in range(_TRIES):
        seen = len(await entries_of(record))
        if await store.append(f"{record.id}:turns", entries, seen, settings().gateway_keep_s):
            await store.keep({record.id: settings().gateway_keep_s})
            await note_use(record.id)
            return
    raise locked(record.id)
