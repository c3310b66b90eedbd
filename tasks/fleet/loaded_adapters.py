"""Adapters that were loaded over HTTP: names beside those of `PETIOLE_SERVED_ADAPTERS`.

Redis has each by its name, until it is unloaded. So every process that reads the models knows it, and a worker
that starts later serves it: a worker reads an adapter's files at the first request, if the worker's settings name
their place."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict, ValidationError

from petiole.tasks.keys import ADAPTERS_KEY
from petiole.tasks.servers import connections

logger = logging.getLogger(__name__)


class LoadedAdapter(BaseModel):
    """`path`: a folder on the workers, or a hub id. `model`: a name of the model that it changes."""

    model_config = ConfigDict(defer_build=True)

    path: str
    model: str


async def load(name: str, adapter: LoadedAdapter, *, replaces: bool) -> bool:
    """Store it. False if there is one of this name and it `replaces` none."""
    store, raw = connections.async_streams(), adapter.model_dump_json()
    if replaces:
        await store.hset(ADAPTERS_KEY, name, raw)
        return True
    return bool(await store.hsetnx(ADAPTERS_KEY, name, raw))


async def unload(name: str) -> bool:
    """Whether there was one. Tasks that name its path go on."""
    return bool(await connections.async_streams().hdel(ADAPTERS_KEY, name))


def read(fields: Mapping[bytes, bytes]) -> dict[str, LoadedAdapter]:
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
