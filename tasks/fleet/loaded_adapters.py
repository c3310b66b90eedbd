"""Adapters that were loaded over HTTP: names beside those of `PETIOLE_SERVED_ADAPTERS`.

Redis has each by its name, until it is unloaded. So every process that reads the models knows it, and a worker
that starts later serves it: a worker reads an adapter's files at the first request, if the worker's settings name
their place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import redis
from pydantic import BaseModel, ConfigDict, ValidationError

from petiole.tasks.servers import connections
from petiole.tasks.wire.keys import ADAPTERS_KEY

logger = logging.getLogger(__name__)

MOST = 1000
"""Every read of the models reads all of them."""


class LoadedAdapter(BaseModel):
    """`path`: a folder on the workers, or a hub id. `model`: a name of the model that it changes. `tenant`: who
    has loaded it."""

    model_config = ConfigDict(defer_build=True)

    path: str
    model: str
    tenant: str = ""


Stored = Mapping[str, LoadedAdapter]
"""By name."""


async def stored() -> Stored:
    return read(await connections.async_streams().hgetall(ADAPTERS_KEY))


async def change(name: str, decided: Callable[[Stored], LoadedAdapter | None]) -> None:
    """Store under this name what is decided of those that are stored; None removes it. Nobody else changes one
    meanwhile. Tasks that name a path go on."""
    async with connections.async_streams().pipeline(transaction=True) as pipe:
        while True:
            await pipe.watch(ADAPTERS_KEY)
            adapter = decided(read(await pipe.hgetall(ADAPTERS_KEY)))
            pipe.multi()  # type: ignore[no-untyped-call]
            if adapter is None:
                pipe.hdel(ADAPTERS_KEY, name)
            else:
                pipe.hset(ADAPTERS_KEY, name, adapter.model_dump_json())
            try:
                await pipe.execute()
                return
            except redis.WatchError:
                continue


def read(fields: Mapping[Any, Any]) -> dict[str, LoadedAdapter]:
    """By name, what is stored."""
    found = {}
    for raw_name, raw in fields.items():
        name = raw_name.decode(errors="replace")
        try:
            found[name] = LoadedAdapter.model_validate_json(raw)
        except ValidationError:  # perhaps another version's
            logger.warning("what is stored of the adapter %s cannot be read", name)
    return found


def of_model(loaded: Mapping[str, LoadedAdapter], names: Iterable[str]) -> dict[str, str]:
    """By name, the paths of those of a model with these names."""
    ours = set(names)
    return {name: adapter.path for name, adapter in loaded.items() if adapter.model in ours}
