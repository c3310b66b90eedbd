"""Looks at the responses that are watched and at budgets, and sends the notices that are due. Each gateway has a
dispatcher: whichever comes first takes what is due. A server that is slow or dead holds up nobody's notices but
its own tenant's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlsplit

import h11
import msgspec
import redis

from petiole.gateway.core.caller import Caller, as_caller
from petiole.gateway.core.failures import Failure
from petiole.gateway.core.webhook_events import Notice, Webhook, signed
from petiole.gateway.serving.egress import answered, inner, networks_of, public
from petiole.gateway.serving.webhooks import queue, receivers
from petiole.gateway.serving.webhooks.budget_watch import LOOK_S, BudgetWatch
from petiole.tasks.settings import settings

logger = logging.getLogger("petiole.gateway.webhooks")

POLL_S, OUTAGE_S, WAIT_S = 1.0, 5.0, 10.0
MOST_LOOKS = 100
MOST_TENANTS = 32
"""Told at a time, by one gateway."""
AT_ONCE = 8
"""Notices on their way to one tenant, from one gateway."""
ROUNDS = 50

EndedAs = Callable[[str], Awaitable[str | None]]
"""How the caller's response of this name has ended, such as `response.completed`; None: it runs. Raises
`Failure`."""


class NotTaken(Exception):  # noqa: N818
    """The server has not taken it. The message says why, and nothing of the URL, which may have a secret."""


async def post(url: str, headers: Mapping[str, str], body: bytes) -> None:
    """One try: a POST to the address that was checked, within `WAIT_S` in all. Only the answer's status is read.
    Raises `NotTaken`."""
    networks = networks_of(settings().gateway_webhook_networks)

    def check(address: str, secure: bool) -> None:
        if not (inner(address, networks) or (secure and public(address))):
            raise NotTaken("its address is not public" if secure else "only inner networks are told without TLS")

    told = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    try:
        async with asyncio.timeout(WAIT_S):
            status, _ = await answered("POST", url, told, body, check)
    except TimeoutError:
        raise NotTaken(f"no answer within {WAIT_S:g} s") from None
    except (OSError, ValueError, h11.RemoteProtocolError) as error:
        raise NotTaken(type(error).__name__) from None
    if not 200 <= status < 300:
        raise NotTaken(f"status {status}")


class WebhookDispatcher:
    """`ended_as`: asked about what is watched. `counted`: told of each notice: "delivered", "failed" (it is tried
    again) or "dropped"."""

    def __init__(self, ended_as: EndedAs, counted: Callable[[str], None]) -> None:
        self._ended_as, self._counted = ended_as, counted
        self._telling: dict[str, asyncio.Task[None]] = {}
        self._running: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Once, in the running event loop."""
        if not self._running:
            works = (self._rounds, POLL_S), (BudgetWatch(self._counted).look, LOOK_S)
            self._running += [asyncio.create_task(_again_and_again(*work)) for work in works]

    async def _rounds(self) -> None:
        while await self.round():
            pass

    async def round(self) -> bool:
        """Take what is due, and begin to tell it. Returns whether more responses may be due."""
        watched, tenants = await queue.due(MOST_LOOKS)
        for tenant in tenants:
            if tenant not in self._telling and len(self._telling) < MOST_TENANTS:
                self._telling[tenant] = asyncio.create_task(self._tell(tenant))
        await asyncio.gather(*map(self._look, watched))
        return len(watched) == MOST_LOOKS

    async def _look(self, place: str) -> None:
        """A response is watched until its notice waits, or until it is known no longer."""
        tenant, _, name = place.rpartition("/")
        with as_caller(Caller(name=tenant)):
            try:
                ended = await self._ended_as(name)
            except Failure as failure:
                if failure.status == 404:
                    await queue.unwatch(place)
                return
            if ended is None:
                return
            for _ in range(await queue.add(ended, name, int(time.time()))):
                self._counted("dropped")
        await queue.unwatch(place)

    async def _tell(self, tenant: str) -> None:
        try:
            webhook = await receivers.of(tenant)
            if webhook is None:
                return await queue.leave(tenant)
            for _ in range(ROUNDS):
                notices = await queue.take(tenant, AT_ONCE)
                told = await asyncio.gather(*(self._send(tenant, webhook, notice) for notice in notices))
                if not notices or not all(told):
                    return
        except (Failure, redis.RedisError, OSError) as error:
            logger.warning("the webhook of tenant %r cannot be told: %s", tenant, type(error).__name__)
        finally:
            del self._telling[tenant]

    async def _send(self, tenant: str, webhook: Webhook, raw: bytes) -> bool:
        """One try. Returns whether the tenant's server has taken it."""
        try:
            notice = msgspec.json.decode(raw, type=Notice)
        except msgspec.MsgspecError:
            await queue.taken(tenant, raw)
            return True
        now, body, name = time.time(), notice.body_for(tenant), notice.id_for(tenant)
        try:
            await post(webhook.url, signed(webhook, name, body, int(now)), body)
        except NotTaken as why:
            age_s, host = now - notice.at, urlsplit(webhook.url).hostname
            if age_s > queue.TRIED_FOR_S:
                outcome, then = "dropped", "given up"
                await queue.taken(tenant, raw)
            else:
                in_s = queue.pause_s(age_s)
                outcome, then = "failed", f"tried again in {in_s:.0f} s"
                await queue.again(tenant, raw, in_s)
            logger.warning("webhook of tenant %r at %s: %s; %s is %s", tenant, host, why, name, then)
            self._counted(outcome)
            return False
        await queue.taken(tenant, raw)
        self._counted("delivered")
        return True


async def _again_and_again(work: Callable[[], Awaitable[None]], pause_s: float) -> None:
    failed = ""
    while True:
        before, failed = failed, ""
        try:
            await work()
        except Exception as error:  # the notices wait
            failed = type(error).__name__
            if failed != before:  # an outage is said once
                logger.warning("webhooks cannot be told: %s", failed)
        await asyncio.sleep(OUTAGE_S if failed else pause_s)
