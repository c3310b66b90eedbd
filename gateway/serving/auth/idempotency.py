"""A request that repeats another one joins it, in place of a second task.

    Idempotency-Key             the first request with this key of the tenant, whatever has become of it
    x-stainless-retry-count     SDKs say it, and send no key. Some send equal requests on purpose, such as
                                samples. So a retry joins only the one unfinished request with this body, of this
                                tenant's key, that its client has left. If there is none, or more than one, the
                                retry is a new request

A gateway that is killed does not say which clients have left it: their retries are new requests."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from pathlib import Path

import msgspec

from petiole.gateway.core.caller import ClientRequest, caller, request
from petiole.gateway.core.failures import Failure, invalid, unavailable
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.serving import records
from petiole.gateway.serving.retry import patiently
from petiole.tasks.servers import connections
from petiole.tasks.servers.connections import Commands
from petiole.tasks.wire.keys import gateway_key, stream_keys
from petiole.tasks.wire.record import scripts

LONGEST_KEY = 255
LEFT_FOR_S = 600
"""How long a request that its client has left is remembered."""

SUBMITTED_WITHIN_S = 30
"""How long an `Idempotency-Key` belongs to a request without a record: its gateway may have been killed."""

_WAITS, _PAUSE_S = 100, 0.05
_SOURCES = scripts.sources(Path(__file__).parent, {})


class IdempotencyRecord(msgspec.Struct):
    """Which request has an `Idempotency-Key`. `digest` and `sense`: the request's. `kept`: its record was written,
    so where there is none, it was deleted."""

    id: str
    kind: str
    digest: str
    kept: bool = True
    sense: str = ""


async def earlier(name: str, kind: str) -> RequestRecord | None:
    """The record of the request that this one repeats. None: it is the first, and goes on under this name; it may
    ask again. Raises `Failure`."""
    made = request()
    if made is None:
        return None
    found = None
    if made.idempotency_key:
        found = await _of_key(made, name, kind)
    elif made.retries and not made.name:
        found = await _left(made, kind)
    made.name, made.kind = (name, kind) if found is None else (found.id, kind)
    return found


async def forget(name: str) -> None:
    """The request of this name was refused: what repeats it is tried anew."""
    made = request()
    if made is None or not made.idempotency_key:
        return
    client, key = connections.async_streams(), _key_of(made)
    with contextlib.suppress(Failure):
        raw = await patiently(lambda: client.get(key))
        claim = _claim(raw)
        if claim is not None and claim.id == name:
            await _unclaim(key, raw)


async def abandon(name: str) -> None:
    """The request of this name was given up: `forget`, unless its submission goes on without its client."""
    if not submitting():
        await forget(name)


def submitting() -> bool:
    """Whether the submission of the request in this context goes on, though its client may leave."""
    made = request()
    return made is not None and made.submitting


def keeping(record: RequestRecord, keep_s: int) -> Commands:
    """The commands that let the request have its `Idempotency-Key` as long as its record is kept."""
    made = request()
    if made is None or not made.idempotency_key:
        return []
    claim = msgspec.json.encode(IdempotencyRecord(record.id, record.kind, made.digest, sense=made.sense))
    return [("SET", _key_of(made), claim, "EX", keep_s)]


async def left() -> None:
    """The client of the request in this context has gone before its answer was complete."""
    made = request()
    if made is None or made.retries is None or made.idempotency_key or not made.name:
        return
    key = _same(made)
    with contextlib.suppress(Failure):
        await patiently(
            lambda: connections.aperform([("HSET", key, made.name, "gone"), ("EXPIRE", key, LEFT_FOR_S)])
        )


async def _of_key(made: ClientRequest, name: str, kind: str) -> RequestRecord | None:
    if len(made.idempotency_key) > LONGEST_KEY:
        raise invalid(None, f"Idempotency-Key: must have at most {LONGEST_KEY} characters", "invalid_value")
    client, key = connections.async_streams(), _key_of(made)
    own = msgspec.json.encode(IdempotencyRecord(name, kind, made.digest, kept=False, sense=made.sense))
    for _ in range(_WAITS):
        if await patiently(lambda: client.set(key, own, nx=True, ex=SUBMITTED_WITHIN_S)):
            return None
        raw = await patiently(lambda: client.get(key))
        first = _claim(raw)
        if first is None:  # refused meanwhile
            continue
        if first.id == name:
            return None
        if first.kind != kind or not made.says(first.digest, first.sense):
            raise invalid(None, "Idempotency-Key: was used for another request", "idempotency_key_reused")
        record = await _known(first.id, kind)
        if record is not None and not (record.readers and await _cancelled(record)):
            return record
        if record is not None or first.kept:  # its client has left it for too long, or it was deleted
            await _unclaim(key, raw)
        else:
            await asyncio.sleep(_PAUSE_S)  # it is being submitted
    raise unavailable("the request with this Idempotency-Key is being submitted; try again")


async def _known(name: str, kind: str) -> RequestRecord | None:
    """None: there is no such record. Raises `Failure` if Redis does not say."""
    try:
        return await records.get(name, kind)
    except Failure as failure:
        if failure.status != 404:
            raise
        return None


async def _unclaim(key: str, raw: bytes | str | None) -> None:
    """Give it back, if it is what was read."""
    await patiently(lambda: unclaim()(keys=[key], args=[raw or ""]))


async def _left(made: ClientRequest, kind: str) -> RequestRecord | None:
    """Another one's retry may take it at the same time, so a script decides."""
    client, key = connections.async_streams(), _same(made)
    marks = await patiently(lambda: client.hgetall(key))
    unfinished: dict[str, RequestRecord] = {}
    for raw, mark in marks.items():
        with contextlib.suppress(Failure):
            record = await records.get(raw.decode() if isinstance(raw, bytes) else raw, kind)
            if mark == b"gone" and not await _finished(record):
                unfinished[record.id] = record
    if not unfinished:
        return None
    name = await rejoin()(key, list(unfinished))
    return unfinished.get(name)


async def _finished(record: RequestRecord) -> bool:
    """Whether all tasks have ended, or one was cancelled."""
    found = await _states(record)
    return all(b"done" in state for state in found) or any(b"cancel" in state for state in found)


async def _cancelled(record: RequestRecord) -> bool:
    return any(b"cancel" in state for state in await _states(record))


async def _states(record: RequestRecord) -> list[set[bytes]]:
    """The names of what each task's state has, and of what was asked of it."""
    keys = [key for one in map(stream_keys, record.tasks) for key in (one.state, one.asked)]
    found = await patiently(lambda: connections.aperform([("HGETALL", key) for key in keys]))
    names = [set(fields if isinstance(fields, dict) else fields[::2]) for fields in found]
    return [state | asked for state, asked in zip(names[::2], names[1::2], strict=True)]


class Rejoin:
    """The script, on an event loop's connections."""

    def __init__(self) -> None:
        self._script = connections.async_streams().register_script(_SOURCES["rejoin"])

    async def __call__(self, key: str, names: list[str]) -> str:
        reply = await patiently(lambda: self._script(keys=[key], args=names))
        return reply.decode() if isinstance(reply, bytes) else str(reply)


rejoin = connections.PerLoop(Rejoin)
"""The running event loop's."""

unclaim = connections.PerLoop(lambda: connections.async_streams().register_script(_SOURCES["unclaim"]))
"""The running event loop's."""


def _claim(raw: object) -> IdempotencyRecord | None:
    try:
        return msgspec.json.decode(raw, type=IdempotencyRecord) if isinstance(raw, bytes) else None
    except msgspec.MsgspecError:
        return None


def _key_of(made: ClientRequest) -> str:
    return _place("once", made.idempotency_key)


def _same(made: ClientRequest) -> str:
    return _place("same", f"{caller().key} {made.digest}")


def _place(what: str, name: str) -> str:
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return gateway_key(caller().place_of(f"{what}:{digest}"))
