"""What a tenant's tasks have in common, whatever the interface: its salt, its priority, its name.

Anything that submits for a caller passes through here, so no interface can forget the salt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from petiole.gateway.core.caller import Caller
from petiole.tasks.keys import TENANT_HEADER
from petiole.tasks.settings import settings
from petiole.tasks.urls import RABBITMQ, scheme

NOTHING: Mapping[str, Any] = {}


def options(asks: Caller, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a task. The tenant's salt and the client's own make one salt, which nobody else can name."""
    if not asks.tenant.salt:
        return dict(given)
    own = str(given.get("salt", ""))
    return {**given, "salt": hashlib.sha256(f"{asks.tenant.salt}\0{own}".encode()).hexdigest()}


def submission(asks: Caller, given: Mapping[str, Any], headers: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """The options of a submission, with these headers. No task of a tenant is more urgent than its priority."""
    if not asks.name:
        return dict(given)
    found = {**given, "headers": {**given.get("headers", {}), **headers, TENANT_HEADER: asks.name}}
    most = asks.tenant.priority
    if most is None:
        return found
    if scheme(settings().broker_url) in RABBITMQ:  # there 9 is first
        return {**found, "priority": min(9 - most, given.get("priority", 9))}
    return {**found, "priority": max(most, given.get("priority", 0))}
