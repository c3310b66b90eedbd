"""Records in Redis: what any replica needs, beside the log, to answer for a request. A tenant finds its own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from petiole.gateway.core.caller import caller
from petiole.gateway.core.failures import Failure
from petiole.gateway.core.record import RequestRecord, dump, load
from petiole.gateway.serving.retry import patiently
from petiole.tasks.servers import connections
from petiole.tasks.wire.keys import gateway_key


def written(record: RequestRecord, keep_s: int) -> tuple[Any, ...]:
    """The command that writes it."""
    return "SET", _key(record.id), dump(record), "EX", keep_s


async def put(record: RequestRecord, keep_s: int) -> None:
    await patiently(lambda: connections.aperform([written(record, keep_s)]))


async def get(name: str, kind: str) -> RequestRecord:
    """Raises `Failure`: 404 if there is none of this kind."""
    missing = Failure(404, f"no {kind} with id {name[:128]!r} is known", code="not_found", param="id")
    if not re.fullmatch("[A-Za-z0-9_-]{1,128}", name):
        raise missing
    raw = await patiently(lambda: connections.async_streams().get(_key(name)))
    try:
        record = load(bytes(raw)) if isinstance(raw, bytes) else None
    except msgspec.MsgspecError:
        record = None
    if record is None or record.kind != kind:
        raise missing
    return record


async def known(names: Sequence[str]) -> dict[str, RequestRecord]:
    """The records of these names that exist and are the caller's."""
    if not names:
        return {}
    found = await patiently(lambda: connections.async_streams().mget([_key(name) for name in names]))
    read: dict[str, RequestRecord] = {}
    for name, raw in zip(names, found, strict=True):
        with contextlib.suppress(msgspec.MsgspecError):
            if isinstance(raw, bytes):
                read[name] = load(raw)
    return read


async def forget(name: str) -> None:
    await patiently(lambda: connections.async_streams().delete(_key(name)))


def _key(name: str) -> str:
    return gateway_key(caller().place_of(name))
