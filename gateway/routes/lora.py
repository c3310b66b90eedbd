"""The handlers of vLLM's /load_lora_adapter and /unload_lora_adapter, for keys with the right `adapters`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

from celery.exceptions import TimeoutError as GaveUp
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from petiole.gateway.core.caller import ADAPTERS, caller
from petiole.gateway.core.failures import Failure, invalid, unavailable
from petiole.gateway.core.requests import RequestBody
from petiole.gateway.serving import request_body
from petiole.gateway.serving.auth import rate_limits
from petiole.gateway.serving.auth.rights import needing
from petiole.gateway.serving.catalogue import catalogue
from petiole.gateway.serving.retry import failure_of, patiently
from petiole.tasks.fleet import loaded_adapters
from petiole.tasks.fleet.loaded_adapters import LoadedAdapter
from petiole.tasks.fleet.models import ModelFacts
from petiole.tasks.submission import definitions

logger = logging.getLogger("petiole.gateway.adapters")

TRIED_S = 120.0
"""How long a worker may take to load an adapter: it may come from the hub."""


class LoadAdapter(RequestBody):
    """`base_model_name`: of the model that it changes; None: the one that takes adapters."""

    REFUSED: ClassVar = {"is_3d_lora_weight": "is not served: adapters of experts are not"}

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=1024)
    base_model_name: str | None = None
    load_inplace: bool = False


class UnloadAdapter(RequestBody):
    IGNORED: ClassVar = frozenset({"lora_int_id"})

    lora_name: str


async def load(request: Request) -> Response:
    asked = await request_body.read(request, LoadAdapter)
    name, known = asked.lora_name, await catalogue().shown(0)
    if not caller().may_ask(name):
        raise invalid("lora_name", "lora_name: must be a name that this key may ask for", "invalid_value")
    if any(name in model.names for model in known):
        raise invalid("lora_name", f"lora_name: {name!r} is the name of a model", "invalid_value")
    if not asked.load_inplace and any(name in model.adapters for model in known):
        raise _loaded_already(name)
    model = _base(asked.base_model_name, known)
    await _tried(asked.lora_path, model)
    adapter = LoadedAdapter(path=asked.lora_path, model=model)
    if not await patiently(lambda: loaded_adapters.load(name, adapter, replaces=asked.load_inplace)):
        raise _loaded_already(name)
    await _tell("loaded", name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(request: Request) -> Response:
    name = (await request_body.read(request, UnloadAdapter)).lora_name
    if not caller().may_ask(name) or not await patiently(lambda: loaded_adapters.unload(name)):
        told = f"The lora adapter '{name}' cannot be found."
        raise Failure(404, told, code="not_found", param="lora_name")
    await _tell("unloaded", name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


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
    except GaveUp:
        raise unavailable("no worker has loaded the adapter in time", "no_worker") from None
    except Exception as error:
        raise failure_of(error, {"adapter": "lora_path"}) from error


async def _tell(what: str, name: str) -> None:
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
