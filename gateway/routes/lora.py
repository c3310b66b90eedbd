"""The handlers of vLLM's /load_lora_adapter and /unload_lora_adapter, for keys with the right `adapters`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from petiole.gateway.core.caller import ADAPTERS, ADMIN, caller
from petiole.gateway.core.failures import LATE, Failure, invalid, unavailable
from petiole.gateway.core.requests import RequestBody
from petiole.gateway.serving import request_body
from petiole.gateway.serving.auth import rate_limits
from petiole.gateway.serving.auth.callers import needing
from petiole.gateway.serving.catalogue import catalogue
from petiole.gateway.serving.retry import failure_of, patiently
from petiole.tasks.fleet import loaded_adapters
from petiole.tasks.fleet.loaded_adapters import MOST, LoadedAdapter, Stored
from petiole.tasks.fleet.models import ModelFacts
from petiole.tasks.submission import definitions

logger = logging.getLogger("petiole.gateway.adapters")

TRIED_S = 120.0
"""How long a worker may take to load an adapter: it may come from the hub."""


NAME = "^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$"
"""The form of an adapter's name: a hub id is one."""


class LoadAdapter(RequestBody):
    """`base_model_name`: of the model that it changes; None: the one that takes adapters."""

    REFUSED: ClassVar = {"is_3d_lora_weight": "is not served: adapters of experts are not"}

    lora_name: str = Field(max_length=256, pattern=NAME)
    lora_path: str = Field(min_length=1, max_length=1024)
    base_model_name: str | None = None
    load_inplace: bool = False


class UnloadAdapter(RequestBody):
    IGNORED: ClassVar = frozenset({"lora_int_id"})

    lora_name: str


async def load(request: Request) -> Response:
    asked = await request_body.read(request, LoadAdapter)
    name = asked.lora_name
    if not caller().may_ask(name):
        raise invalid("lora_name", "lora_name: must be a name that this key may ask for", "invalid_value")
    known = await _free_of_settings(name)
    if any(name in model.names for model in known):
        raise invalid("lora_name", f"lora_name: {name!r} is the name of a model", "invalid_value")
    model = _base(asked.base_model_name, await catalogue().shown())

    def decided(stored: Stored) -> LoadedAdapter:
        before = stored.get(name)
        if before is None and len(stored) >= MOST:
            limit = f"at most {MOST} adapters may be loaded, unload one first"
            raise invalid("lora_name", f"lora_name: {limit}, got {name!r}", "invalid_value")
        if before is not None and not asked.load_inplace:
            raise _loaded_already(name)
        owner = caller().name if before is None else _own(name, before).tenant
        return LoadedAdapter(path=asked.lora_path, model=model, tenant=owner)

    decided(await patiently(loaded_adapters.stored))  # before a worker tries it
    await _tried(asked.lora_path, model)
    await patiently(lambda: loaded_adapters.change(name, decided))
    await _tell("loaded", name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(request: Request) -> Response:
    name = (await request_body.read(request, UnloadAdapter)).lora_name
    if caller().may_ask(name):
        await _free_of_settings(name)

    def decided(stored: Stored) -> None:
        if name not in stored or not caller().may_ask(name):
            told = f"The lora adapter '{name}' cannot be found."
            raise Failure(404, told, code="not_found", param="lora_name")
        _own(name, stored[name])

    await patiently(lambda: loaded_adapters.change(name, decided))
    await _tell("unloaded", name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


async def _free_of_settings(name: str) -> Sequence[ModelFacts]:
    """What the whole fleet serves: names are one space for all callers. Raises `Failure`."""
    stored, known = await patiently(loaded_adapters.stored), await catalogue().known(0)
    if name not in stored and any(name in model.adapters for model in known):
        limit = "must not be a name of PETIOLE_SERVED_ADAPTERS, which a worker's settings change alone"
        raise invalid("lora_name", f"lora_name: {limit}, got {name!r}", "invalid_value")
    return known


def _own(name: str, adapter: LoadedAdapter) -> LoadedAdapter:
    """The adapter, if the caller may change it. Raises `Failure`."""
    asks = caller()
    if asks.name not in ("", adapter.tenant) and ADMIN not in asks.rights:
        told = f"lora_name: {name!r} was loaded by another tenant: only its keys, and those of admins, change it"
        raise Failure(403, told, code="not_its_own", param="lora_name")
    return adapter


def _loaded_already(name: str) -> Failure:
    told = f"The lora adapter '{name}' has already been loaded."
    more = "If you want to load the adapter in place, set 'load_inplace' to True."
    return invalid("lora_name", f"{told} {more}", "invalid_value")


def _base(name: str | None, known: Sequence[ModelFacts]) -> str:
    """The first name of the model that is changed. Raises `Failure`."""
    taking = {model.names[0]: model for model in known if model.takes_adapters and model.names}
    found = [first for first, model in taking.items() if name is None or name in model.names]
    if len(found) == 1:
        return found[0]
    limit = f"must be one of {', '.join(sorted(taking))}"
    if not taking:
        limit = "no model takes adapters: see PETIOLE_LORA_SLOTS of the workers"
    raise invalid("base_model_name", f"base_model_name: {limit}, got {name}", "invalid_value")


async def _tried(path: str, model: str) -> None:
    """Let a worker generate one token with this adapter. Raises `Failure`."""
    found = await catalogue().find(model)
    await rate_limits.admit_brief(found.queue)
    asked: dict[str, Any] = {"prompt": "a", "max_tokens": 1, "adapter": path}
    try:
        task = await definitions.generate.adelay(**asked, queue=found.queue, expires=TRIED_S)
        await task.aget(timeout=TRIED_S)
    except LATE:
        raise unavailable("no worker has loaded the adapter in time", "no_worker") from None
    except Exception as error:
        raise failure_of(error, {"adapter": "lora_path"}) from error


async def _tell(what: str, name: str) -> None:
    """Have this gateway know of the change before it answers, and log it."""
    await catalogue().known(0)
    asks = caller()
    logger.info("adapter %s %s by key %s of tenant %s", name, what, asks.key, asks.name)


def routes() -> list[Route]:
    """Below /v1, as vLLM has them, and beside it, as SGLang."""
    handlers = {"load": load, "unload": unload}
    return [
        Route(f"/{verb}_lora_adapter", needing(ADAPTERS, handler), methods=["POST"])
        for verb, handler in handlers.items()
    ]
