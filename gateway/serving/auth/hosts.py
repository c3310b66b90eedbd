"""By which names a gateway that has no keys may be called, on loopback or with `PETIOLE_GATEWAY_HOSTS`: those of
loopback, and those in that setting.

The rule that a page of another origin reads no answer looks at names alone. So a page whose own name leads to
127.0.0.1 since it was loaded (DNS rebinding) could read every answer. But its browser says that name."""

from __future__ import annotations

import ipaddress

from starlette.types import Scope

from petiole.tasks.settings import settings

_named: frozenset[str] | None = None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address. A name other than localhost is taken for one that others
    reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def guard() -> None:
    """From now on this process answers nobody without a key who calls it by another name."""
    global _named
    _named = frozenset(filter(None, (one.strip().lower() for one in settings().gateway_hosts.split(","))))


def is_known(scope: Scope) -> bool:
    """Whether the request calls the gateway by a name that it has. One without a name comes from no browser."""
    if _named is None:
        return True
    for header, value in scope["headers"]:
        if header == b"host":
            name = value.decode("latin-1").lower()
            host = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
            return is_loopback(host) or host.endswith(".localhost") or bool(_named & {host, "*"})
    return True
