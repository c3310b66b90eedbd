"""Notices that wait in Redis, and the responses that are watched until there is one.

    watched_key()    sorted set: `place_of` a response, by when it is looked at next; 0: its task has ended
    TENANTS          sorted set: tenants with notices, by when the first is due
    /notices/TENANT  sorted set: notices as JSON, by when each is tried next
    /told/ABOUT      string with a TTL: a notice about this was told, and is told once

Times are ms of Redis' clock. A gateway that takes something moves its time by `LEASE_S`: if that gateway dies,
another one takes it then. What a dead server leaves is bounded: `MOST_NOTICES` a tenant, each for
`TRIED_FOR_S`."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from petiole.gateway.core.caller import caller
from petiole.gateway.core.webhook_events import Notice
from petiole.gateway.serving.retry import patiently
from petiole.gateway.serving.webhooks import receivers
from petiole.tasks.servers import connections
from petiole.tasks.servers.connections import Commands
from petiole.tasks.wire.keys import gateway_key, watched_key
from petiole.tasks.wire.record import scripts

TENANTS = gateway_key("/notices")
MOST_NOTICES = 10_000
TRIED_FOR_S = 3 * 86_400
LEASE_S = 60
LOOK_S = 300
"""How often a response is looked at that no worker has said to have ended: it was cancelled in its queue, say."""

SOONEST_S, LATEST_S = 5.0, 6 * 3600.0

_SCRIPTS = scripts.sources(Path(__file__).parent, {"due": {"LEASE_MS": 1000 * LEASE_S, "LOOK_MS": 1000 * LOOK_S}})


class DueWebhooks(NamedTuple):
    """Responses to look at, by their places, and tenants with notices that are due. `more`: of responses."""

    watched: Sequence[str]
    tenants: Sequence[str]


async def watching() -> bool:
    """Whether the caller has a webhook. Raises `Failure`."""
    return await receivers.of(caller().name) is not None


def watch(name: str) -> Commands:
    """The commands that let this response of the caller's be watched."""
    look_at = round(1000 * (time.time() + LOOK_S))
    return [("ZADD", watched_key(), "NX", look_at, caller().place_of(name))]


async def look_now(name: str) -> None:
    """This response of the caller's may have ended, although no worker says so. Raises `Failure`."""
    place = caller().place_of(name)
    await patiently(lambda: connections.async_streams().zadd(watched_key(), {place: 0}, xx=True))


async def notify(type: str, about: str, at: int) -> int:
    """Let the caller's tenant know, if it has a webhook, that something has ended. It may be said again with the
    same `at`: that is the same notice. `type`: such as `batch.completed`. `about`: its id. `at`: when it ended, in
    seconds. Returns how many older notices had to go for it. Raises `Failure`."""
    return await add(type, about, at) if await watching() else 0


async def add(type: str, about: str, at: int) -> int:
    """`notify`, although this gateway may know no webhook: whoever has asked for the notice knows one."""
    return await _add(Notice(type, about, at))


async def add_once(notice: Notice, kept_s: int) -> int:
    """`add`, unless a notice about the same was added within this time, by any gateway."""
    return await _add(notice, [gateway_key(f"/told/{notice.about}")], [kept_s])


async def _add(notice: Notice, more_keys: Sequence[str] = (), more: Sequence[int] = ()) -> int:
    tenant, told = caller().name, msgspec.json.encode(notice)
    asked = [tenant, told, MOST_NOTICES, TRIED_FOR_S, *more]
    return int(await _call("add", [TENANTS, _key(tenant), *more_keys], asked))


async def unwatch(place: str) -> None:
    await patiently(lambda: connections.async_streams().zrem(watched_key(), place))


async def due(most: int) -> DueWebhooks:
    """Take what is due of the watched responses, up to `most` of them."""
    watched, tenants = await _call("due", [watched_key(), TENANTS], [most])
    return DueWebhooks([one.decode() for one in watched], [one.decode() for one in tenants])


async def take(tenant: str, most: int) -> list[bytes]:
    """Take notices of this tenant that are due, the first due first."""
    found: list[bytes] = await _call("take", [TENANTS, _key(tenant)], [tenant, 1000 * LEASE_S, most])
    return found


async def taken(tenant: str, notice: bytes) -> None:
    """The tenant's server has it, or nobody will."""
    await patiently(lambda: connections.async_streams().zrem(_key(tenant), notice))


async def again(tenant: str, notice: bytes, in_s: float) -> None:
    """Try it again after this time."""
    await _call("again", [TENANTS, _key(tenant)], [tenant, notice, round(1000 * in_s)])


async def leave(tenant: str) -> None:
    """This gateway knows no webhook of the tenant. Another one's settings may; otherwise the notices expire."""
    then = round(1000 * (time.time() + LEASE_S))
    await patiently(lambda: connections.async_streams().zadd(TENANTS, {tenant: then}, xx=True))


def pause_s(age_s: float) -> float:
    """After how long a notice of this age is tried again: its age doubles from try to try. What has failed
    together is not tried again together."""
    return min(max(age_s, SOONEST_S), LATEST_S) * random.uniform(0.8, 1.2)


def _key(tenant: str) -> str:
    return gateway_key(f"/notices/{tenant}")


class _Scripts:
    """On an event loop's connections."""

    def __init__(self) -> None:
        client = connections.async_streams()
        self.of = {name: client.register_script(source) for name, source in _SCRIPTS.items()}


_scripts = connections.PerLoop(_Scripts)


async def _call(name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
    return await patiently(lambda: _scripts().of[name](keys=keys, args=args))
