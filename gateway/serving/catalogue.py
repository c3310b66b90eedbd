"""The models of the fleet, as their workers have described them, read at most once in some seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from petiole.gateway.core.caller import caller
from petiole.gateway.core.failures import Failure, invalid
from petiole.gateway.serving.retry import patiently
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet import models
from petiole.tasks.fleet.models import KNOWN_FOR_S, UNKNOWN_FOR_S, ModelFacts, ModelRoute
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings


class Catalogue:
    """What an event loop has read recently."""

    def __init__(self) -> None:
        self._known: Sequence[ModelFacts] = ()
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def known(self, for_s: float = KNOWN_FOR_S) -> Sequence[ModelFacts]:
        """What was read at most `for_s` ago, or is read now. While Redis is away: what was read last."""
        if time.monotonic() - self._read_at <= for_s:
            return self._known
        async with self._reading:
            if time.monotonic() - self._read_at > for_s:
                try:
                    self._known = await patiently(models.amodels)
                    self._read_at = time.monotonic()
                except Failure:
                    if not self._known:
                        raise
        return self._known

    async def shown(self, for_s: float = KNOWN_FOR_S) -> Sequence[ModelFacts]:
        """What the caller may see of `known`: the names that it may ask for, in its queue if it has its own."""
        queue = caller().tenant.queue
        return [_seen(model) for model in await self.known(for_s) if queue is None or queue in model.queues]

    async def find(self, name: str) -> ModelRoute:
        """Where the model of this name is served. Raises `Failure`: 404 for one that is unknown, or not the
        caller's to ask for."""
        queue = caller().tenant.queue
        own = queue or settings().queue
        try:
            return models.find(await self.shown(), name, own, queue)
        except InvalidRequest:
            pass
        try:
            return models.find(await self.shown(UNKNOWN_FOR_S), name, own, queue)
        except InvalidRequest as error:
            raise invalid("model", str(error), "model_not_found", 404) from None


def _seen(model: ModelFacts) -> ModelFacts:
    asks = caller()
    if asks.tenant.models is None:
        return model
    names = [name for name in model.names if asks.may_ask(name)]
    adapters = {name: where for name, where in model.adapters.items() if asks.may_ask(name)}
    return model.model_copy(update={"names": names, "adapters": adapters})


catalogue = connections.PerLoop(Catalogue)
"""The running event loop's."""
