"""The facts of the model that this worker serves: see `tasks.fleet.models`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from petiole.tasks.fleet.models import ModelFacts
from petiole.tasks.output_parsing import formats
from petiole.tasks.settings import Settings

MOST_ADAPTERS = 32
"""How many of the adapters that requests have named are shown."""


class Adapters:
    """The adapters that requests have named last. One thread adds to it; any thread may read it."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, None] = OrderedDict()

    def used(self, name: str) -> None:
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > MOST_ADAPTERS:
            self._names.popitem(last=False)

    def names(self) -> list[str]:
        return sorted(self._names.copy())


def names_of(settings: Settings, model: str, *, reloaded: bool) -> list[str]:
    """The names under which producers ask for the model: those of the settings. Without these, the last part of
    the model's path or hub id, and the whole of it. `model`: what the engine calls it, which counts after a
    reload."""
    given = [name for name in (part.strip() for part in settings.served_names.split(",")) if name]
    whole = model if reloaded else settings.model
    return list(dict.fromkeys(given or [whole.rstrip("/").rpartition("/")[2] or whole, whole]))


def model_name(settings: Settings, model: str) -> str:
    """What the model is called in the ledger: the first of its names. `model`: what the engine calls it."""
    return names_of(settings, model or settings.model, reloaded=True)[0]


def owner_of(model: str) -> str:
    """Who published a checkpoint of the hub; "" for a folder."""
    publisher, _, name = model.partition("/")
    return publisher if publisher and name and "/" not in name and not Path(model).exists() else ""


def facts_of(
    settings: Settings,
    engine: Mapping[str, Any],
    *,
    model: str,
    fingerprint: str,
    reloaded: bool,
    queues: Iterable[str],
    own_queues: Iterable[str],
    worker: str,
    version: str,
    loaded_adapters: list[str],
) -> ModelFacts:
    """`engine`: `Engine.facts()`. `queues`: tenants' queues among them are left out, because their tasks find
    them by a header."""
    tenants = {f"{settings.queue}.{tenant}" for tenant in settings.weights}
    whole = model if reloaded else settings.model
    format = formats.of_checkpoint(engine)
    return ModelFacts.model_validate(
        {
            **{name: value for name, value in engine.items() if name != "chat_template"},
            "tool_format": engine.get("tool_format") or (format.name if format else None) or None,
            "fingerprint": fingerprint,
            "model": whole,
            "names": names_of(settings, model, reloaded=reloaded),
            "owned_by": owner_of(whole),
            "queues": sorted(set(queues) - tenants),
            "own_queues": sorted(own_queues),
            "adapters": settings.adapters,
            "loaded_adapters": loaded_adapters,
            "worker": worker,
            "version": version,
        }
    )
