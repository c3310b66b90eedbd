"""The handlers of /admin, for keys with the right `admin`, and of /key, where each key sees what it may."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from petiole.gateway.core.caller import ADMIN, Tenant, caller
from petiole.gateway.core.failures import Failure, invalid
from petiole.gateway.serving import request_body
from petiole.gateway.serving.answering import json_answer
from petiole.gateway.serving.auth import api_keys, budgets, key_list, manage
from petiole.gateway.serving.auth.callers import Handler, needing
from petiole.gateway.serving.auth.key_list import ChangeKey, ChangeTenant, CreateKey
from petiole.gateway.serving.retry import failure_of
from petiole.tasks.app.thread_executor import LOOKUPS
from petiole.tasks.errors import InvalidRequest, PetioleError

T = TypeVar("T")

logger = logging.getLogger("petiole.gateway.admin")

_KEY = re.compile("[0-9a-f]{12}")


async def show_own(_: Request) -> Response:
    return json_answer(key_list.shown_caller(caller()))


async def list_keys(_: Request) -> Response:
    def answer() -> Response:
        shown = [key_list.shown_key(one.name, one.key, one.where) for one in manage.listed()]
        return json_answer({"object": "list", "data": shown})

    return await _managed(answer)


async def create_key(request: Request) -> Response:
    asked = await request_body.read(request, CreateKey)
    key, made = await _managed(lambda: manage.add(asked.tenant, {}, {}, asked.changed_limits, asked.changes))
    name = api_keys.name_of(api_keys.digest_of(key))
    _tell("made", f"key {name}")
    return json_answer({**key_list.shown_key(name, made, "redis"), "key": key})


async def change_key(request: Request) -> Response:
    asked, name = await request_body.read(request, ChangeKey), _name_of(request)
    changed = await _managed(lambda: manage.change_key(name, asked.changes, asked.changed_limits))
    _tell("changed", f"key {name}")
    return json_answer(key_list.shown_key(name, changed, "redis"))


async def revoke_key(request: Request) -> Response:
    name = _name_of(request)
    await _managed(lambda: manage.revoke(name))
    _tell("revoked", f"key {name}")
    return json_answer({"id": name, "object": "key.deleted", "deleted": True})


async def list_tenants(_: Request) -> Response:
    used = await _used()

    def answer() -> Response:
        stored, own = manage.stored_tenants(), api_keys.of_settings().tenants
        of_both = {name: (one, "redis") for name, one in stored.items()}
        of_both |= {name: (one, "settings") for name, one in own.items()}
        shown = [_shown_tenant(name, *of_both[name], used) for name in sorted(of_both)]
        return json_answer({"object": "list", "data": shown})

    return await _managed(answer)


async def change_tenant(request: Request) -> Response:
    """One that is unknown is made."""
    asked, name = await request_body.read(request, ChangeTenant), request.path_params["id"]
    if name in api_keys.of_settings().tenants:
        raise invalid("id", "id: must be a tenant in Redis, got one of the settings", "invalid_value")
    changes, limits = asked.changes, asked.changed_limits
    changed = await _managed(lambda: manage.change_tenant(name, changes, limits, make=True))
    _tell("changed", f"tenant {name}")
    return json_answer(_shown_tenant(name, changed, "redis", await _used()))


async def _used() -> list[Mapping[str, int]]:
    """What tenants have used, by name: on each day of this month, today's first."""
    month, _ = budgets.periods(datetime.now(UTC))
    return await budgets.used_tokens().on(month.days)


def _shown_tenant(name: str, tenant: Tenant, where: str, used: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    by_day = [day.get(name, 0) for day in used]
    return key_list.shown_tenant(name, tenant, where, by_day[0], sum(by_day))


def _name_of(request: Request) -> str:
    """A key's whole name: a few digits would be enough for `petiole keys`, where a person looks."""
    name: str = request.path_params["id"]
    if not _KEY.fullmatch(name):
        raise _unknown()
    return name


def _unknown() -> Failure:
    return Failure(404, "id: must be the name of a key in Redis", code="not_found", param="id")


async def _managed(call: Callable[[], T]) -> T:
    """What Redis says, on a thread. Raises `Failure`."""
    try:
        return await LOOKUPS.run(call)
    except InvalidRequest as error:
        raise _unknown() if error.field in ("key", "name") else failure_of(error) from None
    except PetioleError as error:
        raise Failure(500, str(error), code="server_error") from None


def _tell(what: str, of: str) -> None:
    asks = caller()
    logger.info("%s %s by key %s of tenant %s", of, what, asks.key, asks.name)


def routes() -> list[Route]:
    """Below /v1."""
    of_admins: list[tuple[str, str, Handler]] = [
        ("GET", "/admin/keys", list_keys),
        ("POST", "/admin/keys", create_key),
        ("POST", "/admin/keys/{id}", change_key),
        ("DELETE", "/admin/keys/{id}", revoke_key),
        ("GET", "/admin/tenants", list_tenants),
        ("POST", "/admin/tenants/{id}", change_tenant),
    ]
    return [
        Route("/key", show_own, methods=["GET"]),
        *(Route(path, needing(ADMIN, handler), methods=[method]) for method, path, handler in of_admins),
    ]
